"""What lowering asks of a program whatever the state: uses, clashes, what is ready early or used late, what may wait. Built
once."""

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
    """Facts by value and by op.

    ``factor_colors`` are those of an op's factors (-1 for those that cannot be split); ``nodes`` and ``colors`` are those of a
    value's dimensions (-1 where there is none); ``uses`` (op, operand) pairs; ``early`` arguments and views of them; ``late``
    values that no product and no loop of their region rests on; ``waits`` whether a partial result may stay so until its one
    use; ``joins`` the other, earlier operands of a sum that is a value's one use; ``stays`` whether a result may lie as it is
    computed; ``alike`` a number that ops share if they are the same in all but their values; ``sharers`` by operand how many
    products in the region would share a reshard of it; ``placed`` a number that ops share if they are alike, with operands that
    are ready early alike and shared alike; ``linear`` see ``linear_operands``; ``arrays`` what reshards of a value depend on;
    ``sections`` by op the stretch of a region in which a reshard of a value is done once (see ``_sections``), ``runs_in`` the
    region of each section; ``overlapped`` late values that products or loops of their region come after, beside which a
    collective can run.
    """

    analysis: Analysis
    color: tuple[int, ...]
    first_node: tuple[int, ...]
    factor_colors: tuple[tuple[int, ...], ...]
    clashes: Clashes
    nodes: tuple[tuple[int, ...], ...]
    colors: tuple[tuple[int, ...], ...]
    uses: tuple[tuple[tuple[int, int], ...], ...]
    position: tuple[int, ...]
    early: tuple[bool, ...]
    late: tuple[bool, ...]
    waits: tuple[bool, ...]
    joins: tuple[tuple[int, ...], ...]
    stays: tuple[bool, ...]
    alike: tuple[int, ...]
    sharers: tuple[tuple[int, ...], ...]
    placed: tuple[int, ...]
    linear: tuple[tuple[int, ...] | None, ...]
    arrays: tuple[ArrayType, ...]
    sections: tuple[int, ...]
    runs_in: tuple[int, ...]
    crossing: Mapping[tuple[int, int], int]
    overlapped: tuple[bool, ...]

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
            tuple(tuple(color[n] if n >= 0 else -1 for n in own) for own in nodes),
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
    """Values on which no product and no loop rests before their region ends, such as gradients."""
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
    found, loops = [0] * len(program.ops), [0] * len(program.regions)
    for op in program.schedule:
        found[op.id] = loops[op.region]
        loops[op.region] += bool(op.regions)
    return found


def _waits(
    program: Program,
    linear: Sequence[tuple[int, ...] | None],
    stretch: Sequence[int],
    op: Op,
    uses: Sequence[tuple[int, int]],
) -> bool:
    """Has a partial sum one use only, linear and in the same region, with no loop in between, through which every device would
    keep a whole array? Then the use decides."""
    if len(uses) != 1 or not (op.unit is Unit.MATRIX or linear[op.id] != () or op.kind in ADDING_SCATTERS):
        return False
    user, operand = uses[0]
    own = linear[user]
    near = program.ops[user].region == op.region and stretch[user] == stretch[op.id]
    return near and (own is None or operand in own)


def _joins(
    program: Program,
    linear: Sequence[tuple[int, ...] | None],
    makers: dict[int, Op],
    position: list[int],
    value: int,
    uses: list[tuple[int, int]],
) -> tuple[int, ...]:
    """The other operands of the sum that a value goes into, as far as they are made before it."""
    if len(uses) != 1 or linear[uses[0][0]] is not None:
        return ()
    own = position[makers[value].id]
    others = (v for v in program.ops[uses[0][0]].operands if v >= 0 and v != value)
    return tuple(v for v in others if v in makers and 0 <= position[makers[v].id] < own)


def array_type(program: Program, value: int) -> ArrayType:
    """The reducer is that of the op that makes the value; an op reduces by one reducer."""
    own, op = program.values[value], program.ops[program.definitions[value][0]]
    assert op.rule is not None
    reducer = next((f.reducer for f in op.rule.factors if f.reducer), "sum")
    if (reducer in ("and", "or") and own.dtype != "bool") or (reducer in ("max", "min") and "complex" in own.dtype):
        reducer = f"gathered {reducer}"
    paired = program.values[op.operands[0]].itemsize if reducer in PAIRED else 0.0
    narrow = program.values[program.moved_as[value]].itemsize if value in program.moved_as else 0.0
    return ArrayType(own.shape, own.itemsize, reducer, paired, narrow=narrow, uniform=value in program.uniform)


def _sections(program: Program) -> tuple[tuple[int, ...], tuple[int, ...], dict[tuple[int, int], int]]:
    """By op its section, by section its region, and the sections of edges between a link and a body.

    Within one section a value is brought into a sharding once. A loop body is one, and so is what stands behind the barrier of
    a ``remat``: sharing across it would keep alive what is to be computed again.
    """
    numbers: dict[tuple[int, int], int] = {}

    def number(region: int, scope: int) -> int:
        return numbers.setdefault((region, scope), len(numbers))

    barriers: dict[tuple[int, int], int] = {}

    def barrier(scope: int, region: int) -> int:
        """The innermost ``remat`` with a barrier that a scope stands in, inside of a region; -1 for none."""
        if (scope, region) not in barriers:
            own = program.scopes[scope]
            inside = own.region == region and own.parent >= 0
            found = scope if own.has_barrier else -1
            barriers[scope, region] = -1 if not inside else found if found >= 0 else barrier(own.parent, region)
        return barriers[scope, region]

    sections = tuple(number(op.region, barrier(op.scope, op.region)) for op in program.ops)
    crossing: dict[tuple[int, int], int] = {}
    for op in program.ops:
        inner = {v for r in op.regions for v in (*program.regions[r].inputs, *program.regions[r].outputs)}
        for own in (program.ops[link] for link in op.links):
            # What a loop only reads is brought there before it starts.
            for v in () if own.kind.endswith(".const") else (*own.operands, *own.results):
                if v >= 0 and v in inner and program.home[v] != op.region:
                    crossing[own.id, v] = number(program.home[v], -1)
    return sections, tuple(region for region, _ in numbers), crossing


def reshard_sections(program: Program) -> tuple[tuple[int, ...], Mapping[tuple[int, int], int]]:
    """By op the section in which the reshards of its operands are shared, and by link and value that of an edge into a body."""
    sections, _, crossing = _sections(program)
    return sections, crossing


def _alike(program: Program, overlapped: Sequence[bool], arrays: Sequence[ArrayType]) -> tuple[int, ...]:
    numbers: dict[Any, int] = {}
    found = []
    for op in program.ops:
        types = tuple(program.values[v].type_text if v >= 0 else "" for v in (*op.operands, *op.results))
        values = [v for v in (*op.operands, *op.results) if v >= 0]
        moving = tuple((overlapped[v], arrays[v].narrow, arrays[v].uniform) for v in values)
        key = (op.rule, op.kind, op.flops, types, moving, op.attribute("axes"), op.id in program.rounding)
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)


def _placed(
    program: Program, alike: tuple[int, ...], early: tuple[bool, ...], sharers: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    numbers: dict[Any, int] = {}
    found = []
    for op in program.ops:
        key = (alike[op.id], tuple(v >= 0 and early[v] for v in op.operands), sharers[op.id])
        found.append(numbers.setdefault(key, len(numbers)))
    return tuple(found)
