"""Axes carry what their names say, where axes of equal size could carry it as well."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import shardwise


def step(w: dict[str, Any], x: Any) -> Any:
    return jax.numpy.cumsum(jax.nn.relu(x @ w["in"]), 1) @ w["out"]


@pytest.mark.parametrize(("names", "batch"), [("data model", "data"), ("model data", "data"), ("a b", "a")])
def test_the_batch_prefers_data_among_equal_axes(names: str, batch: str) -> None:
    """Four examples can be sharded over one of two axes, and the hidden dimension over the other. Positions depend on earlier
    ones."""
    shapes = {"in": (2048, 65536), "out": (65536, 2048)}
    w = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((4, 3001, 2048), "bfloat16")
    first, second = names.split()
    plan = shardwise.plan(step, w, x, mesh={first: 4, second: 4}, topology="v5e:4x4")
    other = second if batch == first else first
    assert plan.spec("x") == jax.sharding.PartitionSpec(batch)
    assert plan.spec("w/in") == jax.sharding.PartitionSpec(None, other)
