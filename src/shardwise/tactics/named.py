"""Strategies by name. Those that need a place (a sequence, a vocabulary, experts, edges) find it by structure
(``tactics.places``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision
from shardwise.tactics.places import PathDim
from shardwise.tactics.roles import NAME_THEM
from shardwise.tactics.strategies import (
    FSDP,
    ContextParallel,
    DataParallel,
    EdgeSharding,
    ExpertParallel,
    Megatron,
    Pipeline,
    SequenceParallel,
    Shard,
    ZeRO1,
    ZeRO2,
)
from shardwise.tactics.tactic import Axes, Context, OverAxes, Tactic, decide

#: The strategies in the order in which they are applied. Those that shard the batch come before experts, whose axes are then
#: the minor ones of the batch: an all-to-all brings those to the experts, while major ones need a permute of all tokens first.
PARTS: Final = tuple(
    "pipeline edges dp fsdp zero1 zero2 expert context megatron feedforward sequence vocabulary".split()
)
_SIMPLE: Final[dict[str, Callable[..., Tactic]]] = {
    "pipeline": Pipeline,
    "dp": DataParallel,
    "fsdp": FSDP,
    "zero1": ZeRO1,
    "zero2": ZeRO2,
    "megatron": Megatron,
    "feedforward": functools.partial(Megatron, heads=False),
}
#: By name: the kind of places, what they are, and the strategy at one of them.
_PLACED: Final[dict[str, tuple[str, str, Callable[[str, PathDim], Tactic]]]] = {
    "sequence": ("sequences", "sequence in its batch or cache", SequenceParallel),
    "context": ("sequences", "sequence in its batch or cache", ContextParallel),
    "vocabulary": ("vocabularies", "parameter that a gather looks into", lambda axis, place: Shard(*place, axis)),
    "expert": ("experts", "parameter dimension by which rows choose their matrix", ExpertParallel),
    "edges": ("edges", "batch argument by which another's first dimension is looked into", EdgeSharding),
}


@dataclass(frozen=True, slots=True)
class AtPlaces(OverAxes):
    """Applies a strategy at the places that the program has for it; raises DecisionError where there is none."""

    name: str
    axes: Axes

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        kind, what, make = _PLACED[self.name]
        places: tuple[PathDim, ...] = getattr(context.places, kind)
        if not places:
            hint = ""
            if kind == "sequences":
                hint = (
                    f": {NAME_THEM}"
                    if not context.roles.get("batch")
                    else "; roles={'batch': 'path'} names another batch"
                )
            raise DecisionError(f"{self.name}: the program has no {what}{hint}")
        tactics = [make(axis, place) for place in places]
        return decide(context, tactics, taken)[len(taken) :]


def name_of(tactic: Tactic) -> str:
    """Returns the name of a strategy of ``named``; nothing for another tactic."""
    if isinstance(tactic, AtPlaces):
        return tactic.name
    if isinstance(tactic, Megatron) and not tactic.heads:
        return "feedforward"
    return next((name for name, kind in _SIMPLE.items() if kind is type(tactic)), "")


def named(name: str, axes: Axes) -> Tactic:
    """Returns the strategy of a name, one of ``PARTS``, on some axes."""
    return _SIMPLE[name](axes) if name in _SIMPLE else AtPlaces(name, axes)
