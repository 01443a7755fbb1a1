"""The dependency graph of a lowering: which results change when a decision is added, and which are equal in every state.

The problem. A new state differs from a known one by a decision or two. Only what depends on these has to be computed again, and
the repeated layers of an unrolled model need not be computed once each.

The idea. ``shardwise.lowering.lowered`` computes three things: how a value is *stored*, how an op *computes*, and the *actual*
sharding in which a value leaves its op. Each is a node here, with an edge from every node that its rule reads. The decisions
that a rule reads itself (axes of colors, sides of conflicts, kept values) are listed by unit, bit and keep. Nodes are numbered
so that edges go from smaller to larger numbers.

Values and ops whose results are equal in every state share a node. They are found by their *keys*, which are built from the
leaves up as the hashes of a Merkle tree: shapes, rules and units, and the nodes that are read. The layers of an unrolled model
meet here, because storage depends on colors alone.

The weak point. The functions here name what each rule of ``Lowered`` reads. A reading that is missing here would give wrong
costs: ``tests/evaluator/test_dependencies.py`` records every reading and looks it up here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from shardwise.evaluator.space import Space
from shardwise.ir.program import Op, Program
from shardwise.ir.traits import VIEWS
from shardwise.lowering.candidate_tables import Reach
from shardwise.lowering.decisions import State
from shardwise.lowering.sharding import Axes
from shardwise.lowering.storage import sets_of_views
from shardwise.lowering.structure import Structure, Total


@dataclass(slots=True)
class Reads:
    """What a rule reads: decisions about units, bits and keeps, and other nodes."""

    units: set[int] = field(default_factory=set)
    bits: set[int] = field(default_factory=set)
    keeps: set[int] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)

    def add(self, other: Reads) -> None:
        self.units |= other.units
        self.bits |= other.bits
        self.keeps |= other.keeps
        self.nodes |= other.nodes


#: The decisions that a node reads itself: units, bits and keeps.
View = tuple[frozenset[int], frozenset[int], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Node:
    """``kind`` is "stored", "computes" or "actual"; ``index`` the first value or op that it stands for; ``view`` the number of
    the decisions that it reads, ``reads`` the nodes. In the few states in which the uses of a result are compared
    (``Lowered.stays``) it reads ``wide_view`` and ``wide_reads``."""

    kind: str
    index: int
    view: int
    reads: tuple[int, ...]
    wide_view: int
    wide_reads: tuple[int, ...]


class Situation:
    """What the nodes depend on besides the program: equal (``key``) for spaces that differ only in their meshes. ``kept``: by
    value a number for how the base keeps it replicated, itself or what it is a view of."""

    def __init__(self, program: Program, space: Space):
        self.units, self.keeps, self.base = space.units, space.keeps, State(space.mesh, space.base)
        self.named = frozenset[int]().union(*self.base.kept)
        axes = sets_of_views(program, self.base.kept)
        numbers: dict[Hashable, int] = {((), False): 0}
        fixed = ((axes.get(v.id, ()), v.id in self.named) for v in program.values)
        self.kept = tuple([numbers.setdefault(one, len(numbers)) for one in fixed])
        sides, pinned = (tuple(sorted(some.items())) for some in (self.base.sides, self.base.pinned))
        self.key: Hashable = self.units, self.keeps, self.base.order, self.base.padded, sides, pinned, self.kept


class Dependencies:
    """The nodes of a program in a space of states: ``stored`` and ``actual`` by value, ``computes`` by op."""

    def __init__(self, structure: Structure, situation: Situation):
        self.structure, self.program = structure, structure.program
        self._base, self._base_kept, self._base_named = situation.base, situation.kept, situation.named
        self._unit = {c: (u, k) for u, colors in enumerate(situation.units) for k, c in enumerate(colors)}
        self._base_axes: dict[int, list[tuple[int, int]]] = {}  # by color: (rank, axis)
        for rank, (color, axis) in enumerate(self._base.order):
            self._base_axes.setdefault(color, []).append((rank, axis))
        # By value: the keeps that name it, or what it is a view of.
        self._kept = {v: frozenset(keeps) for v, keeps in sets_of_views(self.program, situation.keeps).items()}
        self._named: dict[int, frozenset[int]] = {}  # by value: the keeps that name the value itself
        for k, values in enumerate(situation.keeps):
            for v in values:
                self._named[v] = self._named.get(v, frozenset()) | {k}
        self._looks: dict[tuple[int, ...], tuple[frozenset[int], Hashable]] = {}  # of ``_colored``
        self._uses: dict[int, tuple[int, Reads]] = {}
        self._use_numbers: dict[Hashable, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self.nodes: list[Node] = []
        self.views: dict[View, int] = {}
        count = len(self.program.values)
        self.stored, self.actual, self.computes = [-1] * count, [-1] * count, [-1] * len(self.program.ops)
        for value in self.program.definitions:
            self.stored[value] = self._stored(value)
        self.actual = list(self.stored)
        differs = [self._may_differ(v) for v in range(count)]
        for op in self._in_order(differs):
            self.computes[op.id] = self._computes(op)
            for value in op.results:
                if differs[value] and value not in structure.total_of:
                    self.actual[value] = self._actual(op, value)
                total = structure.added_to.get(value)
                if total is not None and value == total.addend and differs[total.old]:
                    self.actual[total.old] = self.actual[total.new] = self._total(total)
        readers: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for read in node.wide_reads:
                readers[read].append(number)
        self.readers = [tuple(numbers) for numbers in readers]
        self.by_view: list[list[int]] = [[] for _ in self.views]
        for number, node in enumerate(self.nodes):
            for view in {node.view, node.wide_view}:
                self.by_view[view].append(number)

    def _in_order(self, differs: list[bool]) -> Iterator[Op]:
        """The ops with a rule, each after those whose choice it reads: a loop's carry comes after the body that computes it."""
        ops, definitions, joins = self.program.ops, self.program.definitions, self.structure.joins
        total_of = self.structure.total_of
        done = [op.rule is None for op in ops]
        queued = [False] * len(ops)
        for first in self.program.schedule:
            waiting = [first.id]
            while waiting:
                op = ops[waiting[-1]]
                read = [*op.operands, *(w for v in op.results for w in joins[v])]
                # A total is as its addend is.
                known = [total_of[v].addend if v in total_of else v for v in read if v >= 0 and differs[v]]
                makers = [definitions[v][0] for v in known]
                missing = [] if done[op.id] else [m for m in dict.fromkeys(makers) if not done[m] and not queued[m]]
                if missing:
                    waiting += missing
                    for m in missing:
                        queued[m] = True
                    continue
                waiting.pop()
                if not done[op.id]:
                    done[op.id] = True
                    yield op

    def unit_sets(self) -> set[frozenset[int]]:
        """Returns the sets of units on which nodes depend, directly or through other nodes."""
        masks: list[frozenset[int]] = []
        views = list(self.views)
        for node in self.nodes:
            masks.append(views[node.wide_view][0].union(*(masks[n] for n in node.wide_reads)))
        return set(masks)

    def reach(self, op: Op, space: Space) -> Reach:
        """Returns the axes that any state of a space can give to an op's factors, and those on which the op can pass partial
        sums on."""
        sizes = space.mesh.sizes
        axes = tuple(range(len(sizes)))

        def able(color: int, size: int) -> Axes:
            if color not in self._unit and color not in self._base_axes:
                return ()
            return tuple(a for a in axes if size % sizes[a] == 0 or self._is_padded(color, a, space))

        rule, colors = op.factor_rule, self.structure.factor_colors[op.id]
        factors = tuple(able(color, factor.size) for color, factor in zip(colors, rule.factors, strict=True))
        return factors, axes if self._may_pass(op) else ()

    def _is_padded(self, color: int, axis: int, space: Space) -> bool:
        """Can a state of a space pad a color on an axis?"""
        unit = self._unit.get(color, (-1, 0))[0]
        return (unit, axis) in space.padded or (color, axis) in self._base.padded

    def _node(self, kind: str, index: int, key: Hashable, reads: Reads, uses: Reads | None = None) -> int:
        number = self._numbers.setdefault((kind, key), len(self.nodes))
        if number == len(self.nodes):
            wide = Reads()
            for some in (reads, uses or reads):
                wide.add(some)
            self.nodes.append(Node(kind, index, *self._numbered(reads), *self._numbered(wide)))
        return number

    def _numbered(self, reads: Reads) -> tuple[int, tuple[int, ...]]:
        view = (frozenset(reads.units), frozenset(reads.bits), frozenset(reads.keeps))
        return self.views.setdefault(view, len(self.views)), tuple(sorted(reads.nodes))

    # What decisions say about colors.

    def _colored(self, colors: tuple[int, ...], reads: Reads) -> Hashable:
        """Adds the units of some colors; returns a key of all that a state can decide about them: their units, which of
        a unit's colors they are, and the axes that the base gives them."""
        if colors not in self._looks:
            units = [self._unit.get(c) for c in colors]
            place = {pair: k for k, pair in enumerate(sorted({unit for unit in units if unit is not None}))}
            looks = tuple((unit[0], place[unit]) if unit is not None else -1 for unit in units)
            base = sorted((rank, axis, c) for c in set(colors) for rank, axis in self._base_axes.get(c, ()))
            order = tuple((axis, colors.index(c), (c, axis) in self._base.padded) for _, axis, c in base)
            look = looks, tuple(colors.index(c) for c in colors), order
            self._looks[colors] = frozenset(unit for unit, _ in place), look
        reads.units |= self._looks[colors][0]
        return self._looks[colors][1]

    def _conflicts(self, op: int, places: dict[int, int], reads: Reads) -> Hashable:
        """Adds the bits of the conflicts between some dimension names of an op; returns these, by the names' places."""
        conflicts = []
        for first, second, bit in self.structure.clashes.by_op.get(op, ()):
            if first in places and second in places:
                reads.bits.add(bit)
                sides = tuple(side for (b, _), side in sorted(self._base.sides.items()) if b == bit)
                conflicts.append((places[first], places[second], bit, sides))
        return tuple(conflicts)

    def _candidates(self, op: Op, reads: Reads) -> Hashable:
        """Adds what ``Lowered.factor_axes`` reads; returns a key that is equal for ops with equal candidates."""
        s = self.structure
        assert op.rule is not None
        start, count = s.first_node[op.id], len(op.rule.factors)
        colors = self._colored(s.color[start : start + count], reads)
        conflicts = self._conflicts(op.id, {start + f: f for f in range(count)}, reads)
        return s.alike[op.id], colors, conflicts, self._may_pass(op)

    # The three rules.

    def _stored(self, value: int) -> int:
        """Returns the node of a value's storage (``Lowered.stored``)."""
        s, reads = self.structure, Reads()
        colors = self._colored(s.colors[value], reads)
        places = {n: d for d, n in enumerate(s.nodes[value]) if n >= 0}
        conflicts = self._conflicts(self.program.definitions[value][0], places, reads)
        kept = self._kept.get(value, frozenset())
        reads.keeps |= kept
        array = self.program.values[value]
        fixed = self._base_kept[value], self._base.pinned.get(value)
        return self._node("stored", value, (array.type_text, array.origin, colors, conflicts, kept, fixed), reads)

    def _computes(self, op: Op) -> int:
        """Returns the node of an op's choice (``Lowered.choose``)."""
        s, reads, asked = self.structure, Reads(), Reads()
        inputs: list[Hashable] = []
        for k, v in enumerate(op.operands):
            if v >= 0:
                reads.nodes.add(self.actual[v])
                inputs.append((self.actual[v], s.early[v], s.sharers[op.id][k], op.operands.index(v)))
            else:
                inputs.append(-1)
        candidates = self._candidates(op, reads)
        outputs: list[Hashable] = []
        for v in op.results:
            joins: tuple[Hashable, ...] = tuple(self.actual[other] for other in s.joins[v])
            reads.nodes |= {self.stored[v], *(self.actual[other] for other in s.joins[v])}
            if v in s.added_to and self._waits(v, reads):
                joins = ("addend", self._deferred(s.added_to[v], reads))
            elif v in s.total_of:
                joins = ("total", self.actual[v])
                reads.nodes.add(self.actual[v])
            uses = -1
            if self._may_stay(v):
                self._colored(s.colors[v], reads)
                uses = self._uses_of(v, asked)
            outputs.append((self.stored[v], self._waits(v, reads), joins, uses))
        if total := s.adding.get(op.id):
            outputs.append(self.actual[total.old])
            reads.nodes.add(self.actual[total.old])
        return self._node("computes", op.id, (candidates, tuple(inputs), tuple(outputs)), reads, asked)

    def _total(self, total: Total) -> int:
        """Returns the node of the sharding of a total in a loop (``Lowered.actual_sharding``)."""
        reads = Reads(nodes={self.actual[total.addend]})
        key = ("total", self.actual[total.addend], self._deferred(total, reads))
        return self._node("actual", total.old, key, reads)

    def _deferred(self, total: Total, reads: Reads) -> Hashable:
        """Adds what ``Lowered._deferred`` reads; returns a key for its answer."""
        reads.nodes.add(self.stored[total.old])
        return self.stored[total.old], total.old in self._base.pinned

    def _actual(self, op: Op, value: int) -> int:
        """Returns the node of the sharding in which a value leaves its op (``Lowered.actual_sharding``), which may differ from
        its storage."""
        reads = Reads(nodes={self.computes[op.id], self.stored[value]})
        self._waits(value, reads)
        asked = Reads()
        if self._may_stay(value):
            self._colored(self.structure.colors[value], reads)
            self._uses_of(value, asked)
        key = (self.computes[op.id], op.results.index(value), self.stored[value])
        return self._node("actual", value, key, reads, asked)

    def _may_pass(self, op: Op) -> bool:
        s = self.structure
        return op.id in s.adding or (s.linear[op.id] != () and any(v >= 0 and s.waits[v] for v in op.operands))

    def _waits(self, value: int, reads: Reads) -> Hashable:
        """Adds what ``Lowered.may_wait`` reads; returns a key for its answer."""
        if not self.structure.waits[value] or value in self._base.pinned:
            return False
        if value in self.structure.added_to:
            return True
        if value in self._base_named:
            return False
        named = self._named.get(value, frozenset())
        reads.keeps |= named
        return True, named

    def _may_stay(self, value: int) -> bool:
        colors = [c for c in self.structure.colors[value] if c in self._unit or c in self._base_axes]
        return self.structure.stays[value] and len(colors) > 1 and value not in self._base.pinned

    def _may_differ(self, value: int) -> bool:
        """Can a value leave its op in another sharding than it is stored in?"""
        if total := self.structure.total_of.get(value):
            return self._may_differ(total.addend)
        return bool(self._waits(value, Reads())) or self._may_stay(value)

    def _uses_of(self, value: int, reads: Reads) -> int:
        """Adds what ``Lowered.stays`` reads of a value's consumers, through views; returns a number that equal ones share."""
        if value not in self._uses:
            s, used = self.structure, Reads(nodes={self.stored[value]})
            self._colored(s.colors[value], used)
            keys: list[Hashable] = []
            for number in dict.fromkeys(user for user, _ in s.uses[value]):
                use = self.program.ops[number]
                if use.rule is None:
                    continue
                arrays = (*use.operands, *use.results)
                stored = [self.stored[v] if v >= 0 else -1 for v in arrays]
                used.nodes |= {n for n in stored if n >= 0}
                if use.kind in VIEWS:
                    result = use.results[0]
                    more = self._uses_of(result, used)
                    keys.append((s.alike[number], stored[-1], more, self._may_stay(result)))
                    continue
                arriving = tuple(
                    (n, v == value, s.early[v] if v >= 0 else 0) for n, v in zip(stored, arrays, strict=True)
                )
                keys.append((self._candidates(use, used), arriving, s.sharers[number]))
            self._uses[value] = self._use_numbers.setdefault(tuple(keys), len(self._use_numbers)), used
        key, used = self._uses[value]
        reads.add(used)
        return key
