"""Emits a captured program on whole arrays, with constraints or marks inserted, for XLA's partitioner.

The walk is that of the device-local program (``shardwise.spmd.walk``) with nothing sharded: each op is bound as it was written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op, Program
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import Sharding
from shardwise.partitioner.quirks import clamp_starts
from shardwise.spmd.program import LocalProgram
from shardwise.spmd.walk import Handed


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a sharding can be stated: value ``number`` as ``stored``, operand ``index`` of an op as ``used``, or
    ``computed``."""

    place: str
    number: int
    index: int = 0


class WholeProgram(LocalProgram):
    """A program on whole arrays. Subclasses change arrays and ops."""

    def __init__(self, program: Program):
        factors = tuple(((),) * len(op.rule.factors) if op.rule else () for op in program.ops)
        shardings = tuple(Sharding.whole(len(v.shape)) for v in program.values)
        super().__init__(program, ShardedProgram(MeshAxes((), ()), factors, ((),) * len(program.ops), shardings))
        self._manual = {s.id for s in program.scopes if s.kind == "shard_map"}
        for scope in program.scopes:  # a scope comes after its parent
            if scope.parent in self._manual:
                self._manual.add(scope.id)

    def visit(self, place: Place, array: Any) -> Any:
        """Returns the array to continue with."""
        return array

    def scope(self, op: Op) -> Any:
        """Returns a context manager in which an op is bound."""
        return contextlib.nullcontext()

    def bind(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results of an equation that is no loop, branch or call."""
        return internals.bind(equation, arrays)

    def step(self, op: Op) -> None:
        if op.scope in self._manual:
            return
        if op.kind == "shard_map.output":
            self._shard_map(op)
        else:
            super().step(op)

    def _shard_map(self, op: Op) -> None:
        """Stores one result of a ``shard_map``, which keeps its own mesh and specs."""
        equation, place = self._contents.equations[op.id], (op.scope, op.equation)
        if place not in self.copies:
            borders = (o for o in self.program.ops if o.kind == "shard_map.input" and (o.scope, o.equation) == place)
            given = {o.attribute("position"): self._read(o, 0) for o in borders}
            for k, v in enumerate(equation.invars):
                if k not in given:  # a literal, or what no output depends on
                    given[k] = v.val if internals.is_literal(v) else jnp.zeros(v.aval.shape, v.aval.dtype)
            self.copies[place] = internals.bind(equation, [given[k] for k in range(len(given))])
        self._store(op, op.results[0], self.copies[place][op.attribute("position")])

    def _store(self, op: Op, value: int, *xs: Any) -> None:
        self.stored[value] = xs[0] if op.kind == "output" else self.visit(Place("stored", value), xs[0])

    def _results(self, op: Op, arrays: list[Any]) -> list[Any]:
        equation = self._contents.equations[op.id]
        for k, v in enumerate(op.operands):
            if v >= 0:
                arrays[k] = self.visit(Place("used", op.id, k), arrays[k])
        with self.scope(op):
            if op.kind == "dynamic_slice":
                arrays = clamp_starts(arrays, equation.params["slice_sizes"])
            if op.kind == "convert_element_type" != equation.primitive.name:  # of a gather from a narrower array
                results = [jax.lax.convert_element_type(arrays[0], equation.outvars[0].aval.dtype)]
            else:
                results = self.bind(equation, arrays)
        return [self.visit(Place("computed", op.id, k), x) for k, x in enumerate(results)]

    def _loop(self, op: Op, links: list[Op], initial: Handed, body: Callable[[int, Handed], Handed]) -> Handed:
        with self.scope(op):
            return super()._loop(op, links, initial, body)
