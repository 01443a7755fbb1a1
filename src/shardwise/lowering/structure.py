"""Facts about a program that lowering and costs read in every state: uses, conflicts, what is ready early or used late, which
reductions may wait. Built once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import HEAVY, Op, Origin, Program, Unit
from shardwise.ir.traits import ADDING_SCATTERS, VIEWS, linear_operands
from shardwise.lowering.sharding import PAIRED, ArrayType
from shardwise.lowering.storage import Clashes


@dataclass(frozen=True)
class Structure:
    """Facts by value and by op."""

    analysis: Analysis
    color: tuple[int, ...]  # by node of the analysis
    first_node: tuple[int, ...]  # by op: the node of its first factor
    factor_colors: tuple[tuple[int, ...], ...]  # by op; -1 for factors that cannot be split
    clashes: Clashes
    nodes: tuple[tuple[int, ...], ...]  # by value and dimension; -1 for none
    colors: tuple[tuple[int, ...], ...]  # likewise
    uses: tuple[tuple[tuple[int, int], ...], ...]  # by value: (op, operand) pairs
    position: tuple[int, ...]  # by op: its place in the schedule
    early: tuple[bool, ...]  # by value: is it an argument or a view of one?
    late: tuple[bool, ...]  # by value: does no product and no loop of its region depend on it?
    waits: tuple[bool, ...]  # by value: may a partial result stay partial until its one use?
    joins: tuple[tuple[int, ...], ...]  # by value: the other, earlier operands of a sum that is its one use
    stays: tuple[bool, ...]  # by value: may it stay in the sharding in which it is computed?
    alike: tuple[int, ...]  # a number that ops share if they differ only in their values
    sharers: tuple[tuple[int, ...], ...]  # by op and operand: how many products of the region would share its reshard
    placed: tuple[int, ...]  # a number that alike ops share if their operands have the same ``early`` and ``sharers``
    linear: tuple[tuple[int, ...] | None, ...]  # see ``linear_operands``
    arrays: tuple[ArrayType, ...]  # by value: what its reshards depend on
    sections: tuple[int, ...]  # by op: the part of a region in which a value is resharded once (``_sections``)
    runs_in: tuple[int, ...]  # by section: its region
    crossing: Mapping[tuple[int, int], int]  # by op and value: the section of an edge between a link and a body
    overlapped: tuple[
        bool, ...
    ]  # by value: is it late, with products or loops after it that its collectives can overlap?

    def section(self, op: int, value: int) -> int:
        """Where the reshard of a value on an edge of an op is done: inside of a loop for what a link ties to its body."""
        return self.crossing.get((op, value), self.sections[op])

    @property
    def program(self) -> Program:
        return self.analysis.program

    @staticmethod
    def of(analysis: Analysis) -> Structure:
        program, names = analysis.program, analysis.names
        color, first = names.color.tolist(), names.first_node.tolist()
        nodes: list[list[int]] = [[-1] * len(v.shape) for v in program.values]
        rows = zip(names.member_value.tolist(), names.member_dim.tolist(), names.member_node.tolist(), strict=True)
        for v, d, n in rows:
            nodes[v][d] = n
        uses: list[list[tuple[int, int]]] = [[] for _ in program.values]
        products: dict[tuple[int, int], int] = {}
        for op in program.ops:
            for k, v in enumerate(op.operands):
                if v >= 0:
                    uses[v].append((op.id, k))
                    if op.unit is Unit.MATRIX:
                        products[v, op.region] = products.get((v, op.region), 0) + 1
        position = [-1] * len(program.ops)
        for place, op in enumerate(program.schedule):
            position[op.id] = place
        makers = {v: op for op in program.ops if op.rule is not None for v in op.results}
        linear, late = tuple(linear_operands(program, op) for op in program.ops), _late(program)
        overlapped = _overlapped(program, late, position)
        arrays = tuple(array_type(program, v.id) for v in program.values)
        early, alike = _early(program), _alike(program, overlapped, arrays)
        sections, runs_in, crossing = _sections(program)
        stretch = _stretches(program)
        sharers = tuple(
            tuple(products.get((v, op.region), 1) if op.unit is Unit.MATRIX else 1 for v in op.operands)
            for op in program.ops
        )
        return Structure(
            analysis,
            tuple(color),
            tuple(first),
            tuple(_factor_colors(op, color, first[op.id]) for op in program.ops),
            Clashes.of(analysis),
            tuple(map(tuple, nodes)),
            tuple(tuple(color[n] if n >= 0 else -1 for n in by_dim) for by_dim in nodes),
            tuple(map(tuple, uses)),
            tuple(position),
            early,
            late,
            tuple(
                v.id in makers and _waits(program, linear, stretch, makers[v.id], uses[v.id]) for v in program.values
            ),
            tuple(
                _joins(program, linear, makers, position, v.id, uses[v.id]) if v.id in makers else ()
                for v in program.values
            ),
            tuple(
                v.id in makers and (makers[v.id].unit is Unit.MATRIX or makers[v.id].kind in VIEWS)
                for v in program.values
            ),
            alike,
            sharers,
            _placed(program, alike, early, sharers),
            linear,
            arrays,
            sections,
            runs_in,
            crossing,
            overlapped,
        )


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
    links = {k for op in program.ops for k in op.links}
    for op in (*(program.ops[k] for k in sorted(links)), *reversed(program.schedule)):
        ends = op.id in links or op.kind == "output"
        last = not waited[op.id] and (ends or all(late[v] for v in op.results))
        for v in op.operands:
            if v >= 0:
                late[v] = late[v] and last
    return tuple(late)


def _overlapped(program: Program, late: Sequence[bool], position: Sequence[int]) -> tuple[bool, ...]:
    last: dict[int, int] = {}
    for op in program.ops:
        if op.unit in HEAVY or op.regions:
            last[op.region] = max(last.get(op.region, -1), position[op.id])
    makers = {v: op for op in program.ops if op.rule is not None for v in op.results}
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


def _waits(
    program: Program,
    linear: Sequence[tuple[int, ...] | None],
    stretch: Sequence[int],
    op: Op,
    uses: Sequence[tuple[int, int]],
) -> bool:
    """Has a partial sum one use only, linear and in the same region, with no loop in between (through which every device would
    keep an array of full size)? Then the use decides."""
    if len(uses) != 1 or not (op.unit is Unit.MATRIX or linear[op.id] != () or op.kind in ADDING_SCATTERS):
        return False
    user, operand = uses[0]
    linear_in = linear[user]
    near = program.ops[user].region == op.region and stretch[user] == stretch[op.id]
    return near and (linear_in is None or operand in linear_in)


def _joins(
    program: Program,
    linear: Sequence[tuple[int, ...] | None],
    makers: dict[int, Op],
    position: list[int],
    value: int,
    uses: list[tuple[int, int]],
) -> tuple[int, ...]:
    """The other operands of the sum that a value goes into, as far as they are computed before it."""
    if len(uses) != 1 or linear[uses[0][0]] is not None:
        return ()
    end = position[makers[value].id]
    others = (v for v in program.ops[uses[0][0]].operands if v >= 0 and v != value)
    return tuple(v for v in others if v in makers and 0 <= position[makers[v].id] < end)


def array_type(program: Program, value: int) -> ArrayType:
    """What reshards of a value depend on. The reducer is that of the op that computes it; an op has one reducer."""
    array, op = program.values[value], program.ops[program.definitions[value][0]]
    assert op.rule is not None
    reducer = next((f.reducer for f in op.rule.factors if f.reducer), "sum")
    if (reducer in ("and", "or") and array.dtype != "bool") or (reducer in ("max", "min") and "complex" in array.dtype):
        reducer = f"gathered {reducer}"
    paired = program.values[op.operands[0]].itemsize if reducer in PAIRED else 0.0
    narrow = program.values[program.moved_as[value]].itemsize if value in program.moved_as else 0.0
    return ArrayType(array.shape, array.itemsize, reducer, paired, narrow=narrow, uniform=value in program.uniform)


def _sections(program: Program) -> tuple[tuple[int, ...], tuple[int, ...], dict[tuple[int, int], int]]:
    """By op its section, by section its region, and the sections of edges between a link and a body.

    Within one section a value is resharded to a sharding once. A loop body is a section, and so is the part behind the barrier
    of a ``remat``: sharing across it would keep alive what is to be rematerialized.
    """
    numbers: dict[tuple[int, int], int] = {}

    def number(region: int, scope: int) -> int:
        return numbers.setdefault((region, scope), len(numbers))

    barriers: dict[tuple[int, int], int] = {}

    def barrier(scope: int, region: int) -> int:
        """The innermost ``remat`` with a barrier around a scope, inside of a region; -1 for none."""
        if (scope, region) not in barriers:
            here = program.scopes[scope]
            inside = here.region == region and here.parent >= 0
            outer = scope if here.has_barrier or not inside else barrier(here.parent, region)
            barriers[scope, region] = outer if inside else -1
        return barriers[scope, region]

    sections = tuple(number(op.region, barrier(op.scope, op.region)) for op in program.ops)
    crossing: dict[tuple[int, int], int] = {}
    for op in program.ops:
        inner = {v for r in op.regions for v in (*program.regions[r].inputs, *program.regions[r].outputs)}
        for link in (program.ops[n] for n in op.links):
            # What a loop only reads is resharded before it starts.
            for v in () if link.kind.endswith(".const") else (*link.operands, *link.results):
                if v >= 0 and v in inner and program.home[v] != op.region:
                    crossing[link.id, v] = number(program.home[v], -1)
    return sections, tuple(region for region, _ in numbers), crossing


def reshard_sections(program: Program) -> tuple[tuple[int, ...], Mapping[tuple[int, int], int]]:
    """By op the section in which reshards of its operands are shared; by link and value the section of an edge into a body."""
    sections, _, crossing = _sections(program)
    return sections, crossing


def _alike(program: Program, overlapped: Sequence[bool], arrays: Sequence[ArrayType]) -> tuple[int, ...]:
    numbers: dict[Any, int] = {}
    by_op = []
    for op in program.ops:
        types = tuple(program.values[v].type_text if v >= 0 else "" for v in (*op.operands, *op.results))
        values = [v for v in (*op.operands, *op.results) if v >= 0]
        moving = tuple((overlapped[v], arrays[v].narrow, arrays[v].uniform) for v in values)
        key = (op.rule, op.kind, op.flops, types, moving, op.attribute("axes"), op.id in program.rounding)
        by_op.append(numbers.setdefault(key, len(numbers)))
    return tuple(by_op)


def _placed(
    program: Program, alike: tuple[int, ...], early: tuple[bool, ...], sharers: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    numbers: dict[Any, int] = {}
    by_op = []
    for op in program.ops:
        key = (alike[op.id], tuple(v >= 0 and early[v] for v in op.operands), sharers[op.id])
        by_op.append(numbers.setdefault(key, len(numbers)))
    return tuple(by_op)
