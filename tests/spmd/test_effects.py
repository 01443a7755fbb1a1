"""Mutable arrays, callbacks, arguments in host memory and functions without results: run as in the plain run, or refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import shardwise
from shardwise.errors import CaptureError, SpmdError
from tests.spmd.test_ops import check, draw


def test_mutable_arrays_of_the_program_are_values() -> None:
    def fn(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros(8))

        def body(carry: Any, row: Any) -> Any:
            total[...] += row
            return carry + total[0], None

        return jax.lax.scan(body, 0.0, x)[0], total[...]

    assert check(fn, (draw(16, 8),), {"a": 2, "b": 4}) > 0


def test_mutable_arrays_of_others_are_refused() -> None:
    total = jax.new_ref(jnp.zeros(8))

    def fn(x: Any) -> Any:
        total[...] = x[0]
        return x * 2

    with pytest.raises(CaptureError, match="fn reads or changes a mutable array"):
        shardwise.plan(fn, draw(8, 8), mesh={"a": 8})
    with pytest.raises(CaptureError, match="r is a mutable array, which cannot be planned"):
        shardwise.plan(lambda r, x: r[...] + x, total, draw(8, 8), mesh={"a": 8})


def test_effects_that_jax_does_not_order_on_several_devices_are_refused() -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("{}", x.sum(), ordered=True)
        return x * 2

    with pytest.raises(SpmdError, match=r"debug_\w+ at test_effects.py:\d+ .* leave out ordered=True"):
        shardwise.plan(fn, draw(8, 8), mesh={"a": 8}, tactics=[]).jit(fn)(draw(8, 8))
    assert shardwise.plan(fn, draw(8, 8), mesh={"a": 1}, tactics=[]).jit(fn)(draw(8, 8)).shape == (8, 8)


def test_a_function_without_results() -> None:
    assert shardwise.plan(lambda x: (), draw(8, 8), mesh={"a": 2, "b": 4}).jit(lambda x: ())(draw(8, 8)) == ()


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA of JAX 0.9 cannot partition transfers")
@pytest.mark.parametrize("kind", ["pinned_host", "unpinned_host"])
def test_an_argument_in_host_memory(kind: str) -> None:
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)
    x = jax.device_put(draw(8, 8), host)
    plan = shardwise.plan(lambda x: x * 2, x, mesh={"a": 8}, pins={"x": jax.sharding.PartitionSpec("a")})
    np.testing.assert_allclose(plan.jit(lambda x: x * 2)(x), draw(8, 8) * 2)


def test_effects_run_once() -> None:
    seen: list[float] = []

    def fn(x: Any) -> Any:
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x * 2

    x = draw(16, 8)
    plan = shardwise.plan(fn, x, mesh={"a": 8}, tactics=[], pins={"x": jax.sharding.PartitionSpec("a")})
    assert np.allclose(plan.jit(fn)(x), x * 2)
    positive = jax.jit(lambda x: io_callback(lambda v: np.asarray(v.sum() > 0), jax.ShapeDtypeStruct((), bool), x))
    assert shardwise.plan(positive, x, mesh={"a": 8}, tactics=[]).jit(positive)(x).dtype == bool
    jax.effects_barrier()
    assert len(seen) == 1 and np.isclose(seen[0], x.sum(), atol=1e-4)


def test_callbacks_with_results_of_several_ranks() -> None:
    def fn(x: Any) -> Any:
        like = (
            jax.ShapeDtypeStruct((), x.dtype),
            jax.ShapeDtypeStruct((2, 8), x.dtype),
            jax.ShapeDtypeStruct((3,), "int32"),
        )
        return jax.pure_callback(lambda v: (v.sum(), np.asarray(v)[:2] * 2, np.arange(3, dtype="int32")), like, x)

    assert check(fn, (draw(16, 8),), {"a": 2, "b": 4}) > 0
