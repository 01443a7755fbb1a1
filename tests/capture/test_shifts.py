"""Pieces that are joined or padded again are shifts: sharded dimensions exchange what crosses the borders of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise as sw

N = 1024
X = jnp.asarray(np.where(np.arange(N * 64) % 7 == 5, -0.0, np.sin(np.arange(N * 64.0))).reshape(N, 64), "float32")


def _gradient(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: (fn(x) ** 3).sum())


def _back(x: Any) -> Any:
    return jax.lax.pad(x[3:-1], 7.0, [(2, 2, 0), (0, 0, 0)])


SHIFTS: dict[str, Callable[[Any], Any]] = {
    "roll": lambda x: jnp.roll(x, 1, 0),
    "roll back": lambda x: jnp.roll(x, -2, 0),
    "roll far": lambda x: jnp.roll(x, 300, 0),
    "roll two": lambda x: jnp.roll(x, (5, 1), (0, 1)),
    "roll integers": lambda x: jnp.roll((x > 0).astype("int8"), 1, 0),
    "roll booleans": lambda x: jnp.roll(x > 0, 1, 0),
    "roll and back": _gradient(lambda x: jnp.roll(x, 3, 0) * x),
    "edge": lambda x: jnp.concatenate([x[1:], x[-1:]]),
    "reflected": lambda x: jnp.concatenate([x[1:2], x[1:-1], x[-2:-1]]),
    "zeros": lambda x: jax.lax.pad(x[:-1], 0.0, [(1, 0, 0), (0, 0, 0)]),
    "moved by less": _back,
    "gradient": _gradient(_back),
    "in a loop": lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x + 0.1 * jnp.roll(x, 1, 0), x),
    "vmap": lambda x: jax.vmap(lambda c: jnp.roll(c, 1))(x.T).T,
}


@pytest.mark.parametrize("fn", SHIFTS.values(), ids=SHIFTS)
def test_neighbors_exchange(fn: Callable[[Any], Any]) -> None:
    plan = sw.plan(fn, X, mesh={"data": 8}, tactics=[sw.Shard("x", 0, "data")])
    assert {c.kind for c in plan.collectives} == {"collective-permute"}
    assert plan.outputs[0].spec[0] == ("data",)
    found, expected = np.asarray(plan.jit(fn)(X)), np.asarray(jax.jit(fn)(X))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))  # also of zeros


@pytest.mark.parametrize("fn", [lambda x: jnp.concatenate([x[512:], x[:512]]), lambda x: jnp.concatenate([x, x[:1]])])
def test_other_joins_are_left(fn: Callable[[Any], Any]) -> None:
    plan = sw.plan(fn, X, mesh={"data": 8}, tactics=[])
    assert [e.primitive.name for e in plan.jaxpr.eqns if e.primitive.name == "concatenate"]
