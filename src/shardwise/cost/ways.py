"""The ways to compute an op on a mesh, each with its own time: what the compute rule chooses from.

A way gives every mesh axis to one factor of the op or to none. It does not depend on a state, save for which factors may have
which axis and in what order, so that all states of one mesh and cost share what is worked out here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.cost.faults import CONVOLUTION, PAD, failing_pads, fails_convolution
from shardwise.cost.halo import cut_sizes, halo_widths
from shardwise.cost.local import LocalCost
from shardwise.cost.moves import still_partial
from shardwise.cost.sharding import Axes, Collective, Kind, Sharding, result_sharding, tensor_sharding
from shardwise.cost.structure import LINEAR, Structure
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.ir.rule import Rule


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to compute an op: the axes of its factors, those over which it passes partial values on, the shardings that it
    needs of its operands (as if nothing was passed on) and makes of its results, and its own time with that of its halos.

    ``parts``: into how many parts each operand and result is cut; ``devices``: how many share the work. Ops that are alike
    have one object for one way, so that it can be looked up by.
    """

    assigned: tuple[Axes, ...]
    passed: Axes
    needs: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    seconds: float
    parts: tuple[int, ...]
    devices: int

    def need(self, operand: int, given: Sharding) -> Sharding:
        """How an operand that comes in a sharding is used: what is passed on stays partial."""
        return still_partial(self.needs[operand], given, self.passed)


def can_pass(op: Op, inputs: Sequence[Sharding], axis: int) -> bool:
    """Is the op linear in its operands that are partial on an axis?"""
    if op.kind not in LINEAR:
        return False
    linear = LINEAR[op.kind]
    partial = [k for k, given in enumerate(inputs) if axis in given.partial]
    return linear is None or (len(partial) == 1 and partial[0] in linear)


#: Of what has no rule.
NO_WAY: Final = Way((), (), (), (), 0.0, (), 1)


class Ways:
    """The ways to compute the ops of a program on a mesh."""

    def __init__(self, structure: Structure, mesh: MeshAxes, cost: LocalCost):
        self.structure, self.mesh, self.cost = structure, mesh, cost
        self.program = structure.program
        self._known: dict[object, list[Way]] = {}
        self._one: dict[object, Way] = {}
        self._divided: dict[tuple[int, int, int], bool] = {}

    def ways(
        self, op: Op, able: tuple[tuple[int, ...], ...], order: tuple[Axes | None, ...], passing: Axes
    ) -> list[Way]:
        """For every axis one of the factors that are ``able`` to take it (-1: none), or, on axes of ``passing``, passing
        partial values on. ``order`` has the axes of every factor that may have several, major first; None for any order."""
        alike = self.structure.alike[op.id]
        key = (alike, able, order, passing)
        if key in self._known:
            return self._known[key]
        options = [[*((None,) if axis in passing else ()), *factors] for axis, factors in enumerate(able)]
        found = []
        for choice in itertools.product(*options):
            passed = tuple(a for a, f in enumerate(choice) if f is None)
            for assigned in self._assignments(op, choice, order):
                one = (alike, assigned, passed)
                if one not in self._one:
                    self._one[one] = self._way(op, assigned, passed)
                found.append(self._one[one])
        self._known[key] = found
        return found

    def _assignments(
        self, op: Op, choice: Sequence[int | None], order: tuple[Axes | None, ...]
    ) -> Iterable[tuple[Axes, ...]]:
        """Axes by factor, in order; none where sizes do not divide, or XLA would compute wrongly."""
        rule = op.rule
        assert rule is not None
        assigned: list[Axes] = [()] * len(rule.factors)
        for a, f in enumerate(choice):
            if f is not None and f >= 0:
                assigned[f] += (a,)
        for f, axes in enumerate(assigned):
            pieces = 1
            for a in axes:
                pieces *= self.mesh.sizes[a]
            if pieces > 1 and not self._divides(op, f, pieces):
                return ()
        chosen = tuple(assigned)
        if op.kind == CONVOLUTION and fails_convolution(rule, chosen, self.mesh):
            return ()
        if op.kind == PAD:
            ends = [tensor_sharding(majors, chosen).dims for majors in (rule.operand_majors[0], rule.result_majors[0])]
            if failing_pads(op, *ends):
                return ()
        if all(len(axes) < 2 for axes in chosen):
            return (chosen,)
        return itertools.product(*(_ordered(axes, own) for axes, own in zip(chosen, order, strict=True)))

    def _divides(self, op: Op, factor: int, pieces: int) -> bool:
        key = (self.structure.alike[op.id], factor, pieces)
        if key not in self._divided:
            self._divided[key] = not any(size % pieces for size in cut_sizes(self.program, op, factor))
        return self._divided[key]

    def _way(self, op: Op, assigned: tuple[Axes, ...], passed: Axes) -> Way:
        rule, values = op.rule, self.program.values
        assert rule is not None
        needs = tuple(tensor_sharding(majors, assigned) for majors in rule.operand_majors)
        made = tuple(result_sharding(rule, r, assigned, passed) for r in range(len(op.results)))
        parts = tuple(sharding.shards(self.mesh) for sharding in (*needs, *made))
        used = [(values[v], n) for v, n in zip(op.operands, parts, strict=False) if v >= 0]
        moved = sum(value.nbytes / n for value, n in used)
        moved += sum(values[v].nbytes / n for v, n in zip(op.results, parts[len(needs) :], strict=True))
        dtype = max((value for value, _ in used), key=lambda value: value.itemsize).dtype if used else "float32"
        devices = math.prod(self.mesh.sizes[a] for axes in assigned for a in axes)
        seconds = sum(self.cost.communication_s(steps, False) for _, steps in self.halo_steps(op, assigned))
        seconds += self.cost.compute_s(op.flops / devices, moved, op.unit, dtype)
        return Way(assigned, passed, needs, made, seconds, parts, devices)

    def halo_steps(self, op: Op, assigned: tuple[Axes, ...]) -> list[tuple[int, tuple[Collective, ...]]]:
        """What each windowed operand's shards get from their neighbours: a permute from each side."""
        rule = op.rule
        assert rule is not None
        values = [*op.operands, *op.results]
        found = []
        for window in rule.windows:
            axes = assigned[window.factor]
            # Between two operands (a weight's gradient) it is the one looked into that moves.
            operand, other = (window.of, window.by) if window.of < len(op.operands) else (window.by, window.of)
            if not axes or operand >= len(op.operands):
                continue
            sizes = [self._windowed_size(rule, t, window.factor, values[t]) for t in (operand, other)]
            pieces = math.prod(self.mesh.sizes[a] for a in axes)
            widths = halo_widths(window, pieces, *sizes, operand == window.of)
            held = tensor_sharding(rule.operand_majors[operand], assigned).shards(self.mesh)
            row = self.program.values[values[operand]].nbytes / held / (sizes[0] // pieces)
            steps = tuple(Collective(Kind.PERMUTE, axes, w * row, w * row, True) for w in widths if w)
            if steps:
                found.append((operand, steps))
        return found

    def _windowed_size(self, rule: Rule, tensor: int, factor: int, value: int) -> int:
        place = next(d for d, dim in enumerate(rule.tensors[tensor]) if factor in dim)
        return self.program.values[value].shape[place]


def _ordered(axes: Axes, order: Axes | None) -> Iterable[Axes]:
    """A factor's axes, major first: in one order, or in each."""
    if len(axes) < 2:
        return (axes,)
    return itertools.permutations(axes) if order is None else (tuple(sorted(axes, key=order.index)),)
