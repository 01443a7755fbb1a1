"""The candidates of an op: how it can be computed on a mesh, and how long each takes. The compute rule chooses from them.

A candidate gives every mesh axis to one factor of the op or to none. It depends on a state only by which factors can take which
axis and in what order, so that all states of one mesh and cost share what is computed here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.ir.traits import MANUAL
from shardwise.lowering.halo import Fetch, cut_sizes, fetches
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.padding import can_pad
from shardwise.lowering.sharding import (
    ArrayType,
    Axes,
    Collective,
    Kind,
    Sharding,
    partial_need,
    result_sharding,
    tensor_sharding,
)
from shardwise.lowering.structure import Structure

#: Ops that state the axes of their factors.
_SHARD_MAP: Final = ("shard_map.input", "shard_map.output")


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """How an op can compute: the axes of its factors (``assigned``), the axes on which it passes partial sums on (``passed``),
    the shardings in which it needs its operands and computes its results, and its time with halos, without reshards. ``parts``:
    how many times each operand and result is larger than its block; ``devices`` share the work. Ops that are alike share the
    object."""

    assigned: tuple[Axes, ...]
    passed: Axes
    needs: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    seconds: float
    parts: tuple[float, ...]
    devices: float

    def need(self, operand: int, given: Sharding) -> Sharding:
        """The sharding in which an operand is needed that comes in another: what is passed on stays partial."""
        return partial_need(self.needs[operand], given, self.passed)


class Halo(NamedTuple):
    """What an operand fetches from other devices, and the permutes that bring it."""

    operand: int
    fetches: tuple[Fetch, ...]
    steps: tuple[Collective, ...]


def can_pass(linear: tuple[int, ...] | None, inputs: Sequence[Sharding], axis: int) -> bool:
    """Is an op linear in its operands that are partial on an axis?"""
    partial = [k for k, given in enumerate(inputs) if axis in given.partial]
    return linear is None or (len(partial) == 1 and partial[0] in linear)


#: The candidate of an op without a rule.
NO_CANDIDATE: Final = Candidate((), (), (), (), 0.0, (), 1)


class Candidates:
    """The candidates of a program's ops on a mesh."""

    def __init__(self, structure: Structure, mesh: MeshAxes, cost: LocalCost):
        self.structure, self.mesh, self.cost = structure, mesh, cost
        self.program = structure.program
        kinds = dict(zip(structure.array_kinds, zip(structure.arrays, structure.overlapped, strict=True), strict=True))
        types = {kind: array._replace(ring=cost.ring(array, late)) for kind, (array, late) in kinds.items()}
        self.arrays = tuple([types[kind] for kind in structure.array_kinds])
        self._rounding = self.program.rounding if cost.rounds else frozenset[int]()
        self._candidates: dict[object, list[Candidate]] = {}
        self._one: dict[object, Candidate] = {}
        self._nbytes: dict[int, tuple[list[int], str]] = {}  # of ``_arrays``
        self._divided: dict[tuple[int, int, int], bool] = {}
        self._uneven: dict[int, dict[int, frozenset[int]]] = {}
        self._fetched: dict[object, tuple[Fetch, ...] | None] = {}

    def rounds(self, op: Op) -> bool:
        """Does an op read its operands rounded?"""
        return op.id in self._rounding

    def operand(self, op: Op, operand: int) -> ArrayType:
        """What reshards of an operand depend on, for this op."""
        array = self.arrays[op.operands[operand]]
        return array.rounded if op.id in self._rounding else array

    def of(
        self, op: Op, able: tuple[tuple[int, ...], ...], order: tuple[Axes | None, ...], passing: Axes
    ) -> list[Candidate]:
        """The candidates of an op: for every axis one of the factors that are ``able`` to take it (-1: none), or, on axes of
        ``passing``, to pass partial sums on. ``order`` has the axes of factors with several, major first; None for any
        order."""
        alike = self.structure.alike[op.id]
        key: object = (alike, able, order, passing)
        if op.kind in _SHARD_MAP:
            key = (op.kind, op.id)
            names = self.mesh.names
            if key not in self._candidates:
                assigned = tuple(tuple(names.index(n) for n in axes if n in names) for axes in op.attribute("axes"))
                self._candidates[key] = [self._candidate(op, assigned, ())]
        if key in self._candidates:
            return self._candidates[key]
        options = [[*((None,) if axis in passing else ()), *factors] for axis, factors in enumerate(able)]
        candidates = []
        for choice in itertools.product(*options):
            passed = tuple(a for a, f in enumerate(choice) if f is None)
            for assigned in self._assignments(op, choice, order):
                one = (alike, assigned, passed)
                if one not in self._one:
                    self._one[one] = self._candidate(op, assigned, passed)
                candidates.append(self._one[one])
        self._candidates[key] = candidates
        return candidates

    def _assignments(
        self, op: Op, choice: Sequence[int | None], order: tuple[Axes | None, ...]
    ) -> Iterable[tuple[Axes, ...]]:
        """Axes by factor, in order; none where sizes do not divide and cannot be padded, or windows do not fit the blocks."""
        rule = op.factor_rule
        assigned: list[Axes] = [()] * len(rule.factors)
        for a, f in enumerate(choice):
            if f is not None and f >= 0:
                assigned[f] += (a,)
        for f, axes in enumerate(assigned):
            even = not axes or self._divides(op, f, self.mesh.pieces(axes))
            if not even and (len(axes) > 1 or not can_pad(self.program, op, f)):
                return ()
        chosen = tuple(assigned)
        if rule.windows and self.fetches(op, chosen) is None:
            return ()
        if all(len(axes) < 2 for axes in chosen):
            return (chosen,)
        return itertools.product(*(_ordered(axes, wanted) for axes, wanted in zip(chosen, order, strict=True)))

    def _divides(self, op: Op, factor: int, pieces: int) -> bool:
        key = (self.structure.alike[op.id], factor, pieces)
        if key not in self._divided:
            self._divided[key] = not any(size % pieces for size in cut_sizes(self.program, op, factor))
        return self._divided[key]

    def uneven(self, op: Op) -> dict[int, frozenset[int]]:
        """The factors of an op that some axes do not divide, and these axes."""
        alike = self.structure.alike[op.id]
        if alike not in self._uneven:
            sizes = [factor.size for factor in op.factor_rule.factors]
            axes = [frozenset(a for a, k in enumerate(self.mesh.sizes) if n % k) for n in sizes]
            self._uneven[alike] = {f: some for f, some in enumerate(axes) if some}
        return self._uneven[alike]

    def _candidate(self, op: Op, assigned: tuple[Axes, ...], passed: Axes) -> Candidate:
        rule, values = op.factor_rule, self.program.values
        needs, results = self._shardings(op, assigned, passed)
        parts: tuple[float, ...] = tuple([sharding.shards(self.mesh) for sharding in (*needs, *results)])
        devices: float = self.mesh.pieces(itertools.chain(*assigned))
        uneven = self.uneven(op)
        if uneven and not all(axes.isdisjoint(assigned[f]) for f, axes in uneven.items()):
            shapes = [values[v].shape if v >= 0 else () for v in (*op.operands, *op.results)]
            parts = tuple(s.parts(shape, self.mesh) for s, shape in zip((*needs, *results), shapes, strict=True))
            devices = Sharding(assigned).parts([factor.size for factor in rule.factors], self.mesh)
        nbytes, dtype = self._arrays(op)
        moved = sum([size / n for size, n in zip(nbytes, parts, strict=True)])
        seconds = self.cost.compute_s(op, devices, moved, dtype)
        if rule.windows or op.kind in MANUAL:
            seconds += sum(self.cost.communication_s(halo.steps, False) for halo in self.halo_steps(op, assigned))
        return Candidate(assigned, passed, needs, results, seconds, parts, devices)

    def _arrays(self, op: Op) -> tuple[list[int], str]:
        """The bytes of operands and results, and the dtype of the operand with the largest elements."""
        alike = self.structure.alike[op.id]
        if alike not in self._nbytes:
            values = [self.program.values[v] if v >= 0 else None for v in (*op.operands, *op.results)]
            used = [value for value in values[: len(op.operands)] if value]
            dtype = max(used, key=lambda value: value.itemsize).dtype if used else "float32"
            self._nbytes[alike] = [value.nbytes if value else 0 for value in values], dtype
        return self._nbytes[alike]

    def _shardings(
        self, op: Op, assigned: tuple[Axes, ...], passed: Axes
    ) -> tuple[tuple[Sharding, ...], tuple[Sharding, ...]]:
        """The shardings of operands and results."""
        computed, key = self.structure.computed, (self.structure.alike[op.id], assigned, passed)
        if key not in computed:
            rule = op.factor_rule
            needs = tuple([tensor_sharding(majors, assigned) for majors in rule.operand_majors])
            computed[key] = needs, tuple([result_sharding(rule, r, assigned, passed) for r in range(len(op.results))])
        return computed[key]

    def fetches(self, op: Op, assigned: tuple[Axes, ...]) -> tuple[Fetch, ...] | None:
        """What a windowed op fetches from other devices; None where it cannot be computed with these axes."""
        values = self.program.values
        pieces = tuple(map(self.mesh.pieces, assigned))
        key = (self.structure.alike[op.id], pieces)
        if key not in self._fetched:
            shapes = [values[v].shape if v >= 0 else () for v in (*op.operands, *op.results)]
            self._fetched[key] = fetches(op.kind, op.factor_rule, shapes, pieces)
        return self._fetched[key]

    def halo_steps(self, op: Op, assigned: tuple[Axes, ...]) -> list[Halo]:
        """The permutes of each windowed operand, dimension by dimension; a collective in a ``shard_map`` as it is."""
        rule = op.rule
        if op.kind in MANUAL:
            return self._manual(op)
        if rule is None or not rule.windows:
            return []
        by_operand: dict[int, list[Fetch]] = {}
        for fetch in self.fetches(op, assigned) or ():
            by_operand.setdefault(fetch.operand, []).append(fetch)
        halos = []
        for k, fetched in by_operand.items():
            value, need = self.program.values[op.operands[k]], tensor_sharding(rule.operand_majors[k], assigned)
            local_bytes = math.prod(need.local_shape(value.shape, self.mesh)) * value.itemsize
            steps = []
            for fetch in fetched:
                row, axes = local_bytes / fetch.block, assigned[fetch.factor]
                steps += [Collective(Kind.PERMUTE, axes, r.length * row, r.length * row, r.near) for r in fetch.rounds]
                # Each of several results reads the operand as it arrived.
                local_bytes = row * fetch.width if op.kind != "split" else local_bytes
            if steps:
                halos.append(Halo(k, tuple(fetched), tuple(steps)))
        return halos

    def _manual(self, op: Op) -> list[Halo]:
        names = [n for n in op.attribute("axes", ()) if n in self.mesh.names]
        axes = tuple(map(self.mesh.index, names))
        halos = []
        for k, (v, r) in enumerate(zip(op.operands, op.results, strict=True)):
            sizes = (self.program.values[r if v < 0 else v].nbytes, self.program.values[r].nbytes)
            if axes and max(sizes) > 0:
                step = Collective(Kind(MANUAL[op.kind]), axes, float(sizes[0]), float(sizes[1]))
                halos.append(Halo(k, (), (step,)))
        return halos


def _ordered(axes: Axes, order: Axes | None) -> Iterable[Axes]:
    """A factor's axes, major first: in one order, or in each."""
    if len(axes) < 2:
        return (axes,)
    return itertools.permutations(axes) if order is None else (tuple(sorted(axes, key=order.index)),)
