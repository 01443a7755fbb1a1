"""Trip counts of loops from their text: where the counter starts, what it is compared with, how it advances.

A value is followed backwards through adds, copies and fusions until it is a constant or an element of the loop's state
plus a constant. Anything else is unknown, and then so is the trip count; no guess is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.verification.instructions import PASSING, Computation, Instruction


@dataclass(frozen=True, slots=True)
class Value:
    """``state[element] + offset``, or the constant ``offset`` where ``element`` is ``None``."""

    element: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class _Scope:
    """A computation with the values of its parameters; ``None`` stands for the loop's state."""

    computation: Computation
    parameters: tuple[Value | None, ...] | None
    known: dict[str, Value | None] = field(default_factory=dict)


def trip_count(computations: dict[str, Computation], loop: Instruction) -> int | None:
    """Trips of a ``while`` instruction, ``None`` where they are not constant."""
    condition, body = computations.get(loop.attribute("condition")), computations.get(loop.attribute("body"))
    if condition is None or body is None:
        return None
    reader = _Reader(computations)
    compared = reader.compared(_Scope(condition, None))
    if compared is None:
        return None
    left, right, direction = compared
    initial = reader.initial(loop)
    left, right = initial.at_start(left, body, reader), initial.at_start(right, body, reader)
    if left is None or right is None:
        return None
    if left.element is None:
        left, right, direction = right, left, {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
    if left.element is None or right.element is not None:
        return None
    start, step = initial.constant(left.element), reader.step(body, left.element)
    if start is None or not step:
        return None
    forwards = {"LT": True, "LE": True, "GT": False, "GE": False, "NE": step > 0}.get(direction)
    if forwards is None or forwards != (step > 0):
        return None
    distance = right.offset - left.offset - start + {"LE": 1, "GE": -1}.get(direction, 0)
    return max(0, -(-distance // step))


@dataclass(frozen=True, slots=True)
class _Initial:
    """The loop's first state."""

    elements: tuple[Value | None, ...]

    def constant(self, element: int) -> int | None:
        value = self.elements[element] if element < len(self.elements) else None
        return value.offset if value is not None and value.element is None else None

    def at_start(self, value: Value | None, body: Computation, reader: _Reader) -> Value | None:
        """A state element that the body passes on unchanged is the constant it starts with."""
        if value is None or value.element is None or reader.step(body, value.element) != 0:
            return value
        start = self.constant(value.element)
        return None if start is None else Value(None, start + value.offset)


class _Reader:
    def __init__(self, computations: dict[str, Computation]):
        self._computations = computations

    def compared(self, scope: _Scope) -> tuple[Value | None, Value | None, str] | None:
        root = scope.computation.root
        while root.opcode in PASSING and root.operands:
            root = scope.computation.by_name[root.operands[0]]
        if root.opcode == "fusion":
            return self.compared(self._inside(root, scope))
        if root.opcode != "compare":
            return None
        sides = [self.value(scope, name) for name in root.operands]
        return sides[0], sides[1], root.attribute("direction")

    def initial(self, loop: Instruction) -> _Initial:
        # Constants of an outer loop's state are not followed: its scope has no parameters known.
        computation = self._computations[loop.computation]
        scope = _Scope(computation, ())
        state = computation.by_name[loop.operands[0]]
        while state.opcode in PASSING:
            state = computation.by_name[state.operands[0]]
        if state.opcode != "tuple":
            return _Initial(())
        return _Initial(tuple(self.value(scope, name) for name in state.operands))

    def step(self, body: Computation, element: int) -> int | None:
        """What one trip adds to an element of the state, ``None`` if that is not a constant."""
        root = body.root
        if root.opcode != "tuple" or element >= len(root.operands):
            return None
        value = self.value(_Scope(body, None), root.operands[element])
        return value.offset if value is not None and value.element == element else None

    def value(self, scope: _Scope, name: str) -> Value | None:
        """What a name stands for; only whole scalars are followed, so that big programs are not walked through."""
        if name not in scope.known:
            i = scope.computation.by_name.get(name)
            shape = i.arrays if i is not None else ()
            whole = len(shape) == 1 and not shape[0].dims and shape[0].dtype[0] in "su"
            scope.known[name] = self._follow(scope, i) if i is not None and whole else None
        return scope.known[name]

    def _follow(self, scope: _Scope, i: Instruction) -> Value | None:
        if i.opcode == "constant":
            return Value(None, int(i.arguments)) if i.arguments.lstrip("-").isdigit() else None
        if i.opcode == "parameter":
            number = int(i.arguments)
            known = scope.parameters or ()
            return known[number] if number < len(known) else None
        if i.opcode == "get-tuple-element":
            return self._element(scope, i)
        if i.opcode in PASSING:
            return self.value(scope, i.operands[0])
        if i.opcode in ("add", "subtract"):
            left, right = (self.value(scope, operand) for operand in i.operands)
            return _sum(left, right, 1 if i.opcode == "add" else -1)
        if i.opcode == "fusion":
            inner = self._inside(i, scope)
            return self.value(inner, inner.computation.root.name)
        return None

    def _element(self, scope: _Scope, i: Instruction) -> Value | None:
        source = scope.computation.by_name[i.operands[0]]
        index = int(i.attribute("index"))
        if source.opcode == "parameter" and scope.parameters is None:
            return Value(index, 0)
        if source.opcode == "tuple":
            return self.value(scope, source.operands[index])
        if source.opcode == "fusion":
            inner = self._inside(source, scope)
            root = inner.computation.root
            return self.value(inner, root.operands[index]) if root.opcode == "tuple" else None
        return None

    def _inside(self, fusion: Instruction, scope: _Scope) -> _Scope:
        called = self._computations[fusion.attribute("calls")]
        return _Scope(called, tuple(self.value(scope, name) for name in fusion.operands))


def _sum(left: Value | None, right: Value | None, sign: int) -> Value | None:
    if left is None or right is None:
        return None
    if right.element is None:
        return Value(left.element, left.offset + sign * right.offset)
    if left.element is None and sign > 0:
        return Value(right.element, left.offset + right.offset)
    return None
