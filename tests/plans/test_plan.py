"""Plans: made, saved, loaded, applied; and everything that can be wrong with a file."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise import zoo
from shardwise.errors import PlanError, QueryError
from shardwise.plans.plan import Plan
from shardwise.tactics.strategies import FSDP, DataParallel, Keep, Megatron, Replicate, Shard
from tests.dims.programs import shape
from tests.planner.programs import mlp
from tests.plans.files import signed


def step(w, x, scale=2.0):
    return jax.nn.relu(x @ w["in"]) @ w["out"] * scale


W = {"in": shape(8, 64), "out": shape(64, 16)}
X = shape(32, 8)


def made(**more) -> Plan:
    tactics = [DataParallel("data"), Megatron("model")]
    return shardwise.plan(
        step, W, X, mesh={"data": 2, "model": 4}, tactics=tactics, roles={"batch": "x", "params": "w"}, **more
    )


def test_specs_by_path_and_as_trees() -> None:
    plan = made()
    assert plan.array("w/in").spec == ((), ("model",)) and plan.array("w/out").spec == (("model",), ())
    assert plan.array("x").spec == (("data",), ()) and plan.array("out").spec == (("data",), ())
    P = jax.sharding.PartitionSpec
    assert plan.in_specs == ({"in": P(None, "model"), "out": P("model")}, P("data"))
    assert plan.out_specs == P("data")
    with pytest.raises(QueryError, match="did you mean w/in"):
        plan.spec("w/inn")


def test_saved_and_loaded_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    plan, file = made(), tmp_path / "plan.json"
    plan.save(file)
    assert shardwise.load_plan(file) == plan
    assert shardwise.load_plan(file).to_json() == file.read_text() == made().to_json()
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_goes_to_other_processes() -> None:
    plan = made()
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan


def test_a_loaded_plan_runs(tmp_path: Path) -> None:
    fn, args = mlp()
    plan = shardwise.plan(
        fn, *args, mesh={"data": 8}, tactics=[FSDP("data")], roles={"batch": ("x", "y"), "params": "w"}
    )
    plan.save(tmp_path / "p.json")
    planned = shardwise.load_plan(tmp_path / "p.json").jit(fn)
    (new, loss), (want, want_loss) = planned(*args), jax.jit(fn)(*args)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert new[0].sharding.spec == jax.sharding.PartitionSpec(
        *(axes[0] if axes else None for axes in plan.array("w/0").spec)
    )


def test_donation_static_and_keyword_arguments() -> None:
    def update(state, *, batch, kind):
        return {"w": state["w"] - 0.1 * (batch.T @ batch if kind == "gram" else 0)}, jnp.sum(batch)

    args = {"w": jnp.ones((8, 8))}, jnp.ones((16, 8))
    plan = shardwise.plan(
        update,
        args[0],
        kwargs={"batch": args[1], "kind": "gram"},
        mesh={"data": 4},
        tactics=[Shard("batch", 0, "data")],
        static_argnames="kind",
        donate_argnames="state",
    )
    assert [a.donated for a in plan.arguments] == [True, False]
    planned = plan.jit(update)
    result, total = planned({"w": jnp.ones((8, 8))}, batch=args[1], kind="gram")
    np.testing.assert_allclose(result["w"], np.ones((8, 8)) - 1.6, rtol=1e-6)
    assert float(total) == 128


def test_keep_and_replicate() -> None:
    tactics = [DataParallel("data"), Megatron("model")]
    where = {"mesh": {"data": 2, "model": 4}, "roles": {"batch": "x", "params": "w"}}
    kept = shardwise.plan(step, W, X, tactics=[*tactics, Keep("w/in", "model")], **where)
    assert kept.array("w/in").spec == ((), ()) and kept.array("w/out").spec == (("model",), ())
    whole = shardwise.plan(step, W, X, tactics=[*tactics, Replicate("w")], **where)
    assert whole.array("w/in").spec == whole.array("w/out").spec == ((), ())


@pytest.mark.parametrize(
    ("tactics", "roles", "message"),
    [
        ([DataParallel("dat")], {"batch": "x"}, r"the mesh has no axis 'dat'; its axes are data"),
        ([DataParallel("data")], {"batch": "xx"}, r"no argument has the path 'xx'; did you mean x\?"),
        ([Megatron("data")], {"params": "x"}, r"no dimension is made by one parameter's product"),
        ([Shard("w/out", 5, "data")], {}, r"there is no dimension 5"),
        ([Shard("w/none", 0, "data")], {}, r"no argument or output has the path 'w/none'"),
    ],
)
def test_tactics_that_cannot_apply_say_why(tactics, roles, message: str) -> None:
    with pytest.raises(shardwise.ShardwiseError, match=message):
        shardwise.plan(step, W, X, mesh={"data": 2}, tactics=tactics, roles=roles)


def damage(**changes):
    def change(data):
        data.update(changes)
        return data

    return change


def edit(group: str, index: int, **changes):
    def change(data):
        data[group][index].update(changes)
        return data

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(schema=99), "has schema 99; this version of Shardwise reads schema 13: plan again"),
        (damage(mesh={"data": 0}), "not a positive whole number"),
        (damage(arguments=3), "arguments: expected a list"),
        (
            damage(small=[{"keep": [0], "axis": "data", "what": 1, "why": ""}]),
            "small[0].what: expected a text, not 1",
        ),
        (edit("arguments", 0, spec=[["nope"], []]), "the mesh has no axis 'nope'"),
        (edit("arguments", 0, spec=[["model"], ["model"]]), "axis 'model' is used twice"),
        (edit("arguments", 0, shape=[7, 64], spec=[["data"], []]), "size 7 does not divide by 2"),
        (edit("arguments", 0, spec=[[], [], []]), "has 2 dimensions, its spec 3"),
        (edit("arguments", 0, shape="x"), "arguments[0].shape: expected a list, not 'x'"),
        (
            damage(choices=[{"shard": [0], "axis": "z", "sides": [], "what": "", "padded": False}]),
            "the mesh has no axis 'z'",
        ),
        (damage(search={"front": []}), "search: method is missing"),
        (lambda data: [data], "is not a plan"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(signed(change(json.loads(made().to_json()))))
    with pytest.raises(PlanError) as caught:
        shardwise.load_plan(file)
    assert message in str(caught.value)


def test_truncated_missing_and_unwritable_files(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(made().to_json()[:200])
    with pytest.raises(PlanError, match="no complete JSON"):
        shardwise.load_plan(file)
    with pytest.raises(PlanError, match="cannot read"):
        shardwise.load_plan(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot write"):
        made().save(tmp_path / "no" / "such" / "plan.json")


def test_all_problems_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    data = json.loads(made().to_json())
    data["arguments"][0]["spec"] = [["nope"], []]
    data["outputs"][0]["spec"] = [["data"], ["data"]]
    (tmp_path / "p.json").write_text(signed(data))
    with pytest.raises(PlanError) as caught:
        shardwise.load_plan(tmp_path / "p.json")
    assert "nope" in str(caught.value) and "used twice" in str(caught.value)


def test_plans_refuse_other_functions_shapes_and_meshes() -> None:
    plan = made()
    w, x = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (W, X))
    with pytest.raises(PlanError, match="plan again"):
        plan.jit(lambda w, x: x @ w["in"])(w, x)
    with pytest.raises(PlanError, match="plan again"):
        plan.jit(step)(w, jnp.ones((64, 8)))
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(PlanError, match="the plan is for a mesh of data 2 × model 4; this one is data 4 × model 2"):
        plan.on_mesh(mesh)
    with pytest.raises(PlanError, match=r"a plan runs on a jax\.sharding\.Mesh of real devices, not on AbstractMesh"):
        plan.on_mesh(mesh.abstract_mesh)
    large = shardwise.plan(step, W, X, mesh={"data": 32}, tactics=[DataParallel("data")], roles={"batch": "x"})
    with pytest.raises(PlanError, match="needs 32 devices"):
        large.jit(step)


def test_text_fits_eighty_columns() -> None:
    text = str(made())
    assert max(map(len, text.splitlines())) <= 80
    assert "float32[8, 64/model]" in text and "model  w/{in[1], out[0]}" in text


def test_shardings_shapes_and_initialisation_on_a_mesh() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plan = made().on_mesh(mesh)
    w, x = plan.in_shardings
    assert w["in"].spec == jax.sharding.PartitionSpec(None, "model") and x.mesh == mesh
    shapes, _ = plan.restore_args
    assert shapes["out"].shape == (64, 16) and shapes["out"].sharding == w["out"]
    made_sharded = plan.init(lambda k: jax.tree.map(lambda s: jnp.full(s.shape, k), W), 3.0, of="w")
    assert made_sharded["in"].sharding == w["in"] and float(made_sharded["out"][0, 0]) == 3.0
    with pytest.raises(PlanError, match="their shapes must agree"):
        plan.init(lambda: {"in": jnp.ones((8, 64))}, of="w")


def test_apply_goes_into_a_jit_of_ones_own() -> None:
    plan = made()
    w, x = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (W, X))
    applied = plan.apply(step)
    both = jax.jit(lambda w, x: applied(w, x).sum() * 2)
    np.testing.assert_allclose(both(w, x), jax.jit(step)(w, x).sum() * 2, rtol=1e-5)


def test_jit_plans_once_for_each_shape() -> None:
    @shardwise.jit(mesh={"data": 8}, tactics=[DataParallel("data")], roles={"batch": "x"}, static_argnames="power")
    def power(x, power=2):
        return x**power

    for rows in (16, 32, 16):
        x = jnp.arange(rows * 2.0).reshape(rows, 2)
        np.testing.assert_allclose(power(x), x**2)
        np.testing.assert_allclose(power(x, power=3), x**3)
    assert len(power._by_type) == 4
    assert power.plan(jnp.ones((16, 2))).array("x").spec == (("data",), ())
    assert power(jnp.ones((16, 2))).sharding.spec == jax.sharding.PartitionSpec("data")


def scaled(w, rate):
    return {"w": w["w"] * rate, "twice": w["w"] * (rate * 2)}


@pytest.mark.parametrize("planned_with", [0.5, np.float32(0.5), jnp.full((), 0.5, jnp.float32)], ids=repr)
def test_a_plan_takes_numbers_and_arrays_for_one_another(planned_with) -> None:
    w = {"w": jnp.arange(32.0).reshape(8, 4)}
    where = {"mesh": {"data": 8}, "tactics": [DataParallel("data")], "roles": {"batch": "w"}}
    planned = shardwise.plan(scaled, w, planned_with, **where).jit(scaled)
    for rate in (0.25, np.float32(0.25), jnp.full((), 0.25, jnp.float32), jnp.asarray(0.25), 1.0):
        got, want = planned(w, rate), jax.jit(scaled)(w, rate)
        assert jax.tree.map(lambda a: (a.dtype, a.weak_type), got) == jax.tree.map(
            lambda a: (a.dtype, a.weak_type), want
        )
        np.testing.assert_allclose(got["twice"], want["twice"])
        assert got["w"].sharding.spec == jax.sharding.PartitionSpec("data")


def test_an_integer_planned_as_a_number_may_come_as_an_array() -> None:
    def power(x, n):
        return jax.lax.fori_loop(0, n, lambda _, y: y * x, jnp.ones_like(x))

    x = jnp.arange(8.0)
    plan = shardwise.plan(power, x, 3, mesh={"data": 8}, tactics=[DataParallel("data")], roles={"batch": "x"})
    for n in (2, np.int32(2), jnp.int32(3)):
        np.testing.assert_allclose(plan.jit(power)(x, n), x ** int(n))


def test_a_weak_type_that_changes_the_program_needs_a_plan_of_its_own() -> None:
    w = {"w": jnp.ones((8, 4), jnp.bfloat16)}
    where = {"mesh": {"data": 8}, "tactics": [DataParallel("data")], "roles": {"batch": "w"}}
    planned = shardwise.plan(scaled, w, 0.5, **where).jit(scaled)
    assert planned(w, 0.25)["w"].dtype == jnp.bfloat16
    with pytest.raises(PlanError, match="plan again"):
        planned(w, jnp.float32(0.25))  # a strong float32 makes the product float32
    dropin = shardwise.jit(scaled, **where)
    assert [dropin(w, r)["w"].dtype for r in (jnp.float32(1), jnp.asarray(1.0))] == [jnp.float32, jnp.bfloat16]


def test_every_call_is_checked_not_only_the_first() -> None:
    plan = made()
    w, x = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), (W, X))
    planned = plan.jit(step)
    planned(w, x)
    for wrong in (jnp.ones((64, 8)), jnp.ones((32, 8), jnp.bfloat16), jnp.ones((32, 8), jnp.int32)):
        with pytest.raises(PlanError, match="plan again"):
            planned(w, wrong)
    np.testing.assert_allclose(planned(w, x), jax.jit(step)(w, x), rtol=1e-5)


def test_results_are_passed_in_again() -> None:
    """JAX's type of an array tells the mesh that it lies on; that is no reason to plan again, with its sharding for a pin."""
    program = zoo.parse("gpt:tiny")
    state, batch = program.make_args(0)[:-1], program.make_args(0)[-1]
    tactics = [FSDP("data"), Megatron("model")]
    train = shardwise.jit(
        program.fn, mesh={"data": 4, "model": 2}, tactics=tactics, roles={"batch": "batch", "params": "params"}
    )
    first = train.planned(*state, batch)
    for _ in range(3):
        *state, _ = train(*state, batch)
        assert train.planned(*state, batch) is first


def test_other_static_arguments_are_another_program() -> None:
    def scale(x, n):
        return x * n if n > 1 else jnp.tanh(x)

    where = {"mesh": {"data": 8}, "tactics": [DataParallel("data")], "roles": {"batch": "x"}}
    planned = shardwise.plan(scale, X, 2, static_argnames="n", **where).jit(scale)
    x = jnp.ones((32, 8))
    assert float(planned(x, 2)[0, 0]) == float(planned(x, n=3)[0, 0]) - 1 == 2
    with pytest.raises(PlanError, match="plan again"):
        planned(x, 1)


def test_a_call_costs_little_more_than_jax_jit() -> None:
    """The bar is 100 µs (make bench-jit); a busy machine is given ten times that."""
    from benchmarks.jit import measure

    assert measure(101, calls=60).added_s < 1e-3


def test_explain_diff_and_code() -> None:
    plan = made()
    whole = shardwise.plan(step, W, X, mesh={"data": 2, "model": 4}, tactics=[])
    assert "float32[8, 64/model]" in plan.explain("w/in") and 'P(None, "model"), 4 shards' in plan.explain("w/in")
    difference = plan.diff(whole)
    assert "w/in: float32[8, 64/model] | float32[8, 64]" in difference and "- w/{in[1], out[0]}" in difference
    assert plan.diff(made()) == "the plans are the same\n"
    scope: dict = {}
    exec(plan.code(), scope)
    assert scope["IN_SPECS"]["w"]["out"] == jax.sharding.PartitionSpec("model")
