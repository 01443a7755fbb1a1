"""Runs Shardy's propagation: how every value is sharded, given inputs, outputs and a few constraints.

The function is lowered once, for an abstract mesh, with each op in its own name scope and a mark at every place where a
constraint may be stated; shardings are read back by scope. Kernels and callbacks are replaced by custom calls.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from shardwise.capture import jax_internals as internals
from shardwise.capture.equations import partition_spec
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.collector import collector_paused
from shardwise.ir.program import Op, Program
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Axes, Sharding
from shardwise.partitioner.whole import Place, WholeProgram

Dims = tuple[Axes, ...]
Constraints = Mapping[Place, Sharding]

_SCOPE: Final = "shardwise.op"
_LOOPS: Final = ("stablehlo.while", "stablehlo.case", "stablehlo.if")
_OP_SCOPE: Final = re.compile(r"shardwise\.op(\d+)")


def abstract_mesh(mesh: MeshAxes) -> AbstractMesh:
    """Returns a mesh of automatic axes without devices."""
    return AbstractMesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def named_sharding(mesh: Any, sharding: Sharding) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(sharding.spec(MeshAxes.of(mesh))))


class Constrained(WholeProgram):
    """A program with constraints."""

    def __init__(self, program: Program, constraints: Constraints, mesh: Any):
        super().__init__(program)
        self._constraints, self._mesh = constraints, mesh

    def visit(self, place: Place, array: Any) -> Any:
        sharding = self._constraints.get(place)
        if sharding is None:
            return array
        constrain: Any = jax.lax.with_sharding_constraint
        return constrain(array, named_sharding(self._mesh, sharding))


class _Marked(WholeProgram):
    """Numbers stored values that have dimensions, and some other places; every op is bound in a scope of its number."""

    def __init__(self, program: Program, others: Collection[Place]):
        super().__init__(program)
        self._others = others
        self.numbers: dict[Place, int] = {}

    def visit(self, place: Place, array: Any) -> Any:
        if not (place.number >= 0 and array.shape if place.place == "stored" else place in self._others):
            return array
        return internals.mark(array, self.numbers.setdefault(place, len(self.numbers)))

    def scope(self, op: Op) -> Any:
        return jax.named_scope(f"{_SCOPE}{op.id}")

    def bind(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        results = internals.stand_in(equation, arrays)
        return internals.bind(equation, arrays) if results is None else results


class Propagation:
    """Shardy's propagation from the inputs and outputs of a lowered program; ``others``: places besides those of stored values
    where constraints may be stated."""

    @collector_paused()
    def __init__(self, lowered: Lowered, jaxpr: Any, others: Collection[Place]):
        self._program, self._mesh = lowered.program, abstract_mesh(lowered.mesh)
        marked = _Marked(self._program, others)

        def run(*arrays: Any) -> list[Any]:
            return marked(*arrays)

        shapes = [internals.plain_shape(v.aval) for v in internals.split_jaxpr(jaxpr)[0].invars]
        inputs = [self._named(lowered.storage[a.value]) for a in self._program.arguments]
        outputs = [self._named(lowered.storage[v]) for v in self._program.outputs]
        jitted = jax.jit(run, in_shardings=inputs, out_shardings=outputs, keep_unused=True)
        module = jitted.trace(*shapes).lower(lowering_platforms=("cpu",))
        self._module = internals.MarkedModule(module, lowered.mesh.names)
        self._numbers = marked.numbers
        self._ops: dict[str, Op | None] = {}

    def _named(self, sharding: Sharding) -> NamedSharding:
        return named_sharding(self._mesh, sharding)

    def _op(self, location: str) -> Op | None:
        if location not in self._ops:
            match = _OP_SCOPE.findall(location)
            self._ops[location] = self._program.ops[int(match[-1])] if match else None
        return self._ops[location]

    def _results(self, op: Op) -> Sequence[int]:
        """Returns the values that an op returns as it is emitted: of a loop or branch those of its links, -1 where nothing uses
        one."""
        if op.rule is not None:
            return op.results
        links, inner = (
            [self._program.ops[k] for k in op.links],
            {v for r in op.regions for v in self._program.regions[r].inputs},
        )
        ordered = [link for part in (".carry", ".output") for link in links if link.kind.endswith(part)]
        return [next((v for v in link.results if v not in inner), -1) for link in ordered]

    @collector_paused()
    def shardings(self, constraints: Constraints) -> dict[int, Dims]:
        """Returns the shardings of the values that ops of the program define, by value number."""
        values = self._program.values
        stated = {self._numbers[p]: self._named(s) for p, s in constraints.items() if p in self._numbers}
        shardings: dict[int, Dims] = {}
        for name, location, per_result in self._module.propagated(stated):
            op = self._op(location)
            if op is None or (op.rule is None and name not in _LOOPS):
                continue  # added by the lowering of a loop
            results = self._results(op)
            # A loop's counter precedes its results.
            for value, dims in zip(results, per_result[-len(results) :], strict=False):
                if value >= 0 and len(dims) == len(values[value].shape):
                    shardings[value] = dims  # the last op of a scope has the results of the program's op
        return shardings
