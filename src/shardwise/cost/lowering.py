"""Lowering a state: how every op computes, and the collectives on every edge (design, section 6).

The compute rule. An op computes under the assignment of axes to its factors (or to none) that is cheapest *locally*: reshards
of its operands from how they are stored, plus its own time, plus the reduction or reshard of its results to how they are
stored. Candidates for an axis are the factors whose color was given that axis; the losing side of a conflict is none. Ties go
to the order of decisions.

Deferred reductions. A result that is partial stays so where its one use is linear in it and lies in the same region: sums of
partial values are partial, and so are their casts, transposes, reshapes and products with whole values. The use decides by the
same local comparison whether it takes the value as partial or reduced, so ``dq·Wq + dk·Wk + dv·Wv`` is reduced once.

Staying as computed (not in the design). A product's result with two dimensions that were given one axis may lie in either way.
It stays as its op computes it where that, with the time of its uses, is cheaper than storage: the masks of a mixture of
experts stay with their tokens. Weak: uses are asked one by one, with their other operands as stored, and those in a loop's
body are not multiplied by its trips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.cost.decisions import State
from shardwise.cost.faults import CONVOLUTION, PAD, failing_pads, fails_convolution
from shardwise.cost.halo import cut_sizes, halo_widths
from shardwise.cost.local import LocalCost
from shardwise.cost.sharding import Axes, Collective, Kind, Sharding, reshard, result_sharding, tensor_sharding
from shardwise.cost.storage import VIEWS, Clashes, store
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Op, Origin, Program, Unit
from shardwise.ir.rule import Rule

#: Ops that are linear in each of these operands when the others are whole (None: in every operand at once).
LINEAR: Final[dict[str, tuple[int, ...] | None]] = {
    "add": None,
    "add_any": None,
    "sub": None,
    "neg": (0,),
    "convert_element_type": (0,),
    "transpose": (0,),
    "reshape": (0,),
    "squeeze": (0,),
    "copy": (0,),
    "mul": (0, 1),
    "div": (0,),
    "reduce_sum": (0,),
}


@dataclass(frozen=True, slots=True)
class Reshard:
    """Collectives on the edge into an op (``operand``) or out of it (``result``), executed ``trips`` times."""

    op: int
    value: int
    operand: int  # -1 for a result
    source: Sharding
    target: Sharding
    steps: tuple[Collective, ...]
    trips: float


@dataclass(frozen=True)
class Lowered:
    """A state worked out: ``storage`` by value, ``actual`` how it really leaves its op (partial where deferred), ``factors``
    the axes of every op's factors, ``passing`` the axes over which an op passes partial values on."""

    analysis: Analysis
    state: State
    storage: tuple[Sharding, ...]
    actual: tuple[Sharding, ...]
    factors: tuple[tuple[Axes, ...], ...]
    passing: tuple[Axes, ...]
    reshards: tuple[Reshard, ...]
    refused: tuple[str, ...]

    @property
    def program(self) -> Program:
        return self.analysis.program

    def __str__(self) -> str:
        from shardwise.cost.text import format_lowered

        return format_lowered(self)


def lower_state(analysis: Analysis, state: State, cost: LocalCost) -> Lowered:
    """Works out a state: two rules, reshards, deferred reductions."""
    return _Lowering(analysis, state, cost).run()


class _Lowering:
    def __init__(self, analysis: Analysis, state: State, cost: LocalCost):
        self.analysis, self.state, self.cost = analysis, state, cost
        self.program, self.mesh = analysis.program, state.mesh
        self.color = analysis.names.color.tolist()
        self.first_node = analysis.names.first_node.tolist()
        self.clashes = Clashes.of(analysis)
        self.given = set(state.order)
        self.rank = {pair: k for k, pair in enumerate(state.order)}
        self.fixed = {*state.pinned, *(v for v, _ in state.kept)}
        self.looking = False  # while uses are asked what they would like, nothing else is
        self.crossed = self._crossed()
        self.known: dict[object, tuple[tuple[Axes, ...], Axes]] = {}
        self.uses: list[list[tuple[int, int]]] = [[] for _ in self.program.values]
        for op in self.program.ops:
            for k, v in enumerate(op.operands):
                if v >= 0:
                    self.uses[v].append((op.id, k))

    def run(self) -> Lowered:
        storage, refused = store(self.analysis, self.state, self.clashes)
        self.storage = storage
        self.actual = list(storage)
        self.early = [v.origin is Origin.ARGUMENT for v in self.program.values]
        factors: list[tuple[Axes, ...]] = [()] * len(self.program.ops)
        passing: list[Axes] = [()] * len(self.program.ops)
        reshards: list[Reshard] = []
        paid: set[tuple[int, int, Sharding]] = set()
        for op in self.program.schedule:
            if op.rule is None:
                continue
            assigned, passed = self._choose(op)
            factors[op.id], passing[op.id] = assigned, passed
            reshards += self._operand_reshards(op, assigned, passed, paid)
            for k, steps in self._halos(op, assigned):
                need = self._need(op, k, assigned, passed)
                trips = float(self.program.trips[op.region])
                reshards.append(Reshard(op.id, op.operands[k], k, need, need, steps, trips))
            reshards += self._result_reshards(op, assigned, passed)
            if op.kind in VIEWS:
                ready = all(self.early[v] for v in op.operands if v >= 0)
                for v in op.results:
                    self.early[v] = ready
        return Lowered(
            self.analysis,
            self.state,
            tuple(storage),
            tuple(self.actual),
            tuple(factors),
            tuple(passing),
            tuple(reshards),
            tuple(dict.fromkeys(refused)),
        )

    # The compute rule.

    def _candidates(self, op: Op) -> list[list[int]]:
        """By axis: -1 for none, and the factors that may take it, in the order of decisions."""
        rule = op.rule
        assert rule is not None
        start = self.first_node[op.id]
        lost = self.clashes.losers(op.id, self.color, self.state)
        found = []
        for axis in range(len(self.mesh.sizes)):
            able = [
                f
                for f, ok in enumerate(rule.splittable)
                if ok and (self.color[start + f], axis) in self.given and (start + f, axis) not in lost
            ]
            ranked = sorted((self.rank[self.color[start + f], axis], f) for f in able)
            able = [f for _, f in ranked]
            found.append([*able, -1])
        return found

    def _choose(self, op: Op) -> tuple[tuple[Axes, ...], Axes]:
        rule = op.rule
        assert rule is not None
        candidates = self._candidates(op)
        partial = {a for v in op.operands if v >= 0 for a in self.actual[v].partial}
        nothing = ((),) * len(rule.factors)
        if not partial and all(len(c) == 1 for c in candidates):
            return nothing, ()
        stored_in = tuple(self.actual[v] if v >= 0 else Sharding(()) for v in op.operands)
        stored_out = tuple(self.storage[v] for v in op.results)
        early = tuple(v >= 0 and self.early[v] for v in op.operands)
        context = tuple((self._may_wait(op, v), self._joins_partial(op, v)) for v in op.results)
        shared = tuple(self._sharers(op, v) if v >= 0 else 0 for v in op.operands)
        alone = op.id if op.unit is Unit.MATRIX and self.crossed.intersection(op.results) else -1
        key = (id(rule), op.kind, stored_in, stored_out, early, tuple(map(tuple, candidates)), context, shared, alone)
        if key not in self.known:
            self.known[key] = self._cheapest(op, candidates, partial)[1:]
        return self.known[key]

    def _cheapest(self, op: Op, candidates: list[list[int]], partial: set[int]) -> tuple[float, tuple[Axes, ...], Axes]:
        rule = op.rule
        assert rule is not None
        options = []
        for axis, able in enumerate(candidates):
            choices: list[int | None] = list(able)
            if axis in partial and self._can_pass(op, axis):
                choices.insert(0, None)  # the value stays partial on this axis
            options.append(choices)
        best: tuple[float, tuple[Axes, ...], Axes] | None = None
        for choice in itertools.product(*options):
            assigned = self._assignment(op, choice)
            if assigned is None:
                continue
            passed = tuple(a for a, f in enumerate(choice) if f is None)
            seconds = self._seconds(op, assigned, passed)
            if best is None or seconds < best[0] * (1 - 1e-9):
                best = seconds, assigned, passed
        assert best is not None, "computing whole is always possible"
        return best

    def _can_pass(self, op: Op, axis: int) -> bool:
        """Is the op linear in its operands that are partial on an axis?"""
        partial = [k for k, v in enumerate(op.operands) if v >= 0 and axis in self.actual[v].partial]
        if op.kind not in LINEAR:
            return False
        linear = LINEAR[op.kind]
        return linear is None or (len(partial) == 1 and partial[0] in linear)

    def _assignment(self, op: Op, choice: Sequence[int | None]) -> tuple[Axes, ...] | None:
        """Axes by factor, in the order of decisions; None where sizes do not divide, or XLA would compute wrongly."""
        rule = op.rule
        assert rule is not None
        start = self.first_node[op.id]
        taken = [(a, f) for a, f in enumerate(choice) if f is not None and f >= 0]
        assigned: list[list[int]] = [[] for _ in rule.factors]
        for a, f in sorted(taken, key=lambda pair: self.rank[self.color[start + pair[1]], pair[0]]):
            assigned[f].append(a)
        for f, axes in enumerate(assigned):
            pieces = 1
            for a in axes:
                pieces *= self.mesh.sizes[a]
            if pieces > 1 and any(size % pieces for size in cut_sizes(self.program, op, f)):
                return None
        chosen = tuple(tuple(axes) for axes in assigned)
        if op.kind == CONVOLUTION and fails_convolution(rule, chosen, self.mesh):
            return None
        if op.kind == PAD:
            ends = [tensor_sharding(majors, chosen).dims for majors in (rule.operand_majors[0], rule.result_majors[0])]
            if failing_pads(op, *ends):
                return None
        return chosen

    def _seconds(self, op: Op, assigned: tuple[Axes, ...], passed: Axes) -> float:
        rule = op.rule
        assert rule is not None
        seconds = 0.0
        moved = 0.0
        for k, v in enumerate(op.operands):
            if v < 0:
                continue
            value = self.program.values[v]
            need = self._need(op, k, assigned, passed)
            steps = reshard(value.nbytes, self.actual[v], need, self.mesh)
            # A reshard of one value is paid once in a region: products that use it share it.
            seconds += self.cost.communication_s(steps, self.mesh, self.early[v]) / self._sharers(op, v)
            moved += value.nbytes / need.shards(self.mesh)
        for r, v in enumerate(op.results):
            value = self.program.values[v]
            made = result_sharding(rule, r, assigned, passed)
            steps = reshard(value.nbytes, made, self._target(op, v, made, self._joins_partial(op, v)), self.mesh)
            seconds += self.cost.communication_s(steps, self.mesh, False)
            moved += value.nbytes / made.shards(self.mesh)
        seconds += sum(self.cost.communication_s(steps, self.mesh, False) for _, steps in self._halos(op, assigned))
        parts = 1
        for axes in assigned:
            for a in axes:
                parts *= self.mesh.sizes[a]
        return seconds + self.cost.compute_s(op.flops / parts, moved, op.unit)

    def _need(self, op: Op, operand: int, assigned: tuple[Axes, ...], passed: Axes) -> Sharding:
        assert op.rule is not None
        own = tensor_sharding(op.rule.operand_majors[operand], assigned)
        still = tuple(a for a in self.actual[op.operands[operand]].partial if a in passed)
        return Sharding(own.dims, still)

    def _halos(self, op: Op, assigned: tuple[Axes, ...]) -> list[tuple[int, tuple[Collective, ...]]]:
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
            steps = tuple(Collective(Kind.PERMUTE, axes, w * row, w * row) for w in widths if w)
            if steps:
                found.append((operand, steps))
        return found

    def _windowed_size(self, rule: Rule, tensor: int, factor: int, value: int) -> int:
        place = next(d for d, dim in enumerate(rule.tensors[tensor]) if factor in dim)
        return self.program.values[value].shape[place]

    # Reshards.

    def _operand_reshards(
        self, op: Op, assigned: tuple[Axes, ...], passed: Axes, paid: set[tuple[int, int, Sharding]]
    ) -> list[Reshard]:
        found = []
        trips = float(self.program.trips[op.region])
        for k, v in enumerate(op.operands):
            if v < 0:
                continue
            need = self._need(op, k, assigned, passed)
            steps = reshard(self.program.values[v].nbytes, self.actual[v], need, self.mesh)
            if steps and (op.region, v, need) not in paid:
                paid.add((op.region, v, need))
                found.append(Reshard(op.id, v, k, self.actual[v], need, steps, trips))
        return found

    def _result_reshards(self, op: Op, assigned: tuple[Axes, ...], passed: Axes) -> list[Reshard]:
        assert op.rule is not None
        found = []
        for r, v in enumerate(op.results):
            made = result_sharding(op.rule, r, assigned, passed)
            target = self.actual[v] = self._target(op, v, made, frozenset(made.partial))
            steps = reshard(self.program.values[v].nbytes, made, target, self.mesh)
            if steps:
                found.append(Reshard(op.id, v, -1, made, target, steps, float(self.program.trips[op.region])))
        return found

    def _target(self, op: Op, value: int, made: Sharding, waiting: frozenset[int]) -> Sharding:
        """Where a result goes: to storage, or, where its reduction over some axes may wait, to storage without them."""
        wait = tuple(a for a in made.partial if a in waiting)
        stored = self.storage[value]
        if not made.partial and self._stays(op, value, made):
            return made
        if not wait or not self._may_wait(op, value):
            return stored
        return Sharding(tuple(tuple(a for a in axes if a not in wait) for axes in stored.dims), wait)

    # Values that stay as they are computed.

    def _stays(self, op: Op, value: int, made: Sharding) -> bool:
        """Is a product's result (or a view of one) better left as it is computed than moved to where it is stored?

        Its uses decide: the dispatch mask of a mixture of experts, computed by groups and used with tokens by groups, would
        otherwise go to the experts and back.
        """
        stored = self.storage[value]
        if self.looking or value not in self.crossed or made == stored or made.axes() != stored.axes():
            return False
        if op.unit is not Unit.MATRIX and op.kind not in VIEWS:
            return False
        self.looking = True
        move_s = self._move_s(value, made, stored)
        stays = self._uses_s(value, made) < move_s + self._uses_s(value, stored)
        self.looking = False
        return stays

    def _crossed(self) -> set[int]:
        """Values with two dimensions that were given one axis, so that they may lie in either way."""
        given: dict[int, list[int]] = {}
        for color, axis in self.state.order:
            given.setdefault(color, []).append(axis)
        names = self.analysis.names
        seen: set[tuple[int, int]] = set()
        found: set[int] = set()
        for value, node in zip(names.member_value.tolist(), names.member_node.tolist(), strict=True):
            for axis in given.get(self.color[node], ()):
                if (value, axis) in seen and value not in self.state.pinned:
                    found.add(value)
                seen.add((value, axis))
        return found

    def _move_s(self, value: int, source: Sharding, target: Sharding) -> float:
        steps = reshard(self.program.values[value].nbytes, source, target, self.mesh)
        return self.cost.communication_s(steps, self.mesh, False)

    def _uses_s(self, value: int, sharding: Sharding) -> float:
        """The time of a value's uses if it came in this sharding; through views, to the uses of these."""
        kept, self.actual[value] = self.actual[value], sharding
        seconds = 0.0
        for number in dict.fromkeys(user for user, _ in self.uses[value]):
            use = self.program.ops[number]
            if use.rule is None:
                continue
            if use.kind not in VIEWS:
                seconds += self._cheapest(use, self._candidates(use), set())[0]
                continue
            (result,) = use.results
            seen, stored = self._seen(use, sharding), self.storage[result]
            options = [self._uses_s(result, stored) + self._move_s(result, seen, stored)]
            if seen != stored and result in self.crossed:
                options.append(self._uses_s(result, seen))
            seconds += min(options)
        self.actual[value] = kept
        return seconds

    def _seen(self, view: Op, sharding: Sharding) -> Sharding:
        """A view's result where its operand comes in a sharding."""
        rule = view.rule
        assert rule is not None
        assigned: list[Axes] = [()] * len(rule.factors)
        for factor, axes in zip(rule.operand_majors[0], sharding.dims, strict=True):
            if factor >= 0 and rule.splittable[factor]:
                assigned[factor] = axes
        return tensor_sharding(rule.result_majors[0], assigned)

    def _joins_partial(self, op: Op, value: int) -> frozenset[int]:
        """Axes over which a sum that this value goes into is partial already: reducing it then costs nothing more."""
        if len(self.uses[value]) != 1:
            return frozenset()
        use = self.program.ops[self.uses[value][0][0]]
        if use.kind not in LINEAR or LINEAR[use.kind] is not None:
            return frozenset()
        others = [v for v in use.operands if v >= 0 and v != value]
        return frozenset(a for v in others for a in self.actual[v].partial)

    def _sharers(self, op: Op, value: int) -> int:
        """How many products in the region would share a reshard of this value."""
        if op.unit is not Unit.MATRIX:
            return 1
        ops = (self.program.ops[user] for user, _ in self.uses[value])
        return max(1, sum(user.region == op.region and user.unit is op.unit for user in ops))

    def _may_wait(self, op: Op, value: int) -> bool:
        """Has a partial result one use only, linear and in the same region? Then the use decides.

        XLA reassociates the all-reduces of products and sums; it does not join that of a scatter to another's.
        """
        if len(self.uses[value]) != 1 or not (op.unit is Unit.MATRIX or op.kind in LINEAR) or value in self.fixed:
            return False
        user, operand = self.uses[value][0]
        use = self.program.ops[user]
        linear = LINEAR.get(use.kind, ())
        return use.region == op.region and (linear is None or operand in linear)


def collectives(lowered: Lowered) -> list[tuple[Kind, Axes, float, float, Reshard]]:
    """All collectives that are not slices: kind, axes, bytes on one device, how often, and the reshard they belong to."""
    return [
        (step.kind, step.axes, step.nbytes, r.trips, r)
        for r in lowered.reshards
        for step in r.steps
        if step.kind is not Kind.SLICE
    ]
