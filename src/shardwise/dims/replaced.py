"""Which output replaces an argument: parameters, moments and caches come back updated.

The problem. An output can replace an argument of its shape, dtype and colors. A parameter and its moments have all of these in
common, and neither names nor the order of arguments and outputs tell them apart.

The idea. An update is computed element by element: a moment from itself, a parameter from itself and its moments. So only
values of an output's shape and colors, and no products, are followed back to arguments. The outputs that depend on the fewest
are matched first, each with an argument that is left. Then the arguments without such an output (those that a loop updates row
by row) take the first output that is left and depends on them. A floating-point scalar is always left over, for a loss.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from shardwise.ir.program import HEAVY, Op, Program, Value

#: By value the arguments that it depends on: an integer, of which bit k is argument number k.
Dependencies = Mapping[int, int]


def find_replaced(program: Program, colors: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Returns, by argument, the output that replaces it; ``colors`` are those of the dimensions of all values."""

    def by_kind(values: Iterable[int]) -> dict[Any, list[int]]:
        kinds: dict[Any, list[int]] = {}
        for v in values:
            kinds.setdefault((program.values[v].shape, program.values[v].dtype, colors[v]), []).append(v)
        return kinds

    arguments = [a.value for a in program.arguments]
    bit = {v: 1 << k for k, v in enumerate(arguments)}
    outputs, elementwise = by_kind(program.outputs), _elementwise(program, colors)
    depends = functools.cache(lambda: depends_on(program))
    replaced: dict[int, int] = {}
    for kind, able in by_kind(arguments).items():
        left, free = outputs.get(kind, []), sum(bit[v] for v in able)
        is_loss = not program.values[able[0]].shape and is_floating(program.values[able[0]])
        for output in sorted(left, key=lambda o: (elementwise.get(o, 0) & free).bit_count()):
            if len(left) > is_loss and (own := elementwise.get(output, 0) & free):
                first = own & -own
                replaced[arguments[first.bit_length() - 1]] = output
                left.remove(output)
                free ^= first
        for argument in (v for v in able if free & bit[v] and len(left) > is_loss):
            if (output := next((o for o in left if depends().get(o, 0) & bit[argument]), -1)) >= 0:
                replaced[argument] = output
                left.remove(output)
    return {v: replaced[v] for v in arguments if v in replaced}


def depends_on(program: Program, replaced: Mapping[int, int] | None = None) -> Dependencies:
    """Returns, by value, the arguments that it depends on. What replaces one of the ``replaced`` arguments depends on nothing,
    and what a loop carries for one depends on its initial value alone."""
    replaced = replaced or {}
    arguments = {a.value for a in program.arguments}
    updated = {program.ops[program.definitions[o][0]].operands[0] for o in replaced.values()} - arguments
    carries, carried = set[int](), set(replaced)
    for op in (op for op in program.schedule if op.kind.endswith(".carry")):
        if op.operands[0] in carried or program.argument_of.get(op.operands[0], -1) in carried:
            carries.add(op.id)
            carried.update(op.results)
    return _spread(program, lambda op, v: op.operands[:1] if op.id in carries else op.operands, updated)


def _elementwise(program: Program, colors: Sequence[tuple[int, ...]]) -> Dependencies:
    """Returns, by value, the arguments from which it is computed without a product, through values of its shape and colors."""

    def read(op: Op, value: int) -> Sequence[int]:
        if op.unit in HEAVY:
            return ()
        shape, mine = program.values[value].shape, colors[value]
        return [v for v in op.operands if v >= 0 and colors[v] == mine and program.values[v].shape == shape]

    return _spread(program, read)


def _spread(
    program: Program, read: Callable[[Op, int], Iterable[int]], without: Collection[int] = ()
) -> dict[int, int]:
    """Returns the dependencies of values, from the operands that are ``read`` for a result. Loops are repeated until nothing
    changes."""
    depends = {a.value: 1 << k for k, a in enumerate(program.arguments)}
    ops = [op for op in program.schedule if op.rule is not None and op.kind != "argument"]
    loops, changed = len(program.regions) > 1, True
    while changed:
        changed = False
        for op in ops:
            for v in (v for v in op.results if v not in without):
                bits = functools.reduce(operator.or_, [depends.get(u, 0) for u in read(op, v)], 0)
                if bits & ~depends.get(v, 0):
                    depends[v], changed = depends.get(v, 0) | bits, loops
    return depends


def is_floating(value: Value) -> bool:
    return value.dtype.startswith(("float", "bfloat", "complex"))
