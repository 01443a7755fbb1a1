"""Programs on whole arrays, as XLA's partitioner gets them, equal the plain run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.partitioner.propagation import Propagation
from shardwise.tactics.strategies import Shard

P = jax.sharding.PartitionSpec


def in_shard_map(x: Any, w: Any, mesh: Any) -> Any:
    def local(x: Any, unused: Any, w: Any, scale: Any) -> tuple[Any, Any]:
        y = jax.lax.psum(x @ w, "y") * scale
        rows, _ = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros_like(y[0]), y)
        return y, jax.lax.all_gather(rows, "x")

    specs = dict(in_specs=(P("x", "y"), P(), P("y"), P()), out_specs=(P("x"), P(None)))
    run = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    y, rows = run(jnp.tanh(x), x + 1, w, 2.0)
    return jnp.sin(y), rows


def in_branches(x: Any, w: Any, mesh: Any) -> Any:
    def layer(x: Any) -> Any:
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w @ w.T), lambda x: x * 2, x)

    y = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jax.checkpoint(layer)(c[1])), (0, x))[1]
    return jax.grad(lambda x: (jax.checkpoint(layer)(x) ** 2).sum())(y), jnp.argmax(y, 1), jnp.sort(y, 1)


def with_callback(x: Any, w: Any, mesh: Any) -> Any:
    doubled = jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x + 1)
    part = jax.lax.dynamic_slice(doubled @ w, (jnp.argmax(x[0]), 0), (4, 8))
    return part, x.astype("bfloat16").astype("float32")[jnp.array([3, 1])]


@pytest.mark.parametrize("fn", [in_shard_map, in_branches, with_callback])
def test_a_program_equals_the_plain_run(fn: Callable[..., Any]) -> None:
    x, w = (np.random.default_rng(k).standard_normal(s, np.float32) for k, s in enumerate([(16, 8), (8, 8)]))
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = partial(fn, mesh=mesh)
    plan = shardwise.plan(run, x, w, mesh=mesh, tactics=[Shard("x", 0, "x"), Shard("w", 0, "y")])
    assert plan.spec("x")[0] == "x"
    want, have = (jax.tree.leaves(f(x, w)) for f in (jax.jit(run), plan.jit(run, partitioner="xla")))
    for a, b in zip(want, have, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_shardings_of_loops_are_read_without_what_nothing_uses() -> None:
    def step(x: Any, w: Any) -> Any:
        def layer(carry: Any, _: None) -> Any:
            x, count, _ = carry
            y = jnp.tanh(x @ w)
            return (y, count + y[0], count * y[1]), (y.T, count[None], y)

        (_, count, _), (_, _, stacked) = jax.lax.scan(layer, (x, x[0], x[1]), None, length=3)
        return count, stacked

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in [(16, 8), (8, 8)]]
    plan = shardwise.plan(step, *shapes, mesh={"x": 4}, tactics=[Shard("x", 0, "x")])
    program, lowered = plan.inquiry.analysis.program, plan.settled.lowered
    read = Propagation(lowered, plan.jaxpr, ()).shardings({})
    stacked = program.ops[program.definitions[program.paths["out/1"]][0]].operands[0]
    assert plan.spec("out/1") == P(None, "x") and read[stacked] == lowered.actual[stacked].dims == ((), (0,), ())
