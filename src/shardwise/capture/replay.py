"""Maps the equations of a captured jaxpr to the ops of its program.

Capture inlines calls and numbers equations by scope. Code that walks the jaxpr in the same order (to state constraints, to emit
the device-local program) looks up the ops of an equation, and the scope of its call, here.
"""

from __future__ import annotations

from shardwise.capture import control
from shardwise.ir.program import Op, Program


class Replay:
    """The ops and scopes of a program by scope and number of the equation."""

    def __init__(self, program: Program):
        self._ops: dict[tuple[int, int], list[Op]] = {}
        linked = {k for op in program.ops for k in op.links}
        for op in program.ops:
            if op.equation >= 0 and op.id not in linked and op.kind != "constant":
                self._ops.setdefault((op.scope, op.equation), []).append(op)
        self._repeats = program.repeats
        self._scopes = {
            (s.parent, s.equation, s.name if s.kind in control.LOWERINGS else ""): s.id for s in program.scopes
        }

    def ops(self, scope: int, equation: int) -> list[Op]:
        """Returns the live ops of an equation."""
        place = scope, equation
        return self._ops.get(self._repeats.get(place, place), [])

    def repeats(self, scope: int, equation: int) -> bool:
        """Returns whether an equation is equal to an earlier one of its section, so that both have the same ops."""
        return (scope, equation) in self._repeats

    def inner(self, scope: int, equation: int, part: str = "") -> int:
        """Returns the scope of an equation's call, or of one ``part`` of a loop or branch."""
        return self._scopes[scope, equation, part]
