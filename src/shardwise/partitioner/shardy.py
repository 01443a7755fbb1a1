"""Asks Shardy: given shardings of inputs, outputs and a few constraints, how does it shard every value?

The function is lowered for an abstract mesh (no devices), each op in a name scope of its own, Shardy's propagation runs on the
StableHLO, and the shardings are read back by scope. It is lowered once for all questions, with a mark at every place where a
constraint may be stated. Kernels and callbacks, which only their own devices can lower, have something in their place that
Shardy knows as little of.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardwise.capture import jax_internals as internals
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import Op, Program
from shardwise.lowering.sharding import Axes, Sharding
from shardwise.partitioner.interpret import Interpreter
from shardwise.partitioner.stated import Place

Dims = tuple[Axes, ...]

_SCOPE: Final = "shardwise.op"
_LOOPS: Final = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
_FOUND: Final = re.compile(r"shardwise\.op(\d+)")


def abstract_mesh(mesh: MeshAxes) -> AbstractMesh:
    """A mesh without devices, its axes left to the compiler."""
    return AbstractMesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def partition_spec(sharding: Sharding, mesh: MeshAxes) -> PartitionSpec:
    """The PartitionSpec of a sharding, without trailing Nones."""
    entries: list[Any] = []
    for axes in sharding.dims:
        names = tuple(mesh.names[a] for a in axes)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    spec: Any = PartitionSpec
    return cast(PartitionSpec, spec(*entries))


Constraints = Mapping[Place, Sharding]


class Constrain:
    """The visitor that states constraints."""

    def __init__(self, constraints: Constraints, mesh: Any, axes: MeshAxes):
        self._constraints, self._mesh, self._axes = constraints, mesh, axes

    def _state(self, array: Any, sharding: Sharding | None) -> Any:
        if sharding is None:
            return array
        state: Any = jax.lax.with_sharding_constraint
        return state(array, NamedSharding(self._mesh, partition_spec(sharding, self._axes)))

    def use(self, op: Op, operand: int, array: Any) -> Any:
        return self._state(array, self._constraints.get(Place("used", op.id, operand)))

    def computed(self, op: Op, result: int, array: Any) -> Any:
        return self._state(array, self._constraints.get(Place("computed", op.id, result)))

    def defined(self, value: int, array: Any) -> Any:
        return self._state(array, self._constraints.get(Place("stored", value)))

    def around(self, op: Op) -> Any:
        return contextlib.nullcontext()

    def bind(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        return internals.bind(equation, arrays)


class _Mark:
    """The visitor that marks all stored values that have dimensions, and some other places, each with a number, and binds every
    op in a name scope that carries the op's."""

    def __init__(self, others: Collection[Place]):
        self._others = others
        self.numbers: dict[Place, int] = {}

    def _mark(self, array: Any, place: Place) -> Any:
        return internals.mark(array, self.numbers.setdefault(place, len(self.numbers)))

    def _mark_other(self, array: Any, place: Place) -> Any:
        return self._mark(array, place) if place in self._others else array

    def use(self, op: Op, operand: int, array: Any) -> Any:
        return self._mark_other(array, Place("used", op.id, operand))

    def computed(self, op: Op, result: int, array: Any) -> Any:
        return self._mark_other(array, Place("computed", op.id, result))

    def defined(self, value: int, array: Any) -> Any:
        return self._mark(array, Place("stored", value)) if value >= 0 and array.shape else array

    def around(self, op: Op) -> Any:
        return jax.named_scope(f"{_SCOPE}{op.id}")

    def bind(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        results = internals.stand_in(equation, arrays)
        return internals.bind(equation, arrays) if results is None else results


class Propagation:
    """Shardy's propagation on one program with given shardings of inputs and outputs.

    ``others``: the places, besides those of stored values, where constraints may be stated.
    """

    @collector_paused
    def __init__(
        self,
        program: Program,
        jaxpr: Any,
        mesh: MeshAxes,
        inputs: Sequence[Sharding],
        outputs: Sequence[Sharding],
        others: Collection[Place],
    ):
        self._program, self._axes, self._mesh = program, mesh, abstract_mesh(mesh)
        visitor = _Mark(others)

        def run(*arrays: Any) -> list[Any]:
            return Interpreter(program, visitor).run(jaxpr, arrays)

        shapes = [internals.plain_shape(v.aval) for v in internals.split_jaxpr(jaxpr)[0].invars]
        ends = [[self._named(s) for s in of] for of in (inputs, outputs)]
        jitted = jax.jit(run, in_shardings=ends[0], out_shardings=ends[1], keep_unused=True)
        lowered = jitted.trace(*shapes).lower(lowering_platforms=("cpu",))
        self._module = internals.MarkedModule(lowered, mesh.names)
        self._numbers = visitor.numbers
        self._ops: dict[str, Op | None] = {}

    def _named(self, sharding: Sharding) -> NamedSharding:
        return NamedSharding(self._mesh, partition_spec(sharding, self._axes))

    def _op(self, location: str) -> Op | None:
        if location not in self._ops:
            match = _FOUND.findall(location)
            self._ops[location] = self._program.ops[int(match[-1])] if match else None
        return self._ops[location]

    @collector_paused
    def shardings(self, constraints: Constraints) -> dict[int, Dims]:
        """The sharding that Shardy gives to each value, by value number, for the values that an op of the program defines."""
        values = self._program.values
        stated = {self._numbers[p]: self._named(s) for p, s in constraints.items() if p in self._numbers}
        found: dict[int, Dims] = {}
        for name, location, per_result in self._module.propagated(stated):
            op = self._op(location)
            if op is None or (op.rule is None and name not in _LOOPS):
                continue  # what a loop's lowering adds inside it
            # A loop's operands may stand in front of its results.
            for value, dims in zip(op.results, per_result[-len(op.results) :], strict=False):
                if value >= 0 and len(dims) == len(values[value].shape):
                    found[value] = dims  # the last op of a scope is the one whose results are the op's
        return found
