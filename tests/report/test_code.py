"""The code of a plan is executed: it places arguments and computes the step as planned, whatever the paths are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import shardwise
from shardwise import zoo
from shardwise.cli.main import main
from shardwise.errors import PlanError
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.code import STYLES

P = jax.sharding.PartitionSpec
WHERE: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}}


def executed(plan: Plan, file: Path | str = "plan.json", style: str = "jax") -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(plan.code(style, str(file)), scope)
    return scope


def test_the_file_runs_the_step_as_planned(tmp_path: Path) -> None:
    file = tmp_path / 'it\'s "a" plan.json'
    program = zoo.load("t2b", "tiny")
    args = jax.tree.map(lambda a: np.full(a.shape, 0.1).astype(a.dtype), program.args)
    plan = shardwise.plan(program.fn, *args, **WHERE, tactics="fsdp:data,megatron:model")
    plan.save(file)
    code = executed(plan, file)
    mesh = code["make_mesh"]()
    assert mesh.axis_names == ("data", "model") and mesh.devices.shape == (2, 4)
    names = code["ARGUMENTS"]
    placed = code["place"](mesh, **dict(zip(names, args, strict=True)))
    for given, array in zip(plan.arguments, jax.tree.leaves([placed[name] for name in names]), strict=True):
        assert array.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(mesh, P(*[axes or None for axes in given.spec])), array.ndim
        )
    named = tuple(code["shardings"](mesh, **dict(zip(names, args, strict=True))).values())
    plain = jax.tree.leaves(jax.jit(program.fn)(*args))
    for run in (code["planned"](program.fn, *args, mesh=mesh), jax.jit(program.fn, in_shardings=named)):
        for ours, expected in zip(jax.tree.leaves(run(*placed.values())), plain, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-3)


def test_specs_are_those_of_the_plan_and_layers_are_written_once() -> None:
    program = zoo.load("t2b", "tiny", scan=False, layers=3)
    plan = shardwise.plan(program.fn, *program.args, **WHERE, tactics="fsdp:data,megatron:model")
    code = executed(plan)
    got = [code["specs"](name, tree) for name, tree in zip(code["ARGUMENTS"], program.args, strict=True)]
    leaves = jax.tree.leaves(got, is_leaf=lambda x: isinstance(x, P))
    assert leaves == jax.tree.leaves(plan.in_specs, is_leaf=lambda x: isinstance(x, P))
    text = plan.code()
    assert "for k in range(0, 3)" in text and text.count('"gate"') == 1
    with pytest.raises(KeyError, match="no argument params/other"):
        code["specs"]("params", {"other": 1})


def test_arrays_in_the_memory_of_the_host_are_placed_there() -> None:
    program = zoo.load("t2b", "tiny")
    plan = shardwise.plan(program.fn, *program.args, **WHERE, tactics="dp:data", offload=True)
    code = executed(plan)
    assert code["IN_HOST_MEMORY"] == tuple(a.path for a in plan.arguments if a.host) != ()
    named = dict(zip(code["ARGUMENTS"], program.args, strict=True))
    ours = jax.tree.leaves(list(code["shardings"](code["make_mesh"](), **named).values()))
    kinds = [{True: "pinned_host"}.get(a.host) for a in plan.arguments]
    assert [s.memory_kind if s.memory_kind == "pinned_host" else None for s in ours] == kinds
    assert plan.insights and "over  " not in " ".join(plan.insights)


def test_arguments_may_have_the_names_of_the_code() -> None:
    plan = shardwise.plan(lambda mesh, P: mesh @ P, jnp.ones((64, 8)), jnp.ones((8, 8)), mesh={"data": 4}, tactics=[])
    code = executed(plan)
    placed = code["place"](code["make_mesh"](), mesh=jnp.ones((64, 8)), P=jnp.ones((8, 8)))
    assert placed["mesh"].sharding.spec == P() and code["ARGUMENTS"] == ("mesh", "P")


@pytest.mark.parametrize("style", STYLES)
def test_paths_stay_text(style: str) -> None:
    names = [
        "it's",
        'a "quote"',
        "back\\slash",
        '"): raise SystemExit #',
        "line\nbreak",
        "nul\0",
        "ü",
        "{k}",
        "a/b",
        "a",
        "0",
        "\ud800",
    ]
    tree = {n: jnp.ones((8, 4 + k)) for k, n in enumerate(names)} | {f"L{{k}}{n}": jnp.ones(8) for n in range(4)}
    plan = shardwise.plan(
        lambda w: sum(x.sum() for x in w.values()), tree, mesh={"da'ta": 4}, tactics="dp", roles={"batch": "w"}
    )
    text = plan.code(style, "pl'\n\"an.json").encode("utf-8", "backslashreplace").decode()
    if style == "maxtext":
        assert yaml.safe_load(text)["mesh_axes"] == ["da'ta"]
        return
    scope: dict[str, Any] = {}
    exec(text, scope)
    if style == "jax":
        assert scope["PLAN"] == "pl'\n\"an.json"
        assert jax.tree.leaves(scope["specs"]("w", tree), is_leaf=lambda x: isinstance(x, P)) == [
            plan.spec(a.path) for a in plan.arguments
        ]
    else:
        assert set(scope["names"]) == {a.path for a in plan.arguments}


def test_logical_rules_give_the_specs_under_flax() -> None:
    program = zoo.load("t2b", "tiny")
    plan = shardwise.plan(program.fn, *program.args, **WHERE, tactics="fsdp:data,megatron:model")
    code = executed(plan, style="flax")
    written = [a for a in plan.arguments if a.shape and not a.path.startswith("opt_state/")]
    assert set(code["names"]) == {a.path for a in written}  # those of the optimizer follow from the parameters
    for a in written:
        assert list(code["spec_of"](a.path)) == [x[0] if len(x) == 1 else x or None for x in a.spec], a.path
    assert {"batch", "heads", "mlp", "width"} <= {name for name, _ in code["rules"]}
    config = yaml.safe_load(plan.code("maxtext"))
    assert config["logical_axis_rules"] == json.loads(json.dumps(code["rules"]))
    assert flax.linen.logical_to_mesh_axes(("batch",), code["rules"]) == P("data")


def test_a_name_may_have_several_rules_and_state_its_own() -> None:
    """A width is sharded on both axes, and in the embedding on the one that the vocabulary leaves."""
    program = zoo.load("t2b", "tiny")
    pins = {"*/embed": P("model", "data")}
    plan = shardwise.plan(program.fn, *program.args, **WHERE, tactics="fsdp:data+model", pins=pins)
    code = executed(plan, style="flax")
    assert [axes for name, axes in code["rules"] if name == "width"] == [("data", "model"), "data"]
    assert list(code["spec_of"]("params/embed")) == ["model", "data"]
    zero = executed(shardwise.plan(program.fn, *program.args, **WHERE, tactics="zero1:data"), style="flax")
    moments = [path for path in zero["names"] if path.startswith("opt_state/")]
    assert moments and any("data" in zero["spec_of"](path) for path in moments)
    assert all(set(zero["spec_of"](path)) == {None} for path in zero["names"] if path.startswith("params/"))


def test_moments_beside_their_parameters_in_one_argument() -> None:
    """As in the recipes: the parameters name the tree, and rules have theirs alone."""

    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum((x * p["n"]["s"] @ p["up"]["w"] + p["up"]["b"]) ** 2))(state["params"])
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["opt"]["mu"], grads)
        return {"params": jax.tree.map(lambda p, m: p - m, state["params"], mu), "opt": {"mu": mu}}

    params = {"up": {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}, "n": {"s": jnp.ones(64)}}
    state = {"opt": {"mu": params}, "params": params}
    plan = shardwise.plan(step, state, jnp.ones((256, 64)), **WHERE, tactics="fsdp:data")
    assert plan.roles["params"] == ("state/params",)
    text = plan.code()
    assert "\nPARAMS = {" in text and '"mu": PARAMS' in text and text.count('"up"') == 1
    names = executed(plan, style="flax")["names"]
    assert {path.rpartition("/")[0] for path in names} == {"state/params/up", "state/params/n", ""}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    plan = shardwise.plan(lambda w, x: x @ w, jnp.ones((8, 8)), jnp.ones((64, 8)), mesh={"data": 4}, tactics="dp")
    plan.save("plan.json")
    assert main(["code", "plan.json"]) == 0
    assert capsys.readouterr().out == load_plan("plan.json").code()
    assert main(["code", "plan.json", "--style", "flax", "--output", "rules.py"]) == 0
    assert (tmp_path / "rules.py").read_text() == load_plan("plan.json").code("flax")
    assert main(["code", "plan.json", "--output", "nowhere/x.py"]) == 1
    assert "cannot write" in capsys.readouterr().err
    with pytest.raises(PlanError, match="one of jax, flax, maxtext, not 'tunix'"):
        plan.code("tunix")
