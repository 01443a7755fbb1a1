"""The cost model of a program on hardware, as a sum of local terms (design, section 7). This is the specification.

A *term* is what one small part of the program costs under a state:

- a **kernel**: ops that run as one (``shardwise.cost.compute``);
- an **edge**: the reshards of one value in one section of a region, each different need once, with the halos of windowed
  consumers, and the copies that live meanwhile;
- a **value**: the memory it takes while it lives (``shardwise.cost.memory``);
- a **copy**: what a gather, a scatter or an output copies to row-major order (``shardwise.cost.copies``).

A term reads how its ops compute and the shardings of its values, nothing else. Time is counted in whole picoseconds and memory
in blocks of 512 bytes, so that sums do not depend on their order: ``shardwise.evaluator.evaluator`` adds the same terms from
tables and must agree exactly.

Early gathers and late reductions overlap with compute as far as it goes: ``time = compute + comm - min(overlapped, compute)``.
Memory is the largest sum of what is alive at one point of the program.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from shardwise.cost.compute import kernel_s, stream_s, transferred_bytes
from shardwise.cost.copies import computed_span, copy_span, looks_up, lookup_copies, output_copies, reordered_outputs
from shardwise.cost.kernels import Edge, Kernel, Tensor, kernels
from shardwise.cost.memory import BLOCK, Allocation, Lifetimes, copy_allocations, on_chip_blocks, value_allocations
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import HEAVY, Op
from shardwise.ir.traits import MANUAL
from shardwise.lowering.local_cost import HardwareCost, operations
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.structure import Structure


class TermKind(enum.Enum):
    KERNEL = "kernel"
    EDGE = "edge"
    VALUE = "value"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Term:
    """``ops`` and ``values`` are what it reads; ``points``: where its allocations may begin or end."""

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
    overlapped_ps: int = 0
    allocations: tuple[Allocation, ...] = ()
    reshards: tuple[Reshard, ...] = ()


_NOTHING: Final = Figures()


@dataclass(frozen=True)
class Cost:
    """The cost of a state."""

    compute_ps: int
    comm_ps: int
    overlapped_ps: int
    peak_blocks: int

    @property
    def time_ps(self) -> int:
        return self.compute_ps + self.comm_ps - min(self.overlapped_ps, self.compute_ps)

    @property
    def time_s(self) -> float:
        return self.time_ps * 1e-12

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * BLOCK


class CostModel:
    """A program on hardware: what its terms are, and what each costs under a lowered state."""

    def __init__(self, structure: Structure, cost: HardwareCost):
        self.structure, self.cost = structure, cost
        self.life: Lifetimes = Lifetimes(structure.program, cost.profile.calls_library)
        self.prepared: dict[Hashable, Any] = {}  # what evaluators and bounds on all meshes share

    @staticmethod
    def of(analysis: Analysis, cost: HardwareCost) -> CostModel:
        return CostModel(Structure(analysis), cost)

    def on(self, cost: HardwareCost) -> CostModel:
        """The model of the same program on another mesh. Terms depend on the profile, not on the mesh, and are shared."""
        if cost.profile != self.cost.profile:
            return CostModel(self.structure, cost)
        assert self.terms is not None  # computed before they are shared
        other = copy.copy(self)
        other.cost = cost
        return other

    @property
    def usable_blocks(self) -> int:
        return self.cost.profile.usable_bytes // BLOCK

    @property
    def on_chip_blocks(self) -> int:
        return on_chip_blocks(self.cost.profile)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        narrowed = {stack: itemsize for stack, (itemsize, _, _) in self.life.narrowed.items()}
        return kernels(self.life.clusters, self.cost.profile.transposes, narrowed)

    @cached_property
    def reordered(self) -> dict[int, tuple[int, int]]:
        return reordered_outputs(self.life)

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return tuple(self._terms())

    @cached_property
    def _users(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """By value and section: the ops that use it there, in the order of execution."""
        users: dict[tuple[int, int], dict[int, None]] = {}
        for op in self.structure.program.schedule:
            for v in op.operands if op.rule is not None else ():
                if v >= 0:
                    users.setdefault((v, self.structure.section(op.id, v)), {})[op.id] = None
        return {key: tuple(ops) for key, ops in users.items()}

    @cached_property
    def _with_products(self) -> frozenset[int]:
        """The regions with products in them, not counting inner loops."""
        return frozenset(op.region for op in self.structure.program.ops if op.unit in HEAVY)

    @cached_property
    def _outside(self) -> tuple[float, ...]:
        """By region: the share of its FLOPs outside of the loops in it. A loop does not run beside a collective around it."""
        program = self.structure.program
        own = [0.0] * len(program.regions)
        for op in program.ops:
            own[op.region] += operations(self.cost.profile, op) * float(program.runs[op.region])
        inside = list(own)
        for region in reversed(program.regions[1:]):
            inside[region.parent] += inside[region.id]
        return tuple(mine / every if every else 1.0 for mine, every in zip(own, inside, strict=True))

    def _terms(self) -> Iterable[Term]:
        program, life, section = self.structure.program, self.life, self.structure.section
        for n, kernel in enumerate(self.kernels):
            # The shardings of other values follow from how the ops compute.
            ops = [program.ops[k] for k in (*kernel.products, *(k for e in kernel.edges for k in (e.maker, e.user)))]
            values = {v for op in ops for v in (*op.operands, *op.results) if v >= 0}
            yield Term(TermKind.KERNEL, n, kernel.region, kernel.ops, tuple(sorted(values)))
        edges = dict.fromkeys((v, section(op, v)) for v, (op, _) in program.definitions.items())
        for value, where in edges | dict.fromkeys(self._users):
            maker = program.definitions[value][0]
            used: tuple[int, ...] = (maker,) if section(maker, value) == where else ()
            if self.structure.waits[value] or max(self.structure.colors[value], default=-1) >= 0:
                used += self._users.get((value, where), ())
            points = [0, life.points - 1, life.returned.get(value, 0)]
            points += life.use_points(value)
            points += life.beside_points(maker) if self.structure.overlapped[value] else ()
            points += [life.live[value][0] - 1, life.live[value][1] + 1] if value in life.live else []
            points += [q for k in used for p in life.runs[k] for q in (p, life.ahead(program.ops[k].region, p))]
            yield Term(TermKind.EDGE, value, self.structure.runs_in[where], used, (value,), tuple(points), where)
        for value in life.values():
            points = [*life.live.get(value, ()), *life.windowed.get(value, ()), *life.narrowed.get(value, ())[1:]]
            yield Term(TermKind.VALUE, value, 0, (), (value,), tuple(points))
        for op in (op for op in program.ops if looks_up(op) or op.id in self.reordered):
            if life.runs[op.id] and not life.clusters.by_library:
                read = tuple(dict.fromkeys(v for v in (*op.operands, *op.results) if v >= 0))
                spans = [p for v in read for p in copy_span(life, op, v)]
                spans += computed_span(life, op) if op.id in self.reordered else ()
                yield Term(TermKind.COPY, op.id, op.region, (op.id,), read, tuple(spans))

    def figures(self, lowered: Lowered, term: Term) -> Figures:
        """What a term costs under a state."""
        profile = self.cost.profile
        if term.kind is TermKind.KERNEL:
            kernel = self.kernels[term.number]
            runs = int(self.structure.program.runs[kernel.region])
            compute_ps = runs * round(kernel_s(lowered, kernel, profile, self.life.layouts) * 1e12)
            if not kernel.transfers:
                return Figures(compute_ps)
            # Transfers are asynchronous copies, beside the products of their loop.
            nbytes = transferred_bytes(lowered, kernel, profile, self.life.layouts)
            moved_ps = runs * round(nbytes / profile.host_bytes_per_s * 1e12)
            return Figures(compute_ps, moved_ps, moved_ps if kernel.region in self._with_products else 0)
        if term.kind is TermKind.VALUE:
            return Figures(allocations=tuple(value_allocations(lowered, self.life, term.number, profile)))
        if term.kind is TermKind.COPY:
            op, rows = self.structure.program.ops[term.number], self.reordered.get(term.number)
            if rows is not None:
                allocations = tuple(output_copies(lowered, self.life, op, rows, profile))
            else:
                copies = lookup_copies(lowered, self.life, op, profile)
                allocations = tuple(allocation for allocation, known in copies if known)
            in_memory = [a for a in allocations if not a.on_chip]
            times = [self._copies(op, a.value) * stream_s(2 * a.blocks * BLOCK, 0.0, 0.0, profile) for a in in_memory]
            return Figures(sum([round(s * 1e12) for s in times]), allocations=allocations)
        reshards = tuple(self.edge_reshards(lowered, term))
        if not reshards:
            return _NOTHING
        steps = ((0, 0, 0), *(step for r in reshards for step in self.step_ps(r)))
        compute_ps, comm_ps, overlapped_ps = map(sum, zip(*steps, strict=True))
        allocations = tuple(copy_allocations(lowered, self.life, reshards, profile))
        return Figures(compute_ps, comm_ps, overlapped_ps, allocations, reshards)

    def _copies(self, op: Op, value: int) -> int:
        """How often an operand or result of a lookup is copied: before the loop if it is from outside."""
        home = self.structure.program.home[self.life.clusters.base[value]]
        return int(self.structure.program.runs[op.region if home == op.region else home])

    def shape(self, term: Term) -> Hashable:
        """What a term is made of, apart from how its ops compute: equal for terms of repeated layers."""
        life = self.life
        if term.kind is TermKind.VALUE:
            narrowed, minor = life.narrowed.get(term.number, (0.0,))[0], life.layouts.minor.get(term.number)
            temporary = term.number in life.temporary
            return term.number in life.live, temporary, term.number in life.windowed, narrowed, minor
        if term.kind is TermKind.EDGE:
            maker, minor = self.structure.program.definitions[term.number][0], life.layouts.minor.get(term.number)
            return term.number in life.returned, maker in term.ops, tuple(k in life.point for k in term.ops), minor
        if term.kind is TermKind.COPY:
            op = self.structure.program.ops[term.number]
            return op.kind, self.reordered.get(op.id), tuple([self._copies(op, v) for v in term.values])
        layouts = tuple([life.layouts.of_op[k] for k in term.ops])
        return layouts, _kernel_shape(self.kernels[term.number], term)

    def edge_reshards(self, lowered: Lowered, term: Term) -> Iterable[Reshard]:
        """The reshards of one value in one region, each different need once."""
        program, value = self.structure.program, term.number
        number, result = program.definitions[value]
        maker, actual = program.ops[number], lowered.actual[value]
        if self.structure.section(number, value) == term.section and lowered.computed(maker, result) is not actual:
            yield from (r for r in lowered.result_reshards(maker) if r.value == value)
        paid: set[Hashable] = {actual}
        for op in (program.ops[k] for k in self._users.get((value, term.section), ())):
            moves: list[tuple[Hashable, Reshard]]
            moves = [((r.target, r.steps), r) for r in lowered.operand_reshards(op, value)]
            if op.kind in MANUAL or (op.rule and op.rule.windows):
                moves += lowered.halos(op, value)
            for key, r in moves:
                if key not in paid:
                    paid.add(key)
                    yield r

    def step_ps(self, move: Reshard) -> list[tuple[int, int, int]]:
        """For each collective of a reshard the time of its copies, of itself, and of what of it overlaps with compute."""
        cost, structure = self.cost, self.structure
        runs = int(structure.program.runs[move.region])
        early, late = structure.early[move.value] and move.operand >= 0, structure.late[move.value]
        return [
            (
                runs * round(cost.copy_s(step) * 1e12),
                runs * round(cost.step_s(step, late) * 1e12),
                runs * round(cost.hidden_s(step, early, late) * self._outside[move.region] * 1e12),
            )
            for step in move.steps
        ]

    def evaluate(self, lowered: Lowered) -> Cost:
        """The sum of all terms."""
        return total(self, [self.figures(lowered, term) for term in self.terms])[0]


def total(model: CostModel, figures: Sequence[Figures]) -> tuple[Cost, np.ndarray]:
    """The sum of the figures of all terms, and the blocks that are alive at each point."""
    allocations = [a for f in figures for a in f.allocations]
    curve = memory_curve(model.life.points, allocations, model.on_chip_blocks)
    times = (sum(f.compute_ps for f in figures), sum(f.comm_ps for f in figures), sum(f.overlapped_ps for f in figures))
    return Cost(*times, int(curve.max(initial=0))), curve


def _kernel_shape(kernel: Kernel, term: Term) -> Hashable:
    """The kernel with the ops and values of its term numbered through."""
    ops = {k: n for n, k in enumerate(term.ops)}
    values = {v: n for n, v in enumerate(term.values)}

    def shape(part: object) -> Hashable:
        if isinstance(part, Tensor):
            return ops[part.op], part.number, part.itemsize, part.span
        if isinstance(part, Edge):
            return values[part.value], ops[part.maker], part.result, ops[part.user], part.operand, part.stored
        return tuple(map(shape, part)) if isinstance(part, tuple) else part

    work = tuple(
        tuple(ops[k] for k in numbers) for numbers in (kernel.products, kernel.others, kernel.transfers, kernel.looped)
    )
    return (
        work,
        kernel.feeds,
        *map(shape, (kernel.reads, kernel.writes, kernel.inner, kernel.returned, kernel.transposed)),
    )


def memory_curve(points: int, allocations: Sequence[Allocation], room: int = 0) -> np.ndarray:
    """Blocks of memory in use at each point; ``room``: blocks on the chip."""
    changes = np.zeros(2 * (points + 1), np.int64)
    blocks = np.array([a.blocks for a in allocations], np.int64)
    start = np.array([a.on_chip for a in allocations], np.int64) * (points + 1)
    np.add.at(changes, start + np.array([a.first for a in allocations], np.int64), blocks)
    np.add.at(changes, start + np.array([a.last + 1 for a in allocations], np.int64), -blocks)
    return in_use(changes, room)


def in_use(changes: np.ndarray, room: int) -> np.ndarray:
    """Blocks of memory in use at each point; ``changes``: at each point first those of arrays in memory, then those of arrays
    that may be on the chip. All of these are, where they fit; where they do not, they evict one another, and as much as half
    of the room is saved."""
    memory, small = np.cumsum(changes.reshape(2, -1), axis=1)[:, :-1]
    left = np.minimum(small - room // 2, 2 * (small - room))
    used: np.ndarray = memory + np.maximum(left, 0)
    return used
