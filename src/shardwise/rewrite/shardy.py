"""Asks Shardy: given shardings of inputs, outputs and a few constraints, how does it shard every value?

The function is lowered for an abstract mesh (no devices), each op in a name scope of its own, Shardy's propagation runs on the
StableHLO, and the shardings are read back by scope.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardwise.capture import jax_internals as internals
from shardwise.cost.sharding import Axes, Sharding
from shardwise.cost.stated import Place
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op, Program
from shardwise.rewrite.interpret import Interpreter

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
    """The visitor that states constraints. With ``scopes`` every op is bound in a name scope that carries its number."""

    def __init__(self, constraints: Constraints, mesh: Any, axes: MeshAxes, scopes: bool = False):
        self._constraints, self._mesh, self._axes, self._scopes = constraints, mesh, axes, scopes

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
        return jax.named_scope(f"{_SCOPE}{op.id}") if self._scopes else contextlib.nullcontext()


def propagate(
    program: Program,
    jaxpr: Any,
    mesh: MeshAxes,
    inputs: Sequence[Sharding],
    outputs: Sequence[Sharding],
    constraints: Constraints,
) -> dict[int, Dims]:
    """The sharding that Shardy gives to each value, by value number, for the values that an op of the program defines."""
    placed = abstract_mesh(mesh)
    visitor = Constrain(constraints, placed, mesh, scopes=True)

    def shardings(of: Sequence[Sharding]) -> list[NamedSharding]:
        return [NamedSharding(placed, partition_spec(s, mesh)) for s in of]

    def run(*arrays: Any) -> list[Any]:
        return Interpreter(program, visitor).run(jaxpr, arrays)

    shapes = [internals.plain_shape(v.aval) for v in internals.split_jaxpr(jaxpr)[0].invars]
    jitted = jax.jit(run, in_shardings=shardings(inputs), out_shardings=shardings(outputs), keep_unused=True)
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("cpu",))
    found: dict[int, Dims] = {}
    for name, location, per_result in internals.propagated_shardings(lowered, mesh.names):
        match = _FOUND.findall(location)
        if not match:
            continue
        op = program.ops[int(match[-1])]
        if op.rule is None and name not in _LOOPS:
            continue  # what a loop's lowering adds inside it
        # A loop's operands may stand in front of its results.
        for value, dims in zip(op.results, per_result[-len(op.results) :], strict=False):
            if value >= 0 and len(dims) == len(program.values[value].shape):
                found[value] = dims  # the last op of a scope is the one whose results are the op's
    return found
