"""Paths as a person may write them, and where they are asked for."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.cli.main import main
from shardwise.ir.paths import find_path, find_paths, matching

ARGUMENTS = [
    "state/0/layers/0/mlp/up",
    "state/0/layers/0/mlp/down",
    "state/0/layers/1/mlp/up",
    "state/0/layers/1/mlp/down",
    "state/0/embed",
    "state/1/count",
    "batch/x",
    "batch['a/b']",
]
OUTPUTS = ["out/0/embed", "out/loss"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("batch/x", ["batch/x"]),
        ("batch['a/b']", ["batch['a/b']"]),
        ("state[1]", ["state/1/count"]),
        ("state[0]['embed']", ["state/0/embed"]),
        ('state[0]["embed"]', ["state/0/embed"]),
        ("state/0/layers[1]/mlp/up", ["state/0/layers/1/mlp/up"]),
        ("state/1/", ["state/1/count"]),
        ("count", ["state/1/count"]),
        ("1/mlp/up", ["state/0/layers/1/mlp/up"]),
        ("layers/0", ARGUMENTS[:2]),
        ("layers/*/up", [ARGUMENTS[0], ARGUMENTS[2]]),
        ("*/mlp/down", [ARGUMENTS[1], ARGUMENTS[3]]),
        ("*/mlp", ARGUMENTS[:4]),
        ("state/*", ARGUMENTS[:6]),
        ("embed", ["state/0/embed"]),
        ("out/0/embed", ["out/0/embed"]),
        ("loss", ["out/loss"]),
        ("out[0]", ["out/0/embed"]),
        ("nowhere", []),
        ("", []),
        ("pdate", []),
    ],
)
def test_what_is_meant(asked: str, found: list[str]) -> None:
    assert matching(asked, ARGUMENTS, OUTPUTS) == found


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(
        sw.QueryError, match=r"'mlp/up' is the end of several paths: state/0/layers/0/mlp/up, state/0/layers/1"
    ):
        find_paths("mlp/up", ARGUMENTS)
    with pytest.raises(sw.QueryError, match=r"no argument or output has the path 'stat/0'; did you mean state/0, "):
        find_paths("stat/0", ARGUMENTS, OUTPUTS)
    with pytest.raises(sw.QueryError, match=r"no argument has the path 'z'; there are x, y"):
        find_path("z", ["x", "y"], what="argument")
    with pytest.raises(
        sw.QueryError, match=r"'\*/up' must match one argument or output, and matches 2: state/0/layers/0"
    ):
        find_path("*/up", ARGUMENTS)
    with pytest.raises(sw.QueryError, match=r"p0, p1, p2, p3, p4, p5, p6, p7 and 12 more"):
        find_path("*", [f"p{k}" for k in range(20)])


def step(state: Any, batch: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = batch["x"]
        for layer in weights:
            h = jax.nn.relu(h @ layer["mlp"]["up"]) @ layer["mlp"]["down"]
        return (h**2).mean()

    return (jax.tree.map(lambda w, g: w - g, state[0], jax.grad(loss)(state[0])), state[1] + 1)


def shape(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, "float32")


LAYER = {"mlp": {"up": shape(64, 128), "down": shape(128, 64)}}
ARGS = ([[LAYER, LAYER], shape()], {"x": shape(256, 64)})


def made(**options: Any) -> sw.Plan:
    return sw.plan(step, *ARGS, mesh={"data": 2, "model": 2}, **options)


def test_in_roles_tactics_and_specs() -> None:
    plan = made(tactics="fsdp:data,megatron:model", roles={"batch": "x", "params": "state[0]"})
    assert (
        plan.choices
        == made(tactics="fsdp:data,megatron:model", roles={"batch": "batch/x", "params": "state/0"}).choices
    )
    assert (
        plan.array("0/mlp/up").spec == plan.array("state[0][0]['mlp']/up").spec == plan.array("state/0/0/mlp/up").spec
    )
    assert plan.explain("1/mlp/up") == plan.explain("state/0/1/mlp/up")
    assert made(tactics=[sw.Keep("*/up", "data"), sw.FSDP("data")], roles={"batch": "x", "params": "*/mlp"}).choices
    each = made(tactics=[sw.Shard("state/0/0/mlp/up", 1, "model"), sw.Shard("state/0/1/mlp/up", 1, "model")])
    assert made(tactics=[sw.Shard("*/up", 1, "model")]).choices == each.choices
    changed = plan.what_if(sw.Replicate("1/mlp"), pins={"batch/x": P()})
    assert {spec.path for spec in changed.specs} >= {"state/0/1/mlp/up", "batch/x"}
    names = plan.rules({"*/up": ("embed", "hidden")}).names
    assert list(names) == ["state/0/0/mlp/up", "state/0/1/mlp/up"]


def test_in_pins() -> None:
    plan = made(tactics=[], pins={"*/up": P(None, "model"), "x": P("data")})
    assert plan.array("0/mlp/up").spec == plan.array("1/mlp/up").spec == ((), ("model",)) and plan.array(
        "batch/x"
    ).spec[0] == ("data",)
    with pytest.raises(sw.DecisionError, match="'mlp/up' is the end of several paths"):
        made(tactics=[], pins={"mlp/up": P(None, "model")})
    with pytest.raises(sw.DecisionError, match="no argument or output has the path 'xx', and no inner value is marked"):
        made(tactics=[], pins={"xx": P("data")})


def test_in_micro_batches() -> None:
    assert made(tactics=[], microbatches=2, roles={"batch": "x"}).variant.batch == ("batch/x",)
    with pytest.raises(sw.VariantError, match="the batch, state/1, has no dimension that counts examples"):
        made(tactics=[], microbatches=2, roles={"batch": "state[1]"})


def test_in_questions_to_an_analysis() -> None:
    analysis = sw.analyze(step, *ARGS)
    assert analysis.color_of("x", 0) is analysis.color_of("batch/x", 0)
    assert analysis.why("0/mlp/up", 1, "0/mlp/down", 0).tied


def test_on_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "plan.json")
    sw.plan(step, *ARGS, mesh={"data": 2, "model": 2}, tactics=[sw.Shard("*/up", 1, "model")]).save(file)
    assert main(["explain", file, "state[0]/0/mlp/up", "--json"]) == 0
    assert '"path": "state/0/0/mlp/up"' in capsys.readouterr().out
    assert main(["explain", file, "mlp/up"]) == 1
    assert "is the end of several paths" in capsys.readouterr().err
