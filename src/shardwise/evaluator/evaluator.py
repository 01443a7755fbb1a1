"""The cost of many states at once, from tables (design, section 7).

Problem: a search asks for the cost of tens of thousands of states, and working one out takes tens of milliseconds.

Idea. The cost is a sum of local terms (``shardwise.cost.model``), and a term rests on few decisions
(``shardwise.evaluator.locality``). Terms that rest on the same decisions share a *table*; terms that are alike under every
state are worked out once and counted as often as they occur. A table's row is what its terms cost, in sum, under one way to
take the decisions that it rests on: three times, and blocks of memory at each point of the program. A state is then

1. a key for every table (``shardwise.evaluator.keys``): equal for states that agree on what the table rests on;
2. the rows with these keys, from one hash table;
3. sums of the rows; the peak is the maximum of the summed curve.

All of it is done for a batch of states in NumPy; there is no loop over ops or over states. A row that is missing is made by
the specification, from what a table's terms read of the state. A table has two keys: a narrow one that counts only what is
read where no use is asked what it would like (``Lowered.asked``), and a wide one for the states where some is.

Two keys that differ are taken for equal with a chance of 2**-64 a pair. What limits the speed: adding the curves (a row for
every table and state), and the making of rows while they are new. Making one looks up, in turn, what was worked out of its
ops and values under other states, and what its terms cost where these came out alike.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import numpy as np

from shardwise.cost.memory import BLOCK
from shardwise.cost.model import Cost, CostModel, Term
from shardwise.evaluator.index import Array, Index
from shardwise.evaluator.keys import Action, Keys, Mask
from shardwise.evaluator.locality import Locality, Place, Space
from shardwise.evaluator.remembering import Group, Memory, Places, Remembering
from shardwise.evaluator.rows import Class, Part, Rows
from shardwise.lowering.decisions import Decision, Keep, Shard, State
from shardwise.lowering.lowered import Known, Lowered
from shardwise.lowering.ways import Ways

#: Stands for a row that must be looked up under the wide key.
WIDE: Final = 0
_SEED: Final = 20250815


@dataclass(frozen=True, slots=True)
class _Table:
    """Terms that rest on the same decisions, what they read, and the rows by how that comes out."""

    groups: tuple[Group, ...]
    classes: tuple[Class, ...]
    rows: dict[tuple[Any, ...], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """The costs of a batch of states, arrays of one length."""

    compute_ps: Array
    comm_ps: Array
    hidden_ps: Array
    peak_blocks: Array

    @property
    def time_ps(self) -> Array:
        time: Array = self.compute_ps + self.comm_ps - np.minimum(self.hidden_ps, self.compute_ps)
        return time

    @property
    def peak_bytes(self) -> Array:
        return self.peak_blocks * BLOCK

    def __getitem__(self, k: int) -> Cost:
        parts = (self.compute_ps, self.comm_ps, self.hidden_ps, self.peak_blocks)
        return Cost(*(int(part[k]) for part in parts))


class Evaluator:
    """A compiled cost model: ``evaluate`` gives the costs of states, each a sequence of action numbers in order."""

    def __init__(self, model: CostModel, space: Space, actions: Sequence[Decision]):
        self.model, self.space = model, space
        self.locality = Locality(model.structure, space)
        self._known = Known(Ways(model.structure, space.mesh, model.cost), self.locality.reach)
        self._memory: Memory = {}
        self.actions = tuple(self._action(decision) for decision in actions)
        self._places = Places(self.locality)
        self._tables: list[_Table] = []
        masks = self._classes()
        self._keys = Keys(space, self.actions, list(map(Mask, masks)), _SEED)
        self._moving = np.array([any(c.term.points for c in table.classes) for table in self._tables])
        self._index, self._rows = Index(), Rows(model.life.points)

    # Building.

    def _action(self, decision: Decision) -> Action:
        space, mesh = self.space, self.space.mesh
        if isinstance(decision, Shard):
            unit, axis = space.units.index(decision.colors), mesh.index(decision.axis)
            atoms = [(unit, axis)]
            atoms += [(self.locality.bit_atom[bit], 2 * axis + side) for bit, side in decision.sides if side]
            return Action(decision, unit, axis, unit * len(mesh.sizes) + axis, tuple(atoms))
        assert isinstance(decision, Keep), "pins are part of the base"
        keep, axis = space.keeps.index(decision.values), mesh.index(decision.axis)
        return Action(decision, -1, axis, -1, ((self.locality.keep_atom[keep], axis),))

    def _classes(self) -> list[int]:
        """Makes the tables, and gives the masks: their narrow ones, their wide ones, and those that the lowering rests on."""
        found: dict[Place, list[Term]] = {}
        for term in self.model.terms:
            found.setdefault(self._signed(term), []).append(term)
        tables: dict[tuple[int, int], list[list[Term]]] = {}
        for place, terms in found.items():
            tables.setdefault(place[:2], []).append(terms)
        both = sorted(tables)
        for masks in both:
            self._tables.append(self._table(tables[masks]))
        return [*(n for n, _ in both), *(w for _, w in both), *self._places.masks]

    def _table(self, classes: Sequence[Sequence[Term]]) -> _Table:
        """What alike ops and values come out as is read once."""
        places = self._places
        found: dict[int, list[dict[int, int]]] = {}  # by mask and kind, the first of those with one signature
        reads: list[list[tuple[int, int, int]]] = []
        for terms in classes:
            wanted = [(0, k, places.choice[k]) for k in terms[0].ops]
            wanted += [(1, v, places.actual[v]) for v in terms[0].values]
            wanted += [(2, v, places.stored[v]) for v in terms[0].values]
            for kind, number, place in wanted:
                found.setdefault(place.narrow, [{}, {}, {}])[kind].setdefault(place.sign, number)
            reads.append([(place.narrow, kind, place.sign) for kind, _, place in wanted])
        groups = [
            Group(
                mask, self.locality.number(("group", len(self._tables), mask)), *(tuple(own.values()) for own in kinds)
            )
            for mask, kinds in found.items()
        ]
        order = [(mask, kind, sign) for mask, kinds in found.items() for kind in range(3) for sign in kinds[kind]]
        at = {item: n for n, item in enumerate(order)}
        made = []
        for terms, read in zip(classes, reads, strict=True):
            all_points = np.array([t.points for t in terms], np.int64).reshape(len(terms), -1)
            points = {p: all_points[:, n] for n, p in reversed(list(enumerate(terms[0].points)))}
            made.append(Class(terms[0], len(terms), points, itemgetter(*[at[item] for item in read])))
        return _Table(tuple(groups), tuple(made))

    def _signed(self, term: Term) -> Place:
        """What a term rests on, and its signature."""
        own, structure = self.locality, self.model.structure
        program = structure.program
        narrow = wide = 0
        signs: list[Hashable] = []
        for v in term.values:
            actual, stored = own.actual(v), own.stored(v)
            narrow, wide = narrow | actual.narrow | stored[0], wide | actual.wide | stored[0]
            signs.append((actual.sign, stored[1], structure.early[v], structure.late[v], structure.overlapped[v]))
        place = {v: k for k, v in enumerate(term.values)}
        for k in term.ops:
            op, choice = program.ops[k], own.choice(k)
            narrow, wide = narrow | choice.narrow, wide | choice.wide
            signs.append((choice.sign, tuple(place.get(v, -1) for v in (*op.operands, *op.results))))
        # Intervals go from the earliest to the latest of some points: their order is part of the signature.
        order = tuple(np.unique(term.points, return_inverse=True)[1].tolist()) if term.points else ()
        runs = float(program.runs[term.region])
        return Place(narrow, wide, own.number((term.kind, tuple(signs), order, runs, self.model.shape(term))))

    # Evaluating.

    def evaluate(self, states: Sequence[Sequence[int]]) -> Costs:
        """The costs of states, each a sequence of action numbers in the order in which they are taken."""
        depth = max((len(s) for s in states), default=0)
        taken = np.full((len(states), max(depth, 1)), len(self.actions), np.int64)
        for k, state in enumerate(states):
            taken[k, : len(state)] = state
        rows = self._find(taken)
        return Costs(*self._rows.sums(rows, self._moving))

    def _find(self, taken: Array) -> Array:
        """The row of every table for every state: under its narrow key, or where that says so, under its wide one."""
        count = len(self._tables)
        keys = self._keys(taken, slice(0, 2 * count))
        narrow, wide = keys[:, :count], keys[:, count:]
        rows = self._look(narrow, wide)
        missing = np.flatnonzero((rows < 0).any(axis=1))
        if not len(missing):
            return rows
        with _uncollected():
            keys = self._keys(taken[missing], slice(2 * count, None)).tolist()
            for state, own in zip(missing.tolist(), keys, strict=True):
                again = self._look(narrow[state : state + 1], wide[state : state + 1])[0]
                self._fill(taken[state], np.flatnonzero(again < 0), narrow[state], wide[state], own)
        return self._look(narrow, wide)

    def _look(self, narrow: Array, wide: Array) -> Array:
        rows = self._index.find(narrow)
        asked = rows == WIDE
        if asked.any():
            rows[asked] = self._index.find(wide[asked])
        return rows

    def _fill(self, taken: Array, tables: Array, narrow: Array, wide: Array, keys: list[int]) -> None:
        """Makes the rows of some tables for a state."""
        decisions = tuple(self.actions[n].decision for n in taken.tolist() if n < len(self.actions))
        state = State(self.space.mesh, (*self.space.base, *decisions))
        lowered = Remembering(self.model, state, self._known, self._places, self._memory, keys)
        for table in tables.tolist():
            asked = lowered.asked
            row = self._row(self._tables[table], lowered)
            if lowered.asked == asked:
                self._index.put_one(narrow[table], row)
                continue
            self._index.put_one(narrow[table], WIDE)
            self._index.put_one(wide[table], row)
        vars(lowered).clear()  # its lazy lists refer to it

    def _row(self, table: _Table, lowered: Remembering) -> int:
        """What the terms of a table cost under a state: the same wherever its ops compute and its values lie in the same
        way."""
        try:
            read = lowered.read(table.groups)
        except RecursionError:  # a long chain: work it out from its beginning
            lowered.work_out()
            read = lowered.read(table.groups)
        row = table.rows.get(read)
        if row is None:
            row = table.rows[read] = self._rows.add(*self._sum([self._part(c, read, lowered) for c in table.classes]))
        return row

    def _part(self, own: Class, read: tuple[Any, ...], lowered: Lowered) -> Part:
        key = own.read(read)
        part = own.known.get(key)
        if part is None:
            part = own.known[key] = own.part(self.model.figures(lowered, own.term))
        return part

    def _sum(self, parts: list[Part]) -> tuple[tuple[int, ...], Array]:
        """The times, and the blocks alive at each point."""
        change = np.zeros(self.model.life.points + 1, np.int64)
        changes = [own for p in parts for own in p.changes]
        if changes:
            points = [at for at, _ in changes]
            blocks = np.repeat([n for _, n in changes], [len(at) for at in points])
            np.add.at(change, np.concatenate(points), blocks)
        times = tuple(map(sum, zip(*[p.times_ps for p in parts], strict=True)))
        return times, np.cumsum(change)[:-1]

    def shape(self) -> str:
        """How many tables, classes of terms and points there are."""
        classes = sum(len(table.classes) for table in self._tables)
        return f"{len(self._tables)}, {classes:,}, {self.model.life.points:,}"

    def lowered(self, state: Sequence[int]) -> Lowered:
        """A state worked out plainly."""
        decisions = (*self.space.base, *(self.actions[n].decision for n in state))
        made = Lowered(self.model.structure, State(self.space.mesh, decisions), self.model.cost)
        made.work_out()
        return made


@contextmanager
def _uncollected() -> Iterator[None]:
    """What rows are made of stays: to search it for garbage again and again takes as long as to make it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
