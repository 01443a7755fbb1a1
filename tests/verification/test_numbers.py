"""Planned against plain numbers: arguments and results of every kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import shardwise
from shardwise.tactics.strategies import Shard


def test_random_keys_are_compared_by_their_numbers() -> None:
    def drop(w: jax.Array, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        own, left = jax.random.split(key)
        return jnp.tanh(x @ w) * jax.random.bernoulli(own, 0.5, (8, 16)), left

    args = jnp.ones((16, 16)), jnp.ones((8, 16)), jax.random.key(0)
    plan = shardwise.plan(drop, *args, mesh={"data": 4}, tactics=[Shard("x", 0, "data")])
    verified = shardwise.verify(plan, drop, *args)
    assert verified.agrees
    assert verified.differences is not None and [d.path for d in verified.differences] == ["out/0", "out/1"]


def test_axes_of_one_device_communicate_nothing() -> None:
    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    for mesh in ({"data": 1}, {"data": 4, "model": 1}):
        plan = shardwise.plan(lambda w, x: x @ w, *args, mesh=mesh, tactics=["fsdp"])
        assert shardwise.verify(plan, lambda w, x: x @ w, *args).matched == 1.0
