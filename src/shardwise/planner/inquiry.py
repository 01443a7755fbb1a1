"""A program and the hardware that it was planned for, kept so that a plan can be asked what other decisions would take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from shardwise.cost.model import CostModel
from shardwise.cost.predict import Predicted, predict
from shardwise.dims.analysis import Analysis
from shardwise.lowering.candidates import Candidates
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, Memo
from shardwise.lowering.small import keep_small
from shardwise.lowering.structure import Structure
from shardwise.tactics.roles import Roles
from shardwise.tactics.tactic import Context

#: Places beside each other that are named.
_BESIDE: Final = 3


class Settled(NamedTuple):
    """Decisions carried out: with those for small arguments, and with what they are predicted to take."""

    lowered: Lowered
    small: tuple[Keep, ...]
    predicted: Predicted


@dataclass(frozen=True)
class Inquiry:
    """What it takes to carry out decisions. What was worked out for some is kept for the next."""

    analysis: Analysis
    cost: HardwareCost
    roles: Roles = field(default_factory=dict)

    @property
    def context(self) -> Context:
        """What tactics are told."""
        return Context(self.analysis, self.cost.placement.mesh, self.cost, self.roles)

    @cached_property
    def model(self) -> CostModel:
        return CostModel(Structure.of(self.analysis), self.cost)

    @cached_property
    def _known(self) -> Memo:
        return Memo(Candidates(self.model.structure, self.cost.placement.mesh, self.cost))

    def settle(self, decisions: Sequence[Decision]) -> Settled:
        """Small arguments are kept whole, unless the plan is the worse for it: slower, or too large."""
        lowered = self._lowered(decisions)
        plain = Settled(lowered, (), predict(self.model, lowered))
        small = keep_small(lowered, self.cost)
        if not small:
            return plain
        lowered = self._lowered((*decisions, *small))
        kept = Settled(lowered, small, predict(self.model, lowered))
        before, after = plain.predicted, kept.predicted
        worse = after.time_s > before.time_s or (before.fits and not after.fits)
        return plain if worse else kept

    def _lowered(self, decisions: Sequence[Decision]) -> Lowered:
        state = State(self.cost.placement.mesh, tuple(decisions))
        lowered = Lowered(self.model.structure, state, self.cost, self._known)
        lowered.lower_all()
        return lowered

    def __getstate__(self) -> dict[str, Any]:
        return {"analysis": self.analysis, "cost": self.cost, "roles": self.roles}


def described(analysis: Analysis, decision: Decision) -> Decision:
    """A decision that says what it is about."""
    if isinstance(decision, Pin):
        return replace(decision, what=analysis.program.label(decision.value))
    if isinstance(decision, Keep):
        first, more = analysis.program.label(decision.values[0]), len(decision.values) - 1
        return replace(decision, what=f"{first}{f' and {more} more' if more else ''}")
    size = analysis.colors[decision.colors[0]].size
    return replace(decision, what=f"{places_words(_places(analysis, decision))} (size {size:,})")


def decisions_words(analysis: Analysis, decisions: Sequence[Decision]) -> str:
    """Several decisions in one line: what is sharded, with all its axes in order."""
    axes: dict[str, list[str]] = {}
    for decision in decisions:
        if isinstance(decision, Shard):
            axes.setdefault(_beside(_places(analysis, decision))[0], []).append(decision.axis)
    return "; ".join(f"{what} over {'·'.join(own)}" for what, own in axes.items()) or "nothing sharded"


def _places(analysis: Analysis, decision: Shard) -> list[str]:
    """The dimensions of arguments that a decision is about; outputs are named where no argument can be."""
    given = {a.path for a in analysis.program.arguments}
    found = [p for c in decision.colors for p in analysis.colors[c].places]
    return [str(p) for p in found if p.label in given] or [str(p) for p in found]


def places_words(places: Sequence[str]) -> str:
    """The first of some places with those beside it, and where the others are.

    >>> places_words(["params/mlp/down[0]", "params/mlp/up[1]", "moments/mlp/down[0]", "moments/mlp/up[1]"])
    'params/mlp/{down[0], up[1]} and 2 in moments'
    >>> places_words(["x[0]"]), places_words([])
    ('x[0]', 'inner values')
    """
    words, others = _beside(places)
    rest = Counter(p.partition("/")[0].partition("[")[0] for p in others)
    more = ", ".join(f"{count} in {name}" for name, count in rest.items())
    return f"{words} and {more}" if more else words


def _beside(places: Sequence[str]) -> tuple[str, list[str]]:
    """The first of some places with those beside it, and the others."""
    if not places:
        return "inner values", []
    parent, slash, first = places[0].rpartition("/")
    beside = [p for p in places if p.rpartition("/")[:2] == (parent, slash)][:_BESIDE] if slash else [first]
    shown = [p.rpartition("/")[2] for p in beside]
    words = f"{parent}{slash}{{{', '.join(shown)}}}" if len(shown) > 1 else places[0]
    return words, [p for p in places if p not in beside]
