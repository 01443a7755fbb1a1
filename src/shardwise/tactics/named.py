"""Strategies by name, and tactics as text.

``dp:data,megatron:model`` are tactics in order, each a name and the axes it is applied to: ``fsdp:data+model`` has two axes,
``fsdp`` all of the mesh, and ``megatron+sequence:model`` is two tactics on one axis. A strategy that needs a place (a sequence,
a vocabulary, experts, edges) finds it by structure (``tactics.places``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision
from shardwise.tactics.places import PathDim
from shardwise.tactics.strategies import (
    FSDP,
    Auto,
    ContextParallel,
    DataParallel,
    EdgeSharding,
    ExpertParallel,
    Megatron,
    SequenceParallel,
    Shard,
    ZeRO1,
    ZeRO2,
)
from shardwise.tactics.tactic import Axes, Context, OverAxes, Tactic, decide

#: The strategies in the order in which they are applied.
PARTS: Final = tuple("expert edges dp fsdp zero1 zero2 context megatron sequence vocabulary".split())
#: All names of tactics.
NAMES: Final = (*PARTS, "auto")
_SIMPLE: Final[dict[str, Callable[..., Tactic]]] = {
    "dp": DataParallel,
    "fsdp": FSDP,
    "zero1": ZeRO1,
    "zero2": ZeRO2,
    "megatron": Megatron,
    "auto": Auto,
}
#: By name: the kind of places, what they are, and the strategy at one of them.
_PLACED: Final[dict[str, tuple[str, str, Callable[[str, PathDim], Tactic]]]] = {
    "sequence": ("sequences", "sequence in its batch", SequenceParallel),
    "context": ("sequences", "sequence in its batch", ContextParallel),
    "vocabulary": ("vocabularies", "parameter that a gather looks into", lambda axis, place: Shard(*place, axis)),
    "expert": ("experts", "parameter dimension that products share with what they multiply", ExpertParallel),
    "edges": ("edges", "batch argument by which another's first dimension is looked into", EdgeSharding),
}
#: Tactics as a person writes them.
Given = str | Tactic | Sequence["str | Tactic"]


@dataclass(frozen=True, slots=True)
class AtPlaces(OverAxes):
    """A strategy at the places that the program has for it; DecisionError where it has none."""

    name: str
    axes: Axes

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        kind, what, make = _PLACED[self.name]
        places: tuple[PathDim, ...] = getattr(context.places, kind)
        if not places:
            raise DecisionError(f"{self.name}: the program has no {what}")
        tactics = [make(axis, place) for place in (places[:1] if kind == "experts" else places)]
        return decide(context, tactics, taken)[len(taken) :]


def named(name: str, axes: Axes) -> Tactic:
    """The tactic of a name, on some axes."""
    check_names([name], NAMES)
    return _SIMPLE[name](axes) if name in _SIMPLE else AtPlaces(name, axes)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """Raises one error for all names that are no tactic."""
    unknown = []
    for name in dict.fromkeys(n for n in names if n not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        unknown.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if unknown:
        raise DecisionError(f"no tactic is called {' or '.join(unknown)}; there are {', '.join(known)}")


class Words(NamedTuple):
    """A part of a text between commas: the names of tactics, and of the axes that they share."""

    names: tuple[str, ...]
    axes: tuple[str, ...]


def read_words(text: str, known: Sequence[str] = NAMES) -> list[Words]:
    """The parts of a text.

    >>> read_words("dp:data, megatron+sequence:model")
    [Words(names=('dp',), axes=('data',)), Words(names=('megatron', 'sequence'), axes=('model',))]
    """
    parts = []
    for part in text.split(","):
        before, colon, after = part.partition(":")
        names, axes = ([word.strip() for word in side.split("+")] for side in (before, after))
        if not all(names) or (colon and not all(axes)):
            raise DecisionError(
                f"{text!r} is no list of tactics: write names and axes, such as dp:data,megatron:model or fsdp:data+model"
            )
        parts.append(Words(tuple(names), tuple(axes) if colon else ()))
    check_names([name for words in parts for name in words.names], known)
    return parts


def as_tactics(tactics: Given) -> tuple[Tactic, ...]:
    """Tactics from text, objects, or a list of both.

    >>> as_tactics("fsdp:data+model,auto")
    (FSDP(axes=('data', 'model'), dim=0), Auto(axes=()))
    >>> as_tactics([Megatron("model"), "dp:data"])
    (Megatron(axes=('model',)), DataParallel(axes=('data',), dim=0))
    """
    objects: list[Tactic] = []
    for one in [tactics] if isinstance(tactics, str) or hasattr(tactics, "decide") else tactics:
        if isinstance(one, str):
            objects += [named(name, words.axes) for words in read_words(one) for name in words.names]
        elif hasattr(one, "decide") and not isinstance(one, type):
            objects.append(one)
        else:
            shown = getattr(one, "__name__", type(one).__name__)
            raise DecisionError(f"a tactic is text such as 'fsdp:data', or an object such as FSDP('data'), not {shown}")
    return tuple(objects)
