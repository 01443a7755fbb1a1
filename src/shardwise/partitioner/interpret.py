"""Interprets the jaxpr of a captured function, with constraints or marks inserted. Calls are inlined;
``remat``, loops and branches are rebuilt around their rewritten bodies, with their parameters unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import Replay, called
from shardwise.ir.program import Op, Program
from shardwise.partitioner.quirks import clamp_starts


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a sharding can be stated: value ``number`` as ``stored``, operand ``index`` of an op as ``used``, or
    ``computed``."""

    place: str
    number: int
    index: int = 0


class Interpreter:
    """Runs a program's jaxpr. Subclasses change arrays and ops."""

    def __init__(self, program: Program):
        self.program, self._replay = program, Replay(program)

    def visit(self, place: Place, array: Any) -> Any:
        """Returns the array to continue with."""
        return array

    def scope(self, op: Op) -> Any:
        """Returns a context manager in which an op is bound."""
        return contextlib.nullcontext()

    def bind(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results of an equation that is no loop, branch or call."""
        return internals.bind(equation, arrays)

    def run(self, closed: Any, args: Sequence[Any], scope: int = 0) -> list[Any]:
        """Returns the outputs of the program's jaxpr, or of one that it calls in another scope, on arrays or tracers."""
        jaxpr, consts = internals.split_jaxpr(closed)
        return internals.interpret(jaxpr, (*consts, *args), lambda k, arrays: self._equation(jaxpr, k, arrays, scope))

    def _equation(self, jaxpr: Any, number: int, arrays: list[Any], scope: int) -> list[Any]:
        equation = jaxpr.eqns[number]
        name = equation.primitive.name
        ops = self._replay.ops(scope, number)
        call = called(jaxpr, number)
        if name in _REBUILD and call is None:
            return self._rebuild(equation, arrays, scope, number, ops)
        if name == "shard_map":  # keeps its own mesh and specs
            values = {op.attribute("position"): op.results[0] for op in ops if op.kind == "shard_map.output"}
            results = internals.bind(equation, arrays)
            return [self._stored(values[k], r) if k in values else r for k, r in enumerate(results)]
        if call is not None and name in internals.REMAT:
            inner = self._replay.inner(scope, number)
            rebuilt = internals.retrace(lambda *xs: self.run(call, xs, inner), call)
            return internals.bind(equation, arrays, {"jaxpr": internals.open_jaxpr(rebuilt)})
        if call is not None:
            return self.run(call, arrays, self._replay.inner(scope, number))
        return self._plain(equation, arrays, ops)

    def _stored(self, value: int, array: Any) -> Any:
        return self.visit(Place("stored", value), array)

    def _plain(self, equation: Any, arrays: list[Any], ops: list[Op]) -> list[Any]:
        if equation.primitive.name == "optimization_barrier":
            results = internals.bind(equation, arrays)
            # Dead operands have no op; the ops of live ones are in the order of the equation.
            all_live = len(ops) == len(results)
            return [self._stored(op.results[0], r) for op, r in zip(ops, results, strict=True)] if all_live else results
        if not ops:
            return self.bind(equation, arrays)
        *inner, op = ops
        if inner:  # a gather from a widened array, which XLA's partitioner reads as one op
            return [self._stored(op.results[0], r) for r in self.bind(equation, arrays)]
        constrains = equation.primitive.name == "sharding_constraint" and op.attribute("spec") is not None
        if constrains or equation.primitive.name in ("reshard", "mesh_cast"):
            return [self._stored(op.results[0], arrays[0])]  # the plan states it, on the plan's mesh
        arrays = [
            self.visit(Place("used", op.id, k), a) if v >= 0 else a
            for k, (a, v) in enumerate(zip(arrays, op.operands, strict=True))
        ]
        with self.scope(op):
            if equation.primitive.name == "dynamic_slice":
                arrays = clamp_starts(arrays, equation.params["slice_sizes"])
            results = self.bind(equation, arrays)
        results = [self.visit(Place("computed", op.id, k), r) for k, r in enumerate(results)]
        return [self._stored(v, r) for v, r in zip(op.results, results, strict=True)]

    def _rebuild(self, equation: Any, arrays: list[Any], scope: int, number: int, ops: list[Op]) -> list[Any]:
        """Binds a loop or branch with rewritten bodies. A dead one is left as it is."""
        if not ops:
            return internals.bind(equation, arrays)
        (op,) = ops
        regions = {self.program.regions[r].kind.split(".", 1)[1]: self.program.regions[r] for r in op.regions}

        def body(jaxpr: Any, part: str) -> Any:
            inner = self._replay.inner(scope, number, part)
            inputs = regions[part].inputs

            def run(*xs: Any) -> list[Any]:
                visited = [self._stored(v, x) if v >= 0 else x for v, x in zip(inputs, xs, strict=True)]
                return self.run(jaxpr, visited, inner)

            return internals.retrace(run, jaxpr)

        changed = _REBUILD[equation.primitive.name](equation.params, body)
        with self.scope(op):
            results = internals.bind(equation, arrays, changed)
        return [self._stored(v, r) if v >= 0 else r for v, r in zip(op.results, results, strict=True)]


_Body = Callable[[Any, str], Any]

_REBUILD: dict[str, Callable[[Any, _Body], dict[str, Any]]] = {
    "scan": lambda p, body: {"jaxpr": body(p["jaxpr"], "body")},
    "while": lambda p, body: {"cond_jaxpr": body(p["cond_jaxpr"], "cond"), "body_jaxpr": body(p["body_jaxpr"], "body")},
    "cond": lambda p, body: {"branches": tuple(body(b, f"branch{k}") for k, b in enumerate(p["branches"]))},
}
