"""The lowered program as a JAX function on local blocks, to be run under ``jax.shard_map`` (design, section 10).

The problem. A lowered state says for every op which axes split its factors, and for every value in which sharding it leaves
its op. XLA's partitioner can only be asked for that by constraints.

The idea. The jaxpr is walked again as capture walked it. Each operand is brought from the sharding it has into the one that the
op needs, by the collectives that the cost model counted (``shardwise.lowering.sharding.reshard``); the op is bound on the local
blocks (``shardwise.spmd.local``); its result is brought into the sharding that the plan stores. Loops and branches are emitted
again around local bodies. A value is brought into a sharding once in a section: a loop body, or what stands behind the barrier
of a ``remat``, starts anew.

It is PartIR's way to SPMD (arXiv 2401.11202, section 6), on jaxprs. Partial sums are sums of what the devices have: where a
partial value meets a whole one in a sum, the whole one counts on the first device only.

Weak: an op that nothing here can express is reported (:class:`~shardwise.errors.SpmdError`), and the plan is then executed by
constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.expand import called
from shardwise.capture.replay import Replay
from shardwise.errors import SpmdError
from shardwise.ir.program import Op, Program, Region
from shardwise.lowering.reshard_times import partial_need
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import (
    PAIRED,
    ROUNDED,
    ArrayType,
    Kind,
    Sharding,
    is_made_anew,
    is_narrowed,
    is_rounded,
    reshard,
    result_sharding,
    tensor_sharding,
)
from shardwise.spmd import indexing, kernels, random, reductions, shapes, windows  # noqa: F401  (they register local forms)
from shardwise.spmd.collectives import block_index, emit, pieces
from shardwise.spmd.local import LocalOp, compute

#: Ops that hand their operand on: what they state of shardings is part of the plan.
_STATED: Final = frozenset({"sharding_constraint", "reshard", "mesh_cast", "layout_constraint"})


@dataclass(eq=False, slots=True)
class Local:
    """A value on this device: its block, the sharding that it is a block of, its number, the same value in the other shardings
    that were asked for (rounded or not), by sharding what windowed ops fetched of it, and what it was made of, if that is one
    value."""

    array: Any
    sharding: Sharding
    value: int = -1
    copies: dict[tuple[Sharding, bool], Any] = field(default_factory=dict)
    fetched: dict[Sharding, dict[Any, Any]] = field(default_factory=dict)
    made_of: Local | None = None


class LocalProgram:
    """A traced function on local blocks. Called with the blocks of its arguments, as the plan stores them, it returns those of
    its outputs."""

    def __init__(self, program: Program, sharded: ShardedProgram, jaxpr: Any, rounds: bool = False):
        self.program, self.sharded, self.mesh = program, sharded, sharded.mesh
        self._jaxpr, self._replay = jaxpr, Replay(program)
        self._types = [sharded.array_type(program, v.id) for v in program.values]
        self._rounding = program.rounding if rounds and sharded.rounds else frozenset[int]()
        self._made_once: dict[int, Local] = {}
        self._links = {v: program.ops[k] for op in program.ops for k in op.links for v in program.ops[k].results}

    def __call__(self, *blocks: Any) -> list[Any]:
        inner, consts = internals.split_jaxpr(self._jaxpr)
        given = [
            Local(block, self.sharded.shardings[a.value], a.value)
            for block, a in zip(blocks, self.program.arguments, strict=True)
        ]
        results = self._evaluate(inner, consts, given, 0)
        outputs = [op for op in self.program.ops if op.kind == "output"]
        made = []
        for op, local in zip(outputs, results, strict=True):
            array = self._brought(local, self._need(op, 0, local))
            made.append(self._stored(op, 0, [array]).array)
        self._made_once.clear()
        return made

    # Shardings.

    def _need(self, op: Op, operand: int, given: Local) -> Sharding:
        assert op.rule is not None
        need = tensor_sharding(op.rule.operand_majors[operand], self.sharded.factors[op.id])
        return partial_need(need, given.sharding, self.sharded.passed[op.id])

    def _made(self, op: Op, result: int) -> Sharding:
        assert op.rule is not None
        return result_sharding(op.rule, result, self.sharded.factors[op.id], self.sharded.passed[op.id])

    def _brought(self, local: Local, need: Sharding, rounded: bool = False) -> Any:
        """A value in another sharding, which is remembered."""
        if local.sharding is need:
            return local.array
        key = need, rounded and is_rounded(self._types[local.value], local.sharding)
        if key not in local.copies:
            local.copies[key] = self._reshard([local.array], local.value, local.sharding, *key)
        return local.copies[key]

    def _reshard(self, arrays: list[Any], value: int, source: Sharding, target: Sharding, rounded: bool = False) -> Any:
        """The block of a value in another sharding. It moves in the shortest type that holds what is used of it."""
        type_ = self._types[value] if value >= 0 else ArrayType(jnp.shape(arrays[0]), 1.0)
        type_ = type_.rounded if rounded else type_
        if is_made_anew(type_, source, target):
            sizes = zip(type_.shape, target.dims, strict=True)
            element = jax.lax.slice(arrays[0], (0,) * arrays[0].ndim, (1,) * arrays[0].ndim)
            return jnp.broadcast_to(element, [n // pieces(a, self.mesh) for n, a in sizes])
        steps, now, wide = reshard(type_, source, target, self.mesh), source, None
        if is_narrowed(type_, source) and any(step.kind is not Kind.SLICE for step in steps):
            narrow = ROUNDED if rounded else self.program.values[self.program.moved_as[value]].dtype
            wide, arrays = arrays[0].dtype, [jax.lax.convert_element_type(arrays[0], jnp.dtype(narrow))]
        for step in steps:
            arrays = emit(arrays, step, now, type_.reducer, self.mesh)
            assert step.after is not None
            now = step.after
        return arrays[0] if wide is None else jax.lax.convert_element_type(arrays[0], wide)

    def _stored(self, op: Op, result: int, arrays: list[Any]) -> Local:
        """A result as the plan stores it; with the values that won, where it is the position of a maximum."""
        value = op.results[result]
        target = self.sharded.shardings[value]
        array = self._reshard(arrays, value, self._made(op, result), target)
        return Local(array, target, value)

    def _inside(self, value: int, array: Any) -> Local:
        """An input of a loop's body or a branch, which comes as its link makes it."""
        link = self._links[value]
        return self._stored(link, link.results.index(value), [array])

    def _handed(self, link: Op, operand: int, local: Local) -> Any:
        """A value as a link takes it over the border of a loop or branch."""
        return _strong(self._brought(local, self._need(link, operand, local)))

    # The walk.

    def _evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Local], scope: int) -> list[Local]:
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

    def _equation(self, jaxpr: Any, number: int, given: list[Local], scope: int) -> list[Local]:
        equation = jaxpr.eqns[number]
        name = equation.primitive.name
        if name == "shard_map":
            return self._shard_map(equation, given, scope, number)
        call = called(jaxpr, number)
        if call is not None:
            inner = self._replay.inner(scope, number)
            if self.program.scopes[inner].has_barrier:
                given = self._behind_barrier(given)
            return self._inline(call, given, inner)
        if equations.is_identity(equation):
            return given
        ops = self._replay.ops(scope, number)
        if (scope, number) in self.program.undone:
            assert given[0].made_of is not None
            return [given[0].made_of]
        if not ops:  # nothing needs it, but perhaps what it was made of
            return [Local(None, Sharding(()), made_of=given[0])] if len(given) == len(equation.outvars) == 1 else []
        with internals.standing_at(equation):
            if name in _LOOPS:
                return _LOOPS[name](self, equation, ops[0], given, scope, number)
            if name == "optimization_barrier":
                return self._barrier(ops, given)
            if not self._replay.repeats(scope, number):
                made = self._gather(equation, ops, given) if len(ops) > 1 else self._op(equation, ops[0], given)
                self._made_once.update(zip(ops[-1].results, made, strict=True))
            return [self._made_once[v] for v in ops[-1].results]

    def _inline(self, jaxpr: Any, given: Sequence[Local], scope: int) -> list[Local]:
        inner, consts = internals.split_jaxpr(jaxpr)
        return self._evaluate(inner, consts, given, scope)

    def _shard_map(self, equation: Any, given: list[Local], scope: int, number: int) -> list[Local]:
        """A region of the program that is local already: operands are brought into its specs, and its body is inlined."""
        borders = {(op.kind, op.attribute("position")): op for op in self._replay.ops(scope, number)}
        blocks = []
        for k, local in enumerate(given):
            op = borders.get(("shard_map.input", k))
            if op is None:
                blocks.append(local)
                continue
            with internals.standing_at(equation):
                blocks.append(self._stored(op, 0, [self._brought(local, self._need(op, 0, local))]))
        made = self._inline(equation.params["jaxpr"], blocks, self._replay.inner(scope, number))
        results = []
        for k, local in enumerate(made):
            op = borders.get(("shard_map.output", k))
            results.append(_DEAD if op is None else self._stored(op, 0, [local.array]))
        return results

    def _behind_barrier(self, given: list[Local]) -> list[Local]:
        """The same values, for a computation that shares nothing with what came before."""
        there = dict.fromkeys(local for local in given if local.array is not None)  # one that is handed twice is one
        arrays = internals.barrier([local.array for local in there])
        behind = {x: Local(array, x.sharding, x.value) for x, array in zip(there, arrays, strict=True)}
        return [behind.get(local, _DEAD) for local in given]

    def _op(self, equation: Any, op: Op, given: list[Local]) -> list[Local]:
        arrays = [
            self._brought(x, self._need(op, k, x), op.id in self._rounding) if v >= 0 else x.array
            for k, (x, v) in self._operands(op, given)
        ]
        if op.kind in _STATED:
            return [self._stored(op, 0, arrays)]
        arrays = self._counted_once(op, arrays, given)
        values = (*op.operands, *op.results)
        sizes = tuple(self.program.values[v].shape if v >= 0 else () for v in values)
        shared = tuple(x.fetched.setdefault(self._need(op, k, x), {}) for k, (x, v) in self._operands(op, given))
        local = LocalOp(op, equation, self.sharded.factors[op.id], self.mesh, sizes, shared)
        results = self._once(local, arrays) if equation.effects and op.opaque else compute(local, arrays)
        if op.kind in PAIRED:  # the positions, and where devices are compared the values there
            return [self._stored(op, 0, results)]
        made = [self._stored(op, r, [x]) for r, x in enumerate(results)]
        if len(given) == len(made) == 1:
            made[0].made_of = given[0]
        return made

    def _gather(self, equation: Any, ops: list[Op], given: list[Local]) -> list[Local]:
        """Gathers from the array before it was converted to a wider type, and converts the result."""
        gather, widen = ops
        assert given[0].made_of is not None
        (read,) = self._op(equation, gather, [given[0].made_of, *given[1:]])
        array = self._brought(read, self._need(widen, 0, read))
        return [self._stored(widen, 0, [jax.lax.convert_element_type(array, equation.outvars[0].aval.dtype)])]

    def _operands(self, op: Op, given: list[Local]) -> list[tuple[int, tuple[Local, int]]]:
        return list(enumerate(zip(given, op.operands, strict=True)))

    def _counted_once(self, op: Op, arrays: list[Any], given: list[Local]) -> list[Any]:
        """In a sum with partial values, those that are not partial count on the first device only."""
        passed = self.sharded.passed[op.id]
        if not passed or op.kind not in ("add", "add_any", "sub"):
            return arrays
        found = []
        for x, local in zip(arrays, given, strict=True):
            axes = tuple(a for a in passed if a not in local.sharding.partial)
            first = block_index(axes, self.mesh) == 0
            found.append(jnp.where(first, x, jnp.zeros_like(x)) if axes else x)
        return found

    def _once(self, local: LocalOp, arrays: list[Any]) -> list[Any]:
        """An op with an effect runs on the first device; what it returns goes to all."""
        names = self.mesh.names
        first = block_index(tuple(range(len(names))), self.mesh) == 0
        outs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in local.equation.outvars]
        results = jax.lax.cond(
            first, lambda *xs: local.bind(xs), lambda *xs: [jnp.zeros(o.shape, o.dtype) for o in outs], *arrays
        )
        return [jax.lax.psum(x, names).astype(o.dtype) for x, o in zip(results, outs, strict=True)]

    def _barrier(self, ops: list[Op], given: list[Local]) -> list[Local]:
        """Operands whose result is not used have no op."""
        places = {op.attribute("position"): op for op in ops}
        arrays = [self._brought(given[k], self._need(op, 0, given[k])) for k, op in places.items()]
        results = [_DEAD] * len(given)
        for (k, op), x in zip(places.items(), internals.barrier(arrays), strict=True):
            results[k] = self._stored(op, 0, [x])
        return results

    # Loops and branches.

    def _region(self, op: Op, part: str) -> Region:
        return next(r for r in map(self.program.regions.__getitem__, op.regions) if r.kind.endswith("." + part))

    def _results(self, op: Op, made: dict[int, Any]) -> list[Local]:
        """The results of a loop or branch from what left it, by value."""
        return [_DEAD if v not in made else self._inside(v, made[v]) for v in op.results]

    def _scan(self, equation: Any, op: Op, given: list[Local], scope: int, number: int) -> list[Local]:
        p, region, inner = equation.params, self._region(op, "body"), self._replay.inner(scope, number, "body")
        consts, carries = internals.scan_counts(p)
        links = [self._links[v] if v >= 0 else None for v in region.inputs]
        handed = [x if link is None else self._handed(link, 0, x) for link, x in zip(links, given, strict=True)]
        fixed = {v: self._inside(v, x).array for v, x in zip(region.inputs[:consts], handed, strict=False) if v >= 0}
        alive = [k for k in range(carries) if links[consts + k] is not None]
        stacked = [k for k in range(consts + carries, len(given)) if links[k] is not None]
        # Results that stand by position, of which the stacked ones have links to what the body makes.
        outputs = {k: self._links[v] for k, v in enumerate(op.results) if k >= carries and v >= 0 and v in self._links}

        def body(carried: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            known = {v: Local(x, self.sharded.shardings[v], v) for v, x in fixed.items()}
            for k, x in zip(alive, carried, strict=True):
                known[region.inputs[consts + k]] = self._inside(region.inputs[consts + k], x)
            for k, x in zip(stacked, slices, strict=True):
                known[region.inputs[k]] = self._inside(region.inputs[k], x)
            found = self._inline(p["jaxpr"], [known.get(v, _DEAD) if v >= 0 else _DEAD for v in region.inputs], inner)
            carried = [self._handed(links[consts + k] or op, 1, found[k]) for k in alive]
            return carried, [self._handed(link, 0, found[k]) for k, link in outputs.items()]

        carried, stacks = jax.lax.scan(
            body,
            [handed[consts + k] for k in alive],
            [handed[k] for k in stacked],
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
            _split_transpose=p.get("_split_transpose", False),
        )
        made = {op.results[k]: x for k, x in zip(alive, carried, strict=True)}
        made |= {op.results[k]: x for k, x in zip(outputs, stacks, strict=True)}
        return self._results(op, made)

    def _while(self, equation: Any, op: Op, given: list[Local], scope: int, number: int) -> list[Local]:
        p = equation.params
        counts = {"cond": p["cond_nconsts"], "body": p["body_nconsts"]}
        start = {"cond": 0, "body": counts["cond"]}
        initial = given[sum(counts.values()) :]
        regions = {part: self._region(op, part) for part in counts}
        carries = regions["body"].inputs[counts["body"] :]
        alive = [k for k, v in enumerate(carries) if v >= 0]
        fixed: dict[str, dict[int, Any]] = {}
        for part, region in regions.items():
            own = given[start[part] : start[part] + counts[part]]
            fixed[part] = {
                v: self._inside(v, self._handed(self._links[v], 0, x)).array
                for v, x in zip(region.inputs, own, strict=False)
                if v >= 0
            }

        def run(part: str, carried: Sequence[Any]) -> list[Local]:
            region = regions[part]
            known = {v: Local(x, self.sharded.shardings[v], v) for v, x in fixed[part].items()}
            for k, x in zip(alive, carried, strict=True):
                v = region.inputs[counts[part] + k]
                if v >= 0:
                    known[v] = self._inside(v, x)
            jaxpr, inner = p[f"{part}_jaxpr"], self._replay.inner(scope, number, part)
            return self._inline(jaxpr, [known.get(v, _DEAD) if v >= 0 else _DEAD for v in region.inputs], inner)

        def body(carried: list[Any]) -> list[Any]:
            found = run("body", carried)
            return [self._handed(self._links[carries[k]], 1, found[k]) for k in alive]

        first = [self._handed(self._links[carries[k]], 0, initial[k]) for k in alive]
        results = jax.lax.while_loop(lambda carried: run("cond", carried)[0].array, body, first)
        return self._results(op, {op.results[k]: x for k, x in zip(alive, results, strict=True)})

    def _cond(self, equation: Any, op: Op, given: list[Local], scope: int, number: int) -> list[Local]:
        branches = equation.params["branches"]
        regions = [self._region(op, f"branch{k}") for k in range(len(branches))]
        alive = [k for k, v in enumerate(regions[0].inputs) if v >= 0]
        links = [self._links[regions[0].inputs[k]] for k in alive]
        arrays = [self._handed(link, 0, given[1 + k]) for k, link in zip(alive, links, strict=True)]
        outputs = {k: self._links[v] for k, v in enumerate(op.results) if v >= 0 and v in self._links}

        def branch(n: int) -> Any:
            def run(*xs: Any) -> list[Any]:
                region, inner = regions[n], self._replay.inner(scope, number, f"branch{n}")
                known = {region.inputs[k]: self._inside(region.inputs[k], x) for k, x in zip(alive, xs, strict=True)}
                inputs = [known.get(v, _DEAD) if v >= 0 else _DEAD for v in region.inputs]
                found = self._inline(branches[n], inputs, inner)
                return [self._handed(link, n, found[k]) for k, link in outputs.items()]

            return run

        runs = [branch(n) for n in range(len(branches))]
        results = internals.branch(equation, given[0].array, runs, arrays)
        return self._results(op, {op.results[k]: x for k, x in zip(outputs, results, strict=True)})


def check_expressible(program: Program) -> None:
    """Raises :class:`SpmdError` for an op that the device-local program cannot express."""
    for op in program.ops:
        if op.kind in _UNSUPPORTED:
            raise SpmdError(op.kind, str(program.source_of(op)), _UNSUPPORTED[op.kind])


#: What nothing needs.
_DEAD: Final = Local(None, Sharding(()))
_LOOPS: Final = {"scan": LocalProgram._scan, "while": LocalProgram._while, "cond": LocalProgram._cond}
_UNSUPPORTED: Final = {"xla_pmap": "a manual region of the old kind"}


def _strong(x: Any) -> Any:
    """An array whose dtype gives way to none: what a loop carries keeps its type."""
    if jnp.issubdtype(jnp.asarray(x).dtype if not hasattr(x, "dtype") else x.dtype, jax.dtypes.extended):
        return x
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype)
