"""The lowered program as a JAX function on local blocks, to be run under ``jax.shard_map`` (design, section 10).

The idea. The jaxpr is walked again as capture walked it. Each operand is resharded into the sharding that the op needs, by the
collectives that the cost model counted (``shardwise.lowering.sharding.reshard``); the op is bound on the local blocks
(``shardwise.spmd.local``); its result is resharded into the sharding that the plan stores. Loops and branches are emitted again
around local bodies. A value is resharded once in a section: a loop body, or what stands behind the barrier of a ``remat``,
starts anew.

This is how PartIR lowers to SPMD (arXiv 2401.11202, section 6), on jaxprs. Where a partial sum is added to a value that is not
partial, that value counts on the first device only.

Weak: an op that nothing here can express is reported (:class:`~shardwise.errors.SpmdError`), and the plan is then executed by
constraints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import Replay, called
from shardwise.errors import SpmdError
from shardwise.ir.program import Op, Program, Region
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import PAIRED, ArrayType, Kind, Sharding, is_made_anew, reshard
from shardwise.spmd import indexing, kernels, shapes, windows  # noqa: F401  (they register local forms)
from shardwise.spmd.collectives import block_index, emit
from shardwise.spmd.local import LocalOp, Walk, compute

#: Ops that return their operand: the sharding that they state is part of the plan.
_STATED: Final = frozenset({"sharding_constraint", "reshard", "mesh_cast", "layout_constraint"})


@dataclass(eq=False, slots=True)
class Local:
    """A value on this device: its block, the sharding that it is a block of, and its number. ``copies``: the same value in
    other shardings (rounded or not); ``fetched``: by sharding what windowed ops fetched of it; ``operand``: the value that it
    was computed from, if that is one."""

    array: Any
    sharding: Sharding
    value: int = -1
    copies: dict[tuple[Sharding, bool], Any] = field(default_factory=dict)
    fetched: dict[Sharding, dict[Any, Any]] = field(default_factory=dict)
    operand: Local | None = None


class LocalProgram(Walk):
    """A traced function on local blocks: from the blocks of its arguments, as the plan stores them, to those of its outputs."""

    def __init__(self, program: Program, sharded: ShardedProgram, jaxpr: Any, rounds: bool = False):
        super().__init__(program, sharded, rounds)
        self._jaxpr, self._replay = jaxpr, Replay(program)
        self._repeated: dict[int, Local] = {}
        self._links = {v: program.ops[k] for op in program.ops for k in op.links for v in program.ops[k].results}

    def __call__(self, *blocks: Any) -> list[Any]:
        values = [a.value for a in self.program.arguments]
        arguments = [self._stored(v, block) for v, block in zip(values, blocks, strict=True)]
        results = self._inline(self._jaxpr, arguments, 0)
        outputs = [op for op in self.program.ops if op.kind == "output"]
        arrays = [self._pass(op, 0, local).array for op, local in zip(outputs, results, strict=True)]
        self._repeated.clear()
        return arrays

    # Reshards.

    def _stored(self, value: int, array: Any) -> Local:
        return Local(array, self.sharded.shardings[value], value)

    def _operand(self, op: Op, operand: int, local: Local) -> Any:
        """The block of an operand in the sharding that an op needs, which is kept for other ops."""
        need = self._need(op, operand, local.sharding)
        if local.sharding is need:
            return local.array
        key = need, self._is_rounded(op, local.value, local.sharding)
        if key not in local.copies:
            local.copies[key] = self._reshard([local.array], local.value, local.sharding, *key)
        return local.copies[key]

    def _reshard(self, arrays: list[Any], value: int, source: Sharding, target: Sharding, rounded: bool = False) -> Any:
        """The block of a value in another sharding."""
        array = self._array(value, rounded) if value >= 0 else ArrayType(jnp.shape(arrays[0]), 1.0)
        if is_made_anew(array, source, target):
            sizes = zip(array.shape, target.dims, strict=True)
            element = jax.lax.slice(arrays[0], (0,) * arrays[0].ndim, (1,) * arrays[0].ndim)
            return jnp.broadcast_to(element, [n // self.mesh.pieces(a) for n, a in sizes])
        steps, now, wide = reshard(array, source, target, self.mesh), source, None
        narrow = value >= 0 and self._moved_dtype(value, source, rounded)
        if narrow and any(step.kind is not Kind.SLICE for step in steps):
            wide, arrays = arrays[0].dtype, [jax.lax.convert_element_type(arrays[0], jnp.dtype(narrow))]
        for step in steps:
            arrays = emit(arrays, step, now, array.reducer, self.mesh)
            now = step.after
        return arrays[0] if wide is None else jax.lax.convert_element_type(arrays[0], wide)

    def _result(self, op: Op, result: int, *arrays: Any) -> Local:
        """A result as the plan stores it. The position of a maximum comes with the maximum."""
        value = op.results[result]
        stored = self.sharded.shardings[value]
        return self._stored(value, self._reshard([*arrays], value, self._computed(op, result), stored))

    def _pass(self, op: Op, operand: int, local: Local) -> Local:
        """The result of an op that returns its operand."""
        return self._result(op, 0, self._operand(op, operand, local))

    def _enter(self, value: int, array: Any) -> Local:
        """A value that a link computes: an input of a loop's body or a branch, or its result."""
        link = self._links[value]
        return self._result(link, link.results.index(value), array)

    def _leave(self, link: Op, operand: int, local: Local) -> Any:
        """An operand of a link, which a loop or branch takes."""
        return _strong(self._operand(link, operand, local))

    # The walk.

    def _inline(self, closed: Any, args: Sequence[Local], scope: int) -> list[Local]:
        jaxpr, consts = internals.split_jaxpr(closed)
        env: dict[Any, Local] = {
            var: Local(c, Sharding.whole(jnp.ndim(c))) for var, c in zip(jaxpr.constvars, consts, strict=True)
        }
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Local:
            if internals.is_literal(atom):
                return Local(np.asarray(atom.val, atom.aval.dtype), Sharding.whole(jnp.ndim(atom.val)))
            return env.get(atom, _DEAD)

        for number, equation in enumerate(jaxpr.eqns):
            results = self._equation(jaxpr, number, [read(atom) for atom in equation.invars], scope)
            env.update(zip(equation.outvars, results, strict=False))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, jaxpr: Any, number: int, operands: list[Local], scope: int) -> list[Local]:
        equation = jaxpr.eqns[number]
        name = equation.primitive.name
        if name == "shard_map":
            return self._shard_map(equation, operands, scope, number)
        call = called(jaxpr, number)
        if call is not None:
            inner = self._replay.inner(scope, number)
            if self.program.scopes[inner].has_barrier:
                operands = self._behind_barrier(operands)
            return self._inline(call, operands, inner)
        if equations.is_identity(equation):
            return operands
        ops = self._replay.ops(scope, number)
        if (scope, number) in self.program.undone:
            assert operands[0].operand is not None
            return [operands[0].operand]
        if not ops:  # nothing needs it, but perhaps what it was computed from
            unary = len(operands) == len(equation.outvars) == 1
            return [Local(None, Sharding(()), operand=operands[0])] if unary else []
        with internals.standing_at(equation):
            if name in _LOOPS:
                return _LOOPS[name](self, equation, ops[0], operands, scope, number)
            if name == "optimization_barrier":
                return self._barrier(ops, operands)
            if not self._replay.repeats(scope, number):
                results = (self._gather if len(ops) > 1 else self._op)(equation, ops, operands)
                self._repeated.update(zip(ops[-1].results, results, strict=True))
            return [self._repeated[v] for v in ops[-1].results]

    def _shard_map(self, equation: Any, operands: list[Local], scope: int, number: int) -> list[Local]:
        """A region of the program that is local already: operands are resharded into its specs, and its body is inlined."""
        borders = {(op.kind, op.attribute("position")): op for op in self._replay.ops(scope, number)}
        blocks = list(operands)
        for k, local in enumerate(operands):
            if op := borders.get(("shard_map.input", k)):
                with internals.standing_at(equation):
                    blocks[k] = self._pass(op, 0, local)
        results = self._inline(equation.params["jaxpr"], blocks, self._replay.inner(scope, number))
        ops = [borders.get(("shard_map.output", k)) for k in range(len(results))]
        return [self._result(op, 0, x.array) if op else _DEAD for op, x in zip(ops, results, strict=True)]

    def _behind_barrier(self, operands: list[Local]) -> list[Local]:
        """The same values, for a computation that shares nothing with what came before."""
        values = dict.fromkeys(local for local in operands if local.array is not None)
        arrays = internals.barrier([local.array for local in values])
        behind = {x: Local(array, x.sharding, x.value) for x, array in zip(values, arrays, strict=True)}
        return [behind.get(local, _DEAD) for local in operands]

    def _op(self, equation: Any, ops: list[Op], operands: list[Local]) -> list[Local]:
        (op,) = ops
        used = list(enumerate(zip(operands, op.operands, strict=True)))
        arrays = [self._operand(op, k, x) if v >= 0 else x.array for k, (x, v) in used]
        if op.kind in _STATED:
            return [self._result(op, 0, *arrays)]
        for k, x in enumerate(operands):
            if axes := self._counted_once(op, x.sharding):
                first = block_index(axes, self.mesh) == 0
                arrays[k] = jnp.where(first, arrays[k], jnp.zeros_like(arrays[k]))
        sizes = tuple(self.program.values[v].shape if v >= 0 else () for v in (*op.operands, *op.results))
        shared = tuple(x.fetched.setdefault(self._need(op, k, x.sharding), {}) for k, x in enumerate(operands))
        local = LocalOp(op, equation, self.sharded.factors[op.id], self.mesh, sizes, shared)
        results = self._once(local, arrays) if equation.effects and op.opaque else compute(local, arrays)
        if op.kind in PAIRED:  # the positions, and where devices are compared the values there
            return [self._result(op, 0, *results)]
        stored = [self._result(op, r, x) for r, x in enumerate(results)]
        if len(operands) == len(stored) == 1:
            stored[0].operand = operands[0]
        return stored

    def _gather(self, equation: Any, ops: list[Op], operands: list[Local]) -> list[Local]:
        """Gathers from the array before it was converted to a wider type, and converts the result."""
        gather, widen = ops
        assert operands[0].operand is not None
        (narrow,) = self._op(equation, [gather], [operands[0].operand, *operands[1:]])
        array = self._operand(widen, 0, narrow)
        return [self._result(widen, 0, jax.lax.convert_element_type(array, equation.outvars[0].aval.dtype))]

    def _once(self, local: LocalOp, arrays: list[Any]) -> list[Any]:
        """The results of an op with an effect, which runs on the first device and sends them to all."""
        names = self.mesh.names
        first = block_index(tuple(range(len(names))), self.mesh) == 0
        outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in local.equation.outvars]
        results = jax.lax.cond(
            first, lambda *xs: local.bind(xs), lambda *xs: [jnp.zeros(o.shape, o.dtype) for o in outs], *arrays
        )
        return [jax.lax.psum(x, names).astype(o.dtype) for x, o in zip(results, outs, strict=True)]

    def _barrier(self, ops: list[Op], operands: list[Local]) -> list[Local]:
        """The results of a barrier. Operands whose result is not used have no op."""
        places = {op.attribute("position"): op for op in ops}
        arrays = [self._operand(op, 0, operands[k]) for k, op in places.items()]
        results = [_DEAD] * len(operands)
        for (k, op), x in zip(places.items(), internals.barrier(arrays), strict=True):
            results[k] = self._result(op, 0, x)
        return results

    # Loops and branches.

    def _region(self, op: Op, part: str) -> Region:
        return next(r for r in map(self.program.regions.__getitem__, op.regions) if r.kind.endswith("." + part))

    def _fixed(self, values: Sequence[int], operands: Sequence[Local]) -> dict[int, Any]:
        """By input of a body that is the same in all trips: its block."""
        used = [(v, x) for v, x in zip(values, operands, strict=False) if v >= 0]
        return {v: self._enter(v, self._leave(self._links[v], 0, x)).array for v, x in used}

    def _body(
        self, jaxpr: Any, region: Region, scope: int, fixed: Mapping[int, Any], others: Iterable[tuple[int, Any]]
    ) -> list[Local]:
        """The results of a body, given the blocks of its inputs: those that are ``fixed``, and the others."""
        inputs = {v: self._stored(v, x) for v, x in fixed.items()}
        inputs |= {v: self._enter(v, x) for v, x in others if v >= 0}
        return self._inline(jaxpr, [inputs.get(v, _DEAD) for v in region.inputs], scope)

    def _results(self, op: Op, numbers: Sequence[int], arrays: Sequence[Any]) -> list[Local]:
        """The results of a loop or branch, of which some are alive."""
        results = [_DEAD] * len(op.results)
        for k, array in zip(numbers, arrays, strict=True):
            if op.results[k] >= 0:
                results[k] = self._enter(op.results[k], array)
        return results

    def _scan(self, equation: Any, op: Op, operands: list[Local], scope: int, number: int) -> list[Local]:
        p, region, inner = equation.params, self._region(op, "body"), self._replay.inner(scope, number, "body")
        consts, carries = internals.scan_counts(p)
        alive = [k for k, v in enumerate(region.inputs) if v >= 0 and k >= consts]
        carried, stacked = ([k for k in alive if (k < consts + carries) is is_carry] for is_carry in (True, False))
        links = {k: self._links[region.inputs[k]] for k in alive}
        fixed = self._fixed(region.inputs[:consts], operands)
        # Stacked results stand by position, and have links to what the body computes.
        outputs = {k: self._links[v] for k, v in enumerate(op.results) if k >= carries and v >= 0 and v in self._links}

        def body(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            pairs = [(region.inputs[k], x) for k, x in zip((*carried, *stacked), (*carry, *slices), strict=True)]
            results = self._body(p["jaxpr"], region, inner, fixed, pairs)
            carry = [self._leave(links[k], 1, results[k - consts]) for k in carried]
            return carry, [self._leave(link, 0, results[k]) for k, link in outputs.items()]

        carry, stacks = jax.lax.scan(
            body,
            [self._leave(links[k], 0, operands[k]) for k in carried],
            [self._leave(links[k], 0, operands[k]) for k in stacked],
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
            _split_transpose=p.get("_split_transpose", False),
        )
        return self._results(op, [*(k - consts for k in carried), *outputs], [*carry, *stacks])

    def _while(self, equation: Any, op: Op, operands: list[Local], scope: int, number: int) -> list[Local]:
        p = equation.params
        counts = {"cond": p["cond_nconsts"], "body": p["body_nconsts"]}
        regions = {part: self._region(op, part) for part in counts}
        carries = regions["body"].inputs[counts["body"] :]
        alive = [k for k, v in enumerate(carries) if v >= 0]
        links = [self._links[carries[k]] for k in alive]
        fixed = {
            "cond": self._fixed(regions["cond"].inputs, operands[: counts["cond"]]),
            "body": self._fixed(regions["body"].inputs, operands[counts["cond"] : sum(counts.values())]),
        }
        initial = operands[sum(counts.values()) :]

        def run(part: str, carry: Sequence[Any]) -> list[Local]:
            values = [regions[part].inputs[counts[part] + k] for k in alive]
            inner = self._replay.inner(scope, number, part)
            return self._body(p[f"{part}_jaxpr"], regions[part], inner, fixed[part], zip(values, carry, strict=True))

        def body(carry: Sequence[Any]) -> Sequence[Any]:
            results = run("body", carry)
            return [self._leave(link, 1, results[k]) for k, link in zip(alive, links, strict=True)]

        first = [self._leave(link, 0, initial[k]) for k, link in zip(alive, links, strict=True)]
        return self._results(op, alive, jax.lax.while_loop(lambda carry: run("cond", carry)[0].array, body, first))

    def _cond(self, equation: Any, op: Op, operands: list[Local], scope: int, number: int) -> list[Local]:
        branches = equation.params["branches"]
        regions = [self._region(op, f"branch{k}") for k in range(len(branches))]
        alive = [k for k, v in enumerate(regions[0].inputs) if v >= 0]
        arrays = [self._leave(self._links[regions[0].inputs[k]], 0, operands[1 + k]) for k in alive]
        outputs = {k: self._links[v] for k, v in enumerate(op.results) if v >= 0 and v in self._links}

        def branch(n: int) -> Any:
            def run(*blocks: Any) -> list[Any]:
                inner = self._replay.inner(scope, number, f"branch{n}")
                pairs = [(regions[n].inputs[k], x) for k, x in zip(alive, blocks, strict=True)]
                results = self._body(branches[n], regions[n], inner, {}, pairs)
                return [self._leave(link, n, results[k]) for k, link in outputs.items()]

            return run

        runs = [branch(n) for n in range(len(branches))]
        return self._results(op, [*outputs], internals.branch(equation, operands[0].array, runs, arrays))


def check_expressible(program: Program) -> None:
    """Raises :class:`SpmdError` for an op that the device-local program cannot express."""
    for op in program.ops:
        if op.kind in _UNSUPPORTED:
            raise SpmdError(op.kind, str(program.source_of(op)), _UNSUPPORTED[op.kind])


#: A value that nothing needs.
_DEAD: Final = Local(None, Sharding(()))
_LOOPS: Final = {"scan": LocalProgram._scan, "while": LocalProgram._while, "cond": LocalProgram._cond}
_UNSUPPORTED: Final = {"xla_pmap": "a manual region of the old kind"}


def _strong(x: Any) -> Any:
    """An array whose type is not weak: what a loop carries keeps its type."""
    if jnp.issubdtype(jnp.asarray(x).dtype if not hasattr(x, "dtype") else x.dtype, jax.dtypes.extended):
        return x
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype)
