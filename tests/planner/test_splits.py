"""A mesh axis is used as two where that helps: sizes that the axis does not divide are sharded on a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes

HEADS, GROUP, WIDTH, D = 4, 4, 16, 64


def decode(params: dict[str, Any], cache: dict[str, Any], x: Any) -> Any:
    """One position of grouped-query attention over a cache."""
    q = jnp.einsum("bd,dkgh->bkgh", x, params["q"])
    scores = jax.nn.softmax(jnp.einsum("bkgh,btkh->bkgt", q, cache["k"]), axis=-1)
    return jnp.einsum("bkgt,btkh,kghd->bd", scores, cache["v"], params["o"])


def arguments(positions: int, width: int) -> tuple[Any, Any, Any]:
    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, "float32")

    params = {"q": shape(D, HEADS, GROUP, width), "o": shape(HEADS, GROUP, width, D)}
    cache = {name: shape(2, positions, HEADS, width) for name in ("k", "v")}
    return params, cache, shape(2, D)


def test_four_heads_on_eight_devices_use_a_part_of_the_axis(tmp_path: Path) -> None:
    """The axis divides no dimension of the cache. Split, two examples are on one part and four heads on the other."""
    args = arguments(3 * 4099, 9)
    where: dict[str, Any] = {"topology": "v5e:2x4"}
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ("model",))
    plan = shardwise.plan(decode, *args, mesh=mesh, **where)
    assert plan.mesh == MeshAxes(("model_0", "model_1"), (4, 2))
    assert plan.spec("cache/k") == jax.sharding.PartitionSpec("model_1", None, "model_0")
    assert "the mesh model 8 is used as model_0 4 × model_1 2" in plan.notes[0]
    plain = shardwise.plan(decode, *args, mesh={"model": 8}, tactics="auto:model", **where)
    assert plan.predicted.time_s < plain.predicted.time_s

    rng = np.random.default_rng(0)
    arrays = jax.tree.map(lambda a: (rng.normal(size=a.shape) / 8).astype("float32"), args)
    np.testing.assert_allclose(plan.jit(decode)(*arrays), decode(*arrays), rtol=1e-4, atol=1e-5)
    assert (plan.in_shardings[1]["k"].mesh.devices.reshape(-1) == mesh.devices.reshape(-1)).all()
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(plan.jit(decode)(*arrays), decode(*arrays), rtol=1e-4, atol=1e-5)
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json").bind(decode, *args)
    assert loaded.mesh == plan.mesh and loaded.on_mesh(mesh).in_specs == plan.in_specs
    with pytest.raises(PlanError, match="the plan is for a mesh of model_0 4 × model_1 2"):
        plan.on_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")))


def test_a_mesh_whose_axes_divide_or_are_named_stays_as_it_is() -> None:
    args = arguments(4096, WIDTH)
    for options in ({"mesh": {"model": 4}, "topology": "v5e:2x2"}, {"mesh": {"model": 8}, "tactics": "auto:model"}):
        assert shardwise.plan(decode, *args, **options).mesh.names == ("model",)


def test_an_axis_that_a_shard_map_names_stays_as_it_is() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ("model",))
    spec = jax.sharding.PartitionSpec(None, "model")

    def centered(params: dict[str, Any], cache: dict[str, Any], x: Any) -> Any:
        y = decode(params, cache, x)
        return jax.shard_map(lambda y: y - jax.lax.pmean(y, "model"), mesh=mesh, in_specs=spec, out_specs=spec)(y)

    args = arguments(3 * 4099, 9)
    plan = shardwise.plan(centered, *args, mesh=mesh, topology="v5e:2x4")
    assert plan.mesh.names == ("model",)
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(lambda a: (rng.normal(size=a.shape) / 8).astype("float32"), args)
    np.testing.assert_allclose(plan.jit(centered)(*arrays), jax.jit(centered)(*arrays), rtol=1e-4, atol=1e-5)


def test_axes_that_pinned_arguments_name_stay_as_they_are() -> None:
    """Arguments that are sharded already are pins, which no split mesh can have."""
    params, cache, x = arguments(3 * 4099, 9)
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(8), ("model",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    plan = shardwise.plan(decode, params, cache, sharded, mesh=mesh, topology="v5e:2x4")
    assert plan.mesh.names == ("model",) and plan.spec("x") == whole.spec
