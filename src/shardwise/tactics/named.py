"""Strategies by name, and tactics as text.

``dp:data,megatron:model`` are tactics in order, each a name and the axes it is applied to: ``fsdp:data+model`` has two axes,
``fsdp`` all of the mesh, and ``megatron+sequence:model`` is two tactics on one axis. A strategy that needs a place (a sequence,
a vocabulary, experts, edges) finds it by structure (``search.places``).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision
from shardwise.search.places import PathDim, Places
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
#: Tactics as a person gives them.
Given = str | Tactic | Sequence["str | Tactic"]


@dataclass(frozen=True, slots=True)
class AtPlaces(OverAxes):
    """A strategy at the places that the program has for it; DecisionError where it has none."""

    name: str
    axes: Axes

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        return decide(context, self._tactics(axis, context.places), taken)[len(taken) :]

    def _tactics(self, axis: str, places: Places) -> list[Tactic]:
        if self.name in ("sequence", "context"):
            make = SequenceParallel if self.name == "sequence" else ContextParallel
            return [make(axis, place) for place in self._some(places.sequences, "sequence in its batch")]
        if self.name == "vocabulary":
            tables = self._some(places.vocabularies, "parameter that a gather looks into")
            return [Shard(*place, axis) for place in tables]
        if self.name == "expert":
            what = "parameter dimension that products share with what they multiply"
            return [ExpertParallel(axis, self._some(places.experts, what)[0])]
        edges = self._some(places.edges, "batch argument by which another's first dimension is looked into")
        return [EdgeSharding(axis, place) for place in edges]

    def _some(self, places: tuple[PathDim, ...], what: str) -> tuple[PathDim, ...]:
        if not places:
            raise DecisionError(f"{self.name}: the program has no {what}")
        return places


def named(name: str, axes: Axes) -> Tactic:
    """The tactic of a name, on some axes."""
    check_names([name], NAMES)
    return _SIMPLE[name](axes) if name in _SIMPLE else AtPlaces(name, axes)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """All names that are no tactic are one error, which lists those there are."""
    said = []
    for name in dict.fromkeys(n for n in names if n not in known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        said.append(f"{name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if said:
        raise DecisionError(f"no tactic is called {' or '.join(said)}; there are {', '.join(known)}")


class Words(NamedTuple):
    """A part of a text between commas: the names of tactics, and of the axes that they share."""

    names: tuple[str, ...]
    axes: tuple[str, ...]


def read_words(text: str, known: Sequence[str] = NAMES) -> list[Words]:
    """The parts of a text.

    >>> read_words("dp:data, megatron+sequence:model")
    [Words(names=('dp',), axes=('data',)), Words(names=('megatron', 'sequence'), axes=('model',))]
    """
    found = []
    for part in text.split(","):
        before, colon, after = part.partition(":")
        names, axes = ([word.strip() for word in side.split("+")] for side in (before, after))
        if not all(names) or (colon and not all(axes)):
            raise DecisionError(
                f"{text!r} is no list of tactics: write names and axes, such as dp:data,megatron:model or fsdp:data+model"
            )
        found.append(Words(tuple(names), tuple(axes) if colon else ()))
    check_names([name for words in found for name in words.names], known)
    return found


def as_tactics(given: Given) -> tuple[Tactic, ...]:
    """Tactics from text, objects, or a list of both.

    >>> as_tactics("fsdp:data+model,auto")
    (FSDP(axes=('data', 'model'), dim=0), Auto(axes=()))
    >>> as_tactics([Megatron("model"), "dp:data"])
    (Megatron(axes=('model',)), DataParallel(axes=('data',), dim=0))
    """
    made: list[Tactic] = []
    for one in [given] if isinstance(given, str) or hasattr(given, "decide") else given:
        if isinstance(one, str):
            made += [named(name, words.axes) for words in read_words(one) for name in words.names]
        elif hasattr(one, "decide") and not isinstance(one, type):
            made.append(one)
        else:
            shown = getattr(one, "__name__", type(one).__name__)
            raise DecisionError(f"a tactic is text such as 'fsdp:data', or an object such as FSDP('data'), not {shown}")
    return tuple(made)
