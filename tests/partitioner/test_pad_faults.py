"""Pads that XLA's partitioner gets wrong are planned around."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import shardwise

P = jax.sharding.PartitionSpec


@pytest.mark.parametrize("padding", [(0, 1, 1), (1, 0, 1), (1, -1, 0), (-1, 5, 1), (-2, -2, 0)])
@pytest.mark.parametrize("size", [12, 13, 16])
@pytest.mark.parametrize("source", [P(), P("x")])
def test_pads_equal_the_plain_run(padding: tuple[int, int, int], size: int, source: P) -> None:
    def fn(a):
        return jax.lax.pad(a * 2, np.float32(0), [padding]) * 3

    a = np.arange(1, size + 1, dtype=np.float32)
    made = fn(a).shape[0]
    pins = {}
    if size % 4 == 0:
        pins["a"] = source
    if made % 4 == 0:
        pins["out"] = P("x")
    plan = shardwise.plan(fn, a, mesh={"x": 4}, tactics=[], pins=pins)
    np.testing.assert_array_equal(plan.jit(fn)(a), fn(a))
