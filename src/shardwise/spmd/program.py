"""Emits the lowered program as a JAX function on local blocks, to be run under ``jax.shard_map``.

The walk (``walk.py``) is that of PartIR's lowering to SPMD (arXiv 2401.11202, section 6). Operands and results are resharded by
the collectives that the cost model counted (``shardwise.lowering.sharding.reshard``); the op is bound on the local blocks
(``local.py``). Loops and branches are emitted again around local bodies. Where a partial sum is added to a value that is not
partial, that value counts on the first device only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.errors import SpmdError
from shardwise.ir.program import Op, Origin, Program, Region
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import PAIRED, Kind, Sharding, is_made_anew, reshard
from shardwise.spmd import indexing, kernels, ragged, shapes  # noqa: F401  (they register local forms)
from shardwise.spmd.collectives import block_index, emit
from shardwise.spmd.local import LocalOp, compute
from shardwise.spmd.walk import Handed, Walk

#: Ops that return their operand: the sharding that they state is part of the plan.
_PASSED: Final = frozenset(
    "output shard_map.input shard_map.output sharding_constraint reshard mesh_cast layout_constraint".split()
)
_BARRIER: Final = "optimization_barrier"


class LocalProgram(Walk):
    """A captured function on local blocks: it takes those of the arguments and returns those of the outputs."""

    def __init__(self, program: Program, sharded: ShardedProgram, rounds: bool = False):
        super().__init__(program, sharded, rounds)
        self._contents = program.contents
        self._together: dict[tuple[int, int], list[Op]] = {}  # the ops of one barrier
        self._entering: dict[int, dict[int, None]] = {}  # by scope with a barrier the values that enter it
        for op in program.ops:
            if op.kind == _BARRIER:
                self._together.setdefault((op.scope, op.equation), []).append(op)
            for v in op.operands:
                for scope in self._crossed(program.barriers[op.id], op.region, v):
                    self._entering.setdefault(scope, {})[v] = None

    def __call__(self, *blocks: Any) -> list[Any]:
        arguments = [a.value for a in self.program.arguments]
        self.stored, self.copies = {**self._contents.constants, **dict(zip(arguments, blocks, strict=True))}, {}
        self.run(0)
        results = [self.stored[v] for v in self.program.outputs]
        self.stored, self.copies = {}, {}
        return results

    # Values.

    def _crossed(self, scopes: tuple[int, ...], region: int, value: int) -> list[int]:
        """Returns the scopes, of some with barriers, that a value enters from outside."""
        if not scopes or value < 0 or self.program.values[value].origin is Origin.CONSTANT:
            return []
        maker, home = self.program.ops[self.program.definitions[value][0]], self.program.home[value]
        around = self.program.barriers[maker.id] if maker.region == home else ()  # not for an input of a body
        return [scope for scope in scopes if scope not in around] if home == region else []

    def _read(self, op: Op, operand: int) -> Any:
        value = op.operands[operand]
        if value < 0:
            return self._contents.scalars[op.id, operand]
        return self._behind(self.program.barriers[op.id], op.region, value)

    def _behind(self, scopes: tuple[int, ...], region: int, value: int) -> Any:
        """Returns a value as it is inside of scopes with barriers."""
        if not self._crossed(scopes, region, value):
            return self.stored[value]
        if scopes[0] not in self.copies:
            values = list(self._entering[scopes[0]])
            arrays = jax.lax.optimization_barrier([self._behind(scopes[1:], region, v) for v in values])
            self.copies[scopes[0]] = dict(zip(values, arrays, strict=True))
        return self.copies[scopes[0]][value]

    def _reshard(self, op: Op, value: int, xs: Sequence[Any], ends: tuple[Sharding, Sharding], rounded: bool) -> Any:
        array, arrays, (now, target), wide = self._array(value, rounded), list(xs), ends, None
        if is_made_anew(array, now, target):
            element = jax.lax.slice(arrays[0], (0,) * arrays[0].ndim, (1,) * arrays[0].ndim)
            return jnp.broadcast_to(element, target.local_shape(array.shape, self.mesh))
        steps, narrow = reshard(array, now, target, self.mesh), self._moved_dtype(value, now, rounded)
        in_host = steps and self.program.values[value].host
        if in_host:  # collectives are between devices
            arrays = [jax.device_put(x, jax.memory.Space.Device) for x in arrays]
        if narrow and any(step.kind is not Kind.SLICE for step in steps):
            wide, arrays = arrays[0].dtype, [jax.lax.convert_element_type(arrays[0], jnp.dtype(narrow))]
        for step in steps:
            arrays, now = emit(arrays, step, now, array, self.mesh), step.after
        if in_host and op.kind != "device_put":
            arrays = [jax.device_put(x, jax.memory.Space.Host) for x in arrays]
        return arrays[0] if wide is None else jax.lax.convert_element_type(arrays[0], wide)

    # Ops.

    def step(self, op: Op) -> None:
        equation = self._contents.equations[op.id]
        if op.kind not in ("argument", "constant"):
            with nullcontext() if equation is None else internals.standing_at(equation):
                super().step(op)

    def _op(self, op: Op) -> None:
        if op.kind == _BARRIER:
            ops = self._together[op.scope, op.equation]
            if op is ops[0]:  # emitted once, for all of its ops
                arrays = jax.lax.optimization_barrier([self._operand(op, 0) for op in ops])
                for op, x in zip(ops, arrays, strict=True):
                    self._store(op, op.results[0], x)
            return
        arrays = [self._operand(op, k) for k in range(len(op.operands))]
        results = arrays if op.kind in _PASSED else self._results(op, arrays)
        if op.kind in PAIRED:  # the positions, and where devices are compared the values there
            self._store(op, op.results[0], *results)
            return
        for value, x in zip(op.results, results, strict=True):
            self._store(op, value, x)

    def _results(self, op: Op, arrays: list[Any]) -> list[Any]:
        equation = self._contents.equations[op.id]
        if op.kind == "convert_element_type" != equation.primitive.name:  # of a gather from a narrower array
            return [jax.lax.convert_element_type(arrays[0], equation.outvars[0].aval.dtype)]
        arrays = [self._once_counted(op, k, x) for k, x in enumerate(arrays)]
        local = LocalOp(
            op,
            equation,
            assigned=self.sharded.factors[op.id],
            mesh=self.mesh,
            shapes=self._shapes(op),
            fetches=self._fetches(op),
            shared=tuple(self._fetched(op, k) for k in range(len(arrays))),
        )
        return self._once(local, arrays) if equation.effects and op.opaque else compute(local, arrays)

    def _once_counted(self, op: Op, operand: int, x: Any) -> Any:
        """Returns an operand, or zeros on the devices on which it does not count."""
        axes = self._counted_once(op, operand)
        return jnp.where(block_index(axes, self.mesh) == 0, x, jnp.zeros_like(x)) if axes else x

    def _once(self, local: LocalOp, arrays: list[Any]) -> list[Any]:
        """Runs an op with an effect on the first device, and sends its results to all devices."""
        if self.mesh.devices > 1 and internals.runs_on_one_device(local.equation):
            source = str(self.program.source_of(local.op))
            raise SpmdError(local.op.kind, source, "JAX orders it on one device only: leave out ordered=True")
        names = self.mesh.names
        first = block_index(tuple(range(len(names))), self.mesh) == 0
        outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in local.equation.outvars]
        results = jax.lax.cond(
            first,
            lambda *xs: compute(local, list(xs)),
            lambda *xs: [jnp.zeros(o.shape, o.dtype) for o in outs],
            *arrays,
        )
        return [jax.lax.psum(x, names).astype(o.dtype) for x, o in zip(results, outs, strict=True)]

    # Loops and branches.

    @contextmanager
    def _inside(self, op: Op, number: int) -> Iterator[None]:
        """Restores the values of outside: a body may be traced more than once, and its values are not used outside."""
        saved = self.stored, self.copies
        self.stored, self.copies = dict(self.stored), dict(self.copies)
        yield
        self.stored, self.copies = saved

    def _leave(self, link: Op, operand: int, region: Region | None = None) -> Any:
        """Returns an array whose type is not weak: a carried value must keep its type."""
        x = self._once_counted(link, operand, jnp.asarray(self._operand(link, operand)))
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)

    def _loop(self, op: Op, links: list[Op], initial: Handed, body: Callable[[int, Handed], Handed]) -> Handed:
        equation = self._contents.equations[op.id]
        p = equation.params
        carried, entering, leaving = (
            [link.id for link in links if link.kind.endswith(part)] for part in (".carry", ".input", ".output")
        )

        def run(number: int, blocks: Sequence[Any], results: Sequence[int]) -> list[Any]:
            left = body(number, dict(zip((*carried, *entering), blocks, strict=True)))
            return [left[k] for k in results]

        def scanned(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            left = run(0, (*carry, *slices), (*carried, *leaving))
            return left[: len(carried)], left[len(carried) :]

        first, others = [initial[k] for k in carried], [initial[k] for k in entering]
        if op.kind == "scan":
            options = {key: p[key] for key in ("length", "reverse", "unroll")}
            split = p.get("_split_transpose", False)
            carry, stacks = jax.lax.scan(scanned, first, others, **options, _split_transpose=split)
            return dict(zip((*carried, *leaving), (*carry, *stacks), strict=True))
        if op.kind == "while":
            test, repeated = (lambda c: run(0, c, [op.id])[0]), (lambda c: run(1, c, carried))
            return dict(zip(carried, jax.lax.while_loop(test, repeated, first), strict=True))
        branches = [lambda *blocks, n=n: run(n, blocks, leaving) for n in range(len(op.regions))]
        results = internals.branch(equation, self._read(op, 0), branches, others)
        return dict(zip(leaving, results, strict=True))
