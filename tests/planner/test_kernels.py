"""Kernels and callbacks that nobody gave a rule: computed whole, planned without the devices that could lower them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import shardwise
from shardwise.errors import MeshError
from shardwise.tactics.strategies import DataParallel

SHAPES = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")


def like(x: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x.sum())
    return x


def told(x: jax.Array) -> jax.Array:
    io_callback(lambda _: None, None, x)
    return x


def doubled(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda a: 2 * np.asarray(a), like(x), x)


def added(x: jax.Array) -> jax.Array:
    return jax.pure_callback(lambda a, b: np.asarray(a) + np.asarray(b), like(x), x, x)


def kernel(x: jax.Array) -> jax.Array:
    from jax.experimental import pallas as pl  # brings primitives that tests/rules would look for, had it come earlier

    def double(source: Any, target: Any) -> None:
        target[...] = 2 * source[...]

    return pl.pallas_call(double, out_shape=like(x))(x)


def step(inner: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda w, x: inner(jnp.tanh(x @ w)) @ w


@pytest.mark.parametrize("inner", [printed, told, doubled, added, kernel])
def test_they_are_planned(inner: Callable[[jax.Array], jax.Array]) -> None:
    found = shardwise.plan(step(inner), *SHAPES, mesh={"d": 4}, budget_evals=50)
    assert found.predicted.fits
    where: dict[str, Any] = {"mesh": {"d": 4}, "roles": {"batch": "x"}}
    assert shardwise.plan(step(inner), *SHAPES, tactics=[DataParallel("d")], **where).array("x").spec == (("d",), ())


@pytest.mark.parametrize("inner", [printed, doubled, added])
def test_they_compute_the_same(inner: Callable[[jax.Array], jax.Array]) -> None:
    args = [jax.random.normal(jax.random.key(k), s.shape) for k, s in enumerate(SHAPES)]
    where: dict[str, Any] = {"mesh": {"d": 4}, "roles": {"batch": "x"}}
    plan = shardwise.plan(step(inner), *args, tactics=[DataParallel("d")], **where)
    np.testing.assert_allclose(plan.jit(step(inner))(*args), step(inner)(*args), rtol=1e-4, atol=1e-4)


def test_a_kernel_is_no_product() -> None:
    """It takes what its bytes take, not what a product of its sizes would."""
    big = jax.ShapeDtypeStruct((4096, 4096), "float32")
    plan = shardwise.plan(lambda x: kernel(x), big, mesh={"d": 1}, topology="v5e", tactics=[])
    assert plan.predicted.time_s < 1e-3


def test_a_shard_map_over_other_axes_is_refused() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec: Any = PartitionSpec

    def mapped(x: jax.Array) -> jax.Array:
        total = jax.shard_map(lambda a: jax.lax.psum(a, "rows"), mesh=mesh, in_specs=spec("rows"), out_specs=spec())
        return total(x)

    with pytest.raises(MeshError, match=r"shard_map at .*runs over the mesh axes rows, .*has d: name them alike"):
        shardwise.plan(mapped, SHAPES[1], mesh={"d": 4})
    assert shardwise.plan(mapped, SHAPES[1], mesh={"rows": 4}, tactics=[]).mesh.names == ("rows",)


def test_keyword_arguments_stand_where_the_plan_has_them() -> None:
    def apart(w: jax.Array, x: jax.Array, bias: jax.Array) -> jax.Array:
        return x @ w + bias

    args = jnp.ones((8, 8)), jnp.ones((16, 8)), jnp.arange(8.0)
    plan = shardwise.plan(apart, *args, mesh={"d": 2}, tactics=[])
    planned = plan.jit(apart)
    want = apart(*args)
    for found in (
        planned(*args),
        planned(w=args[0], x=args[1], bias=args[2]),
        planned(args[0], bias=args[2], x=args[1]),
    ):
        np.testing.assert_array_equal(found, want)
    named = shardwise.plan(apart, args[0], kwargs={"x": args[1], "bias": args[2]}, mesh={"d": 2}, tactics=[])
    np.testing.assert_array_equal(named.jit(apart)(args[0], x=args[1], bias=args[2]), want)
