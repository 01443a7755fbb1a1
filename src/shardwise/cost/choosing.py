"""The compute rule for many ops under many states at once, in NumPy.

What an op may do is on its menu (``shardwise.cost.menu``). How long a way takes is a sum: its own time, that of bringing each
operand, that of taking each result where it goes; and infinity where a factor was not given the axes that the way takes. Each
addend rests on a fact or two (how the operand lies, which axes the factor was given), and of these there are few: so a *row*
of times, one for every way, is kept for each combination. The rule is then the least of a sum of rows, found for all misses of
a level at once. Where a result may lie in either way its uses are asked (``Lowered.stays``): how long a use takes is the least
of a sum of rows, too.

Rows are added in the order of the specification, so that sums agree to the last bit. What is not decided here, such as ways
that take the same time, is left to the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shardwise.cost.index import Array, Index
from shardwise.cost.locality import Locality
from shardwise.cost.lowering import NOTHING, Known, seen_through
from shardwise.cost.menu import SAME, Menu
from shardwise.cost.reads import ASKED, Group, Reads, Source, States
from shardwise.cost.sharding import Sharding
from shardwise.cost.storage import VIEWS
from shardwise.cost.structure import Structure
from shardwise.cost.ways import can_pass
from shardwise.ir.program import Op

#: Numbers in one array of times.
_CHUNK: Final = 1 << 19
_NONE: Final[frozenset[int]] = frozenset()


class Row(NamedTuple):
    """Times by way; another such for results that stay as they are made; and for which of the ways this is another place on
    the same axes."""

    times: Array
    staying: Array | None = None
    differs: Array | None = None


class Rule(NamedTuple):
    """Ops of a level, side by side: the rows of their ways, whether each is a result's (another follows it, for results that
    stay as they are made), where that of a single result is (else -1), which of the results may lie in either way, what their
    ways make, in which order the specification has the ways, and whom to ask."""

    rows: Reads
    is_result: Array
    result: Array
    crossed: Reads
    made: Array
    order: Array
    node: Array


class Chosen(NamedTuple):
    """By miss the way (-1 where this is left to others), whether results stay as they are made, whether uses were asked, and
    whether ways took the same time."""

    way: Array
    stays: Array
    asked: Array
    tied: Array


#: Of one of a rule's ops, under a state, the first of some ways that take the same time.
First = Callable[[int, int, list[int]], int]


class _Use(NamedTuple):
    """A use of a value: a leaf, or a view through which others use it, by number."""

    is_view: bool
    number: int


class _View(NamedTuple):
    op: Op
    node: int


class Choosing:
    """Rows of times, and uses to ask. First ``menu``, ``groups``, ``crossings`` and ``node`` are asked for, then ``close``."""

    def __init__(self, source: Source, structure: Structure, locality: Locality, known: Known):
        self._source, self._structure, self._locality, self._known = source, structure, locality, known
        self.things, self.width = source.things, 0
        self._salts: dict[Hashable, int] = {}
        self._index = Index()
        self._count = 1  # the first row is nothing
        self._nodes: dict[int, int] = {}
        self._uses: list[list[_Use]] = []
        self._leaves: list[list[Group]] = []
        self._views: list[_View] = []
        self._moves = np.zeros(64)
        self._moved = 0
        self._pair = self.things.more(2) | np.uint64(1)

    # Building.

    def salt(self, key: Hashable) -> int:
        """A random number for what is looked up alike."""
        if key not in self._salts:
            self._salts[key] = int(self.things.more(1)[0])
        return self._salts[key]

    def menu(self, op: Op) -> Menu:
        menu = self._known.menus.menu(op, (), ())
        self.width = max(self.width, len(menu.ways))
        return menu

    def groups(self, op: Op) -> list[Group]:
        """The rows of an op's ways: its own times, operands, results, factors, and what may be passed on."""
        s, menu, source = self._structure, self.menu(op), self._source
        found = [self._group((menu,), (), lambda: Row(_seconds(menu)))]
        found += [self._operand(op, menu, k, source.lies(v)) for k, v in enumerate(op.operands) if v >= 0]
        for r, v in enumerate(op.results):
            waits = self._locality.always_waits(v)
            facts = [source.stored(v), *([source.waits(v)] if waits is None else [])]
            facts += [source.lies(other) for other in s.joins[v] if waits is not False]
            found.append(self._result(menu, r, waits, tuple(facts)))
            if len(op.results) == 1 and self._locality.may_stay(v):
                self.node(v)
        found += self._given(op, menu)
        if any(way.passed for way in menu.ways):
            facts = [source.lies(v) for v in op.operands if v >= 0]
            pattern = tuple(v >= 0 for v in op.operands)

            def passing(*lies: Sharding) -> Row:
                own = iter(lies)
                inputs = [next(own) if there else NOTHING for there in pattern]
                waiting = {a for sharding in inputs for a in sharding.partial}
                able = {a for a in waiting if can_pass(op, inputs, a)}
                return _only([able.issuperset(way.passed) for way in menu.ways])

            found.append(self._group((menu, "passing", pattern), tuple(facts), passing))
        return found

    def _group(self, key: tuple[Hashable, ...], facts: tuple[int, ...], make: Callable[..., Row]) -> Group:
        return Group(self.salt(key), facts, make)

    def _operand(self, op: Op, menu: Menu, k: int, fact: int) -> Group:
        early, sharers = self._structure.early[op.operands[k]], self._structure.sharers[op.id][k]
        ends, place = menu.needs[k]

        def arriving(lies: Sharding) -> Row:
            if not any(lies.dims) and not lies.partial:
                return Row(np.zeros(len(menu.ways)))
            moves = ends.arriving(lies, early)
            return Row(np.array([moves[end] for end in range(len(ends.items))])[place] / sharers)

        return self._group((menu, "operand", k, early, sharers), (fact,), arriving)

    def _result(self, menu: Menu, r: int, waits: bool | None, facts: tuple[int, ...]) -> Group:
        ends, place = menu.made[r]

        def leaving(stored: Sharding, *others: Any) -> Row:
            may, joins = (others[0], others[1:]) if waits is None else (waits, others)
            waiting = frozenset(a for lies in joins for a in lies.partial) if may else _NONE
            both = [ends.leaving(stored, waiting, stays) for stays in (False, True)]
            times = [np.array([moves[end] for end in range(len(ends.items))])[place] for moves in both]
            axes = stored.axes()
            differs = [made is not stored and not made.partial and made.axes() == axes for made in ends.items]
            return Row(times[0], times[1], np.array(differs)[place])

        return self._group((menu, "result", r, waits, len(facts)), facts, leaving)

    def _given(self, op: Op, menu: Menu) -> list[Group]:
        def taking(factor: int) -> Callable[..., Row]:
            def left(axes: tuple[int, ...]) -> Row:
                bits = menu.taking(factor, axes)
                return _only([bool(bits >> n & 1) for n in range(len(menu.ways))])

            return left

        given = self._source.given
        may = set(menu.factors())  # of those that might be given axes, those that make a difference
        factors = [f for f in self._locality.factors(op) if f in may]
        return [self._group((menu, "given", f), (given(op.id, f),), taking(f)) for f in factors]

    def crossings(self, op: Op) -> list[Group]:
        """Facts whether results may lie in either way."""
        may = [v for v in op.results if self._locality.may_stay(v)]
        return [Group(0, (self._source.crossed(v),), lambda crossed: crossed) for v in may]

    def node(self, value: int) -> int:
        """A number for the uses of a value."""
        if value not in self._nodes:
            number = self._nodes[value] = len(self._uses)
            self._uses.append([])
            self._source.stored(value)
            for user in dict.fromkeys(user for user, _ in self._structure.uses[value]):
                use = self._structure.program.ops[user]
                if use.rule is not None and use.kind in VIEWS:
                    self._source.crossed(use.results[0])
                    self._views.append(_View(use, self.node(use.results[0])))
                    self._uses[number].append(_Use(True, len(self._views) - 1))
                elif use.rule is not None:
                    self._leaves.append(self._leaf(use, value))
                    self._uses[number].append(_Use(False, len(self._leaves) - 1))
        return self._nodes[value]

    def _leaf(self, use: Op, value: int) -> list[Group]:
        """The rows of a use that is asked: nothing is passed on, and results are not left as they are."""
        menu, stored = self.menu(use), self._source.stored
        found = [self._group((menu,), (), lambda: Row(_seconds(menu)))]
        for k, v in enumerate(use.operands):
            if v >= 0:
                found.append(self._operand(use, menu, k, ASKED if v == value else stored(v)))
        found += [self._result(menu, r, False, (stored(v),)) for r, v in enumerate(use.results)]
        found += self._given(use, menu)
        if any(way.passed for way in menu.ways):
            found.append(self._group((menu, "whole"), (), lambda: _only([not way.passed for way in menu.ways])))
        return found

    def rule(self, ops: Sequence[Op], groups: list[list[Group]]) -> Rule:
        """For ops of a level, once all facts were asked for."""
        rows = Reads.of(self._source, groups)
        is_result = np.zeros(rows.salts.shape, np.int64)
        result = np.full(len(ops), -1)
        made, order = (np.zeros((len(ops), self.width), np.int64) for _ in range(2))
        node = np.zeros(len(ops), np.int64)
        crossings = [self.crossings(op) for op in ops]
        for n, op in enumerate(ops):
            first = 1 + sum(v >= 0 for v in op.operands)
            is_result[n, first : first + len(op.results)] = 1
            if len(op.results) == 1:
                result[n] = first
                if crossings[n]:
                    menu = self.menu(op)
                    made[n, : len(menu.ways)] = [self.things.number(way.made[0]) for way in menu.ways]
                    order[n, menu.in_order] = range(len(menu.ways))
                    node[n] = self._nodes[op.results[0]]
        return Rule(rows, is_result, result, Reads.of(self._source, crossings), made, order, node)

    def close(self) -> None:
        """From now on no more is asked for."""
        source, values = self._source, list(self._nodes)
        self._times = np.zeros((256, self.width))
        self._differs = np.zeros((256, self.width), np.bool_)
        self._deep = np.array([len(uses) for uses in self._uses], np.int64)
        self._slots = np.full((len(self._uses), int(self._deep.max(initial=0)), 2), -1)
        for n, uses in enumerate(self._uses):
            self._slots[n, : len(uses)] = np.array(uses, np.int64).reshape(-1, 2)
        self._leaf_rows = Reads.of(source, self._leaves)
        results = [view.op.results[0] for view in self._views]
        self._view_reads = Reads.of(source, [self._lying(v, True) for v in results])
        self._node_reads = Reads.of(source, [self._lying(v, False) for v in values])
        self._seen = self.things.more(len(self._views))
        self._view_node = np.array([view.node for view in self._views], np.int64)
        nbytes = self._structure.nbytes
        self._nbytes = [nbytes[v] for v in values]
        self._sized = np.array([self.salt(("moves", size)) for size in self._nbytes], np.uint64)
        self._salted = self.things.more(len(values))

    def _lying(self, value: int, crossed: bool) -> list[Group]:
        facts = [self._source.stored(value), *([self._source.crossed(value)] if crossed else [])]
        return [Group(0, (fact,), lambda own: own) for fact in facts]

    # Choosing.

    def choose(self, rule: Rule, n: Array, states: States, asking: Array, first: First) -> Chosen:
        """For misses: which of the rule's ops, under which state, and a key for what its uses read. ``first`` decides between
        ways that take the same time."""
        step = max(1, _CHUNK // self.width)
        slices = [slice(k, k + step) for k in range(0, len(n), step)]
        found = [self._choose(rule, n[own], states.at(own), asking[own], first) for own in slices]
        return Chosen(*(np.concatenate(parts) for parts in zip(*found, strict=True)))

    def _choose(self, rule: Rule, n: Array, states: States, asking: Array, first: First) -> Chosen:
        rows = self._look(rule.rows, n, states)
        times = plain = self._sum(rows)
        liked = np.zeros(plain.shape, np.bool_)
        ask, mixed = (np.zeros(len(n), np.bool_) for _ in range(2))
        if rule.crossed.salts.shape[1]:
            things, _ = rule.crossed.keys(self._source, states, n)
            crossed = ((things == self.things.number(True)) & (rule.crossed.factors[n] > 0)).any(axis=(1, 2))
            mixed = crossed & (rule.result[n] < 0)
            either = np.flatnonzero(crossed & ~mixed)
            if len(either):
                own = n[either], states.at(either), asking[either], rows[either], plain[either]
                times = plain.copy()
                times[either], liked[either], ask[either] = self._staying(rule, *own)
        equal = times <= times.min(axis=1, keepdims=True) * (1 + SAME)
        way = equal.argmax(axis=1)
        tied = equal.sum(axis=1) > 1
        for k in np.flatnonzero(tied).tolist():
            way[k] = first(int(n[k]), int(states.which[k]), np.flatnonzero(equal[k]).tolist())
        stays = liked[np.arange(len(n)), way].astype(np.int64)
        way[mixed] = -1
        return Chosen(way, stays, ask, tied)

    def _staying(
        self, rule: Rule, n: Array, states: States, asking: Array, rows: Array, plain: Array
    ) -> tuple[Array, Array, Array]:
        """Results that might stay as they are computed, see ``Lowered._fastest``: the times, where uses would like it, and
        whether any was asked."""
        staying = self._sum(rows + rule.is_result[n])
        differs = self._differs[rows[np.arange(len(n)), rule.result[n]]]
        least = plain.min(axis=1, keepdims=True)
        pairs = differs & (plain < np.inf) & ((staying < least * (1 - SAME)) | (plain <= least * (1 + SAME)))
        miss, way = np.nonzero(pairs)
        liked = np.zeros(plain.shape, np.bool_)
        if len(miss):
            own = n[miss]
            liked[miss, way] = self._likes(rule.node[own], rule.made[own, way], states.at(miss), asking[miss])
        times = np.where(liked, staying, plain)
        # Of several that win by staying the specification has the first.
        equal = liked & (staying < least * (1 - SAME)) & (times <= times.min(axis=1, keepdims=True) * (1 + SAME))
        first = np.where(equal, rule.order[n], self.width).argmin(axis=1)
        equal[np.arange(len(n)), first] = False
        return np.where(equal, plain, times), liked, pairs.any(axis=1)

    def _look(self, reads: Reads, n: Array, states: States, told: Array | None = None) -> Array:
        """Numbers of rows, by item and group."""
        things, keys = reads.keys(self._source, states, n, told)

        def make(at: int) -> int:
            place, g = divmod(at, keys.shape[1])
            own = reads.groups[n[place]]
            if g >= len(own):
                return 0
            group, objects = own[g], self.things.objects
            read = [objects[k] for k in things[place, g, : len(group.facts)].tolist()]
            return self._add(group.make(*read))

        return self._index.look(keys, make)

    def _add(self, row: Row) -> int:
        if self._count + 2 > len(self._times):
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._differs = np.concatenate([self._differs, np.zeros_like(self._differs)])
        first, wide = self._count, len(row.times)
        for times in (row.times, row.staying):
            if times is not None:
                self._times[self._count, :wide], self._times[self._count, wide:] = times, np.inf
                self._count += 1
        if row.differs is not None:
            self._differs[first, :wide] = row.differs
        return first

    def _sum(self, rows: Array) -> Array:
        total: Array = self._times[rows[:, 0]]
        for g in range(1, rows.shape[1]):
            total += self._times[rows[:, g]]
        return total

    # Asking uses.

    def _likes(self, nodes: Array, made: Array, states: States, asking: Array) -> Array:
        """Whether values are better left as they are made: ``Lowered.stays``, for results that differ from how they are
        stored."""
        keys = asking + self.things.random[made] * self._pair[0] + self._salted[nodes]
        found = self._index.find(keys)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            new, first, which = np.unique(keys[missing], return_index=True, return_inverse=True)
            at = missing[first]
            nodes, made, states = nodes[at], made[at], states.at(at)
            stored = self._node_reads.keys(self._source, states, nodes)[0][:, 0, 0]
            staying, moved = self._both_s(nodes, made, nodes, stored, states, states)
            likes = (staying < self._move_s(nodes, made, stored) + moved).astype(np.int32)
            self._index.put(new, likes)
            found[missing] = likes[which]
        return found > 0

    def _both_s(
        self, one: Array, told: Array, other: Array, others: Array, states: States, other_states: States
    ) -> tuple[Array, Array]:
        """``_uses_s`` of two lots at once."""
        which = np.concatenate([states.which, other_states.which])
        nodes, both = np.concatenate([one, other]), np.concatenate([told, others])
        found = self._uses_s(nodes, both, States(states.outcomes, which))
        return found[: len(one)], found[len(one) :]

    def _uses_s(self, nodes: Array, told: Array, states: States) -> Array:
        """The time of values' uses if they came in the shardings that are told."""
        total = np.zeros(len(nodes))
        for slot in range(int(self._deep[nodes].max())):
            is_view, number = self._slots[nodes, slot].T
            for kind, use_s in enumerate((self._leaf_s, self._view_s)):
                own = is_view == kind
                if own.all():
                    total += use_s(number, told, states)
                    break
                if own.any():
                    at = np.flatnonzero(own)
                    total[at] += use_s(number[at], told[at], states.at(at))
        return total

    def _leaf_s(self, leaves: Array, told: Array, states: States) -> Array:
        least: Array = self._sum(self._look(self._leaf_rows, leaves, states, told)).min(axis=1)
        return least

    def _view_s(self, views: Array, told: Array, states: States) -> Array:
        things = self.things
        seen = self._index.look(
            things.random[told] + self._seen[views],
            lambda n: things.number(seen_through(self._views[views[n]].op, things.objects[told[n]])),
        )
        stored, crossed = self._view_reads.keys(self._source, states, views)[0][:, :, 0].T
        nodes = self._view_node[views]
        at = np.flatnonzero((seen != stored) & (crossed == things.number(True)))
        moved, stayed = self._both_s(nodes, stored, nodes[at], seen[at], states, states.at(at))
        moved += self._move_s(nodes, seen, stored)
        moved[at] = np.minimum(moved[at], stayed)
        return moved

    def _move_s(self, nodes: Array, source: Array, target: Array) -> Array:
        things, mover = self.things, self._known.mover

        def make(n: int) -> int:
            if self._moved == len(self._moves):
                self._moves = np.concatenate([self._moves, np.zeros_like(self._moves)])
            ends = things.objects[source[n]], things.objects[target[n]]
            self._moves[self._moved] = mover.seconds(self._nbytes[nodes[n]], *ends)
            self._moved += 1
            return self._moved - 1

        pair = things.random[source] * self._pair[0] + things.random[target] * self._pair[1]
        found = self._index.look(pair + self._sized[nodes], make)  # may make room for more
        moves: Array = self._moves[found]
        return moves


def _seconds(menu: Menu) -> Array:
    return np.array([way.seconds for way in menu.ways])


def _only(able: list[bool]) -> Row:
    """Nothing for ways that are able, infinity for the others."""
    return Row(np.where(able, 0.0, np.inf))
