"""Plans under ``jax.jit`` of one's own: specs, shardings, arrays on devices, meshes that are given or set."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardwise as sw
from tests.plans.files import signed

SIZES = {"data": 2, "model": 4}


def step(w: Any, x: Any) -> Any:
    return jax.nn.relu(x @ w["in"]) @ w["out"]


def arrays() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w = {"in": rng.normal(size=(8, 64)), "out": rng.normal(size=(64, 16))}
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (w, rng.normal(size=(32, 8))))


def made(**options: Any) -> sw.Plan:
    asked = {"mesh": SIZES, "tactics": "dp:data,megatron:model"} | options
    return sw.plan(step, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays()), **asked)


def close(have: Any) -> None:
    np.testing.assert_allclose(have, jax.jit(step)(*arrays()), rtol=1e-4, atol=1e-4)


def test_specs_are_partition_specs() -> None:
    plan = made()
    assert plan.spec("w/in") == plan["w/in"] == P(None, "model") and plan["x"] == P("data")
    assert plan.in_specs == ({"in": P(None, "model"), "out": P("model")}, P("data")) and plan.out_specs == P("data")
    assert sw.plan(lambda x: x * 2, jnp.ones((8, 4)), mesh=SIZES, tactics=[sw.Shard("x", 0, ("data", "model"))])[
        "x"
    ] == P(("data", "model"))


def test_shardings_go_into_jit() -> None:
    plan = made()
    jitted = jax.jit(step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)
    have = jitted(*arrays())
    close(have)
    assert have.sharding == plan.out_shardings and have.sharding.spec == P("data")
    text = jitted.lower(*arrays()).compile().as_text()
    assert "all-reduce" in text


def test_too_few_devices_and_loaded_plans_say_so(tmp_path: Any) -> None:
    large = sw.plan(step, *arrays(), mesh={"data": 32}, tactics="dp")
    with pytest.raises(
        sw.PlanError, match=r"a mesh of data 32 needs 32 devices; there are 8; to try .*device_count=32"
    ):
        large.in_shardings  # noqa: B018
    made().save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    for use in (lambda: loaded.in_shardings, lambda: loaded.verify(), lambda: loaded.compare()):
        with pytest.raises(sw.PlanError, match=r"plan\.bind\(fn, \*args\) gives one that does"):
            use()
    bound = loaded.bind(step, *arrays())
    assert bound.in_shardings == made().in_shardings and bound.verify(*arrays()).agrees


def test_arrays_are_put_in_their_place() -> None:
    plan = made()
    w, x = plan.shard(arrays())
    assert w["in"].sharding.spec == P(None, "model") and x.sharding.spec == P("data")
    close(plan.jit(step)(w, x))
    assert plan.shard(arrays()[0], of="w")["out"].sharding == w["out"].sharding
    assert plan.shard(jnp.ones((64, 16)), of="out").sharding == w["out"].sharding
    with pytest.raises(
        sw.PlanError, match=r"not those under 'w' \(2 arrays\).*w/in is \[8, 64\] there and \[32, 8\] here"
    ):
        plan.shard(arrays()[1], of="w")
    with pytest.raises(sw.QueryError, match="no argument has the path 'y'"):
        plan.shard(arrays()[1], of="y")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_real_mesh(kind: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    devices = mesh.devices.tolist()
    for plan in (made(mesh=mesh), made().on_mesh(mesh)):
        assert plan.in_shardings[1].mesh.devices.tolist() == devices
        close(jax.jit(step, in_shardings=plan.in_shardings, out_shardings=plan.out_shardings)(*plan.shard(arrays())))
        close(plan.jit(step)(*arrays()))
        close(plan.jit(step)(*jax.device_put(arrays(), jax.sharding.NamedSharding(mesh, P()))))
        close(plan.jit(step, partitioner="xla")(*arrays()))
        close(plan.jit(step).lower(*arrays()).compile()(*arrays()))
    assert made(mesh=mesh) == made()
    close(sw.jit(step, mesh=mesh, tactics="dp:data,megatron:model")(*arrays()))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_of_set_mesh(kind: Any) -> None:
    reverse = list(reversed(jax.devices()))
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2, devices=reverse)
    with jax.set_mesh(mesh):
        plan = made(mesh=None)
        assert plan.mesh == made().mesh and plan.in_shardings[1].mesh == mesh
        close(plan.jit(step)(*arrays()))
        close(plan.jit(step)(*plan.shard(arrays())))
        close(jax.jit(plan.apply(step))(*plan.shard(arrays())))
        close(sw.jit(step, tactics="dp:data,megatron:model")(*arrays()))
        assert plan.init(lambda: arrays()[1], of="x").sharding.spec == P("data")
        with pytest.raises(sw.PlanError, match="the plan is for a mesh of data 8; this one is data 2 × model 4"):
            made(mesh={"data": 8}, tactics="dp").in_shardings  # noqa: B018
    assert plan.in_shardings[1].mesh != mesh


def test_another_mesh_that_is_set_is_another_plan() -> None:
    planned = sw.jit(step, tactics="dp")
    for sizes in ((8, 1), (2, 4)):
        with jax.set_mesh(jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)):
            close(planned(*arrays()))
            assert planned.plan(*arrays()).mesh.sizes == sizes
    close(planned(*arrays()))
    assert planned.plan(*arrays()).predicted.hardware == "cpu:8"


def test_keyword_arguments_have_no_place_in_jit() -> None:
    w, x = arrays()
    plan = sw.plan(step, w, kwargs={"x": x}, mesh=SIZES, tactics="dp:data")
    with pytest.raises(sw.PlanError, match=r"the plan was made with x by name: plan\.jit\(fn\) runs it"):
        plan.in_shardings  # noqa: B018
    close(plan.jit(step)(w, x=x))
    assert plan.verify(w, kwargs={"x": x}).agrees and plan.verify().differences is None


def test_verify_and_compare_of_its_own_function() -> None:
    plan = made()
    assert plan.verify(*arrays()).agrees and plan.verify().matched == 1
    other = made(tactics="fsdp")
    names = [row.name for row in plan.compare(("other", other), tactics="dp").ranked]
    assert {"plan 1", "plan other", "replicated"} <= set(names)


def test_the_short_form() -> None:
    plan = made()
    assert repr(plan).startswith("<Plan of step on data 2 × model 4: ") and len(repr(plan)) < 80
    assert str(plan) != repr(plan)


# Static arguments, and arguments with the names of options.


def scaled(x: Any, mode: str, power: int = 2) -> Any:
    return x**power if mode == "power" else x * 3


@pytest.mark.parametrize("static", [{"static_argnums": (1, 2)}, {"static_argnames": ("mode", "power")}])
def test_static_arguments_are_remembered(static: Any, tmp_path: Any) -> None:
    x = jnp.arange(32.0).reshape(16, 2)
    plan = sw.plan(scaled, x, "power", 3, mesh={"data": 8}, tactics=[sw.Shard("x", 0, "data")], **static)
    assert plan.static == next(iter(static.values()))
    plan.save(tmp_path / "plan.json")
    for own in (plan, sw.load_plan(tmp_path / "plan.json")):
        np.testing.assert_allclose(own.jit(scaled)(x, "power", 3), x**3)
        np.testing.assert_allclose(own.bind(scaled, x, "power", 3).jit(scaled)(x, "power", 3), x**3)
        assert sw.verify(own, scaled, x, "power", 3).agrees
    assert plan.verify(x, "power", 3).agrees and plan.verify().matched == 1
    assert plan.compare(tactics=[]).rows
    np.testing.assert_allclose(jax.jit(scaled, in_shardings=plan.in_shardings, **static)(x, "power", 3), x**3)
    with pytest.raises(sw.PlanError, match="plan again"):
        plan.jit(scaled)(x, "other", 3)


def test_damaged_static_arguments(tmp_path: Any) -> None:
    (tmp_path / "plan.json").write_text(signed(json.loads(made().to_json()) | {"static": [None]}))
    with pytest.raises(sw.PlanError, match=r"static\[0\]: expected a whole number, not None"):
        sw.load_plan(tmp_path / "plan.json")


def test_arguments_called_like_options() -> None:
    def odd(mesh: Any, seed: Any, tactics: Any) -> Any:
        return mesh @ seed + tactics

    args = jnp.ones((16, 4)), jnp.ones((4, 8)), jnp.ones((8,))
    named = dict(zip(("mesh", "seed", "tactics"), args, strict=True))
    asked: dict[str, Any] = {"mesh": {"data": 4}, "tactics": "dp:data"}
    for plan in (sw.plan(odd, *args, **asked), sw.plan(odd, kwargs=named, **asked)):
        assert plan["mesh"] == P("data") and plan.verify().matched == 1
        np.testing.assert_allclose(plan.jit(odd)(**named), odd(*args))
    assert sw.verify(plan, odd, kwargs=named).agrees
    assert sw.compare(odd, kwargs=named, mesh={"data": 4}, tactics="dp").rows
    assert sw.analyze(odd, kwargs=named).program.named_paths[0] == ("mesh", "seed", "tactics")
    np.testing.assert_allclose(sw.jit(odd, **asked)(**named), odd(*args))
    with pytest.raises(TypeError, match="unexpected keyword argument 'tatics'"):
        sw.plan(odd, *args, mesh={"data": 4}, tatics="dp:data")  # type: ignore[call-arg]
