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

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from shardwise.cost.decisions import State
from shardwise.cost.lazy import Lazy
from shardwise.cost.local import LocalCost
from shardwise.cost.sharding import Axes, Collective, Kind, Sharding, reshard, result_sharding, tensor_sharding
from shardwise.cost.storage import VIEWS, kept_axes, store
from shardwise.cost.structure import LINEAR, Structure
from shardwise.cost.ways import Way, Ways
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Op, Unit
from shardwise.ir.rule import Rule

NOTHING: Final = Sharding(())
_SAME: Final = 1e-9
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


class Stay(enum.Enum):
    """Whether results that may stay as they are computed do: never, always, or as their uses would like."""

    NEVER = 0
    ALWAYS = 1
    ASKED = 2


@dataclass(frozen=True, slots=True)
class Known:
    """What was worked out already of like ops in like places, shared by all states of one mesh and cost."""

    ways: Ways
    choices: dict[object, tuple[Choice, ...]] = field(default_factory=dict)
    asked_s: dict[object, float] = field(default_factory=dict)
    moves_s: dict[object, float] = field(default_factory=dict)


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
        self.actual: Lazy[Sharding] = Lazy(values, self.lie)
        self.choices: Lazy[Choice] = Lazy(ops, self.choose)
        self.known = known or Known(Ways(structure, state.mesh, cost))
        self.asked = 0  # how often uses were asked what they would like
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

    def _orders(self, op: Op) -> tuple[Axes, ...]:
        """The axes that an op's factors were given, where they are several, in the order of decisions."""
        s, rule = self.structure, op.rule
        assert rule is not None
        start = s.first_node[op.id]
        given = (self._axes.get(s.color[start + f], ()) for f in range(len(rule.factors)))
        return tuple(axes if len(axes) > 1 else () for axes in given)

    def given(self, value: int) -> tuple[Axes, ...]:
        """The axes that a value's dimensions were given, in the order of decisions."""
        return tuple(self._axes.get(c, ()) for c in self.structure.colors[value])

    def choose(self, number: int) -> Choice:
        """How an op computes."""
        op, s = self.program.ops[number], self.structure
        rule = op.rule
        if rule is None:
            return (), ()
        candidates = self.candidates(op)
        inputs = tuple(self.actual[v] if v >= 0 else NOTHING for v in op.operands)
        if all(len(c) == 1 for c in candidates) and not any(i.partial for i in inputs):
            return ((),) * len(rule.factors), ()
        joins = tuple(self._joins(v) for v in op.results)
        waits = tuple(self.may_wait(v) for v in op.results)
        crossed = tuple(s.stays[v] and self._crossed(v) for v in op.results)
        key = (*self._key(op, candidates, inputs), joins, waits, crossed)
        if key in self.known.choices:
            return _first(self.known.choices[key], candidates)
        asked = self.asked
        equal = self._cheapest(op, candidates, inputs, joins)[1]
        if self.asked == asked:  # else it rests on what its uses would like, too
            self.known.choices[key] = equal
        return _first(equal, candidates)

    def _key(self, op: Op, candidates: Sequence[Sequence[int]], inputs: object) -> tuple[object, ...]:
        """Equal for ops that compute alike, but for what becomes of their results."""
        s = self.structure
        able = tuple(tuple(sorted(factors)) for factors in candidates)
        outputs = tuple(self.storage[v] for v in op.results)
        early = tuple(v >= 0 and s.early[v] for v in op.operands)
        shared = tuple(self._sharers(op, v) for v in op.operands)
        return s.alike[op.id], able, self._orders(op), inputs, outputs, early, shared

    def _cheapest(
        self,
        op: Op,
        candidates: Sequence[Sequence[int]],
        inputs: Sequence[Sharding],
        joins: Sequence[frozenset[int]] | None,
    ) -> tuple[float, tuple[Choice, ...]]:
        """The least seconds, and the ways to compute that take no more. ``joins`` is None while a use is only asked what it
        would like."""
        passing: tuple[int, ...] = ()
        if joins is not None:
            partial = {a for given in inputs for a in given.partial}
            passing = tuple(a for a in sorted(partial) if _can_pass(op, inputs, a))
        able = tuple(tuple(sorted(factors)) for factors in candidates)
        ways = self.known.ways.ways(op, able, self._orders(op), passing)
        times = [self._seconds(op, way, inputs, joins) for way in ways]
        least = min(times)
        if joins is not None and any(self.structure.stays[v] and self._crossed(v) for v in op.results):
            # Results that might stay as they are computed: their uses are asked only where a way could win by it.
            for k, way in enumerate(ways):
                if self._seconds(op, way, inputs, joins, Stay.ALWAYS) < least * (1 - _SAME):
                    times[k] = self._seconds(op, way, inputs, joins, Stay.ASKED)
                    least = min(least, times[k])
        return least, tuple(
            (w.assigned, w.passed) for w, t in zip(ways, times, strict=True) if t <= least * (1 + _SAME)
        )

    def _seconds(
        self,
        op: Op,
        way: Way,
        inputs: Sequence[Sharding],
        joins: Sequence[frozenset[int]] | None,
        how: Stay = Stay.NEVER,
    ) -> float:
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
            target = self._target(v, way.made[r], joins[r], how) if joins is not None else self.storage[v]
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

    # Where values go.

    def need(self, op: Op, operand: int) -> Sharding:
        """How an op uses an operand."""
        assert op.rule is not None
        return _need(op.rule, operand, *self.choices[op.id], self.actual[op.operands[operand]])

    def made(self, op: Op, result: int) -> Sharding:
        """How a result is computed, before anything is moved."""
        assert op.rule is not None
        return result_sharding(op.rule, result, *self.choices[op.id])

    def operand_reshards(self, op: Op, of: int = -1) -> Iterator[Reshard]:
        """On the edges into an op; with ``of`` those of one value only."""
        for k, v in enumerate(op.operands):
            if v >= 0 and of in (v, -1):
                yield from self._reshard(op, v, k, self.actual[v], self.need(op, k))

    def result_reshards(self, op: Op) -> Iterator[Reshard]:
        for r, v in enumerate(op.results):
            yield from self._reshard(op, v, -1, self.made(op, r), self.actual[v])

    def halos(self, op: Op) -> Iterator[Reshard]:
        for k, steps in self.known.ways.halo_steps(op, self.choices[op.id][0]):
            need = self.need(op, k)
            yield Reshard(op.id, op.operands[k], k, need, need, steps, float(self.program.trips[op.region]))

    def _reshard(self, op: Op, value: int, operand: int, source: Sharding, target: Sharding) -> Iterator[Reshard]:
        steps = reshard(self.structure.nbytes[value], source, target, self.mesh)
        if steps:
            yield Reshard(op.id, value, operand, source, target, steps, float(self.program.trips[op.region]))

    def lie(self, value: int) -> Sharding:
        """How a value really leaves its op."""
        s = self.structure
        stay = s.stays[value] and self._crossed(value)
        if not stay and not self.may_wait(value):
            return self.storage[value]
        number, result = self.program.definitions[value]
        made = self.made(self.program.ops[number], result)
        return self._target(value, made, frozenset(made.partial))

    def _target(self, value: int, made: Sharding, waiting: frozenset[int], how: Stay = Stay.ASKED) -> Sharding:
        """Where a result goes: to storage, or, where its reduction over some axes may wait, to storage without them."""
        wait = tuple(a for a in made.partial if a in waiting)
        stored = self.storage[value]
        if how is not Stay.NEVER and not made.partial and self._stays(value, made, how):
            return made
        if not wait or not self.may_wait(value):
            return stored
        return Sharding(tuple(tuple(a for a in axes if a not in wait) for axes in stored.dims), wait)

    def may_wait(self, value: int) -> bool:
        """May a partial result stay so until its one use?"""
        return self.structure.waits[value] and value not in self._fixed

    def _joins(self, value: int) -> frozenset[int]:
        """Axes over which a sum that this value goes into is partial already: reducing it then costs nothing more."""
        return frozenset(a for v in self.structure.joins[value] for a in self.actual[v].partial)

    # Values that stay as they are computed.

    def _crossed(self, value: int) -> bool:
        """Were two dimensions given one axis, so that the value may lie in either way?"""
        if value in self.state.pinned:
            return False
        given = [a for axes in self.given(value) for a in axes]
        return len(set(given)) < len(given)

    def _stays(self, value: int, made: Sharding, how: Stay) -> bool:
        """Is a product's result (or a view of one) better left as it is computed than moved to where it is stored?

        Its uses decide: the dispatch mask of a mixture of experts, computed by groups and used with tokens by groups, would
        otherwise go to the experts and back.
        """
        stored = self.storage[value]
        if not self.structure.stays[value] or made == stored or made.axes() != stored.axes():
            return False
        if not self._crossed(value):
            return False
        if how is Stay.ALWAYS:
            return True
        self.asked += 1
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


def _first(equal: tuple[Choice, ...], candidates: Sequence[Sequence[int]]) -> Choice:
    """Of ways that take the same time, the one that goes with the order of decisions: passing on before computing in parts
    before computing whole."""
    if len(equal) == 1:
        return equal[0]

    def places(choice: Choice) -> list[int]:
        assigned, passed = choice
        by_axis = {a: f for f, axes in enumerate(assigned) for a in axes}
        return [-1 if a in passed else list(able).index(by_axis.get(a, -1)) for a, able in enumerate(candidates)]

    return min(equal, key=places)


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
