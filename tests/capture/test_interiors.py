"""Interiors that are written back are computed for all positions: neighbors exchange what crosses the borders of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise as sw

U = jnp.asarray(np.sin(np.arange(64 * 64.0)).reshape(64, 64), "float32")
BOTH = [sw.Shard("u", 0, "a"), sw.Shard("u", 1, "b")]


def _average(u: Any) -> Any:
    return u.at[1:-1, 1:-1].set(0.25 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]))


def _called(u: Any) -> Any:
    """With calls, and a division by zero outside of the interior."""
    return u.at[1:-1].add(jnp.where(u[2:] > 0, jnp.square(u[1:-1]), jnp.maximum(u[:-2], 0.0) / u[1:-1]))


def _waves(u: Any) -> Any:
    def step(_: Any, fields: Any) -> Any:
        u, v = fields
        v = v.at[:, :-1].add(u[:, 1:] - u[:, :-1])
        return u.at[:, 1:].add(0.1 * (v[:, 1:] - v[:, :-1])), v

    return jax.lax.fori_loop(0, 3, step, (u, jnp.zeros_like(u)))[0]


INTERIORS: dict[str, Callable[[Any], Any]] = {
    "average": _average,
    "in a loop": lambda u: jax.lax.fori_loop(0, 3, lambda _, u: _average(u), u),
    "gradient": jax.grad(lambda u: (_average(u) ** 3).sum()),
    "calls": _called,
    "several fields": _waves,
    "padded": lambda u: jax.lax.pad(u[2:] - u[:-2], 7.0, [(1, 1, 0), (0, 0, 0)]),
    "numbers": lambda u: u.at[:-1, 3:-2].multiply(2.0).at[1:].min(0.5).at[:-1].max(-0.5),
    "booleans": lambda u: (u > 0).at[1:-1].set((u[2:] > 0) & (u[:-2] > 0)),
}


@pytest.mark.parametrize("fn", INTERIORS.values(), ids=INTERIORS)
def test_neighbors_exchange(fn: Callable[[Any], Any]) -> None:
    plan = sw.plan(fn, U, mesh={"a": 4, "b": 2}, tactics=BOTH)
    assert {c.kind for c in plan.collectives} <= {"collective-permute"}
    assert plan.outputs[0].spec == (("a",), ("b",))
    np.testing.assert_array_equal(plan.jit(fn)(U), jax.jit(fn)(U))


def _primitives(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [e.primitive.name for e in sw.plan(fn, *args, mesh={"a": 2}, tactics=[]).jaxpr.eqns]


def test_others_are_left() -> None:
    assert "scatter" in _primitives(lambda u: u.at[:16].set(u[16:32] * 2), U)  # a small part
    assert "scatter" in _primitives(lambda u, v: u.at[1:-1].set(v), U, U[2:])  # no piece of an array of that size
    assert "scatter" in _primitives(lambda u: u.at[1:-1].set(jnp.cumsum(u[2:], 1)), U)  # looks at other positions
    assert "scatter" not in _primitives(lambda u: u.at[1:-1].set(u[2:] * 2), U)


def test_what_several_writes_share_is_computed_once() -> None:
    def fn(u: Any) -> Any:
        shared = jnp.exp(u[2:] + u[:-2])
        return u.at[1:-1].set(shared), u.at[2:].add(shared), u.at[:-2].set(shared * 2)

    plan = sw.plan(fn, U, mesh={"a": 4}, tactics=[sw.Shard("u", 0, "a")])
    assert plan.program().count("= exp(") == 1
    for x, y in zip(plan.jit(fn)(U), jax.jit(fn)(U), strict=True):
        np.testing.assert_array_equal(x, y)
