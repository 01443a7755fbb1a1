"""Tactics as text.

``dp:data,megatron:model`` are tactics in order, each a name and the axes it is applied to: ``fsdp:data+model`` has two axes,
``fsdp`` all of the mesh, and ``megatron+sequence:model`` is two tactics on one axis. ``auto:model@params/mlp``
searches ``model`` for arguments at a path, ``auto@params/mlp+x`` the axes that are left for arguments at two.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Final, NamedTuple

from shardwise.errors import DecisionError
from shardwise.tactics.auto import Auto
from shardwise.tactics.named import PARTS, name_of, named
from shardwise.tactics.strategies import ExpertParallel
from shardwise.tactics.tactic import Batched, Tactic, axis_names

#: All names of tactics.
NAMES: Final = (*PARTS, "auto")
#: Tactics as users write them.
TacticsLike = str | Tactic | Sequence["str | Tactic"]


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises one error for all names that are no tactic."""
    unknown = []
    for name in dict.fromkeys(n for n in names if n not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        unknown.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        raise DecisionError(f"no tactic is called {' or '.join(unknown)}; there are {', '.join(known)}")


class Words(NamedTuple):
    """A part of a text between commas: the names of tactics, of the axes that they share, and paths for ``auto``."""

    names: tuple[str, ...]
    axes: tuple[str, ...]
    only: tuple[str, ...] = ()


def read_words(text: str, known: Sequence[str] = NAMES) -> list[Words]:
    """Returns the parts of a text.

    >>> read_words("dp:data, megatron+sequence:model")
    [Words(names=('dp',), axes=('data',), only=()), Words(names=('megatron', 'sequence'), axes=('model',), only=())]
    """
    parts = []
    for part in text.split(","):
        place, at, paths = part.partition("@")
        before, colon, after = place.partition(":")
        names, axes, only = ([word.strip() for word in side.split("+")] for side in (before, after, paths))
        if not all(names) or (colon and not all(axes)) or (at and (not all(only) or names != ["auto"])):
            raise DecisionError(
                f"{text!r} is no list of tactics: write names and axes, such as dp:data,megatron:model or fsdp:data+model, "
                "and paths for auto alone, such as auto:model@params/mlp"
            )
        parts.append(Words(tuple(names), tuple(axes) if colon else (), tuple(only) if at else ()))
    check_names([name for words in parts for name in words.names], known)
    return parts


def tactic_text(tactic: Tactic) -> str:
    """Returns a tactic as text, where there is such a text.

    >>> [tactic_text(tactic) for tactic in as_tactics("fsdp:data+model,sequence:model,auto:model@params/mlp")]
    ['fsdp:data+model', 'sequence:model', 'auto:model@params/mlp']
    """
    name = "auto" if isinstance(tactic, Auto) else name_of(tactic)
    if not name:
        return repr(tactic)
    axes, only = axis_names(getattr(tactic, "axes", ())), getattr(tactic, "only", ())
    return name + (f":{'+'.join(axes)}" if axes else "") + (f"@{'+'.join(only)}" if only else "")


def as_tactics(tactics: TacticsLike) -> tuple[Tactic, ...]:
    """Returns tactics from text, objects, or a list of both.

    They are in the order in which they are written, except that the batch is sharded before experts on other axes: an
    all-to-all takes an axis from tokens to experts only where it is the minor axis of the batch.

    >>> from shardwise.tactics.strategies import Megatron
    >>> as_tactics("fsdp:data+model,auto")
    (FSDP(axes=('data', 'model'), dim=None), Auto(axes=(), only=()))
    >>> as_tactics([Megatron("model"), "dp:data"])
    (Megatron(axes=('model',), heads=True), DataParallel(axes=('data',), dim=None))
    >>> [tactic_text(tactic) for tactic in as_tactics("expert:model,dp:data")]
    ['dp:data', 'expert:model']
    """
    objects: list[Tactic] = []
    for one in [tactics] if isinstance(tactics, str) or hasattr(tactics, "decide") else tactics:
        if isinstance(one, str):
            parts = [(name, words) for words in read_words(one) for name in words.names]
            objects += [Auto(w.axes, only=w.only) if name == "auto" else named(name, w.axes) for name, w in parts]
        elif hasattr(one, "decide") and not isinstance(one, type):
            objects.append(one)
        else:
            shown = getattr(one, "__name__", type(one).__name__)
            raise DecisionError(f"a tactic is text such as 'fsdp:data', or an object such as FSDP('data'), not {shown}")
    ordered: list[Tactic] = []
    for tactic in objects:
        ordered.insert(_position(tactic, ordered), tactic)
    return tuple(ordered)


def _position(tactic: Tactic, before: Sequence[Tactic]) -> int:
    """Returns where a tactic is inserted into those that were written before it."""
    if isinstance(tactic, Batched) and tactic.axes:
        for k, other in enumerate(before):
            experts = isinstance(other, ExpertParallel) or name_of(other) == "expert"
            axes = axis_names(getattr(other, "axes", ()))
            later = any(isinstance(one, Auto) for one in before[k:])
            if experts and axes and not later and not set(axes) & set(tactic.axes):
                return k
    return len(before)
