"""Arrays in the memory of the host: those that a program moves itself."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import shardwise
from shardwise.plans.plan import Plan

Space = jax.memory.Space
pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA of JAX 0.9 cannot partition transfers")
LAYERS, WIDTH, ROWS = 4, 64, 256


def draw(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / shape[-1] ** 0.5, "float32")


def in_host(x: Any) -> Any:
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def step(w: Any, mean: Any, x: Any, back: Any = Space.Host) -> tuple[Any, Any]:
    """A step whose moments are in the memory of the host, and are updated layer by layer."""

    def loss(w: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0] ** 2)

    def update(_: None, one: tuple[Any, Any, Any]) -> tuple[None, tuple[Any, Any]]:
        w, mean, gradient = one
        mean = 0.9 * jax.device_put(mean, Space.Device) + gradient
        return None, (w - 0.1 * mean, jax.device_put(mean, back))

    return jax.lax.scan(update, None, (w, mean, jax.grad(loss)(w)))[1]


@pytest.fixture(scope="module")
def arguments() -> tuple[Any, Any, Any]:
    return draw(LAYERS, WIDTH, WIDTH), in_host(draw(LAYERS, WIDTH, WIDTH) + 1), draw(ROWS, WIDTH)


@pytest.fixture(scope="module")
def plan(arguments: tuple[Any, Any, Any]) -> Plan:
    return shardwise.plan(
        step, *arguments, mesh={"data": 2, "model": 4}, topology="v5e:2x4", tactics="fsdp", donate_argnums=(0, 1)
    )


def test_results_are_those_of_plain_jax_and_stay_in_the_host(plan: Plan, arguments: tuple[Any, Any, Any]) -> None:
    expected = jax.jit(step)(*arguments)
    w, mean, x = arguments
    for given in (mean, np.asarray(mean), jnp.asarray(np.asarray(mean))):
        results = plan.jit(step)(w + 0, in_host(given) if given is mean else given, x)
        assert [r.sharding.memory_kind for r in results] == ["device", "pinned_host"]
        for result, same in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, np.asarray(same), rtol=1e-5, atol=1e-6)


def test_the_plan_says_what_is_in_the_host(plan: Plan, tmp_path: Path) -> None:
    assert [(a.path, a.host) for a in (*plan.arguments, *plan.outputs)] == [
        ("w", False),
        ("mean", True),
        ("x", False),
        ("out/0", False),
        ("out/1", True),
    ]
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.arguments == plan.arguments and loaded.outputs == plan.outputs
    assert [s.memory_kind for s in plan.in_shardings] == ["device", "pinned_host", "device"]
    assert "mean  float32[4, 64/data·model, 64] in host memory" in str(plan)


def large(moved: bool) -> Plan:
    """A plan for larger arrays, of which there are shapes only, with the moments in the host or not."""
    w = jax.ShapeDtypeStruct((32, 2048, 2048), "float32")
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    mean = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=host if moved else None)
    x = jax.ShapeDtypeStruct((1024, 2048), "float32")
    fn = functools.partial(step, back=Space.Host if moved else Space.Device)
    return shardwise.plan(fn, w, mean, x, mesh={"data": 8}, topology="v5e:2x4", tactics="fsdp", donate_argnums=(0, 1))


def test_arrays_in_the_host_take_time_to_move_and_no_memory_of_the_device() -> None:
    """Also as XLA's TPU compiler sees it."""
    plans, block = [large(moved) for moved in (True, False)], 32 * 2048 * 2048 * 4 // 8
    in_host, on_device = (plan.predicted.peak_bytes for plan in plans)
    assert on_device - in_host >= 0.9 * block
    (moved,) = (c for c in plans[0].predicted.collectives if c.kind == "host-transfer")
    assert moved.nbytes == 2 * block and np.isclose(moved.time_s, moved.nbytes / 1.6e10)
    if importlib.util.find_spec("libtpu"):
        memory = [plan.verify(backend="v5e:2x4").compiled.memory for plan in plans]
        assert memory[0] is not None and memory[1] is not None
        assert 0.9 * block <= memory[1].peak_bytes - memory[0].peak_bytes <= 1.1 * block


def test_activations_that_a_policy_offloads() -> None:
    names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["hidden"]}
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        **names, offload_src="device", offload_dst="pinned_host"
    )

    def loss(w: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            hidden = checkpoint_name(jnp.sin(x @ w), "hidden")
            return hidden * hidden, None

        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum()

    w, x = draw(LAYERS, WIDTH, WIDTH), draw(ROWS, WIDTH)
    plan = shardwise.plan(jax.grad(loss), w, x, mesh={"data": 2, "model": 4}, topology="v5e:2x4", tactics="dp:data")
    assert any(c.kind == "host-transfer" for c in plan.predicted.collectives)
    expected = np.asarray(jax.jit(jax.grad(loss))(w, x))
    np.testing.assert_allclose(plan.jit(jax.grad(loss))(w, x), expected, rtol=1e-4, atol=1e-5)


def test_a_host_array_in_another_sharding_is_moved_between_devices() -> None:
    def fn(mean: Any, x: Any) -> Any:
        return jax.device_put(mean, Space.Device) @ x

    mean, x = draw(WIDTH, WIDTH), draw(WIDTH, WIDTH)
    pins = {"mean": P("data", "model"), "x": P(None, "data")}
    plan = shardwise.plan(fn, in_host(mean), x, mesh={"data": 2, "model": 4}, tactics=[], pins=pins)
    np.testing.assert_allclose(plan.jit(fn)(in_host(mean), x), mean @ x, rtol=1e-5, atol=1e-5)
