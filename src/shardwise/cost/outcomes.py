"""What the parts of a program come out as under many states at once, as numbers.

Problem: a state that is new takes a decision or two that others did not, and yet most of its ops compute, and most of its
values lie, as they did under some other state. To find this out by lowering it again takes a millisecond.

Idea. A lowering is a graph of small functions (``shardwise.cost.lowering``): how an op computes follows from how its operands
lie, how its results are stored, and which axes its factors were given. What comes out of such a function, an *outcome*, is a
number. A *fact* is what others may read of an outcome, say, how an op needs its first operand: a random 64-bit number, equal
where the fact is. What goes into a function is then a sum of facts, and is looked up for all states of a batch at once.

- How values are stored, which axes a factor was given, and what else rests on few decisions (at most ``FEW``) is found under
  the state's key for these decisions.
- Other ops are found, level by level, under the sum of the facts that they read. Where uses were asked what they would like,
  what these read is added; where ways to compute take the same time, the order of decisions.

Ops that are found nowhere are worked out all at once (``shardwise.cost.choosing``), and so are their facts: each of them rests
on the way that was chosen and on a fact or two. Only what is new there takes Python, and ways that take the same time.
Weak: a level takes some calls of NumPy, however few ops it has. The file is long since levels, what is found in them and what
is put there share one set of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from shardwise.cost.choosing import Choosing, Rule
from shardwise.cost.decisions import State
from shardwise.cost.facets import Facet, Sight, facet_of
from shardwise.cost.index import Array, Index, Sums, Things
from shardwise.cost.keys import Mask
from shardwise.cost.locality import Locality
from shardwise.cost.lowering import Known
from shardwise.cost.menu import Menu
from shardwise.cost.model import CostModel
from shardwise.cost.moves import goes
from shardwise.cost.reads import Group, Reads, States
from shardwise.cost.sharding import Sharding
from shardwise.cost.told import Told
from shardwise.cost.ways import Way
from shardwise.ir.program import Op

#: What rests on no more decisions than this is found by them.
FEW: Final = 2
#: Stand for outcomes that must be looked up under more: what uses read, the order of decisions.
_ASKED, _TIED = range(2)
_SEED: Final = 20260315
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(slots=True)
class _Item:
    """Something that comes out alike for some ops or values, of which ``of`` is one. ``what``: how an op computes, and where
    its results go, else what is read, how a value is stored, say. ``sources`` are the facts that are read (none where ``mask``
    says enough), ``asked`` those that uses read."""

    what: str
    of: tuple[int, ...]
    mask: Mask
    sources: tuple[int, ...] = ()
    asked: tuple[int, ...] = ()
    level: int = 0
    facets: dict[Facet, int] = field(default_factory=dict)  # the number of the fact
    factors: Array = field(default_factory=lambda: np.zeros(0, np.uint64))
    known: dict[Hashable, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Bundle:
    """Items that are found under one mask, and their outcomes by the number that is found."""

    mask: int
    items: Array
    outcomes: Array
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of some items: their numbers, and for each the place of its item and which it is of that item's."""

    numbers: Array
    items: Array
    places: Array


@dataclass(frozen=True, slots=True)
class _Level:
    """Ops that rest on those of lower levels only, and what they read."""

    items: Array
    salt: Array
    sources: Sums
    asked: Sums
    ordered: Array
    facts: _Facts


@dataclass(frozen=True, slots=True)
class _Rules:
    """How a level's ops are worked out at once, and what can be read of them, by op and facet: its group, whether it rests on
    whether results stay, its factor, whether there is one."""

    rule: Rule
    menus: list[Menu]
    facets: Reads
    by_stay: Array
    factors: Array
    there: Array


class Batch:
    """States whose outcomes are found together: ``outcomes`` by item and state, ``facts`` by fact and state."""

    def __init__(self, known: Outcomes, states: Callable[[int], State], keys: Array):
        self.keys = keys  # by mask and state
        self.outcomes = np.zeros((len(known.items), keys.shape[1]), np.int32)  # zero: not yet found
        self.facts = np.zeros((known.facts, keys.shape[1]), np.uint64)
        self._known, self._states = known, states
        self._lowered: dict[int, Told] = {}

    def lowered(self, state: int) -> Told:
        found = self._lowered.get(state)
        if found is None:
            found = self._lowered[state] = Told(self._known, self._states(state), self.outcomes[:, state])
        return found

    def close(self) -> None:
        for lowered in self._lowered.values():
            vars(lowered).clear()  # its lazy lists refer to it


class Outcomes:
    """The outcomes of a program's ops and values. First facts are asked for (``lies``, ``stored``, ``computes``), then
    ``masks`` says for what keys are wanted, then ``find`` finds."""

    def __init__(self, model: CostModel, locality: Locality, known: Known):
        self.model, self.locality, self.known = model, locality, known
        self.program = model.structure.program
        self._where = model.structure, locality.space.mesh, known
        self.things = Things(_SEED)
        self.things.number(False), self.things.number(True)
        self.items: list[_Item] = []
        self.of_value: dict[int, int] = {}
        self.of_op: dict[int, int] = {}
        self.lying_at: dict[int, tuple[int, int]] = {}  # the place of the fact how a value lies, if others read it
        self.facts = 1  # the first is the same everywhere
        self._owner = [(-1, -1)]
        self._signs: dict[Hashable, int] = {}
        self._index, self._choosing = Index(), Choosing(self, model.structure, locality, known)
        self._count, self._used = _TIED + 1, 1
        self._start, self._way, self._stays = (np.zeros(1 << 10, np.int32) for _ in range(3))
        self._facts, self._ids = np.zeros(1 << 12, np.uint64), np.zeros(1 << 12, np.int32)
        self.told: dict[int, tuple[Way, tuple[Sharding, ...]]] = {}  # outcomes that the specification worked out
        for op in self.program.schedule:  # in this order nothing rests on what is still to come
            if op.rule is not None:
                self._op(op.id)

    # Building.

    def _item(self, item: _Item, sign: int) -> int:
        number = self._signs.setdefault((item.what, sign), len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number

    def _op(self, number: int) -> int:
        if number in self.of_op:
            return self.of_op[number]
        op, place = self.program.ops[number], self.locality.choice(number)
        item = _Item("computes", (number,), Mask(place.wide))
        found = self.of_op[number] = self._item(item, place.sign)
        if self.items[found] is not item or place.wide.bit_count() <= FEW:
            return found
        own, s = self.locality, self.model.structure
        item.mask = Mask(own.own(op))
        read = [self.lies(v) for v in op.operands if v >= 0] + [self.stored(v) for v in op.results]
        read += [self.waits(v) for v in op.results if own.always_waits(v) is None]
        read += [self.lies(v) for result in op.results for v in s.joins[result]]
        read += [self.given(number, f) for f in own.factors(op)]
        read += [self.crossed(v) for v in op.results if own.may_stay(v)]
        item.sources = tuple(dict.fromkeys(read))
        values, uses, seen = own.asked(op)
        asked = [*map(self.stored, values), *map(self.crossed, seen)]
        asked += [self.given(use.id, f) for use in uses for f in own.factors(use)]
        item.asked = (0, *dict.fromkeys(asked))
        item.level = 1 + max(self.items[self._owner[fact][0]].level for fact in item.sources)
        return found

    def _fact(self, item: int, facet: Facet) -> int:
        facets = self.items[item].facets
        if facet not in facets:
            facets[facet] = self.facts
            self._owner.append((item, len(facets) - 1))
            self.facts += 1
        return facets[facet]

    def place(self, fact: int) -> tuple[int, int]:
        return self._owner[fact]

    def _own(self, what: str, of: tuple[int, ...], mask: Mask, sign: int) -> int:
        return self._item(_Item(what, of, mask), sign)

    def stored(self, value: int) -> int:
        """The fact how a value is stored."""
        mask, sign = self.locality.stored(value)
        item = self.of_value[value] = self._own("stored", (value,), Mask(mask), sign)
        return self._fact(item, Facet("stored"))

    def given(self, op: int, factor: int) -> int:
        """The fact which axes a factor was given."""
        mask, sign = self.locality.given(op, factor)
        return self._fact(self._own("given", (op, factor), Mask(mask, False), sign), Facet("given"))

    def crossed(self, value: int) -> int:
        """The fact whether a value may lie in either way."""
        mask, sign = self.locality.crossed(value)
        return self._fact(self._own("crossed", (value,), Mask(mask, False), sign), Facet("crossed"))

    def waits(self, value: int) -> int:
        """The fact whether a value may stay partial."""
        mask, sign = self.locality.waits(value)
        return self._fact(self._own("waits", (value,), Mask(mask, False), sign), Facet("waits"))

    def lies(self, value: int) -> int:
        """The fact how a value lies."""
        if not self.locality.may_lie_otherwise(value):
            return self.stored(value)
        op, result = self.program.definitions[value]
        return self._fact(self._op(op), Facet("actual", result))

    def computes(self, op: int, facet: Facet) -> int:
        """A fact of how an op computes."""
        return self._fact(self.of_op[op], facet) if op in self.of_op else 0

    def masks(self) -> list[Mask]:
        """For what ``find`` wants keys. From now on no more facts can be asked for."""
        numbers: dict[Mask, int] = {}

        def number(mask: Mask) -> int:
            return numbers.setdefault(mask, len(numbers))

        own: dict[Mask, list[int]] = {}
        levels: dict[int, list[int]] = {}
        for n, item in enumerate(self.items):
            item.factors = self.things.more(len(item.facets)) | np.uint64(1)
            if item.level:
                levels.setdefault(item.level, []).append(n)
            else:
                own.setdefault(item.mask, []).append(n)
        # Smaller ones are read by larger.
        ordered = sorted(own.items(), key=lambda found: found[0].atoms.bit_count())
        self._bundles = [
            _Bundle(number(mask), np.array(items), np.zeros((64, len(items)), np.int32)) for mask, items in ordered
        ]
        self._bundled = np.array([bundle.mask for bundle in self._bundles])
        self._own_facts = self._facts_of([n for bundle in self._bundles for n in bundle.items.tolist()])
        self._levels = [self._level(items, number) for _, items in sorted(levels.items())]
        for value, (op, result) in self.program.definitions.items():
            facets = list(self.items[self.of_op[op]].facets) if op in self.of_op else []
            if (facet := Facet("actual", result)) in facets:
                self.lying_at[value] = self.of_op[op], facets.index(facet)
        return list(numbers)

    def _level(self, numbers: list[int], number: Callable[[Mask], int]) -> _Level:
        items = [self.items[n] for n in numbers]
        return _Level(
            np.array(numbers),
            self.things.more(len(items), 1),
            Sums.of([item.sources for item in items]),
            Sums.of([item.asked for item in items]),
            np.array([number(item.mask) for item in items]),
            self._facts_of(numbers),
        )

    @cached_property
    def _rules(self) -> list[_Rules]:
        """By level."""
        ops = [[self.program.ops[self.items[n].of[0]] for n in level.items] for level in self._levels]
        groups = [[self._choosing.groups(op) for op in own] for own in ops]
        self._choosing.close()
        made = [self._rules_of(*own) for own in zip(self._levels, ops, groups, strict=True)]
        self._by_way = self.things.more(self._choosing.width)
        return made

    def _rules_of(self, level: _Level, ops: list[Op], groups: list[list[Group]]) -> _Rules:
        items = [self.items[n] for n in level.items]
        facets = Reads.of(self, [[self._facet(item, facet) for facet in item.facets] for item in items])
        by_stay, factors = np.zeros(facets.salts.shape, np.uint64), np.zeros(facets.salts.shape, np.uint64)
        there = np.zeros(facets.salts.shape, np.bool_)
        for n, item in enumerate(items):
            by_stay[n, : len(item.facets)] = [facet.name in ("actual", "taken") for facet in item.facets]
            factors[n, : len(item.facets)] = item.factors
            there[n, : len(item.facets)] = True
        menus = [self._choosing.menu(op) for op in ops]
        return _Rules(self._choosing.rule(ops, groups), menus, facets, by_stay * self.things.more(1), factors, there)

    def _facts_of(self, items: Sequence[int]) -> _Facts:
        rows = [(fact, n, place) for n in items for place, fact in enumerate(self.items[n].facets.values())]
        numbers, owners, places = np.array(rows, np.int64).reshape(len(rows), 3).T
        return _Facts(numbers, owners, places[:, None])

    def _facet(self, item: _Item, facet: Facet) -> Group:
        """How a facet of an op is looked up: it rests on the way that was chosen, perhaps on whether results stay as they are
        made, and on some facts."""
        (number,), (name, k) = item.of, facet
        op, facts, waits = self.program.ops[number], list[int](), None
        operands: list[int] = []
        results: list[int] = []
        if name in ("need", "brought"):
            operands = [op.operands[k]]
        elif name in ("actual", "taken"):
            results = [op.results[k]]
            waits = self.locality.always_waits(op.results[k])
        elif name == "product":
            operands, results = [v for v in op.operands[:2] if v >= 0], [op.results[0]]
        facts = [self.lies(v) for v in operands] + [self.stored(v) for v in results]
        if name in ("actual", "taken") and waits is None:
            facts.append(self.waits(op.results[k]))

        def make(way: Way, stays: bool, *read: Any) -> Hashable:
            lies = dict(zip(operands, read, strict=False))
            stored = dict(zip(results, read[len(operands) :], strict=False))
            if name in ("actual", "taken"):
                made, may = way.made[k], read[-1] if waits is None else waits
                lies[op.results[k]] = goes(
                    made, stored[op.results[k]], frozenset(made.partial) if may else _NONE, stays
                )
            return facet_of(Sight(*self._where, {number: way}, lies, stored), op, facet)

        return Group(
            self._choosing.salt((self._choosing.menu(op), facet, waits, number if name == "product" else -1)),
            tuple(facts),
            make,
        )

    # Finding.

    def find(self, states: Callable[[int], State], keys: Array) -> Batch:
        """The outcomes under some states, with their keys by mask and state."""
        batch = Batch(self, states, keys)
        for bundle, found in zip(self._bundles, self._index.find(keys[self._bundled]), strict=True):
            self._find_own(batch, bundle, found)
        self._read(batch, self._own_facts)
        for number, level in enumerate(self._levels):
            self._find_level(batch, level, number)
            self._read(batch, level.facts)
        self._index.flush()
        return batch

    def _read(self, batch: Batch, facts: _Facts) -> None:
        batch.facts[facts.numbers] = self._facts[self._start[batch.outcomes[facts.items]] + facts.places]

    def read(self, states: States, owners: Array, places: Array) -> Array:
        """What facts are, by number."""
        found: Array = self._ids[self._start[states.of(owners)] + places]
        return found

    def _find_own(self, batch: Batch, bundle: _Bundle, found: Array) -> None:
        missing = np.flatnonzero(found < 0)
        if len(missing):
            keys = batch.keys[bundle.mask, missing]
            new, first, which = np.unique(keys, return_index=True, return_inverse=True)
            for state in missing[first].tolist():
                lowered = batch.lowered(state)
                for n in bundle.items.tolist():
                    batch.outcomes[n, state] = self._work_out(n, lowered)
                if bundle.count == len(bundle.outcomes):
                    bundle.outcomes = np.concatenate([bundle.outcomes, np.zeros_like(bundle.outcomes)])
                bundle.outcomes[bundle.count] = batch.outcomes[bundle.items, state]
                bundle.count += 1
            added = np.arange(bundle.count - len(new), bundle.count)
            self._index.put_later(new, added)
            found[missing] = added[which]
        batch.outcomes[bundle.items] = bundle.outcomes[found].T

    def _find_level(self, batch: Batch, level: _Level, number: int) -> None:
        reading = level.sources(batch.facts) + level.salt
        found = self._index.find(reading)
        if found.min() > _TIED:
            batch.outcomes[level.items] = found
            return
        more = level.asked(batch.facts), batch.keys[level.ordered]
        while True:
            keys, stage = reading.copy(), np.zeros(reading.shape, np.int8)
            for step, marker in enumerate((_ASKED, _TIED)):
                marked = np.nonzero(found == marker)
                if len(marked[0]):
                    keys[marked] += more[step][marked]
                    stage[marked] = step + 1
                    found[marked] = self._index.find(keys[marked])
            missing = np.flatnonzero(found < 0)
            if len(missing):
                new, first, which = np.unique(keys.ravel()[missing], return_index=True, return_inverse=True)
                at = missing[first]
                outcome, asked, tied = self._choose(batch, level, number, at, more[0].ravel()[at])
                if self._put(new, stage.ravel()[at], outcome, asked, tied, *(own.ravel()[at] for own in more)):
                    found = self._index.find(reading)
                    continue
                found.ravel()[missing] = outcome[which]
            batch.outcomes[level.items] = found
            return

    def _put(
        self, keys: Array, stage: Array, outcome: Array, asked: Array, tied: Array, asking: Array, ordered: Array
    ) -> bool:
        """Says what was found, and gives whether this must be looked up under more than was known."""
        keys, again = keys.copy(), False
        for step, (is_so, marker, more) in enumerate(((asked, _ASKED, asking), (tied, _TIED, ordered))):
            new = np.flatnonzero(is_so & (stage <= step))
            if len(new):
                again = True
                own = np.unique(keys[new])
                own = own[self._index.find(own) < 0]
                self._index.put(own, np.full(len(own), marker))
                keys[new] += more[new]
        own, first = np.unique(keys, return_index=True)
        self._index.put(own, outcome[first])
        return again

    def _choose(self, batch: Batch, level: _Level, number: int, at: Array, asking: Array) -> tuple[Array, Array, Array]:
        """The outcomes of misses, whether uses were asked, and whether ways took the same time."""
        n, which = np.divmod(at, batch.outcomes.shape[1])
        outcome = np.full(len(n), -1)
        rules, states = self._rules[number], States(batch.outcomes, which)

        def first(own: int, state: int, equal: list[int]) -> int:
            ways = {rules.menus[own].ways[k]: k for k in equal}
            return ways[batch.lowered(state).first(self.program.ops[self.items[level.items[own]].of[0]], tuple(ways))]

        way, stays, asked, tied = self._choosing.choose(rules.rule, n, states, asking, first)
        known = np.flatnonzero(way >= 0)
        if len(known):
            outcome[known] = self._outcomes_of(level, rules, n[known], states.at(known), way[known], stays[known])
        for k in np.flatnonzero(way < 0).tolist():
            outcome[k] = self._work_out(int(level.items[n[k]]), batch.lowered(int(which[k])))
            asked[k] = tied[k] = True  # it may be so
        return outcome, asked, tied

    def _outcomes_of(self, level: _Level, rules: _Rules, n: Array, states: States, way: Array, stays: Array) -> Array:
        """The outcomes of ops of which the ways are known."""
        things, keys = rules.facets.keys(self, states, n)
        keys += self._by_way[way][:, None] + stays.astype(np.uint64)[:, None] * rules.by_stay[n]

        def make(at: int) -> int:
            place, f = divmod(at, keys.shape[1])
            own = rules.facets.groups[n[place]]
            if f >= len(own):
                return 0
            read = [self.things.objects[k] for k in things[place, f, : len(own[f].facts)].tolist()]
            return self.things.number(own[f].make(rules.menus[n[place]].ways[way[place]], bool(stays[place]), *read))

        ids = self._index.look(keys, make)
        facts = self.things.random[ids] * rules.factors[n]
        signs = facts.sum(axis=1) + level.salt[n, 0] + self._by_way[way] + stays.astype(np.uint64)
        found = self._index.find(signs)
        missing = np.flatnonzero(found < 0)
        if len(missing):
            new, first, which = np.unique(signs[missing], return_index=True, return_inverse=True)
            own = missing[first]
            there = rules.there[n[own]]
            added = self._add(facts[own][there], ids[own][there], there.sum(axis=1))
            self._way[added], self._stays[added] = way[own], stays[own]
            self._index.put(new, added)
            found[missing] = added[which]
        return found

    def _add(self, facts: Array, ids: Array, lengths: Array) -> Array:
        """New outcomes, so many facts each."""
        first, used = self._count, self._used
        self._more(len(lengths), len(facts))
        self._start[first : self._count] = used + np.cumsum(lengths) - lengths
        self._facts[used : self._used], self._ids[used : self._used] = facts, ids
        return np.arange(first, self._count)

    def _more(self, outcomes: int, facts: int) -> None:
        """Makes room."""
        self._count, self._used = self._count + outcomes, self._used + facts
        while self._count > len(self._start):
            for name in ("_start", "_way", "_stays"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        while self._used > len(self._facts):
            self._facts = np.concatenate([self._facts, np.zeros_like(self._facts)])
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])

    def _work_out(self, number: int, lowered: Told) -> int:
        """The outcome of an item under a state, by the specification."""
        item, key = self.items[number], tuple[Hashable, ...]()
        if item.what == "computes":
            op, actual = self.program.ops[item.of[0]], lowered.actual
            own = lowered.computes[op.id], tuple([actual[v] for v in op.results])
            # All that facets look at.
            key = (own, *[actual[v] for v in op.operands if v >= 0], *[lowered.storage[v] for v in op.results])
        else:
            key = (_FACTS[item.what](lowered, *item.of),)
        found = item.known.get(key)
        if found is None:
            found = item.known[key] = self._count
            read = key if item.what != "computes" else tuple([facet_of(lowered, op, facet) for facet in item.facets])
            ids, used = [self.things.number(thing) for thing in read], self._used
            self._more(1, len(ids))
            self._start[found] = used
            self._ids[used : self._used] = ids
            self._facts[used : self._used] = self.things.random[ids] * item.factors
            if item.what == "computes":
                self.told[found] = own
        return found

    def way(self, item: int, outcome: int) -> Way:
        """The way of an op that came out so."""
        if outcome in self.told:
            return self.told[outcome][0]
        return self._choosing.menu(self.program.ops[self.items[item].of[0]]).ways[int(self._way[outcome])]

    def thing(self, outcome: int, place: int = 0) -> Any:
        """One of the facts of what came out."""
        return self.things.objects[self._ids[self._start[outcome] + place]]

    def lying(self, outcome: int, result: int, made: Sharding, stored: Sharding, may_wait: bool) -> Sharding:
        """How a result of an op that came out so lies."""
        if outcome in self.told:
            return self.told[outcome][1][result]
        return goes(made, stored, frozenset(made.partial) if may_wait else _NONE, bool(self._stays[outcome]))


#: What is read of a lowering, for items that are no ops.
_FACTS: Final[Mapping[str, Callable[..., Hashable]]] = {
    "stored": lambda lowered, value: lowered.storage[value],
    "given": lambda lowered, op, factor: lowered.candidates(lowered.program.ops[op])[factor],
    "crossed": lambda lowered, value: lowered.crossed(value),
    "waits": lambda lowered, value: lowered.may_wait(value),
}
