"""Pins hold, whatever else is decided; what cannot hold is said at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardwise
from shardwise.tactics.strategies import DataParallel, Shard
from tests.dims.programs import shape


def step(w, x):
    return jax.nn.relu(x @ w["in"]) @ w["out"]


W = {"in": shape(8, 64), "out": shape(64, 16)}
X = shape(32, 8)
MESH = {"data": 2, "model": 4}


def test_a_pin_holds_and_the_rest_goes_along() -> None:
    plan = shardwise.plan(step, W, X, mesh=MESH, tactics=[], pins={"w/in": P(None, "model")})
    assert plan.array("w/in").spec == ((), ("model",)) and plan.array("w/out").spec == (("model",), ())


def test_a_pin_holds_against_tactics() -> None:
    tactics = [DataParallel("data"), Shard("w/in", 1, "model")]
    plan = shardwise.plan(step, W, X, mesh=MESH, tactics=tactics, pins={"w/out": P()}, roles={"batch": "x"})
    assert plan.array("w/out").spec == ((), ()) and plan.array("w/in").spec == ((), ("model",))
    assert plan.array("x").spec == (("data",), ())


def test_shardings_on_arguments_are_pins() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    plan = shardwise.plan(step, W, placed, mesh=mesh, tactics=[])
    assert plan.array("x").spec == (("data",), ()) and plan.array("out").spec == (("data",), ())
    with pytest.raises(shardwise.ShardwiseError, match="but the array is sharded"):
        shardwise.plan(step, W, placed, mesh=mesh, tactics=[], pins={"x": P("model")})


def test_constraints_in_the_program_are_pins_and_run() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrained(w, x):
        hidden = jax.lax.with_sharding_constraint(x @ w["in"], NamedSharding(mesh, P("data", "model")))
        return jax.nn.relu(hidden) @ w["out"]

    plan = shardwise.plan(constrained, W, X, mesh=mesh, tactics=[])
    assert [c.spec for c in plan.constraints if c.op == "sharding_constraint"] == [(("data",), ("model",))]
    assert plan.array("w/in").spec == ((), ("model",)) and plan.array("x").spec == (("data",), ())
    rng = np.random.default_rng(0)
    w, x = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), (W, X))
    np.testing.assert_allclose(plan.jit(constrained)(w, x), jax.jit(step)(w, x), rtol=1e-4, atol=1e-4)


def test_a_spec_for_a_tree_holds_for_all_its_arrays() -> None:
    """As in JAX it may be shorter than their ranks, and not longer."""

    def biased(w, x):
        return jax.nn.relu(x @ w["in"] + w["bias"]) @ w["out"]

    w = W | {"bias": shape(64)}
    plan = shardwise.plan(biased, w, X, mesh=MESH, tactics=[Shard("w/in", 1, "model")], pins={"w": P()})
    assert all(plan.spec(f"w/{name}") == P() for name in w)
    plan = shardwise.plan(biased, w, X, mesh=MESH, tactics=[], pins={"w": P("model")})
    assert all(plan.array(f"w/{name}").spec[0] == ("model",) for name in w)
    with pytest.raises(shardwise.ShardwiseError, match="w/bias has 1 dimensions, its spec 2"):
        shardwise.plan(biased, w, X, mesh=MESH, tactics=[], pins={"w": P(None, "model")})


def test_all_problems_are_listed_at_once() -> None:
    pins = {
        "w/inn": P("data"),
        "w/in": P("nope", None),
        "w/out": P("data", "data"),
        "x": P(None, None, "data"),
        "out": P(("data", "model", "data"), None),
    }
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.plan(step, W, X, mesh=MESH, tactics=[], pins=pins)
    text = str(caught.value)
    for part in ("did you mean w/in", "no axis 'nope'", "used twice", "has 2 dimensions, its spec 3"):
        assert part in text
    with pytest.raises(shardwise.ShardwiseError, match="size 6 does not divide by 4"):
        shardwise.plan(lambda x: x, shape(6, 4), mesh=MESH, tactics=[], pins={"x": P("model")})
