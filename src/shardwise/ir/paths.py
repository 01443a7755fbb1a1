"""Paths of arguments and outputs as users write them.

A path is exact (``params/mlp/up``, also ``params['mlp']['up']`` or ``state[0]`` for ``state/0``), a tree (``params``), the end
of one path or tree (``mlp/up``), or a pattern in which ``*`` matches any text (``layers/*/w``, ``*/mlp/up``). The first of
these that matches is used, in arguments before outputs. The end of a path must be the end of one path only.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Final

from shardwise.errors import QueryError

_BRACKETS: Final = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(\w+))\]""")
_MOST: Final = 8
#: The number of a layer: ``layers/3/w`` and ``Block_3/w``.
_NUMBER: Final = re.compile(r"(?<=[/_])\d+(?=/|\[|$)")


def matching(asked: str, *groups: Collection[str]) -> list[str]:
    """Returns the paths that match, possibly none; raises QueryError where the end of a path is the end of several.

    >>> paths = ["state/0/w", "state/0/b", "state/1/w", "x"]
    >>> matching("state[0]", paths), matching("b", paths), matching("*/w", paths)
    (['state/0/w', 'state/0/b'], ['state/0/b'], ['state/0/w', 'state/1/w'])
    """
    for group in groups:
        if asked in group:
            return [asked]
    plain = _plain(asked)
    if not plain:
        return []
    for group in groups:
        nodes = _nodes(group)
        roots = [plain] if plain in nodes else []
        if not roots and "*" in plain:
            roots = [node for node in nodes if fnmatchcase(node, plain)]
            roots = roots or [node for node in nodes if fnmatchcase(node, f"*/{plain}")]
        elif not roots:
            roots = [node for node in nodes if node.endswith(f"/{plain}")]
            if len(roots) > 1:
                raise QueryError(
                    f"{asked!r} is the end of several paths: {_listed(roots)}; write more of the one you mean"
                )
        if roots:
            return [path for path in group if not {*_nodes([path])}.isdisjoint(roots)]
    return []


def _plain(asked: str) -> str:
    return _BRACKETS.sub(lambda match: "/" + "".join(filter(None, match.groups())), asked).strip("/")


def below(asked: str, path: str) -> str:
    """Returns what a matching path has below the tree that was asked for; all of it where that was a pattern.

    >>> below("state[0]", "state/0/w"), below("mlp", "params/mlp/up"), below("x", "x"), below("*/w", "state/w")
    ('w', 'up', '', 'state/w')
    """
    _, found, rest = f"/{path}/".partition(f"/{_plain(asked)}/")
    return rest.strip("/") if found else path


def find_paths(asked: str, *groups: Collection[str], what: str = "argument or output") -> list[str]:
    """Returns the paths that match; raises QueryError where there is none."""
    paths = matching(asked, *groups)
    if not paths:
        raise QueryError(f"no {what} has the path {asked!r}{near(asked, *groups)}")
    return paths


def find_path(asked: str, *groups: Collection[str], what: str = "argument or output") -> str:
    """Returns the one path that matches.

    >>> find_path("out[0]", ["x"], ["out/0", "out/1"])
    'out/0'
    """
    paths = find_paths(asked, *groups, what=what)
    if len(paths) > 1:
        raise QueryError(f"{asked!r} must match one {what}, and matches {len(paths)}: {_listed(paths)}")
    return paths[0]


def near(asked: str, *groups: Collection[str]) -> str:
    """Returns a hint for an error: the paths that the user may have meant.

    >>> near("params/kernal", ["params/kernel", "x"])
    '; did you mean params/kernel?'
    """
    nodes = [node for group in groups for node in _nodes(group)]
    last = asked.strip("/").rpartition("/")[2]
    close = difflib.get_close_matches(asked, nodes, n=3, cutoff=0.4) or [n for n in nodes if n.endswith(f"/{last}")][:3]
    close = [node for node in close if not any(other.startswith(f"{node}/") for other in close)]
    return f"; did you mean {', '.join(close)}?" if close else f"; there are {_listed(nodes)}" if nodes else ""


def _nodes(paths: Collection[str]) -> list[str]:
    """Returns paths and the trees that they are in, each tree before its paths."""
    return list(
        dict.fromkeys("/".join(parts[: k + 1]) for parts in (p.split("/") for p in paths) for k in range(len(parts)))
    )


def _listed(paths: Collection[str]) -> str:
    shown = list(paths)[:_MOST]
    more = f" and {len(paths) - _MOST} more" if len(paths) > _MOST else ""
    return ", ".join(shown) + more


def trees(paths: Collection[str], all_paths: Collection[str]) -> list[str]:
    """Returns some of all paths, with the path of a tree instead of all paths in it.

    >>> trees(["p/a/w", "p/a/b", "x"], ["p/a/w", "p/a/b", "p/c", "x"])
    ['p/a', 'x']
    """
    chosen = set(paths)
    partial = set(_nodes([path for path in all_paths if path not in chosen]))
    complete = (next(n for n in _nodes([path]) if n not in partial) for path in all_paths if path in chosen)
    return list(dict.fromkeys(complete))


def pattern(path: str) -> str:
    """Returns a path with ``*`` for each number, which repeated layers have in common.

    >>> pattern("params/layers/3/w[0]"), pattern("params/Block_3/w1")
    ('params/layers/*/w[0]', 'params/Block_*/w1')
    """
    return _NUMBER.sub("*", path)


def merged(paths: Collection[str]) -> str:
    """Returns paths of one pattern as one, with ``*`` for numbers that differ.

    >>> merged(["state/0/layers/0/w", "state/0/layers/1/w"]), merged(["layers/0/w"])
    ('state/0/layers/*/w', 'layers/0/w')
    """
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(one[0] if len(set(one)) == 1 else pattern("/" + one[0])[1:] for one in parts)


def collapsed(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns rows that start with a path; those that differ in numbers of layers alone are one, with their count.

    >>> collapsed([("layers/0/w", "f32[8]"), ("layers/1/w", "f32[8]"), ("x", "f32[4]")])
    [('layers/*/w (2)', 'f32[8]'), ('x', 'f32[4]')]
    """
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(tuple(map(pattern, row)), []).append(row)
    collapsed_rows = []
    for group in groups.values():
        path, *rest = map(merged, zip(*group, strict=True))
        collapsed_rows.append((path + (f" ({len(group)})" if len(group) > 1 else ""), *rest))
    return collapsed_rows
