"""Dataflow in compiled text: where an operand comes from, and what uses a result.

Both directions pass through ops that keep the elements of a value, and into and out of fusions. ``fusions`` are those around
an instruction, innermost last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from shardwise.verification.hlo import Instruction, Module, bits

Fusions = tuple[Instruction, ...]

#: Ops that keep the elements of a value, perhaps in another layout.
SAME_ELEMENTS: Final = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done", "optimization-barrier"}
)
_SAME_OR_CONVERTED: Final = SAME_ELEMENTS | {"convert"}


def slice_count(module: Module, collective: Instruction, element: int | None) -> int:
    """Returns how many slices a result is cut into before any other use; 1 where something uses all of it."""
    total = math.prod(collective.arrays[element or 0].dims)
    counts = set[int]()
    for use in uses(module, collective, element, (), _SAME_OR_CONVERTED):
        piece = math.prod(use.arrays[0].dims) if use is not None and use.opcode == "dynamic-slice" else 0
        if piece == 0 or total % piece:
            return 1
        counts.add(total // piece)
    return counts.pop() if len(counts) == 1 else 1


def narrow_dtype(module: Module, collective: Instruction, part: int, promoted: bool) -> str:
    """Returns the narrower dtype that an operand was widened from, or that the result of a promoted reduction is
    converted to; ``""`` where there is none."""
    operand = module.operand(collective, part)
    if operand is None or len(operand.arrays) != 1:
        return ""
    dtypes = [_dtype_before_conversion(module, operand)]
    if promoted:
        users = list(uses(module, collective, part if len(collective.operands) > 1 else None, (), SAME_ELEMENTS))
        results = {"" if use is None or use.opcode != "convert" else use.arrays[0].dtype for use in users}
        dtypes += results if len(results) == 1 else ()
    return next((d for d in dtypes if d and bits(d) < bits(operand.arrays[0].dtype)), "")


def uses(
    module: Module, value: Instruction, element: int | None, fusions: Fusions, unchanged: frozenset[str]
) -> Iterator[Instruction | None]:
    """Yields the first users that are not in ``unchanged``, ``None`` for a use that cannot be followed."""
    if value.root:
        if fusions:
            yield from uses(module, fusions[-1], element, fusions[:-1], unchanged)
        else:
            yield None
    for user in module.computations[value.computation].users(value.name):
        positions = [p for p, operand in enumerate(user.operands) if operand == value.name]
        if element is not None and not user.opcode.endswith("-done"):
            if user.opcode != "get-tuple-element":
                yield None
            elif int(user.attribute("index")) == element:
                yield from uses(module, user, None, fusions, unchanged)
        elif user.opcode in unchanged or user.opcode.endswith("-done"):
            yield from uses(module, user, element, fusions, unchanged)
        elif user.opcode == "fusion":
            called = module.computations[user.attribute("calls")]
            for parameter in map(called.parameter, positions):
                yield from uses(module, parameter, None, (*fusions, user), unchanged) if parameter else (None,)
        elif user.opcode == "tuple" and user.root and fusions:
            for position in positions:
                yield from uses(module, fusions[-1], position, fusions[:-1], unchanged)
        elif user.opcode == "dynamic-slice" and user.operands[0] != value.name:
            yield None
        else:
            yield user


def _producer(
    module: Module, value: Instruction, fusions: Fusions, unchanged: frozenset[str]
) -> tuple[Instruction | None, Fusions]:
    """Returns the instruction whose elements a value has, one step back, with the fusions around it."""
    if value.opcode in unchanged:
        return module.operand(value), fusions
    if value.opcode == "fusion":
        return module.computations[value.attribute("calls")].root, (*fusions, value)
    if value.opcode == "parameter" and fusions:
        return module.operand(fusions[-1], int(value.arguments)), fusions[:-1]
    return None, ()


def _dtype_before_conversion(module: Module, value: Instruction | None) -> str:
    fusions: Fusions = ()
    while value is not None and value.opcode != "convert":
        if value.opcode == "get-tuple-element":
            value, fusions = _element_producer(module, value, fusions)
        else:
            value, fusions = _producer(module, value, fusions, SAME_ELEMENTS | {"dynamic-slice", "slice"})
    source = module.operand(value) if value is not None else None
    return source.arrays[0].dtype if source is not None else ""


def _element_producer(module: Module, value: Instruction, fusions: Fusions) -> tuple[Instruction | None, Fusions]:
    """Returns where an element of a tuple is computed: in the tuple, in a fusion, or before the loop that carries it."""
    source, index = module.operand(value), int(value.attribute("index"))
    if source is not None and source.opcode == "fusion":
        source, fusions = module.computations[source.attribute("calls")].root, (*fusions, source)
    elif source is not None and source.opcode == "parameter":
        callers = module.callers.get(value.computation, ())
        source = module.operand(callers[0]) if callers and callers[0].opcode == "while" else None
        fusions = ()
    return (module.operand(source, index) if source is not None and source.opcode == "tuple" else None), fusions
