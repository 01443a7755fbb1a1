"""Trip counts of loops that the backend does not annotate: where the counter starts, its limit, and its step.

A scalar is evaluated backwards through adds, copies and fusions until it is a constant, or an element of the loop's state
plus a constant. A trip count that needs anything else is ``None``. The step matters: XLA's windowed products advance their
counter by two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shardwise.verification.hlo import Computation, Instruction

#: Ops whose result has the value of their first operand.
_UNCHANGED: Final = frozenset(
    {"copy", "convert", "bitcast", "reshape", "copy-start", "copy-done", "optimization-barrier"}
)
_MIRRORED: Final = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


class Value(NamedTuple):
    """``state[element] + offset``, or the constant ``offset`` where ``element`` is ``None``."""

    element: int | None
    offset: int


def trip_count(computations: dict[str, Computation], loop: Instruction) -> int | None:
    """Returns the trip count of a ``while`` instruction, ``None`` where it is not constant."""
    condition, body = computations.get(loop.attribute("condition")), computations.get(loop.attribute("body"))
    if condition is None or body is None:
        return None
    root = body.root
    after = _Scope(computations, body).elements(root) if root.opcode == "tuple" else ()
    # Constants of an outer loop's state are not followed: the parameters of the scope around the loop are unknown.
    around = _Scope(computations, computations[loop.computation], ())
    before = around.elements(around.unwrapped(around.computation.by_name[loop.operands[0]]))

    def step(element: int) -> int | None:
        value = after[element] if element < len(after) else None
        return value.offset if value is not None and value.element == element else None

    def start(element: int) -> int | None:
        value = before[element] if element < len(before) else None
        return value.offset if value is not None and value.element is None else None

    def resolved(value: Value | None) -> Value | None:
        """A state element that the body does not change is the constant that it starts with."""
        if value is None or value.element is None or step(value.element) != 0:
            return value
        first = start(value.element)
        return None if first is None else Value(None, first + value.offset)

    left, right, direction = _Scope(computations, condition).compared()
    left, right = resolved(left), resolved(right)
    if left is None or right is None:
        return None
    if left.element is None:
        left, right, direction = right, left, _MIRRORED.get(direction, direction)
    if left.element is None or right.element is not None:
        return None
    first, by = start(left.element), step(left.element)
    if first is None or not by:
        return None
    upwards = {"LT": True, "LE": True, "GT": False, "GE": False, "NE": by > 0}.get(direction)
    if upwards is None or upwards != (by > 0):
        return None
    distance = right.offset - left.offset - first + {"LE": 1, "GE": -1}.get(direction, 0)
    return max(0, -(-distance // by))


class _Scope:
    """A computation with the values of its parameters; ``parameters=None``: its parameter is the loop's state."""

    def __init__(
        self,
        computations: dict[str, Computation],
        computation: Computation,
        parameters: tuple[Value | None, ...] | None = None,
    ):
        self.computations, self.computation, self.parameters = computations, computation, parameters
        self._memo: dict[str, Value | None] = {}

    def unwrapped(self, i: Instruction) -> Instruction:
        while i.opcode in _UNCHANGED and i.operands:
            i = self.computation.by_name[i.operands[0]]
        return i

    def elements(self, i: Instruction) -> tuple[Value | None, ...]:
        """Returns the values of a tuple's elements, none where the instruction is no tuple."""
        return tuple(self.value(name) for name in i.operands) if i.opcode == "tuple" else ()

    def compared(self) -> tuple[Value | None, Value | None, str]:
        """Returns both sides of the comparison that the computation ends with, and its direction."""
        root = self.unwrapped(self.computation.root)
        if root.opcode == "fusion":
            return self._inside(root).compared()
        if root.opcode != "compare":
            return None, None, ""
        left, right = (self.value(name) for name in root.operands)
        return left, right, root.attribute("direction")

    def value(self, name: str) -> Value | None:
        """Returns the value of an integer scalar, ``None`` for everything else."""
        if name not in self._memo:
            i = self.computation.by_name.get(name)
            shape = i.arrays if i is not None else ()
            scalar = len(shape) == 1 and not shape[0].dims and shape[0].dtype[0] in "su"
            self._memo[name] = self._evaluate(i) if i is not None and scalar else None
        return self._memo[name]

    def _evaluate(self, i: Instruction) -> Value | None:
        if i.opcode == "constant":
            return Value(None, int(i.arguments)) if i.arguments.lstrip("-").isdigit() else None
        if i.opcode == "parameter":
            number, parameters = int(i.arguments), self.parameters or ()
            return parameters[number] if number < len(parameters) else None
        if i.opcode == "get-tuple-element":
            return self._element(self.computation.by_name[i.operands[0]], int(i.attribute("index")))
        if i.opcode in _UNCHANGED:
            return self.value(i.operands[0])
        if i.opcode in ("add", "subtract"):
            left, right = (self.value(operand) for operand in i.operands)
            return _sum(left, right, 1 if i.opcode == "add" else -1)
        if i.opcode == "fusion":
            inner = self._inside(i)
            return inner.value(inner.computation.root.name)
        return None

    def _element(self, source: Instruction, index: int) -> Value | None:
        if source.opcode == "parameter" and self.parameters is None:
            return Value(index, 0)
        if source.opcode == "tuple":
            return self.value(source.operands[index])
        if source.opcode == "fusion":
            inner = self._inside(source)
            elements = inner.elements(inner.computation.root)
            return elements[index] if elements else None
        return None

    def _inside(self, fusion: Instruction) -> _Scope:
        called = self.computations[fusion.attribute("calls")]
        return _Scope(self.computations, called, tuple(self.value(name) for name in fusion.operands))


def _sum(left: Value | None, right: Value | None, sign: int) -> Value | None:
    if left is None or right is None:
        return None
    if right.element is None:
        return Value(left.element, left.offset + sign * right.offset)
    if left.element is None and sign > 0:
        return Value(right.element, left.offset + right.offset)
    return None
