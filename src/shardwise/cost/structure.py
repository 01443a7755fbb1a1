"""What lowering asks of a program whatever the state: uses, clashes, what is ready early or used late, what may wait. Built
once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from shardwise.cost.faults import PAD
from shardwise.cost.storage import VIEWS, Clashes
from shardwise.dims.analysis import Analysis
from shardwise.ir.program import HEAVY, Op, Origin, Program, Unit

#: Ops that are linear in each of these operands when the others are whole (None: in every operand at once).
LINEAR: Final[dict[str, tuple[int, ...] | None]] = {
    "add": None,
    "add_any": None,
    "sub": None,
    "neg": (0,),
    "convert_element_type": (0,),
    "transpose": (0,),
    "reshape": (0,),
    "squeeze": (0,),
    "copy": (0,),
    "mul": (0, 1),
    "div": (0,),
    "reduce_sum": (0,),
}
SUMS: Final = frozenset({"add", "add_any"})
SCATTERS: Final = frozenset({"scatter-add", "scatter_add"})


@dataclass(frozen=True)
class Structure:
    """Facts by value and by op.

    ``factor_colors`` are those of an op's factors (-1 for those that cannot be split); ``nodes`` and ``colors`` are those of a
    value's dimensions (-1 where there is none); ``uses`` (op, operand) pairs; ``early`` arguments and views of them; ``late``
    values that no product and no loop of their region rests on; ``waits`` whether a partial result may stay so until its one
    use; ``joins`` the other, earlier operands of a sum that is a value's one use; ``stays`` whether a result may lie as it is
    computed; ``alike`` a number that ops share if they are the same in all but their values; ``sharers`` by operand how many
    products in the region would share a reshard of it; ``placed`` a number that ops share if they are alike, with operands that
    are ready early alike and shared alike.
    """

    analysis: Analysis
    color: tuple[int, ...]
    first_node: tuple[int, ...]
    factor_colors: tuple[tuple[int, ...], ...]
    clashes: Clashes
    nodes: tuple[tuple[int, ...], ...]
    colors: tuple[tuple[int, ...], ...]
    nbytes: tuple[int, ...]
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
        early, alike, scattered = _early(program), _alike(program), _scattered(program)
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
            tuple(v.nbytes for v in program.values),
            tuple(map(tuple, uses)),
            tuple(position),
            early,
            _late(program),
            tuple(
                v.id in makers and _waits(program, scattered, makers[v.id], v.id, uses[v.id]) for v in program.values
            ),
            tuple(
                _joins(program, makers, position, v.id, uses[v.id]) if v.id in makers else () for v in program.values
            ),
            tuple(
                v.id in makers and (makers[v.id].unit is Unit.MATRIX or makers[v.id].kind in VIEWS)
                for v in program.values
            ),
            alike,
            sharers,
            _placed(program, alike, early, sharers),
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


def _scattered(program: Program) -> tuple[bool, ...]:
    """Results of scatters that add, and sums of them with anything."""
    found = [False] * len(program.values)
    for op in program.schedule:
        added = op.kind in SUMS and any(found[v] for v in op.operands if v >= 0)
        for v in op.results if added or op.kind in SCATTERS else ():
            found[v] = True
    return tuple(found)


def _waits(program: Program, scattered: tuple[bool, ...], op: Op, value: int, uses: list[tuple[int, int]]) -> bool:
    """Has a partial result one use only, linear and in the same region? Then the use decides.

    XLA reassociates the all-reduces of products and sums, and those of scatters, but none of one with one of the other: it
    scatters into the reduced product.
    """
    if len(uses) != 1 or not (op.unit is Unit.MATRIX or op.kind in LINEAR or scattered[value]):
        return False
    user, operand = uses[0]
    use = program.ops[user]
    if use.region != op.region:
        return False
    if use.kind in SUMS:
        return scattered[value] or not any(scattered[v] for v in use.operands if v >= 0)
    linear = LINEAR.get(use.kind, ())
    return not scattered[value] and (linear is None or operand in linear)


def _joins(
    program: Program, makers: dict[int, Op], position: list[int], value: int, uses: list[tuple[int, int]]
) -> tuple[int, ...]:
    """The other operands of the sum that a value goes into, as far as they are made before it."""
    if len(uses) != 1:
        return ()
    use = program.ops[uses[0][0]]
    if use.kind not in LINEAR or LINEAR[use.kind] is not None:
        return ()
    own = position[makers[value].id]
    others = (v for v in use.operands if v >= 0 and v != value)
    return tuple(v for v in others if v in makers and 0 <= position[makers[v].id] < own)


def _alike(program: Program) -> tuple[int, ...]:
    numbers: dict[Any, int] = {}
    found = []
    for op in program.ops:
        types = tuple(program.values[v].type_text if v >= 0 else "" for v in (*op.operands, *op.results))
        # Pads are told apart by their attributes, which need not be hashable.
        key = (op.rule, op.kind, op.flops, types, op.id if op.kind == PAD else -1)
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
