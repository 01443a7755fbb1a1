"""Dataflow in compiled text: where an operand comes from, what uses a result, and how often a loop runs.

Both directions pass through ops that keep the elements of a value, and into and out of fusions. ``fusions`` are those around
an instruction, innermost last.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardwise.verification.hlo import Array, Instruction, Module

    Fusions = tuple[Instruction, ...]
    Linear = tuple[int | None, int]

#: Ops that keep the elements of a value, perhaps in another layout.
SAME_ELEMENTS: Final = frozenset(
    {"bitcast", "copy", "reshape", "transpose", "copy-start", "copy-done", "optimization-barrier"}
)
_SAME_OR_CONVERTED: Final = SAME_ELEMENTS | {"convert"}
_TRIP_COUNT: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


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
    sources = [_before_conversion(module, operand)]
    if promoted:
        users = list(uses(module, collective, part if len(collective.operands) > 1 else None, (), SAME_ELEMENTS))
        results = {None if use is None or use.opcode != "convert" else use.arrays[0] for use in users}
        sources += results if len({array and array.dtype for array in results}) == 1 else ()
    wide = operand.arrays[0].bits
    return next((array.dtype for array in sources if array is not None and 0 < array.bits < wide), "")


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
    module: Module, value: Instruction, fusions: Fusions, unchanged: frozenset[str] = frozenset()
) -> tuple[Instruction, Fusions]:
    """Returns the instruction that computes a value, with the fusions around it: back through ops in ``unchanged``, fusions
    and tuples."""
    source, around = None, fusions
    if value.opcode in unchanged:
        source = module.operand(value)
    elif value.opcode == "fusion":
        source, around = module.computations[value.attribute("calls")].root, (*fusions, value)
    elif value.opcode == "parameter" and fusions:
        source, around = module.operand(fusions[-1], int(value.arguments)), fusions[:-1]
    elif value.opcode == "get-tuple-element" and (operand := module.operand(value)):
        container, around = _producer(module, operand, fusions)
        source = module.operand(container, int(value.attribute("index"))) if container.opcode == "tuple" else None
    return (value, fusions) if source is None else _producer(module, source, around, unchanged)


def _before_conversion(module: Module, value: Instruction | None) -> Array | None:
    """Returns the array whose conversion a value is, perhaps before the loops that carry it; ``None`` if it is none."""
    while value is not None:
        value, _ = _producer(module, value, (), SAME_ELEMENTS | {"dynamic-slice", "slice"})
        source = module.operand(value)
        if value.opcode == "convert":
            return source.arrays[0] if source is not None else None
        element = _state_element(module, value)
        loop = next((c for c in module.callers[value.computation] if c.opcode == "while"), None)
        initial = module.operand(loop) if loop is not None else None
        if element is None or initial is None or initial.opcode != "tuple":
            return None
        value = module.operand(initial, element)
    return None


def _state_element(module: Module, value: Instruction) -> int | None:
    """Returns the number of the element of its computation's parameter that a value is."""
    source = module.operand(value) if value.opcode == "get-tuple-element" else None
    return int(value.attribute("index")) if source is not None and source.opcode == "parameter" else None


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Returns the trip count of a ``while`` instruction, ``None`` where it is not constant.

    Where the backend does not annotate it, it follows from the counter's start, limit and step, which are evaluated back to
    constants. The step matters: XLA's windowed products advance their counter by two.
    """
    if annotated := _TRIP_COUNT.search(loop.attributes):
        return int(annotated.group(1))
    condition, body = (module.computations[loop.attribute(key)] for key in ("condition", "body"))
    compare, fusions = _producer(module, condition.root, (), _SAME_OR_CONVERTED)
    direction = compare.attribute("direction")
    if compare.opcode != "compare" or direction == "EQ":
        return None

    def element_of(state: Instruction | None, element: int) -> Linear | None:
        if state is None:
            return None
        state, fusions = _producer(module, state, (), _SAME_OR_CONVERTED)
        return _linear(module, module.operand(state, element), fusions) if state.opcode == "tuple" else None

    def progress(value: Linear | None) -> tuple[int, int] | None:
        """Returns what a value is in the first trip, and what each trip adds to it."""
        if value is None or value[0] is None:
            return value and (value[1], 0)
        start, after = element_of(module.operand(loop), value[0]), element_of(body.root, value[0])
        if start is None or start[0] is not None or after is None or after[0] != value[0]:
            return None
        return start[1] + value[1], after[1]

    left, right = (progress(_linear(module, module.operand(compare, k), fusions)) for k in range(2))
    if left is None or right is None:
        return None
    # The loop runs while left - right is negative (LT), or at most 0 (LE); the others are the same with another sign.
    difference, step = left[0] - right[0], left[1] - right[1]
    if direction in ("GT", "GE") or (direction == "NE" and step < 0):
        difference, step = -difference, -step
    last = 1 if direction in ("LE", "GE") else 0
    return max(0, -((difference - last) // step)) if step > 0 else None


def _linear(module: Module, value: Instruction | None, fusions: Fusions) -> Linear | None:
    """Returns (element, offset) where a value is an element of a loop's state plus a constant, or (``None``, constant)."""
    if value is None:
        return None
    value, fusions = _producer(module, value, fusions, _SAME_OR_CONVERTED)
    if value.opcode == "constant":
        return (None, int(value.arguments)) if value.arguments.lstrip("-").isdigit() else None
    if value.opcode in ("add", "subtract"):
        left, right = (_linear(module, module.operand(value, k), fusions) for k in range(2))
        sign = 1 if value.opcode == "add" else -1
        if left is None or right is None or (right[0] is not None and (left[0] is not None or sign < 0)):
            return None
        return (right[0] if left[0] is None else left[0]), left[1] + sign * right[1]
    element = None if fusions else _state_element(module, value)
    return None if element is None else (element, 0)
