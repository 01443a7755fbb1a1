"""The cost of many states at once, from tables (design, section 7).

Problem: a search asks for the cost of tens of thousands of states, and working one out takes tens of milliseconds.

Idea. The cost is a sum of local terms (``shardwise.cost.model``), and a term rests on few decisions
(``shardwise.cost.locality``). Terms that rest on the same decisions share a *table*; terms that are alike under every state are
worked out once and counted as often as they occur. A table's row is what its terms cost, in sum, under one way to take the
decisions that it rests on: three times, and blocks of memory at each point of the program. A state is then

1. a key for every table: the sum of random 64-bit numbers, one for each of the decisions (``_single``) and one for each pair
   whose order matters (``_pair``), so that what a table does not rest on adds nothing;
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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cost.decisions import Decision, Keep, Shard, State
from shardwise.cost.locality import Locality, Place, Space
from shardwise.cost.lowering import Known, Lowered
from shardwise.cost.memory import BLOCK
from shardwise.cost.model import Cost, CostModel, Figures, Term
from shardwise.cost.ways import Ways

Array = np.ndarray[Any, Any]
_SEED = 20250815
_CHUNK_BYTES = 4 << 20
#: Stands for a row that must be looked up under the wide key.
_WIDE = 0
_ASKED = object()


@dataclass(frozen=True, slots=True)
class Action:
    """One decision, and the atoms that it takes. ``slot`` numbers pairs of a unit and an axis; -1 for a keep."""

    decision: Decision
    unit: int
    axis: int
    slot: int
    atoms: tuple[tuple[int, int], ...]  # (atom, what is said of it)


@dataclass(frozen=True, slots=True)
class _Class:
    """Terms that are alike under every state: one of them, how many there are, and the points of each."""

    term: Term
    count: int
    points: Array  # (count, points of a term)


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
        self._known = Known(Ways(model.structure, space.mesh, model.cost))
        self._memory: dict[tuple[int, int, str], Any] = {}
        self._figured: dict[object, Figures] = {}
        self.actions = tuple(self._action(decision) for decision in actions)
        self._tables, self._masks = self._classes()
        self._moving = np.array([any(c.term.points for _, c in table) for table in self._tables])
        self._rows = _Rows(model.life.points)
        self._numbers()

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

    def _classes(self) -> tuple[list[list[tuple[int, _Class]]], list[int]]:
        """The tables, and the masks: their narrow ones, their wide ones, and the others that the lowering rests on."""
        found: dict[Place, list[Term]] = {}
        for term in self.model.terms:
            found.setdefault(self._signed(term), []).append(term)
        tables: dict[tuple[int, int], list[tuple[int, _Class]]] = {}
        for number, (place, terms) in enumerate(found.items()):
            points = np.array([t.points for t in terms], np.int64).reshape(len(terms), -1)
            tables.setdefault(place[:2], []).append((number, _Class(terms[0], len(terms), points)))
        both = sorted(tables)
        more = sorted(self.locality.masks())
        return [tables[masks] for masks in both], [*(n for n, _ in both), *(w for _, w in both), *more]

    def _signed(self, term: Term) -> Place:
        """What a term rests on, and its signature."""
        own, program = self.locality, self.model.structure.program
        narrow = wide = 0
        signs: list[Hashable] = []
        for v in term.values:
            actual, stored = own.actual(v), own.stored(v)
            narrow, wide = narrow | actual.narrow | stored[0], wide | actual.wide | stored[0]
            signs.append((actual.sign, stored[1], self.model.structure.early[v]))
        place = {v: k for k, v in enumerate(term.values)}
        for k in term.ops:
            op, choice = program.ops[k], own.choice(k)
            narrow, wide = narrow | choice.narrow, wide | choice.wide
            signs.append((choice.sign, tuple(place.get(v, -1) for v in (*op.operands, *op.results))))
        # Intervals go from the earliest to the latest of some points: their order is part of the signature.
        order = tuple(np.unique(term.points, return_inverse=True)[1].tolist()) if term.points else ()
        runs = float(program.runs[term.region])
        return Place(narrow, wide, own.number((term.kind, tuple(signs), order, runs, self.model.shape(term))))

    def _numbers(self) -> None:
        """The random numbers of every action, and of every pair of slots whose order matters, by table."""
        rng = np.random.default_rng(_SEED)
        tables, space = len(self._masks), self.space
        width = 2 * len(space.mesh.sizes)

        def random(count: int) -> Array:
            return rng.integers(0, 2**64, count, dtype=np.uint64)

        holds = np.array([[mask >> atom & 1 for mask in self._masks] for atom in range(space.atoms)], np.uint64)
        said = random(space.atoms * width).reshape(space.atoms, width)
        self._salt = random(tables)
        self._single = np.zeros((len(self.actions) + 1, tables), np.uint64)  # the last is no action
        for n, action in enumerate(self.actions):
            for atom, what in action.atoms:
                self._single[n] += said[atom, what] * holds[atom]
        axes = len(space.mesh.sizes)
        slots = len(space.units) * axes
        self._slot = np.array([a.slot if a.slot >= 0 else slots for a in self.actions] + [slots])
        self._pair = np.zeros((slots + 1, slots + 1, tables), np.uint64)
        for i in range(slots):
            for j in range(slots):
                (u, a), (w, b) = divmod(i, axes), divmod(j, axes)
                if i != j and (u == w or a == b):
                    self._pair[i, j] = random(1) * holds[u] * holds[w]

    # Evaluating.

    def evaluate(self, states: Sequence[Sequence[int]]) -> Costs:
        """The costs of states, each a sequence of action numbers in the order in which they are taken."""
        depth = max((len(s) for s in states), default=0)
        taken = np.full((len(states), max(depth, 1)), len(self.actions), np.int64)
        for k, state in enumerate(states):
            taken[k, : len(state)] = state
        rows = self._find(taken)
        return self._rows.sums(rows, self._moving)

    def _find(self, taken: Array) -> Array:
        """The row of every table for every state: under its narrow key, or where that says so, under its wide one."""
        count = len(self._tables)
        keys = self._keys(taken, slice(0, 2 * count))
        narrow, wide = keys[:, :count], keys[:, count:]
        rows = self._look(narrow, wide)
        missing = rows < 0
        if missing.any():
            for state in np.flatnonzero(missing.any(axis=1)):
                again = self._look(narrow[state : state + 1], wide[state : state + 1])[0]
                self._fill(taken[state], np.flatnonzero(again < 0), narrow[state], wide[state])
            rows = self._look(narrow, wide)
        return rows

    def _look(self, narrow: Array, wide: Array) -> Array:
        rows = self._rows.find(narrow)
        asked = rows == _WIDE
        if asked.any():
            rows[asked] = self._rows.find(wide[asked])
        return rows

    def _keys(self, taken: Array, masks: slice) -> Array:
        """For every state and mask a number that is equal for states that agree on what the mask holds."""
        single, pair = self._single[:, masks], self._pair[:, :, masks]
        keys: Array = self._salt[masks] + single[taken[:, 0]]
        slots = self._slot[taken]
        for j in range(1, taken.shape[1]):
            keys += single[taken[:, j]]
            for i in range(j):
                keys += pair[slots[:, i], slots[:, j]]
        return keys

    def _fill(self, taken: Array, tables: Array, narrow: Array, wide: Array) -> None:
        """Makes the rows of some tables for a state."""
        decisions = tuple(self.actions[n].decision for n in taken if n < len(self.actions))
        state = State(self.space.mesh, (*self.space.base, *decisions))
        known = dict(zip(self._masks, self._keys(taken[None], slice(None))[0].tolist(), strict=True))
        lowered = _Remembering(self, state, known)
        for table in tables:
            asked = lowered.asked
            row = self._row(table, lowered)
            if lowered.asked == asked:
                self._rows.add(narrow[table], *row)
                continue
            if self._rows.find(narrow[table : table + 1])[0] != _WIDE:
                self._rows.point(narrow[table])
            self._rows.add(wide[table], *row)

    def _row(self, table: int, lowered: Lowered) -> tuple[int, int, int, Array]:
        """What the terms of a table cost under a state."""
        compute = comm = hidden = 0
        change = np.zeros(self.model.life.points + 1, np.int64)
        for number, own in self._tables[table]:
            figures = self._figures(number, lowered, own.term)
            compute += own.count * figures.compute_ps
            comm += own.count * figures.comm_ps
            hidden += own.count * figures.hidden_ps
            for a in figures.allocations:
                np.add.at(change, own.points[:, own.term.points.index(a.first)], a.blocks)
                np.add.at(change, own.points[:, own.term.points.index(a.last)] + 1, -a.blocks)
        return compute, comm, hidden, np.cumsum(change)[:-1]

    def _figures(self, number: int, lowered: Lowered, term: Term) -> Figures:
        """Of a class of terms: the same wherever its ops compute and its values lie in the same way."""
        try:
            choices = tuple([lowered.choices[k] for k in term.ops])
            places = tuple([(lowered.actual[v], lowered.storage[v]) for v in term.values])
        except RecursionError:  # a long chain: work it out from its beginning
            lowered.work_out()
            return self._figures(number, lowered, term)
        key = (number, choices, places)
        if key not in self._figured:
            self._figured[key] = self.model.figures(lowered, term)
        return self._figured[key]

    def shape(self) -> str:
        """How many tables, classes of terms and points there are."""
        classes = sum(len(table) for table in self._tables)
        return f"{len(self._tables)}, {classes:,}, {self.model.life.points:,}"

    def lowered(self, state: Sequence[int]) -> Lowered:
        """A state worked out plainly."""
        decisions = (*self.space.base, *(self.actions[n].decision for n in state))
        made = Lowered(self.model.structure, State(self.space.mesh, decisions), self.model.cost)
        made.work_out()
        return made


class _Remembering(Lowered):
    """A lowering that looks up what was worked out under another state that agrees on what it rests on."""

    def __init__(self, evaluator: Evaluator, state: State, keys: dict[int, int]):
        super().__init__(evaluator.model.structure, state, evaluator.model.cost, evaluator._known)
        self._keys, self._own, self._memory = keys, evaluator.locality, evaluator._memory

    def _stored(self, value: int) -> Any:
        mask, sign = self._own.stored(value)
        return self._remember(Place(mask, mask, sign), super()._stored, value)

    def lie(self, value: int) -> Any:
        return self._remember(self._own.actual(value), super().lie, value)

    def choose(self, number: int) -> Any:
        return self._remember(self._own.choice(number), super().choose, number)

    def _remember(self, where: Place, work_out: Callable[[int], Any], number: int) -> Any:
        kind = work_out.__name__
        narrow = (where.sign, self._keys[where.narrow], kind)
        found = self._memory.get(narrow)
        if found is _ASKED:
            self.asked += 1
            found = self._memory.get((where.sign, self._keys[where.wide], kind))
        if found is not None:
            return found
        asked = self.asked
        found = work_out(number)
        if self.asked == asked:
            self._memory[narrow] = found
        else:
            self._memory[narrow] = _ASKED
            self._memory[where.sign, self._keys[where.wide], kind] = found
        return found


class _Rows:
    """Rows by key: an open hash table over growing arrays. Equal curves are kept once."""

    def __init__(self, points: int):
        self._keys = np.zeros(1 << 12, np.uint64)
        self._at = np.full(1 << 12, -1, np.int32)
        self._count = 1  # row 0 points to the wide key
        self._taken = 0
        self._times = np.zeros((256, 3), np.int64)
        self._curve = np.zeros(256, np.int32)
        self._curves = np.zeros((64, points), np.int64)
        self._seen: dict[bytes, int] = {}

    def find(self, keys: Array) -> Array:
        """Row numbers, -1 where there is none."""
        flat = keys.ravel()
        last = np.uint64(len(self._keys) - 1)
        slot = flat & last
        rows: Array = self._at[slot]
        open_ = np.flatnonzero((rows >= 0) & (self._keys[slot] != flat))
        while len(open_):
            slot[open_] = (slot[open_] + np.uint64(1)) & last
            rows[open_] = self._at[slot[open_]]
            open_ = open_[(rows[open_] >= 0) & (self._keys[slot[open_]] != flat[open_])]
        return rows.reshape(keys.shape)

    def add(self, key: np.uint64, compute: int, comm: int, hidden: int, curve: Array) -> None:
        if self._count == len(self._times):
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._curve = np.concatenate([self._curve, np.zeros_like(self._curve)])
        number = self._seen.setdefault(curve.tobytes(), len(self._seen))
        if number == len(self._curves):
            self._curves = np.concatenate([self._curves, np.zeros_like(self._curves)])
        self._curves[number] = curve
        self._times[self._count] = compute, comm, hidden
        self._curve[self._count] = number
        self._put(key, self._count)
        self._count += 1

    def point(self, key: np.uint64) -> None:
        """Says that a narrow key does not tell enough."""
        self._put(key, _WIDE)

    def _put(self, key: np.uint64, row: int) -> None:
        if self._taken * 4 >= len(self._keys):
            self._grow()
        self._taken += 1
        slot = int(key) & (len(self._keys) - 1)
        while self._at[slot] >= 0:
            slot = (slot + 1) & (len(self._keys) - 1)
        self._keys[slot], self._at[slot] = key, row

    def _grow(self) -> None:
        used = self._at >= 0
        keys, rows = self._keys[used], self._at[used]
        self._keys = np.zeros(2 * len(self._keys), np.uint64)
        self._at = np.full(len(self._keys), -1, np.int32)
        self._taken = 0
        for key, row in zip(keys, rows, strict=True):
            self._put(key, int(row))

    def sums(self, rows: Array, moving: Array) -> Costs:
        times = self._times[rows].sum(axis=1)
        curve = self._curve[rows[:, moving]]
        points = self._curves.shape[1]
        peak = np.zeros(len(rows), np.int64)
        step = max(1, _CHUNK_BYTES // (16 * points))
        for k in range(0, len(rows), step):
            part = curve[k : k + step]
            total = np.zeros((len(part), points), np.int64)
            for column in range(part.shape[1]):
                total += self._curves[part[:, column]]
            peak[k : k + step] = total.max(axis=1, initial=0)
        return Costs(times[:, 0], times[:, 1], times[:, 2], peak)
