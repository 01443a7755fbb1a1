"""Finalists: a short list of plans that differ in kind, from all arms of a race.

Problem. The states that a search evaluated last differ in details, and an error of the cost model is the same for all of them.

Idea. Two plans are of one *kind* if they are of one variant and cut the largest arguments and inner values into the same
numbers of parts. Of each kind the best is a candidate. The finalists are the predicted best, the best named strategies (each at
its best variant and mesh), one plan that needs much less memory, and the next best.

Learning. An error of the cost model that all finalists share is known after the first of them: the judge's compute time and
peak memory over the predicted ones. With these two factors (``Correction``) all candidates are ranked again, also those that
were predicted not to fit, and one that is now expected to be faster than the best so far becomes a finalist.

Weak. Two factors for the whole program: an error that only some candidates have is not seen.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shardwise.cost.model import Cost
from shardwise.lowering.decisions import Shard
from shardwise.planner.arms import Arm, Decided
from shardwise.planner.racing import Race
from shardwise.plans.evidence import Correction, Judged
from shardwise.tactics.auto import Auto

#: The largest arguments, and the largest inner values, that make a plan's kind.
_LARGEST: Final = 6
#: The share of finalists that are named strategies, and the share of the best plan's memory that the small one has at most.
_NAMED: Final = 1 / 3
_SMALLER: Final = 0.75
#: A further finalist must be expected to be faster than the best by this share.
_GAIN: Final = 0.01
FOUND: Final = "found"


@dataclass(frozen=True, slots=True)
class Candidate:
    """Decisions on an arm: found by the search, or of a named strategy."""

    name: str
    arm: Arm
    decided: Decided
    kind: object = field(compare=False)

    @property
    def rank(self) -> tuple[int, ...]:
        return self.decided.rank


def candidates(race: Race) -> list[Candidate]:
    """Returns the best plan of each kind on all arms, the best first; those that do not fit come last."""
    every = [c for arm in race.arms if not arm.hopeless for c in _on_arm(race, arm)]
    every.sort(key=lambda c: (c.rank, c.name != FOUND))
    best: dict[object, Candidate] = {}
    for candidate in every:
        best.setdefault(candidate.kind, candidate)
    return list(best.values())


def _on_arm(race: Race, arm: Arm) -> Iterator[Candidate]:
    best, tactics = arm.best, race.asked.tactics
    decided = {FOUND: [best]}
    if tactics and isinstance(tactics[-1], Auto):  # what was evaluated last is complete
        for decisions, cost in arm.states():
            counts = (*best.counts[:-1], len(decisions))
            decided[FOUND].append(replace(best, decisions=decisions, total=cost, counts=counts))
    if race.asked.searches_all and not best.counts[0]:
        for b in arm.inquiry.strategies(arm.quick):
            assert b.cost is not None
            counts = (0, *[len(b.decisions)] * len(tactics))
            decided.setdefault(b.name, []).append(replace(best, decisions=b.decisions, total=b.cost, counts=counts))
    for name, several in decided.items():
        for one in several:
            yield Candidate(name, arm, one, kind_of(arm, one))


def kind_of(arm: Arm, decided: Decided) -> tuple[Any, ...]:
    """Returns the variant, and the parts of each dimension of the largest arguments and inner values."""
    analysis, mesh = arm.captured.analysis, decided.inquiry.cost.placement.mesh
    parts: dict[int, int] = {}
    for decision in decided.decisions:
        if isinstance(decision, Shard):
            parts |= {color: parts.get(color, 1) * mesh.shape[decision.axis] for color in decision.colors}
    others = [d for d in decided.decisions if not isinstance(d, Shard)]
    cut = tuple(tuple(parts.get(c, 1) for c in colors) for colors in _largest(analysis))
    return arm.captured.variant, cut, tuple(map(str, others))


def _largest(analysis: Any) -> list[tuple[int, ...]]:
    """Returns the colors of the largest arguments and of the largest inner values; of equal colors one."""
    program = analysis.program
    arguments = {a.value for a in program.arguments}
    colors: list[tuple[int, ...]] = []
    for inner in (False, True):
        values = [v for v in program.values if (v.id not in arguments) is inner]
        values.sort(key=lambda v: -math.prod(v.shape))
        distinct = dict.fromkeys(tuple(analysis.value_colors[v.id]) for v in values)
        colors += list(distinct)[:_LARGEST]
    return colors


def select(ranked: Sequence[Candidate], count: int) -> list[Candidate]:
    """Returns at most ``count`` candidates that fit, in order: the best, named strategies, a small one, and the next best; if
    none fits, the best."""
    ranked = [c for c in ranked if c.decided.fits] or ranked[:1]
    strategies: dict[str, Candidate] = {}
    for candidate in ranked:
        if candidate.name != FOUND:  # each once, whatever its axes are called
            strategies.setdefault(re.sub(r"(?<=[:+])[^,+]+", "", candidate.name), candidate)
    named = list(strategies.values())[: max(1, round(count * _NAMED))]
    limit = _SMALLER * ranked[0].decided.total.peak_blocks
    small = [c for c in ranked if c.decided.total.peak_blocks <= limit][:1]
    chosen = list(dict.fromkeys([*ranked[:1], *named, *small, *ranked]))[:count]
    return sorted(chosen, key=lambda c: c.rank)


def smaller(ranked: Sequence[Candidate], refused: Collection[Candidate], count: int) -> list[Candidate]:
    """Returns further candidates after all finalists were refused: those that need less memory than any of them."""
    least = min(c.decided.total.peak_blocks for c in refused)
    left = [c for c in ranked if c.decided.fits and c.decided.total.peak_blocks < least]
    by_memory = sorted(left, key=lambda c: c.decided.total.peak_blocks)
    return sorted(dict.fromkeys([*left[: count // 2], *by_memory[: count - count // 2]]), key=lambda c: c.rank)


def learned(judged: Sequence[tuple[Candidate, Judged]]) -> Correction:
    """Returns the correction that candidates and verdicts show: medians, so that one odd finalist does not decide."""
    compute, memory = [], []
    for candidate, verdict in judged:
        total = candidate.decided.total
        if verdict.time_s is not None and total.compute_ps:
            predicted_s = total.time_s if verdict.compute_s is None else total.compute_ps * 1e-12
            compute.append((verdict.compute_s or verdict.time_s) / predicted_s)
        if verdict.peak_bytes and not verdict.refused:
            memory.append(verdict.peak_bytes / total.peak_bytes)
    return Correction(statistics.median(compute or [1.0]), statistics.median(memory or [1.0]))


def corrected(candidate: Candidate, correction: Correction) -> Cost:
    """Returns the cost of a candidate as the judge is expected to see it."""
    total = candidate.decided.total
    return replace(
        total,
        compute_ps=round(total.compute_ps * correction.compute),
        peak_blocks=round(total.peak_blocks * correction.memory),
    )


def promising(
    ranked: Sequence[Candidate], judged: Collection[Candidate], correction: Correction, faster_than_s: float, count: int
) -> list[Candidate]:
    """Returns at most ``count`` further candidates that are expected to fit and to be faster, the fastest first."""
    costs = {c: corrected(c, correction) for c in ranked if c not in judged}
    fitting = [c for c in costs if costs[c].peak_blocks <= c.decided.inquiry.model.usable_blocks]
    faster = [c for c in fitting if costs[c].time_s < faster_than_s * (1 - _GAIN)]
    return sorted(faster, key=lambda c: costs[c].time_ps)[:count]
