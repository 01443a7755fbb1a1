"""What people do besides the recipes: Python numbers and random keys as arguments, static arguments counted from the end."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import shardwise
from shardwise.tactics.strategies import FSDP, DataParallel


def test_a_learning_rate_as_a_python_number_is_planned_once() -> None:
    @shardwise.jit(mesh={"data": 8}, tactics=[FSDP("data")], roles={"batch": "batch", "params": "state"})
    def step(state, batch, rate):
        return {"w": state["w"] - rate * (batch.T @ batch)}

    state, batch = {"w": jnp.ones((16, 16))}, jnp.ones((32, 16))
    for rate in (0.1, 0.2, 0.3):
        np.testing.assert_allclose(step(state, batch, rate)["w"], 1 - 32 * rate, rtol=1e-5)
    assert len(step._by_type) == 1


def test_static_arguments_by_position_from_the_end_and_by_name() -> None:
    where = {"mesh": {"data": 8}, "tactics": [DataParallel("data")], "roles": {"batch": "batch"}}
    batch = jnp.ones(32)
    last = shardwise.jit(lambda batch, n: batch * (n + 0), static_argnums=-1, **where)
    assert [float(last(batch, n)[0]) for n in (2, 3, 2)] == [2, 3, 2] and len(last._by_type) == 2
    named = shardwise.jit(lambda batch, n, m=1: batch * n * m, static_argnames=("n", "m"), **where)
    calls = (named(batch, 2), named(batch, n=3), named(batch, 3, 2), named(batch, 3, m=2), named(batch, m=5, n=2))
    assert [float(result[0]) for result in calls] == [2, 3, 6, 6, 10]


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_in_the_state_are_saved_and_restored(tmp_path: Path, kind: str) -> None:
    def init():
        return {"key": jax.random.key(3, impl=kind), "w": jnp.ones((16, 16))}

    def step(state, batch):
        key, own = jax.random.split(state["key"])
        kept = batch * jax.random.bernoulli(own, 0.5, batch.shape)
        return {"key": key, "w": state["w"] - 0.1 * (batch.T @ kept)}, kept.sum()

    batch = jnp.ones((32, 16))
    plan = shardwise.plan(
        step,
        jax.eval_shape(init),
        batch,
        mesh={"data": 8},
        tactics=[FSDP("data")],
        roles={"batch": "batch", "params": "state/w"},
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", plan.init(init, of="state"))
    shapes, _ = plan.restore_args
    assert shapes["key"].dtype == init()["key"].dtype
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "state", shapes)
    state, total = plan.jit(step)(state, batch)
    want, want_total = jax.jit(step)(init(), batch)
    np.testing.assert_allclose(state["w"], want["w"], rtol=1e-5)
    assert float(total) == float(want_total)
    assert state["w"].sharding.spec == jax.sharding.PartitionSpec("data")
