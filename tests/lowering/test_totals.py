"""What a loop only adds to is reduced once, after the loop, where that takes no more memory; and the numbers are right."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise


def recurrent() -> tuple[Any, tuple[Any, ...]]:
    """A training step of a recurrent net, and its shapes: 8 time steps, 16 examples."""

    def loss(p: Any, x: Any) -> Any:
        def cell(h: Any, xt: Any) -> tuple[Any, None]:
            return jnp.tanh(xt.astype("float32") @ p["in"] + h @ p["rec"] + p["bias"]), None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((x.shape[1], 32)), x)[0] ** 2)

    def step(p: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), value

    weights = {"in": (8, 32), "rec": (32, 32), "bias": (32,)}
    p = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in weights.items()}
    return step, (p, jax.ShapeDtypeStruct((8, 16, 8), "float32"))


def arrays(shapes: Any) -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 100))
    return jax.tree.map(lambda s: 0.3 * jax.random.normal(next(keys), s.shape, s.dtype), shapes)


def planned(fn: Any, shapes: Any, **options: Any) -> shardwise.Plan:
    return shardwise.plan(fn, *shapes, mesh={"data": 8}, topology="v5e:2x4", **options)


def agrees(plan: shardwise.Plan, fn: Any, shapes: Any) -> None:
    args = arrays(shapes)
    expected, found = jax.jit(fn)(*args), plan.jit(fn)(*args)
    for want, have in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=2e-5)


def moved(plan: shardwise.Plan) -> dict[str, float]:
    """The bytes that one device moves in a step, by kind of collective."""
    found: dict[str, float] = {}
    for (kind, _), (_, nbytes) in plan.moved().items():
        found[kind] = found.get(kind, 0) + nbytes
    return found


def test_gradients_over_time_steps_are_reduced_once() -> None:
    """One all-reduce for each weight and one for the loss, not one in each of eight time steps."""
    fn, shapes = recurrent()
    plan = planned(fn, shapes, tactics=[shardwise.Shard("x", 1, "data")])
    assert moved(plan) == {"all-reduce": 4 * (8 * 32 + 32 * 32 + 32 + 1)}
    assert "counted once" in str(plan.program())
    agrees(plan, fn, shapes)


def total(x: Any, start: Any) -> Any:
    return jax.lax.scan(lambda t, part: (t + part.T @ part, None), start, x)[0]


TOTAL = (jax.ShapeDtypeStruct((4, 16, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32"))


def test_the_first_value_counts_once() -> None:
    plan = planned(total, TOTAL, tactics=[shardwise.Shard("x", 1, "data")])
    assert moved(plan) == {"all-reduce": 4 * 8 * 8}
    agrees(plan, total, TOTAL)


def test_a_total_that_is_stored_sharded_is_reduced_into_shards_in_every_trip() -> None:
    """A whole total would take eight times the memory."""
    plan = planned(
        total, TOTAL, tactics=[shardwise.Shard("x", 1, "data")], pins={"start": ("data", None), "out": ("data", None)}
    )
    assert "all-reduce" not in moved(plan)
    agrees(plan, total, TOTAL)


def read_twice(x: Any, start: Any) -> Any:
    def body(t: Any, part: Any) -> tuple[Any, Any]:
        return t + part.T @ part, t[0]

    return jax.lax.scan(body, start, x)


def multiplied(x: Any, start: Any) -> Any:
    return jax.lax.scan(lambda t, part: (2.0 * (t + part.T @ part), None), start, x)[0]


@pytest.mark.parametrize("fn", [read_twice, multiplied])
def test_a_carry_that_the_body_reads_otherwise_is_reduced_in_every_trip(fn: Any) -> None:
    plan = planned(fn, TOTAL, tactics=[shardwise.Shard("x", 1, "data")])
    assert moved(plan) == {"all-reduce": 4 * 4 * 8 * 8}
    agrees(plan, fn, TOTAL)


def nested(x: Any, start: Any) -> Any:
    def outer(t: Any, part: Any) -> tuple[Any, None]:
        inner = jax.lax.scan(lambda s, row: (s + jnp.outer(row, row), None), jnp.zeros((8, 8)), part)[0]
        return t + inner.astype("float32"), None

    return jax.lax.scan(outer, start, x)[0]


def test_loops_inside_of_loops() -> None:
    plan = planned(nested, TOTAL, tactics=[shardwise.Shard("x", 2, "data")])
    agrees(plan, nested, TOTAL)


def test_gradients_of_micro_batches_are_reduced_once() -> None:
    """Data parallelism in four micro-batches: one all-reduce for each gradient, and one for the loss."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])

    def step(w: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    w = {"a": jax.ShapeDtypeStruct((16, 32), "float32"), "b": jax.ShapeDtypeStruct((32, 16), "float32")}
    shapes = (w, jax.ShapeDtypeStruct((128, 16), "float32"))
    plan = planned(step, shapes, tactics="dp:data", microbatches=4)
    assert plan.variant.microbatches == 4
    assert plan.moved() == {("all-reduce", ("data",)): (3, 4 * (2 * 16 * 32 + 1))}
    agrees(plan, step, shapes)


def layered() -> tuple[Any, tuple[Any, ...]]:
    """A training step of scanned layers in a loop over parts of the batch, and its shapes."""

    def loss(w: Any, x: Any) -> Any:
        def layer(h: Any, p: Any) -> tuple[Any, None]:
            return h + jnp.tanh(h @ p["up"].astype(h.dtype)) @ p["down"].astype(h.dtype), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def step(w: Any, x: Any) -> Any:
        def part(total: Any, rows: Any) -> tuple[Any, None]:
            value, grads = jax.value_and_grad(loss)(w, rows)
            return (total[0] + value, jax.tree.map(jnp.add, total[1], grads)), None

        start = jnp.float32(0), jax.tree.map(jnp.zeros_like, w)
        value, grads = jax.lax.scan(part, start, x)[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    w = {"up": jax.ShapeDtypeStruct((3, 8, 16), "float32"), "down": jax.ShapeDtypeStruct((3, 16, 8), "float32")}
    return step, (w, jax.ShapeDtypeStruct((4, 16, 8), "float32"))


def test_stacked_gradients_of_layers_are_reduced_once() -> None:
    fn, shapes = layered()
    plan = planned(fn, shapes, tactics=[shardwise.Shard("x", 1, "data")])
    assert moved(plan) == {"all-reduce": 4 * (2 * 3 * 8 * 16 + 1)}
    agrees(plan, fn, shapes)


def test_stacked_gradients_that_are_stored_sharded_are_scattered_in_every_trip() -> None:
    fn, shapes = layered()
    plan = planned(fn, shapes, tactics="fsdp:data", roles={"batch": "x", "params": "w"})
    assert moved(plan).get("all-reduce", 0) <= 4
    assert plan["w/up"] != jax.sharding.PartitionSpec()
    agrees(plan, fn, shapes)
