"""Lowering a state: the sharding in which every op computes, and the collectives on every edge (design, section 6).

The storage rule. A value is stored sharded on the axes of its dimensions' colors, in the order of the decisions, as far as
sizes divide or are padded; the losing side of a conflict, pins and kept values are the exceptions
(``shardwise.lowering.storage``).

The compute rule. An op computes with the assignment of mesh axes to its factors that is fastest *locally*: the reshards of its
operands, its own time, and the reduction or reshard of its results to their storage. An axis can go to the factors whose color
is sharded on it, or to none. Ties go to the order of decisions.

Deferred reductions. A partial sum stays partial if its only consumer is linear in it and in the same region, with no loop in
between. Sums of partial sums are partial, and so are their casts, transposes, reshapes and products with replicated values.
The consumer decides by the same local comparison whether it takes the value partial or reduced, so that
``dq·Wq + dk·Wk + dv·Wv`` is reduced once.

Totals. What a loop only adds to, such as a gradient over time steps or micro-batches, stays partial until the loop ends, on the
axes on which it is stored replicated: one reduction instead of one in every trip, in the same memory. Where it is stored
sharded, each trip reduces into the shards, since a whole total would take more memory.

Results that stay as computed (not in the design). If two dimensions of a product's result are sharded on one axis, either can
have it. The result keeps the sharding in which its op computes it if that, with the time of its consumers, is faster than
storage: the masks of a mixture of experts stay with their tokens. Weak: consumers are compared one by one, with their other
operands as stored, and those in a loop's body are not multiplied by its trips.

Both rules are local. A :class:`Lowered` computes what is asked for and what that depends on, nothing else: all of it for a
plan, a few ops for the evaluator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Op, Origin
from shardwise.ir.traits import VIEWS
from shardwise.lowering.candidate_tables import SAME, CandidateTable, CandidateTables, Lazy, Moves, Reach, ReshardTimes
from shardwise.lowering.candidates import NO_CANDIDATE, Candidate, Candidates, can_pass
from shardwise.lowering.decisions import State
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.padding import is_inner
from shardwise.lowering.sharding import Axes, Collective, Kind, Sharding, target_sharding, tensor_sharding
from shardwise.lowering.storage import kept_axes, store
from shardwise.lowering.structure import Structure, Total

NOTHING: Final = Sharding(())
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Reshard:
    """Collectives on the edge into an op (``operand``) or out of it (-1), executed in a ``region``, as often as that runs."""

    op: int
    value: int
    operand: int  # -1 for a result
    source: Sharding
    target: Sharding
    steps: tuple[Collective, ...]
    region: int


class Memo:
    """Results that all states of one mesh and cost share, by local situation: the fastest candidates of an op (``chosen``), the
    time of a consumer (``consumer_s``), local sizes (``local``). ``reach``: see ``CandidateTables``."""

    def __init__(self, candidates: Candidates, reach: Callable[[Op], Reach] | None = None):
        self.candidates, self.times = candidates, ReshardTimes(candidates.mesh, candidates.cost)
        self.tables = CandidateTables(candidates, self.times, reach)
        self.chosen: dict[object, tuple[Candidate, ...]] = {}
        self.consumer_s: dict[object, float] = {}
        self.local: dict[Hashable, Any] = {}


def lower_state(analysis: Analysis, state: State, cost: LocalCost) -> Lowered:
    """Lowers a state: storage, computation and reshards of the whole program."""
    lowered = Lowered(Structure(analysis), state, cost)
    lowered.lower_all()
    return lowered


class Lowered:
    """A lowered state: ``storage`` by value, ``actual`` the sharding in which a value leaves its op (partial where the
    reduction is deferred), ``computes`` the chosen candidate by op."""

    def __init__(self, structure: Structure, state: State, cost: LocalCost, memo: Memo | None = None) -> None:
        self.structure, self.state, self.cost = structure, state, cost
        self.program, self.mesh = structure.program, state.mesh
        this = weakref.proxy(self)
        self.storage: Lazy[Sharding] = Lazy(lambda v: this.stored(v)[0])
        self.actual: Lazy[Sharding] = Lazy(lambda v: this.actual_sharding(v))
        self.computes: Lazy[Candidate] = Lazy(lambda op: this.choose(op))
        self.memo = memo or Memo(Candidates(structure, state.mesh, cost))
        self.comparisons = 0  # how often consumers were compared (``stays``)
        self._consumers_s: dict[tuple[int, Sharding], float] = {}
        self._rank = {pair: k for k, pair in enumerate(state.order)}
        self._axes = {color: tuple([axis for _, axis in given]) for color, given in state.given.items()}
        self._stores: dict[object, tuple[Sharding, tuple[tuple[int, int, int], ...]]] = {}
        self._crossings: dict[tuple[int, ...], bool] = {}

    @property
    def analysis(self) -> Analysis:
        return self.structure.analysis

    def lower_all(self) -> None:
        """Lowers every op, in the order of execution."""
        for op in self.program.schedule:
            self.computes[op.id]

    def lower_ops(self, ops: Iterable[int]) -> None:
        """Lowers some ops and those whose choices they depend on, in the order of execution."""
        s, definitions, needed, waiting = self.structure, self.program.definitions, set[int](), list(ops)
        while waiting:
            op = self.program.ops[waiting.pop()]
            if op.id not in needed:
                needed.add(op.id)
                read = (*op.operands, *(w for v in op.results if v >= 0 for w in s.joins[v]))
                waiting += [definitions[v][0] for v in read if v >= 0 and (s.waits[v] or s.stays[v])]
        for number in sorted(needed, key=s.position.__getitem__):
            self.computes[number]

    @cached_property
    def reshards(self) -> tuple[Reshard, ...]:
        """All of the program, in the order of execution."""
        return self.reshards_of(self.program.schedule)

    def reshards_of(self, ops: Iterable[Op]) -> tuple[Reshard, ...]:
        """The reshards on the edges of some ops. A reshard of one value is done once in a section."""
        paid: set[Hashable] = set()
        reshards: list[Reshard] = []
        for op in ops:
            if op.rule is None:
                continue
            section = self.structure.section
            moves: list[tuple[Hashable, Reshard]] = [
                ((section(op.id, r.value), r.value, r.target, r.steps), r) for r in self.operand_reshards(op)
            ]
            for key, r in (*moves, *self.halos(op)):
                if key not in paid:
                    paid.add(key)
                    reshards.append(r)
            reshards += self.result_reshards(op)
        return tuple(reshards)

    # Storage.

    def stored(self, value: int) -> tuple[Sharding, tuple[tuple[int, int, int], ...]]:
        """The storage of a value, and what could not be sharded for divisibility (``store``)."""
        s, shape = self.structure, self.program.values[value].shape
        if self.program.values[value].origin is Origin.CONSTANT:  # part of the program, which every device has
            return Sharding.whole(len(shape)), ()
        nodes, colors = s.nodes[value], s.colors[value]
        op = self.program.definitions[value][0]
        beaten: frozenset[tuple[int, int]] = frozenset()
        if op in s.clashes.by_op:
            lost = s.clashes.losers(op, s.color, self.state, nodes)
            beaten = frozenset(
                (d, a) for d, n in enumerate(nodes) for a in range(len(self.mesh.sizes)) if (n, a) in lost
            )
        kept, pinned = kept_axes(self.program, self.state, value), self.state.pinned.get(value)
        key = (shape, colors, beaten, kept, pinned, is_inner(self.program.values[value]))
        if key not in self._stores:
            self._stores[key] = store(*key, self.state)
        return self._stores[key]

    # Computation.

    def factor_axes(self, op: Op) -> tuple[Axes, ...]:
        """Returns, by factor, the axes that it can take, in the order of decisions. The losing side of a conflict can take
        none. Only a padded factor can take an axis that does not divide its size."""
        s, padded = self.structure, self.state.padded
        colors = s.factor_colors[op.id]
        given = [self._axes.get(c, ()) for c in colors]
        if any(given):
            if op.id in s.clashes.by_op:
                lost, start = s.clashes.losers(op.id, s.color, self.state), s.first_node[op.id]
                given = [tuple([a for a in axes if (start + f, a) not in lost]) for f, axes in enumerate(given)]
            for f, uneven in self.memo.candidates.uneven(op).items():
                if given[f]:
                    given[f] = tuple([a for a in given[f] if a not in uneven or (colors[f], a) in padded])
        return tuple(given)

    def given(self, value: int) -> tuple[Axes, ...]:
        """The axes that a value's dimensions were given, in the order of decisions."""
        return tuple(self._axes.get(c, ()) for c in self.structure.colors[value])

    def choose(self, number: int) -> Candidate:
        """The candidate with which an op computes."""
        op, s = self.program.ops[number], self.structure
        if op.rule is None:
            return NO_CANDIDATE
        given = self.factor_axes(op)
        inputs = tuple([self.actual[v] if v >= 0 else NOTHING for v in op.operands])
        passing: Axes = ()
        for sharding in inputs:
            if sharding.partial:
                waiting = sorted({a for i in inputs for a in i.partial})
                passing = tuple(a for a in waiting if can_pass(s.linear[number], inputs, a))
                break
        table = self.memo.tables.table(op, given, passing)
        if not passing and not any(given):
            return table.replicated
        joins = [self._joins(v) for v in op.results]
        shared = [s.stays[v] and self.shares_axis(v) for v in op.results]
        stored = [self.storage[v] for v in op.results]
        allowed = table.allowed(given, passing)
        if total := s.adding.get(number):
            allowed &= table.passing(self.actual[total.old].partial)
        key = (table, s.placed[number], allowed, *inputs, *stored, *joins, *shared)
        fastest = self.memo.chosen.get(key)
        if fastest is None:
            comparisons = self.comparisons
            fastest = self._fastest(op, table, allowed, inputs, stored, joins, shared)
            if self.comparisons == comparisons:  # else it depends on the consumers as well
                self.memo.chosen[key] = fastest
        return fastest[0] if len(fastest) == 1 else self.first(op, fastest)

    def first(self, op: Op, equal: tuple[Candidate, ...]) -> Candidate:
        """Returns the first of equally fast candidates, by the order of decisions: those that pass sums on come first, and
        the replicated one last."""
        colors, last = self.structure.factor_colors[op.id], (len(self.state.order), 0)

        def places(candidate: Candidate) -> list[tuple[int, int]]:
            by_axis = {a: (self._rank[colors[f], a], f) for f, axes in enumerate(candidate.assigned) for a in axes}
            return [(-1, 0) if a in candidate.passed else by_axis.get(a, last) for a in range(len(self.mesh.sizes))]

        return min(equal, key=places)

    def _fastest(
        self,
        op: Op,
        table: CandidateTable,
        allowed: int,
        inputs: Sequence[Sharding],
        stored: Sequence[Sharding],
        joins: Sequence[frozenset[int]],
        shared: Sequence[bool],
    ) -> tuple[Candidate, ...]:
        """The candidates of an op that take the least time."""
        arriving = self._arriving(op, table, inputs)
        leaving = _leaving(table, stored, joins)
        least, times = table.times(allowed, arriving, leaving, stored)
        if any(shared):
            # Results that might stay as computed: consumers are compared only where a candidate could win by it.
            staying = _leaving(table, stored, joins, shared)
            for n in table.in_order:
                if allowed >> n & 1 and table.beats(n, arriving, staying, least * (1 - SAME)):
                    times[n] = table.time(n, arriving)
                    for v, computed, waiting in zip(op.results, table.candidates[n].results, joins, strict=True):
                        times[n] += self._move_s(v, computed, self._target(v, computed, waiting))
                    least = min(least, times[n])
        return tuple([table.candidates[n] for n, time in times.items() if time <= least * (1 + SAME)])

    def _arriving(self, op: Op, table: CandidateTable, inputs: Sequence[Sharding]) -> list[Moves]:
        """The reshards of an op's operands that are not replicated. Products in a region share the reshard of a value."""
        early, sharers = self.structure.early, self.structure.sharers[op.id]
        return [
            (table.needs[k][0].arriving(inputs[k], early[v]), table.needs[k][1], sharers[k])
            for k, v in enumerate(op.operands)
            if v >= 0 and (any(inputs[k].dims) or inputs[k].partial)
        ]

    def _move_s(self, value: int, source: Sharding, target: Sharding) -> float:
        return self.memo.times.seconds(self.memo.candidates.arrays[value], source, target)

    # Reshards.

    def need(self, op: Op, operand: int) -> Sharding:
        """The sharding in which an op needs an operand."""
        return self.computes[op.id].need(operand, self.actual[op.operands[operand]])

    def computed(self, op: Op, result: int) -> Sharding:
        """The sharding in which an op computes a result, before any reshard."""
        return self.computes[op.id].results[result]

    def operand_reshards(self, op: Op, of: int = -1) -> Iterator[Reshard]:
        """The reshards on the edges into an op; with ``of`` those of one value only."""
        for k, v in enumerate(op.operands):
            if v >= 0 and of in (v, -1) and (need := self.need(op, k)) is not self.actual[v]:
                yield from self._reshard(op, v, k, self.actual[v], need)

    def result_reshards(self, op: Op) -> Iterator[Reshard]:
        for r, v in enumerate(op.results):
            yield from self._reshard(op, v, -1, self.computed(op, r), self.actual[v])

    def halos(self, op: Op, of: int = -1) -> Iterator[tuple[Hashable, Reshard]]:
        """What windowed operands fetch from other devices, each with a key; fetches with the same key happen once."""
        for halo in self.memo.candidates.halo_steps(op, self.computes[op.id].assigned):
            value = op.operands[halo.operand]
            if of in (value, -1):
                need = self.need(op, halo.operand)
                same = (
                    halo.fetches or op.id
                )  # a collective of the user's program is executed each time that it is written
                key = (self.structure.sections[op.id], value, need, same)
                yield key, Reshard(op.id, value, halo.operand, need, need, halo.steps, op.region)

    def _reshard(self, op: Op, value: int, operand: int, source: Sharding, target: Sharding) -> Iterator[Reshard]:
        candidates = self.memo.candidates
        array = candidates.operand(op, operand) if operand >= 0 else candidates.arrays[value]
        steps = self.memo.times.steps(array, source, target)
        if steps:
            region = self.structure.runs_in[self.structure.section(op.id, value)]
            yield Reshard(op.id, value, operand, source, target, steps, region)

    def actual_sharding(self, value: int) -> Sharding:
        """The sharding in which a value leaves its op."""
        s = self.structure
        if total := s.total_of.get(value):
            return self._total_sharding(total)
        stay = s.stays[value] and self.shares_axis(value)
        if not stay and not self.may_wait(value):
            return self.storage[value]
        number, result = self.program.definitions[value]
        computed = self.computed(self.program.ops[number], result)
        return self._target(value, computed, frozenset(computed.partial))

    def _total_sharding(self, total: Total) -> Sharding:
        """The sharding of a total in a loop: partial on the axes on which what is added is, where it is stored replicated: that
        takes no more memory."""
        stored = self.storage[total.old]
        waiting = self._deferred(total).intersection(self.actual[total.addend].partial)
        return Sharding(stored.dims, tuple(sorted(waiting))) if waiting else stored

    def _deferred(self, total: Total) -> frozenset[int]:
        """The axes on which a total can stay partial until its loop ends."""
        if total.old in self.state.pinned:
            return _NONE
        return frozenset(range(len(self.mesh.sizes))) - self.storage[total.old].axes()

    def _target(self, value: int, computed: Sharding, waiting: frozenset[int]) -> Sharding:
        """The sharding to which a result is brought."""
        stays = not computed.partial and self.stays(value, computed)
        return target_sharding(computed, self.storage[value], waiting if self.may_wait(value) else _NONE, stays)

    def may_wait(self, value: int) -> bool:
        """Can the reduction of a partial sum wait for its only consumer? A part of a total that is kept replicated can: the
        total is, after the loop."""
        s = self.structure
        if not s.waits[value] or value in self.state.pinned:
            return False
        return value in s.added_to or not self.state.kept_on(value)

    def _joins(self, value: int) -> frozenset[int]:
        """Axes on which the sum that consumes this value is partial already, so that reducing it costs nothing more."""
        s = self.structure
        if value in s.added_to and self.may_wait(value):
            return self._deferred(s.added_to[value])  # it is reduced once, after the loop
        if value in s.total_of:
            return frozenset(self.actual[value].partial)
        if not self.structure.joins[value] or not self.may_wait(value):
            return _NONE
        return frozenset(a for v in self.structure.joins[value] for a in self.actual[v].partial)

    # Results that stay as computed.

    def shares_axis(self, value: int) -> bool:
        """Are two dimensions of a value sharded on one axis, of which only one can have it?"""
        if value in self.state.pinned:
            return False
        colors = self.structure.colors[value]
        if colors not in self._crossings:
            given = [a for axes in self.given(value) for a in axes]
            self._crossings[colors] = len(set(given)) < len(given)
        return self._crossings[colors]

    def stays(self, value: int, computed: Sharding) -> bool:
        """Is it faster to leave a product's result (or a view of one) as computed than to bring it to its storage?"""
        stored = self.storage[value]
        if not self.structure.stays[value] or computed is stored or not self.shares_axis(value):
            return False
        if computed.axes() != stored.axes():
            return False
        self.comparisons += 1
        return self._uses_s(value, computed) < self._move_s(value, computed, stored) + self._uses_s(value, stored)

    def _uses_s(self, value: int, sharding: Sharding) -> float:
        """The time of a value's consumers if it came in this sharding; views are looked through."""
        if (value, sharding) not in self._consumers_s:
            users = dict.fromkeys(user for user, _ in self.structure.uses[value])
            ops = [self.program.ops[number] for number in users]
            self._consumers_s[value, sharding] = sum(self._use_s(op, value, sharding) for op in ops if op.rule)
        return self._consumers_s[value, sharding]

    def _use_s(self, use: Op, value: int, sharding: Sharding) -> float:
        if use.kind in VIEWS:
            (result,) = use.results
            seen, stored = seen_through(use, sharding), self.storage[result]
            options = [self._uses_s(result, stored) + self._move_s(result, seen, stored)]
            if seen != stored and self.shares_axis(result):
                options.append(self._uses_s(result, seen))
            return min(options)
        inputs = tuple(sharding if v == value else self.storage[v] if v >= 0 else NOTHING for v in use.operands)
        given = self.factor_axes(use)
        table = self.memo.tables.table(use, given, ())
        outputs = [self.storage[v] for v in use.results]
        key = (table, self.structure.placed[use.id], *given, *inputs, *outputs)
        if key not in self.memo.consumer_s:
            arriving = self._arriving(use, table, inputs)
            leaving = _leaving(table, outputs, [_NONE] * len(outputs))
            self.memo.consumer_s[key] = table.times(table.allowed(given, ()), arriving, leaving, outputs)[0]
        return self.memo.consumer_s[key]


def seen_through(view: Op, sharding: Sharding) -> Sharding:
    """The sharding of a view's result, from that of its operand."""
    rule = view.factor_rule
    assigned: list[Axes] = [()] * len(rule.factors)
    for factor, axes in zip(rule.operand_majors[0], sharding.dims, strict=True):
        if factor >= 0 and rule.splittable[factor]:
            assigned[factor] = axes
    return tensor_sharding(rule.result_majors[0], assigned)


def _leaving(
    table: CandidateTable, stored: Sequence[Sharding], joins: Sequence[frozenset[int]], stays: Sequence[bool] = ()
) -> list[Moves]:
    """The reshards of an op's results, some of which can stay as computed."""
    return [
        (ends.leaving(stored[r], joins[r], bool(stays) and stays[r]), place, 1)
        for r, (ends, place) in enumerate(table.results)
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
