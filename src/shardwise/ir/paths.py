"""Paths of arguments and outputs, as a person may write them.

A path is exact (``params/mlp/up``, also ``params['mlp']['up']`` or ``state[0]`` for ``state/0``), a tree of them (``params``),
the end of one path or tree (``mlp/up``), or a pattern: ``*`` stands for any text, ``layers/*/w``, ``*/mlp/up``. The first of
these that matches counts, in arguments before outputs. The end of a path must be the end of one place only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Final

from shardwise.errors import QueryError

_BRACKETS: Final = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(\w+))\]""")
_MOST: Final = 8


def matching(asked: str, *groups: Collection[str]) -> list[str]:
    """The paths that are meant, none where nothing matches; QueryError where the end of a path is the end of several.

    >>> paths = ["state/0/w", "state/0/b", "state/1/w", "x"]
    >>> matching("state[0]", paths), matching("b", paths), matching("*/w", paths)
    (['state/0/w', 'state/0/b'], ['state/0/b'], ['state/0/w', 'state/1/w'])
    """
    for group in groups:
        if asked in group:
            return [asked]
    plain = _BRACKETS.sub(lambda found: "/" + "".join(filter(None, found.groups())), asked).strip("/")
    if not plain:
        return []
    for group in groups:
        found = [path for path in group if path == plain] or [path for path in group if path.startswith(f"{plain}/")]
        if not found and "*" in plain:
            found = _under(group, {node for node in _nodes(group) if fnmatchcase(node, plain)})
            found = found or _under(group, {node for node in _nodes(group) if fnmatchcase(node, f"*/{plain}")})
        elif not found:
            ends = [node for node in _nodes(group) if node.endswith(f"/{plain}")]
            if len(ends) > 1:
                raise QueryError(
                    f"{asked!r} is the end of several paths: {_listed(ends)}; write more of the one that is meant"
                )
            found = _under(group, set(ends))
        if found:
            return found
    return []


def find_paths(asked: str, *groups: Collection[str], what: str = "argument or output") -> list[str]:
    """The paths that are meant, one at least."""
    found = matching(asked, *groups)
    if not found:
        raise QueryError(f"no {what} has the path {asked!r}{near(asked, *groups)}")
    return found


def find_path(asked: str, *groups: Collection[str], what: str = "argument or output") -> str:
    """The one path that is meant.

    >>> find_path("out[0]", ["x"], ["out/0", "out/1"])
    'out/0'
    """
    found = find_paths(asked, *groups, what=what)
    if len(found) > 1:
        raise QueryError(f"one {what} is asked for, and {asked!r} means {len(found)}: {_listed(found)}")
    return found[0]


def near(asked: str, *groups: Collection[str]) -> str:
    """The paths that a wrong one may stand for, to be put after an error.

    >>> near("params/kernal", ["params/kernel", "x"])
    '; did you mean params/kernel?'
    """
    nodes = [node for group in groups for node in _nodes(group)]
    last = asked.strip("/").rpartition("/")[2]
    found = difflib.get_close_matches(asked, nodes, n=3, cutoff=0.4) or [n for n in nodes if n.endswith(f"/{last}")][:3]
    found = [node for node in found if not any(other.startswith(f"{node}/") for other in found)]
    return f"; did you mean {', '.join(found)}?" if found else f"; there are {_listed(nodes)}" if nodes else ""


def _nodes(paths: Collection[str]) -> list[str]:
    """Paths, and the trees that they are in."""
    found: dict[str, None] = {}
    for path in paths:
        found.update((path[: slash.start()], None) for slash in re.finditer("/", path))
        found[path] = None
    return list(found)


def _under(paths: Collection[str], roots: set[str]) -> list[str]:
    """The paths that are one of some nodes, or in one."""
    return [p for p in paths if p in roots or any(p[: slash.start()] in roots for slash in re.finditer("/", p))]


def _listed(paths: Collection[str]) -> str:
    shown = list(paths)[:_MOST]
    more = f" and {len(paths) - _MOST} more" if len(paths) > _MOST else ""
    return ", ".join(shown) + more


def trees(paths: Collection[str], known: Collection[str]) -> list[str]:
    """Some of the known paths, whole trees by the path of the tree.

    >>> trees(["p/a/w", "p/a/b", "x"], ["p/a/w", "p/a/b", "p/c", "x"])
    ['p/a', 'x']
    """
    chosen = set(paths)
    open_ = set(_nodes([path for path in known if path not in chosen]))
    whole = (next(node for node in _nodes([path]) if node not in open_) for path in known if path in chosen)
    return list(dict.fromkeys(whole))
