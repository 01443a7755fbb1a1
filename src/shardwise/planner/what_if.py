"""The predicted cost of a plan with other decisions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.cost.predict import Predicted
from shardwise.errors import PlanError
from shardwise.hardware.layout import place
from shardwise.hardware.topology import topology as topology_of
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered
from shardwise.planner.inquiry import Inquiry, described
from shardwise.plans.parts import Spec
from shardwise.plans.plan import Plan
from shardwise.tactics.pins import make_pins
from shardwise.tactics.tactic import decide
from shardwise.tactics.text import TacticsLike, as_tactics

#: Decisions to leave out: one of the plan's, its number from 1 as they are listed, or words that its text contains.
Which = int | str | Decision | Sequence[int | str | Decision]


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of the step before and after: seconds of ops or collectives at a source line, or bytes at the peak."""

    what: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Respec:
    """An argument or output with another spec."""

    path: str
    before: Spec
    after: Spec


@dataclass(frozen=True)
class WhatIf:
    """A plan before and after some changes. ``times`` and ``memory`` list the differences, the largest first; the times add up
    to the change of ``serial_s``, and overlapped communication is the rest of the change of ``time_s``."""

    changes: tuple[str, ...]
    decisions: tuple[Decision, ...]
    before: Predicted
    after: Predicted
    specs: tuple[Respec, ...]
    times: tuple[Cause, ...]
    memory: tuple[Cause, ...]

    def to_json(self) -> dict[str, Any]:
        parts = {name: [asdict(row) for row in getattr(self, name)] for name in ("specs", "times", "memory")}
        both = {"before": self.before.to_json(), "after": self.after.to_json()}
        return {"schema": 1, "changes": list(self.changes), "decisions": list(map(str, self.decisions))} | both | parts

    def __str__(self) -> str:
        from shardwise.report.difference import what_if_text

        return what_if_text(self)


@dataclass(frozen=True, slots=True)
class Effect:
    """The predicted cost of the plan without one of its decisions."""

    decision: Decision
    time_s: float
    peak_bytes: int
    fits: bool


def what_if(
    plan: Plan,
    tactics: TacticsLike = (),
    without: Which = (),
    pins: Mapping[str, Any] | None = None,
    topology: str | None = None,
) -> WhatIf:
    """See :meth:`Plan.what_if`."""
    inquiry: Inquiry = plan.inquiry
    analysis, mesh = inquiry.analysis, inquiry.cost.placement.mesh
    elsewhere = inquiry
    if topology is not None:
        cost = HardwareCost(place(mesh, topology_of(topology)))
        elsewhere = Inquiry(inquiry.model.on(cost), inquiry.roles)
    dropped = _numbers(without, plan.choices)
    new_pins = make_pins(analysis, mesh, pins) if pins else ()
    pinned = {p.value for p in new_pins if isinstance(p, Pin)}
    kept = [d for k, d in enumerate(plan.choices) if k not in dropped]
    kept = [d for d in kept if not (isinstance(d, Pin) and d.value in pinned)]
    decisions = decide(elsewhere.context, as_tactics(tactics), [*new_pins, *kept])
    before = plan.predicted if plan.predicted.rows else inquiry.settle(plan.choices).predicted
    after = elsewhere.settle(decisions)
    changes = [f"without {plan.choices[k]}" for k in sorted(dropped)]
    changes += [str(described(analysis, d)) for d in decisions if d not in plan.choices]
    changes += [f"on {topology}"] if topology is not None else []
    return WhatIf(
        tuple(changes),
        tuple(described(analysis, d) for d in decisions),
        before,
        after.predicted,
        tuple(_respecs(plan, after.lowered)),
        tuple(_causes(_times(before), _times(after.predicted))),
        tuple(_causes(_memory(before), _memory(after.predicted))),
    )


def effects(plan: Plan) -> tuple[Effect, ...]:
    """See :attr:`Plan.effects`."""
    others = ([*plan.choices[:k], *plan.choices[k + 1 :]] for k in range(len(plan.choices)))
    figures = [plan.inquiry.settle(decisions).predicted for decisions in others]
    return tuple(Effect(d, p.time_s, p.peak_bytes, p.fits) for d, p in zip(plan.choices, figures, strict=True))


def _numbers(which: Which, decisions: Sequence[Decision]) -> set[int]:
    """The numbers of decisions, from 0."""
    numbers: set[int] = set()
    for one in [which] if isinstance(which, int | str | Shard | Keep | Pin) else which:
        matches = {k for k, d in enumerate(decisions) if one in (k + 1, d) or (isinstance(one, str) and one in str(d))}
        if not matches:
            listed = "".join(f"\n  {k}. {d}" for k, d in enumerate(decisions, 1)) or " none"
            raise PlanError(f"the plan has no decision {one!r}; it has:{listed}")
        numbers |= matches
    return numbers


def _respecs(plan: Plan, after: Lowered) -> list[Respec]:
    values = [*(a.value for a in after.program.arguments), *after.program.outputs]
    pairs = zip((*plan.arguments, *plan.outputs), values, strict=True)
    respecs = [Respec(array.path, array.spec, after.storage[v].spec(after.mesh)) for array, v in pairs]
    return list(dict.fromkeys(r for r in respecs if r.before != r.after))


def _times(predicted: Predicted) -> dict[str, float]:
    """Seconds of ops and of kinds of collectives, by source line."""
    seconds: dict[str, float] = defaultdict(float)
    for row in predicted.rows:
        what = row.op if row.kind == "compute" else f"{row.kind} over {'·'.join(row.axes)}"
        seconds[f"{what} at {row.source}" if row.source else what] += row.time_s
    return seconds


def _memory(predicted: Predicted) -> dict[str, float]:
    nbytes: dict[str, float] = defaultdict(float)
    for row in predicted.alive:
        # The label of a value has its source line, that of an argument has none.
        nbytes[row.label if row.source else "all that is smaller"] += row.nbytes
    return nbytes


def _causes(before: dict[str, float], after: dict[str, float]) -> list[Cause]:
    causes = [Cause(name, before[name], after[name]) for name in {**before, **after}]
    return sorted((c for c in causes if c.change), key=lambda c: -abs(c.change))
