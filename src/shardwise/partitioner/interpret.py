"""Runs a captured function's jaxpr again, with a say at every value: where constraints are put in.

The interpreter walks the jaxpr exactly as capture did, so that every equation finds its op by (scope, equation number). Calls
are inlined; ``remat``, loops and branches are rebuilt around their rewritten bodies, with their parameters unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import called
from shardwise.capture.replay import Replay
from shardwise.ir.program import Op, Program


class Visitor(Protocol):
    """What is done to arrays on the way. Each method returns the array to go on with."""

    def use(self, op: Op, operand: int, array: Any) -> Any: ...

    def computed(self, op: Op, result: int, array: Any) -> Any: ...

    def defined(self, value: int, array: Any) -> Any: ...

    def around(self, op: Op) -> Any:
        """A context manager that an op is bound in."""
        ...

    def bind(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        """The results of an equation that is no loop, branch or call."""
        ...


class Interpreter:
    """One program's jaxpr, to be run under a visitor."""

    def __init__(self, program: Program, visitor: Visitor):
        self.program = program
        self.visitor = visitor
        self._replay = Replay(program)

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Runs the whole program's jaxpr on arrays or tracers."""
        inner, consts = internals.split_jaxpr(jaxpr)
        return self._evaluate(inner, consts, args, 0)

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], scope: int) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if internals.is_literal(atom) else env[atom]

        for number, equation in enumerate(jaxpr.eqns):
            results = self._equation(jaxpr, number, [read(atom) for atom in equation.invars], scope)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, jaxpr: Any, number: int, arrays: list[Any], scope: int) -> list[Any]:
        equation = jaxpr.eqns[number]
        name = equation.primitive.name
        ops = self._replay.ops(scope, number)
        call = called(jaxpr, number)
        if name in _REBUILD and call is None:
            return self._rebuild(equation, arrays, scope, number, ops)
        if name == "shard_map":  # keeps its own mesh and specs
            made = {op.attribute("position"): op.results[0] for op in ops if op.kind == "shard_map.output"}
            results = internals.bind(equation, arrays)
            return [self.visitor.defined(made[k], r) if k in made else r for k, r in enumerate(results)]
        if call is not None and name in internals.REMAT:
            inner = self._replay.inner(scope, number)
            rebuilt = internals.retrace(lambda *xs: self._inline(call, xs, inner), call)
            return internals.bind(equation, arrays, {"jaxpr": internals.open_jaxpr(rebuilt)})
        if call is not None:
            return self._inline(call, arrays, self._replay.inner(scope, number))
        return self._plain(equation, arrays, ops)

    def _inline(self, jaxpr: Any, arrays: Sequence[Any], scope: int) -> list[Any]:
        inner, consts = internals.split_jaxpr(jaxpr)
        return self._evaluate(inner, consts, arrays, scope)

    def _plain(self, equation: Any, arrays: list[Any], ops: list[Op]) -> list[Any]:
        if equation.primitive.name == "optimization_barrier":
            results = internals.bind(equation, arrays)
            kept = {op.results[0]: op for op in ops}
            # Dead operands have no op; live ones stand in the order of the equation.
            return (
                [self.visitor.defined(v, r) for v, r in zip(kept, results, strict=True)]
                if len(kept) == len(results)
                else results
            )
        if not ops:
            return self.visitor.bind(equation, arrays)
        *inner, op = ops
        if inner:  # a gather from a widened array, which XLA's partitioner gets as it was written
            return [self.visitor.defined(op.results[0], r) for r in self.visitor.bind(equation, arrays)]
        if op.attribute("spec") is not None and equation.primitive.name == "sharding_constraint":
            return [self.visitor.defined(op.results[0], arrays[0])]  # the plan states it, on its own mesh
        arrays = [
            self.visitor.use(op, k, a) if v >= 0 else a
            for k, (a, v) in enumerate(zip(arrays, op.operands, strict=True))
        ]
        with self.visitor.around(op):
            if equation.primitive.name == "dynamic_slice":
                arrays = _clamped(arrays, equation.params["slice_sizes"])
            results = self.visitor.bind(equation, arrays)
        results = [self.visitor.computed(op, k, r) for k, r in enumerate(results)]
        return [self.visitor.defined(v, r) for v, r in zip(op.results, results, strict=True)]

    def _rebuild(self, equation: Any, arrays: list[Any], scope: int, number: int, ops: list[Op]) -> list[Any]:
        """A loop or branch around its rewritten bodies. One that nothing needs is left as it is."""
        if not ops:
            return internals.bind(equation, arrays)
        (op,) = ops
        regions = {self.program.regions[r].kind.split(".", 1)[1]: self.program.regions[r] for r in op.regions}

        def body(jaxpr: Any, part: str) -> Any:
            inner = self._replay.inner(scope, number, part)
            inputs = regions[part].inputs

            def run(*xs: Any) -> list[Any]:
                shown = [self.visitor.defined(v, x) if v >= 0 else x for v, x in zip(inputs, xs, strict=True)]
                return self._inline(jaxpr, shown, inner)

            return internals.retrace(run, jaxpr)

        changed = _REBUILD[equation.primitive.name](equation.params, body)
        with self.visitor.around(op):
            results = internals.bind(equation, arrays, changed)
        return [self.visitor.defined(v, r) if v >= 0 else r for v, r in zip(op.results, results, strict=True)]


def _clamped(arrays: list[Any], sizes: Sequence[int]) -> list[Any]:
    """A dynamic slice's operands with the starts in range, as the op itself would clamp them.

    XLA's partitioner clamps by the size of one shard of the slice, not of the whole slice, where the sliced dimension is
    sharded in the result.
    """
    array, *starts = arrays
    inside = []
    for start, whole, size in zip(starts, array.shape, sizes, strict=True):
        last = min(whole - size, np.iinfo(start.dtype).max)
        inside.append(jax.lax.clamp(start.dtype.type(0), start, start.dtype.type(last)))
    return [array, *inside]


_Body = Callable[[Any, str], Any]

_REBUILD: dict[str, Callable[[Any, _Body], dict[str, Any]]] = {
    "scan": lambda p, body: {"jaxpr": body(p["jaxpr"], "body")},
    "while": lambda p, body: {"cond_jaxpr": body(p["cond_jaxpr"], "cond"), "body_jaxpr": body(p["body_jaxpr"], "body")},
    "cond": lambda p, body: {"branches": tuple(body(b, f"branch{k}") for k, b in enumerate(p["branches"]))},
}
