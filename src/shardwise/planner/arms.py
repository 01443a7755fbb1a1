"""An arm of the race: a variant of the program on a placed mesh, with the best decisions on it so far."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from shardwise.cost.compute import widest_dtype
from shardwise.cost.memory import BLOCK, blocks, copy_allocations
from shardwise.cost.model import Cost, TermKind, memory_curve, total
from shardwise.errors import VariantError
from shardwise.hardware.layout import Placement, placements
from shardwise.ir.program import Unit
from shardwise.lowering.decisions import Decision
from shardwise.lowering.sharding import Kind
from shardwise.planner.asked import Asked
from shardwise.planner.inquiry import Captured, Inquiry, Variants
from shardwise.planner.mesh import cuts, exchanged
from shardwise.search.bounds import least_bytes
from shardwise.search.goal import Goal
from shardwise.search.run import Budget, Ended
from shardwise.search.searcher import Journal, Searcher
from shardwise.tactics.auto import Auto
from shardwise.tactics.pins import make_pins, stated_shards
from shardwise.tactics.tactic import decide
from shardwise.transforms.variants import AS_IS

#: Placements of the best mesh that are tried.
_MOST_PLACEMENTS: Final = 5
#: The share of memory that a search is assumed to save before any search has shown more.
_LARGER: Final = 0.2


@dataclass(frozen=True, slots=True)
class Decided:
    """Decisions and their cost on a placed mesh, with the number of decisions before each tactic and in all. ``ended`` says why
    each search among the tactics ended."""

    inquiry: Inquiry
    decisions: tuple[Decision, ...]
    total: Cost
    ended: tuple[Ended, ...]
    goal: Goal
    counts: tuple[int, ...]

    @property
    def fits(self) -> bool:
        return self.total.peak_blocks <= self.inquiry.model.usable_blocks

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller is better. Of equally fast ones the first is taken, of equally small ones the fastest."""
        return self.goal.rank(self.total, self.inquiry.model.usable_blocks)[: 3 if self.goal.memory else 2]


@dataclass
class Gains:
    """The largest relative gains of a search so far."""

    time: float = 0.0
    memory: float = _LARGER

    def note(self, before: Decided, after: Decided) -> None:
        if before.fits and after.fits and before.total.time_ps:
            self.time = max(self.time, 1 - after.total.time_ps / before.total.time_ps)
        if not before.fits or before.goal.memory:
            self.memory = max(self.memory, 1 - after.total.peak_blocks / before.total.peak_blocks)

    def applied(self, cost: Cost, least: float) -> Cost:
        """The cost that a state might have after a search that gains at least this share of time."""
        return Cost(int(cost.time_ps * (1 - max(least, self.time))), 0, 0, int(cost.peak_blocks * (1 - self.memory)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A state that does not fit: its time, the number of micro-batches in which it could fit, and its time in as many."""

    time_ps: int
    microbatches: int
    in_parts_ps: int


class _Repeated(NamedTuple):
    """What each micro-batch does for the arguments, which take ``peak_bytes``: it gathers them, into ``copies`` (blocks at each
    point), and reduces their gradients; ``others``: the blocks of everything else. ``alone_ps``: the part of the reductions
    that overlaps as long as there is one batch. In a loop over several they end before the next one starts, with nothing
    beside them."""

    peak_bytes: int
    copies: np.ndarray
    others: np.ndarray
    compute_ps: int
    comm_ps: int
    overlapped_ps: int
    alone_ps: int

    def times(self, usable_bytes: int, gathers: bool) -> int | None:
        """In how many parts it could fit: everything else shrinks in proportion at best. Copies do not; with ``gathers`` they
        are made again where they are needed, so that at best none are left at the peak."""
        room = (usable_bytes - self.peak_bytes) // BLOCK - (0 if gathers else self.copies)
        if np.min(room) <= 0:
            return None
        return int(2 ** math.ceil(math.log2(max(1.0, (self.others / room).max()))))


class Arm:
    """Tactics on one variant and mesh, applied again with larger budgets. A new arm has not searched yet: its best is the best
    named strategy, or with ``quick`` the best of a few; it stays ``quick`` until a search starts from all of them."""

    def __init__(self, captured: Captured, placement: Placement, asked: Asked, journal: Journal, quick: bool):
        self.captured, self.placement = captured, placement
        self.inquiry = captured.inquiry(placement, asked.roles)
        pins = make_pins(captured.analysis, placement.mesh, asked.pins or {})
        if asked.tactics and isinstance(asked.tactics[0], Auto):  # the search decides whether the rest follows
            pins = [replace(pin, colors=()) for pin in pins]
        self._first: tuple[Decision, ...] = (*pins, *stated_shards(captured.analysis, placement.mesh))
        self._tactics = asked.tactics
        self._searches = sum(isinstance(t, Auto) for t in asked.tactics)
        self._searcher = Searcher(self.inquiry.model, journal, self.inquiry.problems)
        self._context = replace(self.inquiry.context, searcher=self._searcher)
        self._states: list[tuple[Decision, ...]] = []  # those of other meshes
        self._repeated: dict[tuple[Decision, ...], _Repeated] = {}
        self.least_bytes = least_bytes(self.inquiry.model, self._first)
        self.quick = quick
        self.best = self._decide(Budget(evaluations=0), quick)

    @property
    def usable_bytes(self) -> int:
        return self.inquiry.model.usable_blocks * BLOCK

    @property
    def hopeless(self) -> bool:
        """Whether it is proven that nothing fits."""
        return self.least_bytes > self.usable_bytes

    @property
    def scaling(self) -> float:
        """The step time over that of perfect scaling: the compute of one device, divided by the number of devices."""
        cost = self._searcher.unsharded
        return (
            self.best.total.time_ps * self.placement.mesh.devices / cost.compute_ps if cost and cost.compute_ps else 1.0
        )

    def search(self, budget: Budget, quick: bool) -> Decided:
        """Applies the tactics with a budget, and returns the best result so far."""
        self.best = min(self._decide(budget, quick), self.best, key=lambda decided: decided.rank)
        return self.best

    def start_from(self, decisions: Iterable[tuple[Decision, ...]]) -> None:
        """Evaluates states that were found on another mesh; searches start from them too."""
        new = [state for state in decisions if state not in self._states]
        if new:
            self._states += new
            ended = self.best.ended
            self.best = replace(self.search(Budget(evaluations=0), quick=True), ended=ended)

    def _decide(self, budget: Budget, quick: bool) -> Decided:
        self.quick &= quick
        self._searcher.begin(budget, self._searches, quick, self._states)
        decisions, counts = self._first, [len(self._first)]
        for tactic in self._tactics:
            decisions = tuple(decide(self._context, [tactic], decisions))
            counts.append(len(decisions))
        results = self._searcher.done
        if len(results) == self._searches > 0 and isinstance(self._tactics[-1], Auto):
            total = results[-1].best.cost
        else:
            total = self.inquiry.model.evaluate(self._context.lower(decisions))
        ended = tuple(r.ended for r in results)
        return Decided(self.inquiry, decisions, total, ended, self._searcher.journal.options.goal, tuple(counts))

    def states(self) -> list[tuple[tuple[Decision, ...], Cost]]:
        """The evaluated states that no other beats in both time and memory; without a search, the best alone."""
        return self._searcher.front() or [(self.best.decisions, self.best.total)]

    def stored_ps(self, cost: Cost) -> int:
        """The time to write and to read all that is alive at the peak of a state; zero if it does not fit."""
        profile = self.inquiry.model.cost.profile
        fits = cost.peak_bytes <= self.usable_bytes
        return int(fits * 2e12 * cost.peak_bytes / (profile.memory_bytes_per_s * profile.memory_efficiency))

    def candidates(self, faster_than_ps: float, gathers: bool = False) -> list[Candidate]:
        """States that are faster, and do not fit, but could in micro-batches, for each of which arguments are gathered, and
        their gradients reduced. ``gathers``: arguments are gathered again for the backward pass."""
        candidates = []
        for decisions, cost in self.states():
            if cost.time_ps >= faster_than_ps or cost.peak_bytes <= self.usable_bytes:
                continue
            if decisions not in self._repeated:
                self._repeated[decisions] = self._each_time(decisions)
            of = self._repeated[decisions]
            if times := of.times(self.usable_bytes, gathers):
                in_parts = Cost(
                    cost.compute_ps + (times - 1) * of.compute_ps,
                    cost.comm_ps + (times - 1) * of.comm_ps,
                    cost.overlapped_ps + (times - 1) * of.overlapped_ps - (of.alone_ps if times > 1 else 0),
                    cost.peak_blocks,
                )
                microbatches = times * self.captured.variant.microbatches
                candidates.append(Candidate(cost.time_ps, microbatches, in_parts.time_ps))
        return candidates

    def _each_time(self, decisions: tuple[Decision, ...]) -> _Repeated:
        """The memory of a state's arguments, and the times of what is done for them in each micro-batch."""
        model, program = self.inquiry.model, self.captured.analysis.program
        s, parts = model.structure, self.captured.variant.microbatches
        ends = [late or v in s.added_to for v, late in enumerate(s.late)]
        edges = [t for t in model.terms if t.kind is TermKind.EDGE and (s.early[t.number] or ends[t.number])]
        edges = [t for t in edges if program.runs[t.region] >= parts]
        lowered = self._context.lower(decisions, {op for t in edges for op in t.ops})
        values = (program.values[a.value] for a in program.arguments)
        used = sum(blocks(v, lowered.storage[v.id], lowered.mesh, model.cost.profile) for v in values)
        moves = [r for t in edges for r in model.edge_reshards(lowered, t)]
        gathers = [r for r in moves if r.operand >= 0 and s.early[r.value]]
        copies = copy_allocations(lowered, model.life, gathers, model.cost.profile)
        copied, every = memory_curve(model.life.points, copies), self._searcher.curve(decisions)
        if every is None:
            whole = self._context.lower(decisions)
            every = total(model, [model.figures(whole, term) for term in model.terms])[1]
        # What stays replicated is reduced once, after all parts.
        reductions = (r for r in moves if ends[r.value] and any(s.purpose is Kind.REDUCE_SCATTER for s in r.steps))
        gathered, reduced = (
            [sum(times) for times in zip((0, 0, 0), *(ps for r in some for ps in model.step_ps(r)), strict=True)]
            for some in (gathers, reductions)
        )
        compute_ps, comm_ps, _ = map(sum, zip(gathered, reduced, strict=True))
        others = np.maximum(every - copied - used, 0)
        return _Repeated(used * BLOCK, copied, others, compute_ps, comm_ps, gathered[2], reduced[2])


def again_ps(variants: Variants, arm: Arm) -> float:
    """The least time of what the rematerialized program of an arm computes again: of its products at the peak rate."""
    try:
        again = variants[replace(arm.captured.variant, microbatches=1, batch=(), remat=True)]
    except VariantError:
        return 0.0
    return max(0.0, product_ps(again, arm.placement) - product_ps(variants[AS_IS], arm.placement))


def product_ps(captured: Captured, placement: Placement) -> float:
    """The time of a variant's products at the peak rate of all devices."""
    program, profile = captured.analysis.program, placement.topology.profile
    products = [op for op in program.ops if op.unit is Unit.MATRIX]
    rates = [profile.matrix_rate(widest_dtype(program, op.operands[:2])) for op in products]
    flops = [op.flops * float(program.runs[op.region]) for op in products]
    return sum(n / rate for n, rate in zip(flops, rates, strict=True)) * 1e12 / placement.mesh.devices


def suited(best: Decided) -> Decided:
    """Returns the decisions with axes of equal size exchanged so that each carries what its name says, where that costs
    nothing."""
    inquiry = best.inquiry
    for decisions in exchanged(inquiry.context, best.decisions):
        total = inquiry.model.evaluate(inquiry.context.lower(decisions))
        other = replace(best, decisions=decisions, total=total)
        if other.rank <= best.rank:
            return other
    return best


def best_placement(captured: Captured, asked: Asked, best: Decided) -> Decided:
    """Returns the decisions on the best placement of the mesh, of those that cut no more rows of a torus."""
    default = best.inquiry.cost.placement
    others = placements(default.mesh, default.topology, limit=_MOST_PLACEMENTS)[1:]
    for other in (p for p in others if cuts(p) <= cuts(default)):
        inquiry = captured.inquiry(other, asked.roles)
        total = inquiry.model.evaluate(inquiry.context.lower(best.decisions))
        best = min(best, replace(best, inquiry=inquiry, total=total), key=lambda one: one.rank)
    return best
