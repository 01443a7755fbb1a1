"""The cost model of a program on hardware, as a sum of local terms (design, section 7). This is the specification.

A *term* is what one small part of the program costs under a state:

- a **kernel**: ops that run as one (``shardwise.cost.compute``);
- an **edge**: one value in one section of a region: how it gets from where it is made to where it is stored, and from there to
  its uses, each different need once, with what windowed uses fetch from other devices; and the copies that live meanwhile;
- a **value**: the memory it takes while it lives (``shardwise.cost.memory``).

A term reads how its own ops compute and how its own values lie, nothing else. Time is counted in whole picoseconds and memory
in blocks of 512 bytes, so that sums do not depend on their order: ``shardwise.evaluator.evaluator`` adds the same terms from
tables and must agree exactly.

Time. Compute and communication are added up; early gathers and late reductions hide behind compute as far as it goes:
``time = compute + comm - min(hidden, compute)``, between the bounds ``max(compute, comm)`` and ``compute + comm``.
Memory. The largest sum of what is alive at one point of the program.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from shardwise.cost.compute import kernel_s
from shardwise.cost.kernels import Edge, Kernel, Tensor, kernels
from shardwise.cost.memory import (
    BLOCK,
    Allocation,
    Lifetimes,
    copy_allocations,
    lifetimes,
    op_points,
    use_points,
    value_allocations,
)
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Op
from shardwise.ir.traits import MANUAL
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.structure import Structure


class TermKind(enum.Enum):
    KERNEL = "kernel"
    EDGE = "edge"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Term:
    """``ops`` and ``values`` are what it reads; ``points`` the points at which its allocations may begin or end; ``section``
    that of an edge."""

    kind: TermKind
    number: int
    region: int
    ops: tuple[int, ...]
    values: tuple[int, ...]
    points: tuple[int, ...] = ()
    section: int = -1


@dataclass(frozen=True, slots=True)
class Figures:
    """What a term costs. Times are for the whole step."""

    compute_ps: int = 0
    comm_ps: int = 0
    hidden_ps: int = 0
    allocations: tuple[Allocation, ...] = ()
    reshards: tuple[Reshard, ...] = ()


NO_FIGURES: Final = Figures()


@dataclass(frozen=True)
class Cost:
    """The cost of a state, whole."""

    compute_ps: int
    comm_ps: int
    hidden_ps: int
    peak_blocks: int

    @property
    def time_ps(self) -> int:
        return self.compute_ps + self.comm_ps - min(self.hidden_ps, self.compute_ps)

    @property
    def time_s(self) -> float:
        return self.time_ps * 1e-12

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * BLOCK


@dataclass(frozen=True)
class CostModel:
    """A program on hardware: what its terms are, and what each costs under a lowered state."""

    structure: Structure
    cost: HardwareCost
    life: Lifetimes = field(init=False)
    kernels: tuple[Kernel, ...] = field(init=False)
    terms: tuple[Term, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "life", lifetimes(self.structure.program, self.cost.profile.calls_library))
        object.__setattr__(self, "kernels", kernels(self.life.clusters, self.cost.profile.turns))
        object.__setattr__(self, "terms", tuple(self._terms()))

    @staticmethod
    def of(analysis: Analysis, cost: HardwareCost) -> CostModel:
        return CostModel(Structure.of(analysis), cost)

    def on(self, cost: HardwareCost) -> CostModel:
        """The model of the same program on another mesh. Terms depend on the profile, not on the mesh, and are shared."""
        if cost.profile != self.cost.profile:
            return CostModel(self.structure, cost)
        other = copy.copy(self)
        object.__setattr__(other, "cost", cost)
        return other

    @property
    def usable_blocks(self) -> int:
        return self.cost.profile.usable_bytes // BLOCK

    @cached_property
    def _users(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """By value and section: the ops that use it there, in the order of execution."""
        found: dict[tuple[int, int], dict[int, None]] = {}
        for op in self.structure.program.schedule:
            if op.rule is not None:
                for v in op.operands:
                    if v >= 0:
                        found.setdefault((v, self.structure.section(op.id, v)), {})[op.id] = None
        return {key: tuple(ops) for key, ops in found.items()}

    def _terms(self) -> Iterable[Term]:
        program, life = self.structure.program, self.life
        for n, work in enumerate(self.kernels):
            ops = work.ops
            # How other values lie shows in how the ops compute.
            read = [*work.products, *(k for e in work.edges for k in (e.maker, e.user))]
            found = {v for k in read for v in (*program.ops[k].operands, *program.ops[k].results) if v >= 0}
            yield Term(TermKind.KERNEL, n, work.region, ops, tuple(sorted(found)))
        section = self.structure.section
        edges = dict.fromkeys((v, section(op, v)) for v, (op, _) in program.definitions.items())
        for value, where in edges | dict.fromkeys(self._users):
            maker = program.definitions[value][0]
            own = (maker,) if section(maker, value) == where else ()
            whole = not self.structure.waits[value] and max(self.structure.colors[value], default=-1) < 0
            ops = own if whole else (*own, *self._users.get((value, where), ()))
            points = [
                0,
                life.points - 1,
                life.returned.get(value, 0),
                *use_points(life, value),
                *life.beside_span(maker),
            ]
            points += [life.live[value][0] - 1, life.live[value][1] + 1] if value in life.live else []
            used = [(program.ops[k].region, p) for k in ops for p in op_points(life, program.ops[k])]
            points += [q for region, p in used for q in (p, life.ahead(region, p))]
            yield Term(TermKind.EDGE, value, self.structure.runs_in[where], ops, (value,), tuple(points), where)
        for value in life.values():
            intervals = (life.live, life.windowed)
            points = [p for known in intervals for p in known.get(value, ())]
            points += life.narrowed.get(value, ())[2:]
            yield Term(TermKind.VALUE, value, 0, (), (value,), tuple(points))

    def figures(self, lowered: Lowered, term: Term) -> Figures:
        """What a term costs under a state."""
        profile = self.cost.profile
        if term.kind is TermKind.KERNEL:
            work = self.kernels[term.number]
            runs = int(self.structure.program.runs[work.region])
            return Figures(compute_ps=runs * round(kernel_s(lowered, work, profile) * 1e12))
        if term.kind is TermKind.VALUE:
            return Figures(allocations=tuple(value_allocations(lowered, self.life, term.number, profile)))
        moves = tuple(self._edge(lowered, term))
        if not moves:
            return NO_FIGURES
        allocations = copy_allocations(lowered, self.life, list(moves), profile)
        return replace(self._moving(moves), allocations=tuple(allocations))

    def shape(self, term: Term) -> Hashable:
        """What a term is made of, apart from how its ops compute: equal for terms of repeated layers."""
        life = self.life
        if term.kind is TermKind.VALUE:
            known = term.number in life.live, term.number in life.windowed
            return *known, life.narrowed.get(term.number, (0, 0.0))[1]
        if term.kind is TermKind.EDGE:
            value, maker = term.number, self.structure.program.definitions[term.number][0]
            return value in life.returned, maker in term.ops, tuple(k in life.point for k in term.ops)
        return _kernel_shape(self.kernels[term.number], term)

    def points(self, op: Op) -> tuple[int, ...]:
        """The first and the last point at which an op runs."""
        return op_points(self.life, op)

    def _edge_users(self, term: Term) -> tuple[int, ...]:
        return self._users.get((term.number, term.section), ())

    def _edge(self, lowered: Lowered, term: Term) -> Iterable[Reshard]:
        """The reshards of one value in one region, each different need once."""
        program = self.structure.program
        value = term.number
        number, result = program.definitions[value]
        maker, actual = program.ops[number], lowered.actual[value]
        if self.structure.section(number, value) == term.section and lowered.made(maker, result) is not actual:
            yield from (r for r in lowered.result_reshards(maker) if r.value == value)
        paid: set[Hashable] = {actual}
        for user in self._edge_users(term):
            op = program.ops[user]
            for r in lowered.operand_reshards(op, value):
                if (r.target, r.steps) not in paid:
                    paid.add((r.target, r.steps))
                    yield r
            for key, r in lowered.halos(op, value) if op.kind in MANUAL or (op.rule and op.rule.windows) else ():
                if key not in paid:
                    paid.add(key)
                    yield r

    def _moving(self, moves: tuple[Reshard, ...]) -> Figures:
        copying = comm = hidden = 0
        for move in moves:
            for step in self.step_ps(move):
                copying, comm, hidden = copying + step[0], comm + step[1], hidden + step[2]
        return Figures(copying, comm, hidden, (), moves)

    def step_ps(self, move: Reshard) -> list[tuple[int, int, int]]:
        """For each collective of a reshard the time of the copies that it needs, its own, and what of that hides."""
        cost, structure = self.cost, self.structure
        runs = int(structure.program.runs[move.region])
        early, late = structure.early[move.value] and move.operand >= 0, structure.late[move.value]
        return [
            (
                runs * round(cost.copy_s(step) * 1e12),
                runs * round(cost.step_s(step, late) * 1e12),
                runs * round(cost.hidden_s(step, early, late) * 1e12),
            )
            for step in move.steps
        ]

    def evaluate(self, lowered: Lowered) -> Cost:
        """The sum of all terms."""
        found = [self.figures(lowered, term) for term in self.terms]
        curve = memory_curve(self.life.points, [a for f in found for a in f.allocations])
        return Cost(
            sum(f.compute_ps for f in found),
            sum(f.comm_ps for f in found),
            sum(f.hidden_ps for f in found),
            int(curve.max(initial=0)),
        )


def _kernel_shape(kernel: Kernel, term: Term) -> Hashable:
    ops = {k: n for n, k in enumerate(term.ops)}
    values = {v: n for n, v in enumerate(term.values)}

    def tensor(t: Tensor) -> Hashable:
        return ops[t.op], t.number, t.itemsize

    def edge(e: Edge) -> Hashable:
        return values[e.value], ops[e.maker], e.result, ops[e.user], e.operand, e.stored

    return (
        tuple(ops[k] for k in kernel.products),
        tuple(ops[k] for k in kernel.others),
        tuple(tuple(map(tensor, places)) for places in kernel.reads),
        kernel.feeds,
        tuple(map(tensor, kernel.writes)),
        tuple(map(edge, kernel.inner)),
        edge(kernel.returned) if kernel.returned else None,
        edge(kernel.transposed) if kernel.transposed else None,
    )


def memory_curve(points: int, allocations: Sequence[Allocation]) -> np.ndarray:
    """Blocks alive at each point."""
    change = np.zeros(points + 1, np.int64)
    for a in allocations:
        change[a.first] += a.blocks
        change[a.last + 1] -= a.blocks
    return np.cumsum(change)[:points]
