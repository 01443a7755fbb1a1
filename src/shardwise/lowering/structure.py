"""Facts about a program that lowering and costs read in every state. Built once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.dims.analysis import Analysis, Group
from shardwise.ir.program import HEAVY, Op, Origin, Program, Unit
from shardwise.ir.traits import ADDING_SCATTERS, SUMS, VIEWS, linear_operands
from shardwise.lowering.padding import is_worth, product_sizes
from shardwise.lowering.sharding import PAIRED, ArrayType, Sharding
from shardwise.lowering.storage import Clashes


class Structure:
    """Facts by value and by op."""

    def __init__(self, analysis: Analysis):
        program, names = analysis.program, analysis.names
        self.analysis, self.program = analysis, program
        color, first = names.color.tolist(), names.first_node.tolist()
        makers = {v: op for op in program.ops if op.rule is not None for v in op.results}
        movable = {v for v, op in makers.items() if op.unit is Unit.MATRIX or op.kind in VIEWS}
        self.color: tuple[int, ...] = tuple(color)  # by node of the analysis
        self.first_node: tuple[int, ...] = tuple(first)  # by op: the node of its first factor
        # By op; -1 for factors that cannot be split.
        self.factor_colors = tuple(_factor_colors(op, color, first[op.id]) for op in program.ops)
        self.clashes = Clashes.of(analysis)
        self.nodes, self.colors = analysis.value_nodes, analysis.value_colors
        self.uses = program.uses
        self.position = _positions(program)  # by op: its place in the schedule
        self.linear = tuple(linear_operands(program, op) for op in program.ops)  # see there
        self.early = _early(program)  # by value: is it an argument or a view of one?
        self.late = _late(program)  # by value: does no product and no loop of its region depend on it?
        # By value: is it late, with products or loops after it that its collectives can overlap?
        self.overlapped = _overlapped(program, self.late, self.position, makers)
        self.waits = _waits(self, makers)  # by value: may a partial result stay partial until its one use?
        self.totals = tuple(t for op in program.ops if op.kind == "scan.carry" for t in _total(self, op, makers))
        self.total_of = {v: t for t in self.totals for v in (t.old, t.new)}
        self.added_to = _added_to(
            self, makers
        )  # by value: the total that it becomes a part of, while its reduction waits
        self.adding = {op: t for t in self.totals for op in (t.sum, t.carry)}  # by op: the total that it passes on
        self._pass_on_totals()
        # By value: the other, earlier operands of a sum that is its one use.
        self.joins = tuple(_joins(self, makers, v.id) for v in program.values)
        # By value: may it stay in the sharding in which it is computed?
        self.stays = tuple(v.id in movable for v in program.values)
        self.arrays = tuple(array_type(program, v.id) for v in program.values)  # what reshards depend on
        self.array_kinds = numbered(zip(self.arrays, self.overlapped, strict=True))  # a number that equal ones share
        self.alike = _alike(self)  # a number that ops share if they differ only in their values
        self.sharers = _sharers(program)  # by op and operand: how many products of the region would share its reshard
        self.placed = _placed(self)  # a number that alike ops share if their operands have the same early and sharers
        # The shardings in which ops that are alike need operands and compute results: a memo for candidates on all meshes.
        self.computed: dict[Hashable, tuple[tuple[Sharding, ...], tuple[Sharding, ...]]] = {}
        # By op its section, by section its region, and the sections of edges between a link and a body.
        self.sections, self.runs_in, self._crossing = find_sections(program)

    def _pass_on_totals(self) -> None:
        """Parts of a total wait, also in stacks that inner loops make of them, and carries of totals pass sums on."""
        self.waits = tuple([waits or v in self.added_to for v, waits in enumerate(self.waits)])
        linear = list(self.linear)
        for total in self.totals:
            linear[total.carry] = None
        for op in {self.program.definitions[v][0] for v in self.added_to}:
            if self.program.ops[op].kind == "scan.output":
                linear[op] = (0,)
        self.linear = tuple(linear)

    @cached_property
    def decided_alike(self) -> dict[frozenset[int], list[tuple[int, int]]]:
        """By set of colors that can be decided: the values with these, and their bytes."""
        matters = {c for group in self.analysis.groups if group.matters for c in group.colors}
        alike: dict[frozenset[int], list[tuple[int, int]]] = {}
        for value, colors in zip(self.program.values, self.colors, strict=True):
            if decided := matters.intersection(colors):
                alike.setdefault(frozenset(decided), []).append((value.id, value.nbytes))
        return alike

    @cached_property
    def _product_sizes(self) -> dict[int, frozenset[int]]:
        return product_sizes(self.program, self.factor_colors)

    def padded_sizes(self, group: Group, pieces: int) -> list[int]:
        """The sizes of a group that can pay to be padded on an axis, because the axis does not divide them."""
        sizes = frozenset[int]().union(*(self._product_sizes.get(c, ()) for c in group.colors))
        most = 2 * group.flops >= self._flops
        return sorted(n for n in sizes if is_worth(n, pieces, most))

    @cached_property
    def _flops(self) -> float:
        return float(sum(op.flops * self.program.runs[op.region] for op in self.program.ops))

    def section(self, op: int, value: int) -> int:
        """Returns the section in which a value is resharded for an op. For the links between a loop and a value of its body it
        is that of the body."""
        return self._crossing.get((op, value), self.sections[op])


class Total(NamedTuple):
    """A carry of a scan to which the body adds, and that it does not read otherwise, such as a gradient over time steps or
    micro-batches: the ``carry`` and the ``sum``, two ops; the values ``old``, in the body, ``addend`` and ``new``."""

    carry: int
    sum: int
    old: int
    addend: int
    new: int


def _total(s: Structure, carry: Op, makers: Mapping[int, Op]) -> Iterator[Total]:
    old, new = carry.results[0], carry.operands[1]
    if new < 0 or len(s.uses[old]) != 1 or len(s.uses[new]) != 1:
        return
    added = s.program.ops[s.program.definitions[new][0]]
    others = [v for v in added.operands if v not in (-1, old)]
    if added.kind in SUMS and old in added.operands and len(others) == 1 and _parts(s, others[0], makers) is not None:
        yield Total(carry.id, added.id, old, others[0], new)


def _added_to(s: Structure, makers: Mapping[int, Op]) -> dict[int, Total]:
    found, waiting = dict[int, Total](), [(t.addend, t) for t in s.totals]
    while waiting:
        value, total = waiting.pop()
        if (parts := _parts(s, value, makers)) is not None:
            found[value] = total
            waiting += [(v, total) for v in parts]
    return found


def _parts(s: Structure, value: int, makers: Mapping[int, Op]) -> Sequence[int] | None:
    """What a value is made of that could be partial sums as well; None if it cannot be one itself until its one use, which is
    linear and in the same region. A stack that a loop makes can, if what it stacks can until then."""
    maker, uses = makers.get(value), s.uses[value]
    if maker is None or len(uses) != 1:
        return None
    user = s.program.ops[uses[0][0]]
    linear = s.linear[user.id]
    if user.kind == "scan.output":
        linear = (0,)
    elif user.region != maker.region:
        return None
    if linear is not None and uses[0][1] not in linear:
        return None
    if maker.kind == "scan.output":
        return maker.operands if _parts(s, maker.operands[0], makers) is not None else None
    if maker.unit is Unit.MATRIX or maker.kind in ADDING_SCATTERS:
        return ()
    return [v for v in maker.operands if v >= 0] if s.linear[maker.id] != () else None


def numbered(keys: Iterable[Hashable]) -> tuple[int, ...]:
    """Numbers that equal keys share."""
    numbers: dict[Hashable, int] = {}
    return tuple([numbers.setdefault(key, len(numbers)) for key in keys])


def _positions(program: Program) -> tuple[int, ...]:
    position = [-1] * len(program.ops)
    for place, op in enumerate(program.schedule):
        position[op.id] = place
    return tuple(position)


def _sharers(program: Program) -> tuple[tuple[int, ...], ...]:
    products = [op for op in program.ops if op.unit is Unit.MATRIX]
    counts = Counter((v, op.region) for op in products for v in op.operands if v >= 0)
    sharers = {op.id: tuple(counts.get((v, op.region), 1) for v in op.operands) for op in products}
    return tuple(sharers.get(op.id, (1,) * len(op.operands)) for op in program.ops)


def _factor_colors(op: Op, color: list[int], first: int) -> tuple[int, ...]:
    return tuple(color[first + f] if ok else -1 for f, ok in enumerate(op.rule.splittable)) if op.rule else ()


def _early(program: Program) -> tuple[bool, ...]:
    early = [v.origin is Origin.ARGUMENT for v in program.values]
    for op in program.schedule:
        if op.rule is not None and op.kind in VIEWS:
            ready = all(early[v] for v in op.operands if v >= 0)
            for v in op.results:
                early[v] = ready
    return tuple(early)


def _late(program: Program) -> tuple[bool, ...]:
    """Values that no product and no loop depends on before their region ends, such as gradients."""
    late = [True] * len(program.values)
    waited = [op.unit in HEAVY or ("." in op.kind and not op.kind.endswith(".output")) for op in program.ops]
    for op in (*(program.ops[k] for k in sorted(program.linked)), *reversed(program.schedule)):
        ends = op.id in program.linked or op.kind == "output"
        last = not waited[op.id] and (ends or all(late[v] for v in op.results))
        for v in op.operands:
            if v >= 0:
                late[v] = late[v] and last
    return tuple(late)


def _overlapped(
    program: Program, late: Sequence[bool], position: Sequence[int], makers: Mapping[int, Op]
) -> tuple[bool, ...]:
    last: dict[int, int] = {}
    for op in program.ops:
        if op.unit in HEAVY or op.regions:
            last[op.region] = max(last.get(op.region, -1), position[op.id])
    return tuple(
        late[v.id] and position[makers[v.id].id] < last.get(makers[v.id].region, -1) if v.id in makers else False
        for v in program.values
    )


def _stretches(program: Program) -> list[int]:
    """By op how many loops of its region come before it."""
    before, loops = [0] * len(program.ops), [0] * len(program.regions)
    for op in program.schedule:
        before[op.id] = loops[op.region]
        loops[op.region] += bool(op.regions)
    return before


def _waits(s: Structure, makers: Mapping[int, Op]) -> tuple[bool, ...]:
    """Which partial sums have one use, linear and in the same region, with no loop in between? There the use decides."""
    ops, stretch = s.program.ops, _stretches(s.program)

    def waits(op: Op, uses: Sequence[tuple[int, int]]) -> bool:
        if len(uses) != 1 or not (op.unit is Unit.MATRIX or s.linear[op.id] != () or op.kind in ADDING_SCATTERS):
            return False
        user, operand = uses[0]
        linear_in = s.linear[user]
        near = ops[user].region == op.region and stretch[user] == stretch[op.id]
        return near and (linear_in is None or operand in linear_in)

    return tuple(v.id in makers and waits(makers[v.id], s.uses[v.id]) for v in s.program.values)


def _joins(s: Structure, makers: Mapping[int, Op], value: int) -> tuple[int, ...]:
    """The other operands of the sum that a value goes into, as far as they are computed before it."""
    uses = s.uses[value]
    if value not in makers or len(uses) != 1 or s.linear[uses[0][0]] is not None:
        return ()
    end = s.position[makers[value].id]
    if value in s.added_to:
        return ()
    others = (v for v in s.program.ops[uses[0][0]].operands if v >= 0 and v != value)
    return tuple(v for v in others if v in makers and 0 <= s.position[makers[v].id] < end)


def array_type(program: Program, value: int) -> ArrayType:
    """What reshards of a value depend on. The reducer is that of the op that computes it; an op has one reducer."""
    array, op = program.values[value], program.ops[program.definitions[value][0]]
    reducer = next((f.reducer for f in op.factor_rule.factors if f.reducer), "sum")
    if (reducer in ("and", "or") and array.dtype != "bool") or (reducer in ("max", "min") and "complex" in array.dtype):
        reducer = f"gathered {reducer}"
    paired = program.values[op.operands[0]].itemsize if reducer in PAIRED else 0.0
    narrow = program.values[program.moved_as[value]].itemsize if value in program.moved_as else 0.0
    return ArrayType(array.shape, array.itemsize, reducer, paired, narrow=narrow, uniform=value in program.uniform)


def find_sections(program: Program) -> tuple[tuple[int, ...], tuple[int, ...], dict[tuple[int, int], int]]:
    """Returns the section of each op, the region of each section, and the sections of the edges between a loop's links and its
    body. A section is a loop body, or the part behind the barrier of a ``remat``: within one, a value is resharded to a
    sharding once."""
    numbers: dict[tuple[int, int], int] = {}

    def number(region: int, scope: int) -> int:
        return numbers.setdefault((region, scope), len(numbers))

    sections = tuple(number(op.region, (*program.barriers[op.id], -1)[0]) for op in program.ops)
    crossing: dict[tuple[int, int], int] = {}
    for op in program.ops:
        inner = {v for r in op.regions for v in (*program.regions[r].inputs, *program.regions[r].outputs)}
        for link in (program.ops[n] for n in op.links):
            # What a loop only reads is resharded before it starts.
            for v in () if link.kind.endswith(".const") else (*link.operands, *link.results):
                if v >= 0 and v in inner and program.home[v] != op.region:
                    crossing[link.id, v] = number(program.home[v], -1)
    return sections, tuple(region for region, _ in numbers), crossing


def _alike(s: Structure) -> tuple[int, ...]:
    arrays = zip(s.program.values, s.arrays, s.overlapped, strict=True)
    types = (*numbered((v.dtype, v.shape, late, a.narrow, a.uniform) for v, a, late in arrays), -1)

    def key(op: Op) -> Hashable:
        every = [types[v] for v in (*op.operands, *op.results)]
        precision = op.id in s.program.rounding, op.attribute("passes")
        return op.rule, op.kind, op.flops, *every, op.attribute("axes"), precision

    return numbered(map(key, s.program.ops))


def _placed(s: Structure) -> tuple[int, ...]:
    return numbered(
        (s.alike[op.id], tuple(v >= 0 and s.early[v] for v in op.operands), s.sharers[op.id]) for op in s.program.ops
    )
