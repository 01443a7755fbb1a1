"""What each part of a lowering rests on: which decisions can change it, and which parts are alike under every state.

Problem: a state is evaluated in microseconds only if what it costs is looked up, and looked up by few decisions at a time.

Idea. Both rules are local, so that for every value and op two things can be told from the program alone:

- its *masks*: the atoms (units of colors, bits that resolve conflicts, sets of values that may be kept) that it rests on, a
  union over what the rules of ``shardwise.lowering.lowered`` read. The wide one counts that uses may be asked what they would
  like; the narrow one holds where nobody asked, which is most often;
- its *signature*: a number that two ops (or values) share only if they come out alike under every state. It is built from the
  leaves up, as a Merkle tree's hashes are: from shapes, rules, units and the signatures of what is read. The layers of an
  unrolled model meet here.

The functions here mirror those of ``Lowered``, each reading for reading; tests compare the tables made by them with plain
lowering on random programs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.lowering.decisions import Decision, Shard, State
from shardwise.lowering.menu import Reach
from shardwise.lowering.storage import VIEWS, kept_axes, views
from shardwise.lowering.structure import Structure


@dataclass(frozen=True)
class Space:
    """What may be decided, on top of ``base``: units of colors that are sharded together, with the bits that resolve their
    conflicts, and sets of values that may be kept whole."""

    mesh: MeshAxes
    units: tuple[tuple[int, ...], ...]
    bits: tuple[tuple[int, ...], ...]
    keeps: tuple[tuple[int, ...], ...] = ()
    base: tuple[Decision, ...] = ()

    @property
    def atoms(self) -> int:
        return len(self.units) + sum(map(len, self.bits)) + len(self.keeps)


class Place(NamedTuple):
    """What something rests on, and its signature."""

    narrow: int
    wide: int
    sign: int


class Locality:
    """Masks and signatures of everything that a lowering works out."""

    def __init__(self, structure: Structure, space: Space):
        self.structure, self.space, self.program = structure, space, structure.program
        self._base = State(space.mesh, space.base)
        self._unit = {c: (u, k) for u, colors in enumerate(space.units) for k, c in enumerate(colors)}
        self._given: dict[int, list[tuple[int, int]]] = {}  # by color: (rank, axis) of what the base decided
        for rank, (color, axis) in enumerate(self._base.order):
            self._given.setdefault(color, []).append((rank, axis))
        first = len(space.units)
        self.bit_atom: dict[int, int] = {}
        for bits in space.bits:
            for bit in bits:
                self.bit_atom.setdefault(bit, first + len(self.bit_atom))
        first += len(self.bit_atom)
        self.keep_atom = {k: first + k for k in range(len(space.keeps))}
        self._kept: dict[int, int] = {}  # by value, views included: the mask of the keeps that hold it
        self._held: dict[int, int] = {}  # by value: the mask of the keeps that name it
        for k, values in enumerate(space.keeps):
            for v in views(self.program, values):
                self._kept[v] = self._kept.get(v, 0) | 1 << self.keep_atom[k]
            for v in values:
                self._held[v] = self._held.get(v, 0) | 1 << self.keep_atom[k]
        self._always = {v: tuple(sorted(a for w, a in self._base.kept if w == v)) for v, _ in self._base.kept}
        self._always_kept = kept_axes(self.program, self._base)
        self._ids: dict[Hashable, int] = {}
        self._stored: dict[int, tuple[int, int]] = {}
        self._actual: dict[int, Place] = {}
        self._choice: dict[int, Place] = {}
        self._used: dict[int, tuple[int, int]] = {}
        self._candidates: dict[int, tuple[int, int]] = {}
        self._reach: dict[int, Reach] = {}
        for op in self.program.schedule:  # in this order nothing rests on what is still to come
            if op.rule is not None:
                self.choice(op.id)

    def masks(self) -> set[int]:
        """All masks that occur."""
        for value in self.program.definitions:
            self.actual(value)
        places = [*self._actual.values(), *self._choice.values()]
        return {mask for place in places for mask in place[:2]} | {mask for mask, _ in self._stored.values()}

    def number(self, key: Hashable) -> int:
        """A small number for a signature."""
        return self._ids.setdefault(key, len(self._ids))

    def _colored(self, colors: tuple[int, ...]) -> tuple[int, Hashable]:
        """The mask of some colors, and how they look to a state: their units, which of a unit's colors they are among these,
        and what the base gave them, in order."""
        mask = 0
        seen = sorted({self._unit[c] for c in colors if c in self._unit})
        place = {pair: k for k, pair in enumerate(seen)}
        looks: list[Hashable] = []
        for c in colors:
            unit = self._unit.get(c)
            if unit is not None:
                mask |= 1 << unit[0]
            looks.append((unit[0], place[unit]) if unit is not None else -1)
        given = sorted((rank, axis, c) for c in set(colors) for rank, axis in self._given.get(c, ()))
        order = tuple((axis, colors.index(c)) for _, axis, c in given)
        same = tuple(colors.index(c) for c in colors)
        return mask, (tuple(looks), same, order)

    def _clashes(self, op: int, own: dict[int, int]) -> tuple[int, Hashable]:
        """Conflicts at an op between some of its nodes, by their places."""
        mask, found = 0, []
        for first, second, bit in self.structure.clashes.by_op.get(op, ()):
            if first in own and second in own:
                if bit in self.bit_atom:
                    mask |= 1 << self.bit_atom[bit]
                sides = tuple(side for (b, _), side in sorted(self._base.sides.items()) if b == bit)
                found.append((own[first], own[second], bit, sides))
        return mask, tuple(found)

    def stored(self, value: int) -> tuple[int, int]:
        """Mask and signature of ``Lowered.storage``."""
        if value not in self._stored:
            s = self.structure
            mask, looks = self._colored(s.colors[value])
            own = {n: d for d, n in enumerate(s.nodes[value]) if n >= 0}
            clash_mask, clashes = self._clashes(self.program.definitions[value][0], own)
            kept = self._kept.get(value, 0)
            always = self._always_kept.get(value, frozenset())
            pinned = self._base.pinned.get(value)
            own_value = self.program.values[value]
            key = ("stored", own_value.type_text, own_value.origin, looks, clashes, kept, always, pinned)
            self._stored[value] = mask | clash_mask | kept, self.number(key)
        return self._stored[value]

    def candidates(self, number: int) -> tuple[int, int]:
        """Of ``Lowered.candidates``."""
        if number not in self._candidates:
            op, s = self.program.ops[number], self.structure
            assert op.rule is not None
            start, count = s.first_node[number], len(op.rule.factors)
            mask, looks = self._colored(s.color[start : start + count])
            clash_mask, clashes = self._clashes(number, {start + f: f for f in range(count)})
            key = ("candidates", s.alike[number], looks, clashes, self._may_pass(op))
            self._candidates[number] = mask | clash_mask, self.number(key)
        return self._candidates[number]

    def reach(self, op: Op) -> Reach:
        """What any state may leave to an op."""
        if op.id not in self._reach:
            axes = tuple(range(len(self.space.mesh.sizes)))
            colors = self.structure.factor_colors[op.id]
            given = tuple(axes if c in self._unit or c in self._given else () for c in colors)
            self._reach[op.id] = given, axes if self._may_pass(op) else ()
        return self._reach[op.id]

    def _may_pass(self, op: Op) -> bool:
        return self.structure.linear[op.id] != () and any(v >= 0 and self.structure.waits[v] for v in op.operands)

    def choice(self, number: int) -> Place:
        """Of ``Lowered.computes``."""
        if number not in self._choice:
            op, s = self.program.ops[number], self.structure
            narrow, own = self.candidates(number)
            wide = narrow
            inputs: list[Hashable] = []
            for k, v in enumerate(op.operands):
                if v < 0:
                    inputs.append(-1)
                    continue
                place = self.actual(v)
                narrow, wide = narrow | place.narrow, wide | place.wide
                inputs.append((place.sign, s.early[v], s.sharers[number][k], op.operands.index(v)))
            outputs: list[Hashable] = []
            for v in op.results:
                stored_mask, sign = self.stored(v)
                waits_mask, waits = self._waits(v)
                narrow, wide = narrow | stored_mask | waits_mask, wide | stored_mask | waits_mask
                joins = [self.actual(other) for other in s.joins[v]]
                for join in joins:
                    narrow, wide = narrow | join.narrow, wide | join.wide
                used = -1
                if self.may_stay(v):
                    used_mask, used = self._uses(v)
                    wide |= used_mask
                outputs.append((sign, waits, tuple(join.sign for join in joins), used))
            sign = self.number(("choice", own, tuple(inputs), tuple(outputs)))
            self._choice[number] = Place(narrow, wide, sign)
        return self._choice[number]

    def _waits(self, value: int) -> tuple[int, Hashable]:
        if not self.structure.waits[value] or value in self._base.pinned or value in self._always:
            return 0, False
        held = self._held.get(value, 0)
        return held, (True, held)

    def may_stay(self, value: int) -> bool:
        colors = [c for c in self.structure.colors[value] if c in self._unit or c in self._given]
        return self.structure.stays[value] and len(colors) > 1 and value not in self._base.pinned

    def may_lie_otherwise(self, value: int) -> bool:
        """May a value lie in another way than it is stored?"""
        return bool(self._waits(value)[1]) or self.may_stay(value)

    def actual(self, value: int) -> Place:
        """Of ``Lowered.actual``."""
        if value not in self._actual:
            mask, sign = self.stored(value)
            waits_mask = self._waits(value)[0]
            place = Place(mask, mask, sign)
            if self.may_lie_otherwise(value):
                op, result = self.program.definitions[value]
                choice = self.choice(op)
                # A result's uses are part of its op's choice.
                narrow, wide = mask | waits_mask | choice.narrow, mask | waits_mask | choice.wide
                place = Place(narrow, wide, self.number(("actual", choice.sign, result, sign)))
            self._actual[value] = place
        return self._actual[value]

    def _uses(self, value: int) -> tuple[int, int]:
        """Of ``Lowered._uses_s``."""
        if value not in self._used:
            s = self.structure
            mask = self.stored(value)[0]
            found: list[Hashable] = []
            for number in dict.fromkeys(user for user, _ in s.uses[value]):
                use = self.program.ops[number]
                if use.rule is None:
                    continue
                stored = [self.stored(v) if v >= 0 else (0, -1) for v in (*use.operands, *use.results)]
                for own, _ in stored:
                    mask |= own
                if use.kind in VIEWS:
                    more, sign = self._uses(use.results[0])
                    mask |= more
                    found.append((s.alike[number], stored[-1][1], sign, self.may_stay(use.results[0])))
                    continue
                own_mask, own_sign = self.candidates(number)
                mask |= own_mask
                given = tuple(
                    (sign, v == value, s.early[v] if v >= 0 else 0)
                    for (_, sign), v in zip(stored, (*use.operands, *use.results), strict=True)
                )
                found.append((own_sign, given, s.sharers[number]))
            self._used[value] = mask, self.number(("uses", tuple(found)))
        return self._used[value]


def space_of(structure: Structure, mesh: MeshAxes, base: tuple[Decision, ...] = ()) -> Space:
    """The groups of the analysis that matter; arguments that a group reaches may be kept whole."""
    groups = [g for g in structure.analysis.groups if g.matters]
    return Space(mesh, tuple(g.colors for g in groups), tuple(tuple(g.bits) for g in groups), (), base)


def shard(space: Space, unit: int, axis: str, sides: tuple[int, ...] = ()) -> Shard:
    """The decision that gives a unit an axis."""
    given = (*sides, *(0,) * (len(space.bits[unit]) - len(sides)))
    return Shard(space.units[unit], axis, tuple(zip(space.bits[unit], given, strict=True)))
