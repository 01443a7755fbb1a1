"""Arguments in memory of the host are placed by copies: nothing is compiled for them, and they stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise as sw


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Has an entry for each compilation while a test runs."""
    seen: list[str] = []
    active = [True]

    def listen(event: str, _: float, **more: Any) -> None:
        if active[0] and event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    active[0] = False  # listeners cannot be taken back one by one


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), loss


def arguments() -> tuple[Any, jax.Array]:
    return {"a": jnp.ones((40, 88)), "b": jnp.full((88, 24), 0.5, "float32")}, jnp.full((56, 40), 0.01, "float32")


@pytest.mark.parametrize("donated", [(), (0,)])
def test_one_compilation_and_the_arguments_stay(compiled: list[str], donated: tuple[int, ...]) -> None:
    args = arguments()
    before = jax.device_get(args)
    plan = sw.plan(step, *args, mesh={"data": 8}, tactics="fsdp", donate_argnums=donated)
    assert any(axes for a in plan.arguments for axes in a.spec)
    compiled.clear()
    params, _ = plan.jit(step)(*args)
    assert len(compiled) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(args), before)
    assert not np.array_equal(params["a"], before[0]["a"])


def test_shard_compiles_nothing(compiled: list[str]) -> None:
    args = arguments()
    plan = sw.plan(step, *args, mesh={"data": 8}, tactics="fsdp")
    compiled.clear()
    placed = plan.shard(args)
    assert not compiled and placed[1].sharding.spec == plan.spec("x")


def test_weak_types_and_keys_are_kept() -> None:
    def draw(key: Any, scale: Any) -> Any:
        return jax.random.normal(key, (64,)) * scale, scale + 1

    args = jax.random.key(0), jnp.asarray(2.0, "float32") * jax.lax.full((), 1.0)
    weak = args[0], jnp.broadcast_to(3.0, (64,))
    for given in (args, weak):
        found = sw.plan(draw, *given, mesh={"data": 8}).jit(draw)(*given)
        expected = jax.jit(draw)(*given)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        assert [x.weak_type for x in found] == [x.weak_type for x in expected]
