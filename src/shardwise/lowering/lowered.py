"""Lowering a state: how every op computes, and the collectives on every edge (design, section 6).

The compute rule. An op computes under the assignment of axes to its factors (or to none) that is cheapest *locally*: reshards
of its operands from how they are stored, plus its own time, plus the reduction or reshard of its results to how they are
stored. Candidates for an axis are the factors whose color was given that axis; the losing side of a conflict is none. Ties go
to the order of decisions.

Deferred reductions. A result that is partial stays so where its one use is linear in it and lies in the same region, with no
loop in between: sums of partial values are partial, and so are their casts, transposes, reshapes and products with whole
values. The use decides by the same local comparison whether it takes the value as partial or reduced, so
``dq·Wq + dk·Wk + dv·Wv`` is reduced once.

Staying as computed (not in the design). A product's result with two dimensions that were given one axis may lie in either way.
It stays as its op computes it where that, with the time of its uses, is cheaper than storage: the masks of a mixture of
experts stay with their tokens. Weak: uses are asked one by one, with their other operands as stored, and those in a loop's
body are not multiplied by its trips.

Both rules are local, and so is everything here: a :class:`Lowered` works out what it is asked for and what that rests on, no
more. Asked for everything it is the plan of a state; asked for a few ops it fills a row of the evaluator's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Op, Origin
from shardwise.ir.traits import VIEWS
from shardwise.lowering.decisions import State
from shardwise.lowering.lazy import Lazy
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.menu import SAME, Menu, Menus, Moves, Reach
from shardwise.lowering.moves import Mover, goes
from shardwise.lowering.sharding import Axes, Collective, Kind, Sharding, tensor_sharding
from shardwise.lowering.storage import kept_axes, store
from shardwise.lowering.structure import Structure
from shardwise.lowering.ways import NO_WAY, Way, Ways, can_pass

NOTHING: Final = Sharding(())
_NONE: Final[frozenset[int]] = frozenset()
#: How an op computes: the axes of its factors, and those over which it passes partial values on.
Choice = tuple[tuple[Axes, ...], Axes]


@dataclass(frozen=True, slots=True)
class Reshard:
    """Collectives on the edge into an op (``operand``) or out of it (``result``), executed in a ``region``, as often as that
    runs."""

    op: int
    value: int
    operand: int  # -1 for a result
    source: Sharding
    target: Sharding
    steps: tuple[Collective, ...]
    region: int


@dataclass(frozen=True, slots=True)
class Known:
    """What was worked out already of like ops in like places, shared by all states of one mesh and cost. ``reach``: see
    ``Menus``."""

    ways: Ways
    reach: Callable[[Op], Reach] | None = None
    mover: Mover = field(init=False)
    menus: Menus = field(init=False)
    chosen: dict[object, tuple[Way, ...]] = field(default_factory=dict)
    asked_s: dict[object, float] = field(default_factory=dict)
    local: dict[tuple[int, Way], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mover", Mover(self.ways.mesh, self.ways.cost))
        object.__setattr__(self, "menus", Menus(self.ways, self.mover, self.reach))


def lower_state(analysis: Analysis, state: State, cost: LocalCost) -> Lowered:
    """Works out a state: two rules, reshards, deferred reductions."""
    lowered = Lowered(Structure.of(analysis), state, cost)
    lowered.work_out()
    return lowered


class Lowered:
    """A state worked out: ``storage`` by value, ``actual`` how it really leaves its op (partial where deferred), ``computes``
    how every op computes."""

    def __init__(self, structure: Structure, state: State, cost: LocalCost, known: Known | None = None) -> None:
        self.structure, self.state, self.cost = structure, state, cost
        self.program, self.mesh = structure.program, state.mesh
        values, ops = len(self.program.values), len(self.program.ops)
        self.storage: Lazy[Sharding] = Lazy(values, lambda v: self._stored(v)[0])
        self.actual: Lazy[Sharding] = Lazy(values, self.lie)
        self.computes: Lazy[Way] = Lazy(ops, self.choose)
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
        self._crossings: dict[tuple[int, ...], bool] = {}

    @property
    def analysis(self) -> Analysis:
        return self.structure.analysis

    def work_out(self) -> None:
        """Works out every op, in the order in which nothing rests on what is still to come."""
        for op in self.program.schedule:
            self.computes[op.id]

    @cached_property
    def choices(self) -> Sequence[Choice]:
        return Lazy(len(self.program.ops), lambda op: (self.computes[op].assigned, self.computes[op].passed))

    @cached_property
    def factors(self) -> Sequence[tuple[Axes, ...]]:
        return Lazy(len(self.program.ops), lambda op: self.computes[op].assigned)

    @cached_property
    def passing(self) -> Sequence[Axes]:
        return Lazy(len(self.program.ops), lambda op: self.computes[op].passed)

    @cached_property
    def reshards(self) -> tuple[Reshard, ...]:
        """All of the program, in the order of execution. A reshard of one value is done once in a section."""
        paid: set[Hashable] = set()
        found: list[Reshard] = []
        for op in self.program.schedule:
            if op.rule is None:
                continue
            section = self.structure.section
            moves: list[tuple[Hashable, Reshard]] = [
                ((section(op.id, r.value), r.value, r.target, r.steps), r) for r in self.operand_reshards(op)
            ]
            for key, r in (*moves, *self.halos(op)):
                if key not in paid:
                    paid.add(key)
                    found.append(r)
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
        from shardwise.lowering.text import format_lowered

        return format_lowered(self)

    # The storage rule.

    def _stored(self, value: int) -> tuple[Sharding, tuple[tuple[int, int, int], ...]]:
        s, shape = self.structure, self.program.values[value].shape
        if self.program.values[value].origin is Origin.CONSTANT:  # part of the program, which every device has
            return Sharding.whole(len(shape)), ()
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

    def candidates(self, op: Op) -> tuple[Axes, ...]:
        """By factor: the axes that it may take, in the order of decisions. The losing side of a conflict is no candidate."""
        s, axes = self.structure, self._axes
        given = tuple([axes.get(c, ()) for c in s.factor_colors[op.id]])
        if op.id in s.clashes.by_op and any(given):
            lost, start = s.clashes.losers(op.id, s.color, self.state), s.first_node[op.id]
            given = tuple(tuple(a for a in own if (start + f, a) not in lost) for f, own in enumerate(given))
        return given

    def given(self, value: int) -> tuple[Axes, ...]:
        """The axes that a value's dimensions were given, in the order of decisions."""
        return tuple(self._axes.get(c, ()) for c in self.structure.colors[value])

    def choose(self, number: int) -> Way:
        """How an op computes."""
        op, s = self.program.ops[number], self.structure
        if op.rule is None:
            return NO_WAY
        given = self.candidates(op)
        inputs = tuple([self.actual[v] if v >= 0 else NOTHING for v in op.operands])
        passing: Axes = ()
        for sharding in inputs:
            if sharding.partial:
                waiting = sorted({a for i in inputs for a in i.partial})
                passing = tuple(a for a in waiting if can_pass(s.linear[number], inputs, a))
                break
        menu = self.known.menus.menu(op, given, passing)
        if not passing and not any(given):
            return menu.whole
        joins = [self._joins(v) for v in op.results]
        crossed = [s.stays[v] and self.crossed(v) for v in op.results]
        stored = [self.storage[v] for v in op.results]
        left = menu.left(given, passing)
        key = (menu, s.placed[number], left, *inputs, *stored, *joins, *crossed)
        found = self.known.chosen.get(key)
        if found is None:
            asked = self.asked
            found = self._fastest(op, menu, left, inputs, stored, joins, crossed)
            if self.asked == asked:  # else it rests on what its uses would like, too
                self.known.chosen[key] = found
        return found[0] if len(found) == 1 else self.first(op, found)

    def first(self, op: Op, equal: tuple[Way, ...]) -> Way:
        """Of ways that take the same time, the one that goes with the order of decisions: passing on before computing in parts
        before computing whole."""
        colors, last = self.structure.factor_colors[op.id], (len(self.state.order), 0)

        def places(way: Way) -> list[tuple[int, int]]:
            by_axis = {a: (self._rank[colors[f], a], f) for f, axes in enumerate(way.assigned) for a in axes}
            return [(-1, 0) if a in way.passed else by_axis.get(a, last) for a in range(len(self.mesh.sizes))]

        return min(equal, key=places)

    def _fastest(
        self,
        op: Op,
        menu: Menu,
        left: int,
        inputs: Sequence[Sharding],
        stored: Sequence[Sharding],
        joins: Sequence[frozenset[int]],
        crossed: Sequence[bool],
    ) -> tuple[Way, ...]:
        """The ways to compute an op that take the least time."""
        arriving = self._arriving(op, menu, inputs)
        leaving = _leaving(menu, stored, joins)
        least, times = menu.times(left, arriving, leaving, stored)
        if any(crossed):
            # Results that might stay as they are computed: their uses are asked only where a way could win by it.
            staying = _leaving(menu, stored, joins, crossed)
            for n in menu.in_order:
                if left >> n & 1 and menu.time(n, arriving, staying) < least * (1 - SAME):
                    times[n] = menu.time(n, arriving, ())
                    for v, made, waiting in zip(op.results, menu.ways[n].made, joins, strict=True):
                        times[n] += self._move_s(v, made, self._target(v, made, waiting))
                    least = min(least, times[n])
        return tuple([menu.ways[n] for n, time in times.items() if time <= least * (1 + SAME)])

    def _arriving(self, op: Op, menu: Menu, inputs: Sequence[Sharding]) -> list[Moves]:
        """The reshards of an op's operands, but for those that are whole. That of one value is paid once in a region: products
        that use it share it."""
        early, sharers = self.structure.early, self.structure.sharers[op.id]
        return [
            (menu.needs[k][0].arriving(inputs[k], early[v]), menu.needs[k][1], sharers[k])
            for k, v in enumerate(op.operands)
            if v >= 0 and (any(inputs[k].dims) or inputs[k].partial)
        ]

    def _move_s(self, value: int, source: Sharding, target: Sharding) -> float:
        return self.known.mover.seconds(self.known.ways.arrays[value], source, target)

    # Where values go.

    def need(self, op: Op, operand: int) -> Sharding:
        """How an op uses an operand."""
        return self.computes[op.id].need(operand, self.actual[op.operands[operand]])

    def made(self, op: Op, result: int) -> Sharding:
        """How a result is computed, before anything is moved."""
        return self.computes[op.id].made[result]

    def operand_reshards(self, op: Op, of: int = -1) -> Iterator[Reshard]:
        """On the edges into an op; with ``of`` those of one value only."""
        for k, v in enumerate(op.operands):
            if v >= 0 and of in (v, -1):
                yield from self._reshard(op, v, k, self.actual[v], self.need(op, k))

    def result_reshards(self, op: Op) -> Iterator[Reshard]:
        for r, v in enumerate(op.results):
            yield from self._reshard(op, v, -1, self.made(op, r), self.actual[v])

    def halos(self, op: Op, of: int = -1) -> Iterator[tuple[Hashable, Reshard]]:
        """What windowed operands fetch from other devices, each with a key: what has the same is done once."""
        for halo in self.known.ways.halo_steps(op, self.computes[op.id].assigned):
            value = op.operands[halo.operand]
            if of in (value, -1):
                need = self.need(op, halo.operand)
                own = halo.fetches or op.id  # a collective of the program is done as often as it stands there
                key = (self.structure.sections[op.id], value, need, own)
                yield key, Reshard(op.id, value, halo.operand, need, need, halo.steps, op.region)

    def _reshard(self, op: Op, value: int, operand: int, source: Sharding, target: Sharding) -> Iterator[Reshard]:
        ways = self.known.ways
        array = ways.operand(op, operand) if operand >= 0 else ways.arrays[value]
        steps = self.known.mover.steps(array, source, target)
        if steps:
            region = self.structure.runs_in[self.structure.section(op.id, value)]
            yield Reshard(op.id, value, operand, source, target, steps, region)

    def lie(self, value: int) -> Sharding:
        """How a value really leaves its op."""
        s = self.structure
        stay = s.stays[value] and self.crossed(value)
        if not stay and not self.may_wait(value):
            return self.storage[value]
        number, result = self.program.definitions[value]
        made = self.made(self.program.ops[number], result)
        return self._target(value, made, frozenset(made.partial))

    def _target(self, value: int, made: Sharding, waiting: frozenset[int]) -> Sharding:
        """Where a result goes, once its uses are asked."""
        stays = not made.partial and self.stays(value, made)
        return goes(made, self.storage[value], waiting if self.may_wait(value) else _NONE, stays)

    def may_wait(self, value: int) -> bool:
        """May a partial result stay so until its one use?"""
        return self.structure.waits[value] and value not in self._fixed

    def _joins(self, value: int) -> frozenset[int]:
        """Axes over which a sum that this value goes into is partial already: reducing it then costs nothing more."""
        if not self.structure.joins[value] or not self.may_wait(value):
            return _NONE
        return frozenset(a for v in self.structure.joins[value] for a in self.actual[v].partial)

    # Values that stay as they are computed.

    def crossed(self, value: int) -> bool:
        """Were two dimensions given one axis, so that the value may lie in either way?"""
        if value in self.state.pinned:
            return False
        colors = self.structure.colors[value]
        if colors not in self._crossings:
            given = [a for axes in self.given(value) for a in axes]
            self._crossings[colors] = len(set(given)) < len(given)
        return self._crossings[colors]

    def stays(self, value: int, made: Sharding) -> bool:
        """Is a product's result (or a view of one) better left as it is computed than moved to where it is stored?

        Its uses decide: the dispatch mask of a mixture of experts, computed by groups and used with tokens by groups, would
        otherwise go to the experts and back.
        """
        stored = self.storage[value]
        if not self.structure.stays[value] or made is stored or not self.crossed(value):
            return False
        if made.axes() != stored.axes():
            return False
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
            seen, stored = seen_through(use, sharding), self.storage[result]
            options = [self._uses_s(result, stored) + self._move_s(result, seen, stored)]
            if seen != stored and self.crossed(result):
                options.append(self._uses_s(result, seen))
            return min(options)
        inputs = tuple(sharding if v == value else self.storage[v] if v >= 0 else NOTHING for v in use.operands)
        given = self.candidates(use)
        menu = self.known.menus.menu(use, given, ())
        outputs = [self.storage[v] for v in use.results]
        key = (menu, self.structure.placed[use.id], *given, *inputs, *outputs)
        if key not in self.known.asked_s:
            arriving = self._arriving(use, menu, inputs)
            leaving = _leaving(menu, outputs, [_NONE] * len(outputs))
            self.known.asked_s[key] = menu.times(menu.left(given, ()), arriving, leaving, outputs)[0]
        return self.known.asked_s[key]


def seen_through(view: Op, sharding: Sharding) -> Sharding:
    """A view's result where its operand comes in a sharding."""
    rule = view.rule
    assert rule is not None
    assigned: list[Axes] = [()] * len(rule.factors)
    for factor, axes in zip(rule.operand_majors[0], sharding.dims, strict=True):
        if factor >= 0 and rule.splittable[factor]:
            assigned[factor] = axes
    return tensor_sharding(rule.result_majors[0], assigned)


def _leaving(
    menu: Menu, stored: Sequence[Sharding], joins: Sequence[frozenset[int]], stays: Sequence[bool] = ()
) -> list[Moves]:
    """The reshards of an op's results, where some of them may stay as they are made."""
    return [
        (ends.leaving(stored[r], joins[r], bool(stays) and stays[r]), place, 1)
        for r, (ends, place) in enumerate(menu.made)
    ]


def collectives(lowered: Lowered) -> list[tuple[Kind, Axes, float, float, Reshard]]:
    """All collectives that are not slices: kind, axes, bytes on one device, how often, and the reshard they belong to."""
    return [
        (step.kind, step.axes, step.nbytes, float(lowered.program.trips[r.region]), r)
        for r in lowered.reshards
        for step in r.steps
        if step.kind is not Kind.SLICE
        for _ in range(step.count)
    ]
