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

Both rules are local, and so is everything here: a :class:`Lowered` works out what it is asked for and what that rests on, no
more. Asked for everything it is the plan of a state; asked for a few ops it fills a row of the evaluator's tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Generic, TypeVar

from shardwise.cost.decisions import State
from shardwise.cost.faults import CONVOLUTION, PAD, failing_pads, fails_convolution
from shardwise.cost.halo import cut_sizes, halo_widths
from shardwise.cost.local import LocalCost
from shardwise.cost.sharding import Axes, Collective, Kind, Sharding, reshard, result_sharding, tensor_sharding
from shardwise.cost.storage import VIEWS, kept_axes, store
from shardwise.cost.structure import LINEAR, Structure
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Op, Unit
from shardwise.ir.rule import Rule

T = TypeVar("T")
NOTHING: Final = Sharding(())
#: How an op computes: the axes of its factors, and those over which it passes partial values on.
Choice = tuple[tuple[Axes, ...], Axes]


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


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute an op: the axes of its factors, those over which it passes partial values on, the shardings that it
    needs of its operands (as if nothing was passed on) and makes of its results, and its own time with that of its halos."""

    assigned: tuple[Axes, ...]
    passed: Axes
    needs: tuple[Sharding, ...]
    made: tuple[Sharding, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Known:
    """What was worked out already of like ops in like places, shared by all states of one mesh and cost."""

    choices: dict[object, Choice] = field(default_factory=dict)
    ways: dict[object, list[Way]] = field(default_factory=dict)
    way: dict[object, Way] = field(default_factory=dict)
    asked_s: dict[object, float] = field(default_factory=dict)
    moves_s: dict[object, float] = field(default_factory=dict)


class Lazy(Sequence[T], Generic[T]):
    """A list whose items are worked out when first asked for, one at a time."""

    def __init__(self, count: int, work_out: Callable[[int], T]):
        self._items: list[T | None] = [None] * count
        self._work_out = work_out

    def __getitem__(self, index: int) -> T:  # type: ignore[override]
        item = self._items[index]
        if item is None:
            item = self._items[index] = self._work_out(index)
        return item

    def __len__(self) -> int:
        return len(self._items)


def lower_state(analysis: Analysis, state: State, cost: LocalCost) -> Lowered:
    """Works out a state: two rules, reshards, deferred reductions."""
    lowered = Lowered(Structure.of(analysis), state, cost)
    lowered.work_out()
    return lowered


class Lowered:
    """A state worked out: ``storage`` by value, ``actual`` how it really leaves its op (partial where deferred), ``choices``
    how every op computes."""

    def __init__(self, structure: Structure, state: State, cost: LocalCost, known: Known | None = None) -> None:
        self.structure, self.state, self.cost = structure, state, cost
        self.program, self.mesh = structure.program, state.mesh
        values, ops = len(self.program.values), len(self.program.ops)
        self.storage: Lazy[Sharding] = Lazy(values, lambda v: self._stored(v)[0])
        self.actual: Lazy[Sharding] = Lazy(values, self._actual)
        self.choices: Lazy[Choice] = Lazy(ops, self._choose)
        self.known = known or Known()
        self._uses_known: dict[tuple[int, Sharding], float] = {}
        self._rank = {pair: k for k, pair in enumerate(state.order)}
        self._axes: dict[int, tuple[int, ...]] = {}
        for color, axis in state.order:
            self._axes[color] = (*self._axes.get(color, ()), axis)
        self._fixed = {*state.pinned, *(v for v, _ in state.kept)}
        self._kept = kept_axes(self.program, state) if state.kept else {}
        self._stores: dict[object, tuple[Sharding, tuple[tuple[int, int, int], ...]]] = {}

    @property
    def analysis(self) -> Analysis:
        return self.structure.analysis

    def work_out(self) -> None:
        """Works out every op, in the order in which nothing rests on what is still to come."""
        for op in self.program.schedule:
            self.choices[op.id]

    @cached_property
    def factors(self) -> Sequence[tuple[Axes, ...]]:
        return Lazy(len(self.program.ops), lambda op: self.choices[op][0])

    @cached_property
    def passing(self) -> Sequence[Axes]:
        return Lazy(len(self.program.ops), lambda op: self.choices[op][1])

    @cached_property
    def reshards(self) -> tuple[Reshard, ...]:
        """All of the program, in the order of execution. A reshard of one value is paid once in a region."""
        paid: set[tuple[int, int, Sharding]] = set()
        found: list[Reshard] = []
        for op in self.program.schedule:
            if op.rule is None:
                continue
            for r in self.operand_reshards(op):
                if (op.region, r.value, r.target) not in paid:
                    paid.add((op.region, r.value, r.target))
                    found.append(r)
            found += self.halos(op)
            found += self.result_reshards(op)
        return tuple(found)

    @cached_property
    def refused(self) -> tuple[str, ...]:
        """What could not be sharded for divisibility, in words: of values that are stored alike, the first with a path."""
        told: list[str] = []
        seen: set[int] = set()
        for value in (v for v in self.program.values if v.path):
            stored = self._stored(value.id)
            for d, pieces, axis in stored[1] if id(stored) not in seen else ():
                name, size = self.mesh.names[axis], value.shape[d]
                told.append(f"{value.path}[{d}] of size {size} does not divide by {pieces} ({name})")
            seen.add(id(stored))
        return tuple(dict.fromkeys(told))

    def __str__(self) -> str:
        from shardwise.cost.text import format_lowered

        return format_lowered(self)

    # The storage rule.

    def _stored(self, value: int) -> tuple[Sharding, tuple[tuple[int, int, int], ...]]:
        s, shape = self.structure, self.program.values[value].shape
        own, colors = s.nodes[value], s.colors[value]
        op = self.program.definitions[value][0]
        lost = s.clashes.losers(op, s.color, self.state, own) if op in s.clashes.by_op else frozenset()
        beaten = frozenset((d, a) for d, n in enumerate(own) for a in range(len(self.mesh.sizes)) if (n, a) in lost)
        kept, pinned = self._kept.get(value, frozenset()), self.state.pinned.get(value)
        key = (shape, colors, beaten, kept, pinned)
        if key not in self._stores:
            self._stores[key] = store(shape, colors, beaten, kept, pinned, self.state)
        return self._stores[key]

    # The compute rule.

    def candidates(self, op: Op) -> tuple[tuple[int, ...], ...]:
        """By axis: the factors that may take it, in the order of decisions, and -1 for none."""
        rule, s = op.rule, self.structure
        assert rule is not None
        start = s.first_node[op.id]
        lost = s.clashes.losers(op.id, s.color, self.state) if op.id in s.clashes.by_op else frozenset()
        able: list[list[tuple[int, int]]] = [[] for _ in self.mesh.sizes]
        for f, ok in enumerate(rule.splittable):
            color = s.color[start + f]
            for axis in self._axes.get(color, ()) if ok else ():
                if (start + f, axis) not in lost:
                    able[axis].append((self._rank[color, axis], f))
        return tuple((*(f for _, f in sorted(found)), -1) for found in able)

    def _choose(self, number: int) -> Choice:
        op, s = self.program.ops[number], self.structure
        rule = op.rule
        if rule is None:
            return (), ()
        candidates = self.candidates(op)
        inputs = tuple(self.actual[v] if v >= 0 else NOTHING for v in op.operands)
        if all(len(c) == 1 for c in candidates) and not any(i.partial for i in inputs):
            return ((),) * len(rule.factors), ()
        joins = tuple(self._joins(v) for v in op.results)
        if any(s.stays[v] and self._crossed(v) for v in op.results):
            return self._cheapest(op, candidates, inputs, joins)[1:]
        waits = tuple(self._may_wait(v) for v in op.results)
        key = (*self._key(op, candidates, inputs), joins, waits)
        if key not in self.known.choices:
            self.known.choices[key] = self._cheapest(op, candidates, inputs, joins)[1:]
        return self.known.choices[key]

    def _key(self, op: Op, candidates: object, inputs: object) -> tuple[object, ...]:
        """Equal for ops that compute alike, but for what becomes of their results."""
        s = self.structure
        assert op.rule is not None
        start = s.first_node[op.id]
        order = tuple(self._axes.get(s.color[start + f], ()) for f in range(len(op.rule.factors)))
        outputs = tuple(self.storage[v] for v in op.results)
        early = tuple(v >= 0 and s.early[v] for v in op.operands)
        shared = tuple(self._sharers(op, v) for v in op.operands)
        return s.alike[op.id], candidates, order, inputs, outputs, early, shared

    def _cheapest(
        self,
        op: Op,
        candidates: Sequence[Sequence[int]],
        inputs: Sequence[Sharding],
        joins: Sequence[frozenset[int]] | None,
    ) -> tuple[float, tuple[Axes, ...], Axes]:
        """The cheapest way to compute, with its seconds. ``joins`` is None while a use is only asked what it would like."""
        passing: tuple[int, ...] = ()
        if joins is not None:
            partial = {a for given in inputs for a in given.partial}
            passing = tuple(a for a in sorted(partial) if _can_pass(op, inputs, a))
        best: tuple[float, tuple[Axes, ...], Axes] | None = None
        for way in self._ways(op, candidates, passing):
            seconds = self._seconds(op, way, inputs, joins)
            if best is None or seconds < best[0] * (1 - 1e-9):
                best = seconds, way.assigned, way.passed
        assert best is not None, "computing whole is always possible"
        return best

    def _ways(self, op: Op, candidates: Sequence[Sequence[int]], passing: Axes) -> list[Way]:
        """The ways to compute an op: for every axis one of its candidates, or passing partial values on."""
        rule, s = op.rule, self.structure
        assert rule is not None
        start = s.first_node[op.id]
        order = tuple(self._axes.get(s.color[start + f], ()) for f in range(len(rule.factors)))
        key = (s.alike[op.id], candidates, order, passing)
        if key in self.known.ways:
            return self.known.ways[key]
        options = []
        for axis, able in enumerate(candidates):
            # First that a value stays partial on an axis.
            options.append([*((None,) if axis in passing else ()), *able])
        found = []
        for choice in itertools.product(*options):
            assigned = self._assignment(op, choice)
            if assigned is None:
                continue
            passed = tuple(a for a, f in enumerate(choice) if f is None)
            one = (s.alike[op.id], assigned, passed)
            if one not in self.known.way:
                self.known.way[one] = self._way(op, assigned, passed)
            found.append(self.known.way[one])
        self.known.ways[key] = found
        return found

    def _assignment(self, op: Op, choice: Sequence[int | None]) -> tuple[Axes, ...] | None:
        """Axes by factor, in the order of decisions; None where sizes do not divide, or XLA would compute wrongly."""
        rule = op.rule
        assert rule is not None
        start, color = self.structure.first_node[op.id], self.structure.color
        taken = [(a, f) for a, f in enumerate(choice) if f is not None and f >= 0]
        assigned: list[list[int]] = [[] for _ in rule.factors]
        for a, f in sorted(taken, key=lambda pair: self._rank[color[start + pair[1]], pair[0]]):
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

    def _way(self, op: Op, assigned: tuple[Axes, ...], passed: Axes) -> Way:
        rule, values = op.rule, self.program.values
        assert rule is not None
        needs = tuple(tensor_sharding(majors, assigned) for majors in rule.operand_majors)
        made = tuple(result_sharding(rule, r, assigned, passed) for r in range(len(op.results)))
        used = [(values[v], need) for v, need in zip(op.operands, needs, strict=True) if v >= 0]
        moved = sum(value.nbytes / need.shards(self.mesh) for value, need in used)
        moved += sum(values[v].nbytes / m.shards(self.mesh) for v, m in zip(op.results, made, strict=True))
        dtype = max((value for value, _ in used), key=lambda value: value.itemsize).dtype if used else "float32"
        parts = math.prod(self.mesh.sizes[a] for axes in assigned for a in axes)
        seconds = sum(self.cost.communication_s(steps, False) for _, steps in self._halo_steps(op, assigned))
        seconds += self.cost.compute_s(op.flops / parts, moved, op.unit, dtype)
        return Way(assigned, passed, needs, made, seconds)

    def _seconds(self, op: Op, way: Way, inputs: Sequence[Sharding], joins: Sequence[frozenset[int]] | None) -> float:
        seconds = way.seconds
        for k, v in enumerate(op.operands):
            need = way.needs[k]
            if v < 0 or (inputs[k] == need and not way.passed):
                continue
            if way.passed:
                need = _still_partial(need, inputs[k], way.passed)
            # A reshard of one value is paid once in a region: products that use it share it.
            seconds += self._move_s(v, inputs[k], need, self.structure.early[v]) / self._sharers(op, v)
        for r, v in enumerate(op.results):
            target = self._target(v, way.made[r], joins[r]) if joins is not None else self.storage[v]
            seconds += self._move_s(v, way.made[r], target)
        return seconds

    def _move_s(self, value: int, source: Sharding, target: Sharding, early: bool = False) -> float:
        if source == target:
            return 0.0
        nbytes = self.structure.nbytes[value]
        key = (nbytes, source, target, early)
        if key not in self.known.moves_s:
            steps = reshard(nbytes, source, target, self.mesh)
            self.known.moves_s[key] = self.cost.communication_s(steps, early)
        return self.known.moves_s[key]

    def _sharers(self, op: Op, value: int) -> int:
        """How many products in the region would share a reshard of this value."""
        return self.structure.products.get((value, op.region), 1) if op.unit is Unit.MATRIX else 1

    def _halo_steps(self, op: Op, assigned: tuple[Axes, ...]) -> list[tuple[int, tuple[Collective, ...]]]:
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

    # Where values go.

    def need(self, op: Op, operand: int) -> Sharding:
        """How an op uses an operand."""
        assert op.rule is not None
        return _need(op.rule, operand, *self.choices[op.id], self.actual[op.operands[operand]])

    def made(self, op: Op, result: int) -> Sharding:
        """How a result is computed, before anything is moved."""
        assert op.rule is not None
        return result_sharding(op.rule, result, *self.choices[op.id])

    def operand_reshards(self, op: Op) -> Iterator[Reshard]:
        for k, v in enumerate(op.operands):
            if v >= 0:
                yield from self._reshard(op, v, k, self.actual[v], self.need(op, k))

    def result_reshards(self, op: Op) -> Iterator[Reshard]:
        for r, v in enumerate(op.results):
            yield from self._reshard(op, v, -1, self.made(op, r), self.actual[v])

    def halos(self, op: Op) -> Iterator[Reshard]:
        for k, steps in self._halo_steps(op, self.choices[op.id][0]):
            need = self.need(op, k)
            yield Reshard(op.id, op.operands[k], k, need, need, steps, float(self.program.trips[op.region]))

    def _reshard(self, op: Op, value: int, operand: int, source: Sharding, target: Sharding) -> Iterator[Reshard]:
        steps = reshard(self.structure.nbytes[value], source, target, self.mesh)
        if steps:
            yield Reshard(op.id, value, operand, source, target, steps, float(self.program.trips[op.region]))

    def _actual(self, value: int) -> Sharding:
        s = self.structure
        stay = s.stays[value] and self._crossed(value)
        if not stay and not self._may_wait(value):
            return self.storage[value]
        number, result = self.program.definitions[value]
        made = self.made(self.program.ops[number], result)
        return self._target(value, made, frozenset(made.partial))

    def _target(self, value: int, made: Sharding, waiting: frozenset[int]) -> Sharding:
        """Where a result goes: to storage, or, where its reduction over some axes may wait, to storage without them."""
        wait = tuple(a for a in made.partial if a in waiting)
        stored = self.storage[value]
        if not made.partial and self._stays(value, made):
            return made
        if not wait or not self._may_wait(value):
            return stored
        return Sharding(tuple(tuple(a for a in axes if a not in wait) for axes in stored.dims), wait)

    def _may_wait(self, value: int) -> bool:
        return self.structure.waits[value] and value not in self._fixed

    def _joins(self, value: int) -> frozenset[int]:
        """Axes over which a sum that this value goes into is partial already: reducing it then costs nothing more."""
        return frozenset(a for v in self.structure.joins[value] for a in self.actual[v].partial)

    # Values that stay as they are computed.

    def _crossed(self, value: int) -> bool:
        """Were two dimensions given one axis, so that the value may lie in either way?"""
        if value in self.state.pinned:
            return False
        given = [a for c in self.structure.colors[value] for a in self._axes.get(c, ())]
        return len(set(given)) < len(given)

    def _stays(self, value: int, made: Sharding) -> bool:
        """Is a product's result (or a view of one) better left as it is computed than moved to where it is stored?

        Its uses decide: the dispatch mask of a mixture of experts, computed by groups and used with tokens by groups, would
        otherwise go to the experts and back.
        """
        stored = self.storage[value]
        if not self.structure.stays[value] or made == stored or made.axes() != stored.axes():
            return False
        if not self._crossed(value):
            return False
        return self._uses_s(value, made) < self._move_s(value, made, stored) + self._uses_s(value, stored)

    def _uses_s(self, value: int, sharding: Sharding) -> float:
        """The time of a value's uses if it came in this sharding; through views, to the uses of these."""
        if (value, sharding) not in self._uses_known:
            users = dict.fromkeys(user for user, _ in self.structure.uses[value])
            ops = [self.program.ops[number] for number in users]
            self._uses_known[value, sharding] = sum(self._use_s(op, value, sharding) for op in ops if op.rule)
        return self._uses_known[value, sharding]

    def _use_s(self, use: Op, value: int, sharding: Sharding) -> float:
        if use.kind in VIEWS:
            (result,) = use.results
            seen, stored = self._seen(use, sharding), self.storage[result]
            options = [self._uses_s(result, stored) + self._move_s(result, seen, stored)]
            if seen != stored and self._crossed(result):
                options.append(self._uses_s(result, seen))
            return min(options)
        inputs = tuple(sharding if v == value else self.storage[v] if v >= 0 else NOTHING for v in use.operands)
        candidates = self.candidates(use)
        key = self._key(use, candidates, inputs)
        if key not in self.known.asked_s:
            self.known.asked_s[key] = self._cheapest(use, candidates, inputs, None)[0]
        return self.known.asked_s[key]

    def _seen(self, view: Op, sharding: Sharding) -> Sharding:
        """A view's result where its operand comes in a sharding."""
        rule = view.rule
        assert rule is not None
        assigned: list[Axes] = [()] * len(rule.factors)
        for factor, axes in zip(rule.operand_majors[0], sharding.dims, strict=True):
            if factor >= 0 and rule.splittable[factor]:
                assigned[factor] = axes
        return tensor_sharding(rule.result_majors[0], assigned)


def _need(rule: Rule, operand: int, assigned: tuple[Axes, ...], passed: Axes, given: Sharding) -> Sharding:
    return _still_partial(tensor_sharding(rule.operand_majors[operand], assigned), given, passed)


def _still_partial(need: Sharding, given: Sharding, passed: Axes) -> Sharding:
    return Sharding(need.dims, tuple(a for a in given.partial if a in passed))


def _can_pass(op: Op, inputs: Sequence[Sharding], axis: int) -> bool:
    """Is the op linear in its operands that are partial on an axis?"""
    if op.kind not in LINEAR:
        return False
    linear = LINEAR[op.kind]
    partial = [k for k, given in enumerate(inputs) if axis in given.partial]
    return linear is None or (len(partial) == 1 and partial[0] in linear)


def collectives(lowered: Lowered) -> list[tuple[Kind, Axes, float, float, Reshard]]:
    """All collectives that are not slices: kind, axes, bytes on one device, how often, and the reshard they belong to."""
    return [
        (step.kind, step.axes, step.nbytes, r.trips, r)
        for r in lowered.reshards
        for step in r.steps
        if step.kind is not Kind.SLICE
    ]
