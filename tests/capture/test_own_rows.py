"""Lookups where each row looks into itself have batching dimensions, and give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise as sw

ROWS, COLUMNS = 16, 6
X = jnp.arange(ROWS * COLUMNS * 3.0).reshape(ROWS, COLUMNS, 3)
AT = jnp.arange(ROWS) * 7 % 17 - 8  # negative and out of range too
PAIR = jnp.stack([AT % COLUMNS, -1 - AT % COLUMNS], 1)


def _rows() -> jax.Array:
    return jnp.arange(ROWS)


OWN: dict[str, Callable[..., Any]] = {
    "gather": lambda x, i, j: x[_rows(), i],
    "two columns": lambda x, i, j: x[_rows()[:, None], j],
    "second dimension": lambda x, i, j: x.swapaxes(0, 1)[i, _rows()],
    "three": lambda x, i, j: x[_rows(), i, i % 3],
    "unsigned": lambda x, i, j: x[_rows().astype("uint32"), i],
    "reshaped": lambda x, i, j: x[_rows().reshape(ROWS, 1), j],
    "set": lambda x, i, j: x.at[_rows(), i].set(-1.0),
    "add": lambda x, i, j: x.at[_rows()[:, None], j].add(2.0),
    "gradient": lambda x, i, j: jax.grad(lambda x: (x[_rows(), i] ** 2).sum())(x),
    "widened": lambda x, i, j: x.astype("bfloat16").astype("float32")[_rows(), i],
}
OTHER: dict[str, Callable[..., Any]] = {
    "reversed": lambda x, i, j: x[_rows()[::-1], i],
    "shifted": lambda x, i, j: x[_rows() - 1, i],
    "argument": lambda x, i, j: x[i, i],
    "chosen": lambda x, i, j: x[jnp.where(i[0] > 0, _rows(), 0), i],
}


def _plan(fn: Callable[..., Any]) -> sw.Plan:
    shard = [sw.Shard(path, 0, "data") for path in ("x", "i", "j")]
    return sw.plan(fn, X, AT, PAIR, mesh={"data": 8}, tactics=shard)


@pytest.mark.parametrize("fn", OWN.values(), ids=OWN)
def test_own_row_needs_no_communication(fn: Callable[..., Any]) -> None:
    plan = _plan(fn)
    assert not plan.collectives
    np.testing.assert_array_equal(plan.jit(fn)(X, AT, PAIR), jax.jit(fn)(X, AT, PAIR))


@pytest.mark.parametrize("fn", OTHER.values(), ids=OTHER)
def test_other_row_communicates(fn: Callable[..., Any]) -> None:
    plan = _plan(fn)
    assert plan.collectives
    np.testing.assert_array_equal(plan.jit(fn)(X, AT, PAIR), jax.jit(fn)(X, AT, PAIR))


def test_fewer_rows_than_the_array_has() -> None:
    def fn(x: jax.Array, i: jax.Array) -> jax.Array:
        return x[jnp.arange(8), i[:8]]

    plan = sw.plan(fn, X, AT, mesh={"data": 8}, tactics=[sw.Shard("x", 0, "data")])
    np.testing.assert_array_equal(plan.jit(fn)(X, AT), jax.jit(fn)(X, AT))
