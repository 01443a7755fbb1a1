"""Tactics on several axes, and tactics as text."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import shardwise as sw
from shardwise.cli.main import main
from shardwise.tactics.named import AtPlaces
from shardwise.tactics.text import NAMES, as_tactics

MESH = {"data": 2, "model": 4}
ROLES = {"batch": "x", "params": ("table", "up", "down")}
SHAPES = [
    jax.ShapeDtypeStruct(s, d)
    for s, d in [((64, 32), "int32"), ((512, 64), "f4"), ((64, 256), "f4"), ((256, 64), "f4")]
]


def step(x: Any, table: Any, up: Any, down: Any) -> Any:
    def loss(weights: Any) -> Any:
        table, up, down = weights
        h = table[x]
        return ((h + jax.nn.relu(h @ up) @ down) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, (table, up, down), jax.grad(loss)((table, up, down)))


def decided(tactics: Any, **options: Any) -> Any:
    return sw.plan(step, *SHAPES, mesh=MESH, roles=ROLES, tactics=tactics, **options).choices


@pytest.mark.parametrize("tactic", [sw.DataParallel, sw.FSDP, sw.ZeRO1, sw.ZeRO2, sw.Megatron])
def test_axes_one_by_one_together_or_all(tactic: Any) -> None:
    in_turn = decided([tactic("data"), tactic("model")])
    assert {d.axis for d in in_turn} == {"data", "model"}
    for several in (tactic("data", "model"), tactic(("data", "model")), tactic(["data", "model"]), tactic()):
        assert decided([several]) == in_turn
    assert tactic("data", "data") == tactic("data") != tactic("model")


@pytest.mark.parametrize(
    "make",
    [
        lambda axes: sw.Shard("up", 1, axes),
        lambda axes: sw.Keep("up", axes),
        lambda axes: sw.SequenceParallel(axes, ("x", 1)),
        lambda axes: sw.ContextParallel(axes, ("x", 1), 1),
        lambda axes: sw.ExpertParallel(axes, ("up", 0)),
        lambda axes: sw.EdgeSharding(axes, ("x", 0)),
    ],
)
def test_a_tuple_of_axes_beside_a_place(make: Any) -> None:
    assert decided([make(("data", "model"))]) == decided([make("data"), make("model")]) != decided([make("data")])


def test_without_an_axis_a_place_is_sharded_or_kept_on_all_of_the_mesh() -> None:
    every = ("data", "model")
    assert decided([sw.Keep("up")]) == decided([sw.Keep("up", every)]) == decided([sw.Replicate("up")])
    assert decided([sw.Shard("up", 1)]) == decided([sw.Shard("up", 1, every)]) != decided([])


def test_several_axes_go_to_one_dimension() -> None:
    plan = sw.plan(step, *SHAPES, mesh=MESH, roles=ROLES, tactics=[sw.Shard("up", 1, ("model", "data"))])
    assert plan.array("up").spec == ((), ("model", "data"))


@pytest.mark.parametrize(
    ("text", "tactics"),
    [
        ("fsdp", [sw.FSDP()]),
        ("fsdp:data+model", [sw.FSDP("data", "model")]),
        (" dp:data , megatron:model ", [sw.DataParallel("data"), sw.Megatron("model")]),
        ("megatron+sequence:model", [sw.Megatron("model"), AtPlaces("sequence", ("model",))]),
        ("zero1:data,zero2:model", [sw.ZeRO1("data"), sw.ZeRO2("model")]),
        ("auto,auto:model", [sw.Auto(), sw.Auto("model")]),
        (["dp:data", sw.Auto("model")], [sw.DataParallel("data"), sw.Auto("model")]),
        (sw.FSDP("data"), [sw.FSDP("data")]),
        ([], []),
    ],
)
def test_text(text: Any, tactics: list[Any]) -> None:
    assert as_tactics(text) == tuple(tactics)


def test_every_name_is_a_tactic() -> None:
    assert len([as_tactics(f"{name}:x") for name in NAMES]) == 13


def test_text_decides_as_the_objects_do() -> None:
    assert decided("dp:data,megatron:model") == decided([sw.DataParallel("data"), sw.Megatron("model")])
    assert decided("fsdp") == decided([sw.FSDP("data", "model")])
    assert decided("context:data") == decided([sw.ContextParallel("data", ("x", 1))])
    assert decided("vocabulary:model") == decided([sw.Shard("table", 0, "model")])
    searched = decided("dp:data,auto:model", budget_evals=50)
    assert searched == decided([sw.DataParallel("data"), sw.Auto("model")], budget_evals=50)


def test_text_wherever_there_are_tactics(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    jitted = sw.jit(step, mesh=MESH, roles=ROLES, tactics="fsdp:data")
    plan = sw.plan(step, *SHAPES, mesh=MESH, roles=ROLES, tactics="fsdp:data")
    assert jitted._asked.tactics == (sw.FSDP("data"),)
    assert plan.what_if("megatron:model").decisions == plan.what_if(sw.Megatron("model")).decisions != plan.decisions
    command = ["plan", "zoo:mlp:tiny", "--mesh", "data=2,model=2", "--output", str(tmp_path / "plan.json")]
    assert main([*command, "--tactics", "fsdp:data"]) == 0
    saved = sw.load_plan(tmp_path / "plan.json")
    assert saved.search is None and {d.axis for d in saved.choices} == {"data"}
    assert main(["what-if", str(tmp_path / "plan.json"), "zoo:mlp:tiny", "--tactics", "megatron:model"]) == 0
    assert "over model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("fsd:data", r"no tactic is called 'fsd' \(did you mean 'fsdp'\?\); there are pipeline, edges, .*, auto"),
        ("zigzag", r"no tactic is called 'zigzag'; there are pipeline, edges, "),
        ("dp:data,", "is no list of tactics: write names and axes, such as dp:data,megatron:model"),
        ("dp:", "is no list of tactics"),
        ("dp:seq", "seq"),
        ("expert:data", "expert: the program has no parameter dimension"),
        ([3], "a tactic is text such as 'fsdp:data', or an object such as FSDP\\('data'\\), not int"),
        ([sw.FSDP], "not FSDP"),
    ],
)
def test_what_is_wrong_is_said(wrong: Any, message: str) -> None:
    with pytest.raises(sw.ShardwiseError, match=message):
        decided(wrong)


def test_a_number_is_no_axis() -> None:
    with pytest.raises(sw.DecisionError, match="FSDP: a mesh axis is a name, such as 'data', not 1"):
        sw.FSDP("data", 1)  # type: ignore[arg-type]


def test_compare_takes_names_alone() -> None:
    compared = sw.compare(step, *SHAPES, mesh=MESH, roles=ROLES, tactics="dp,megatron")
    assert {row.name for row in compared.rows} >= {"dp:data,megatron:model", "replicated"}
    with pytest.raises(sw.DecisionError, match="dp:data: every axis is compared with every tactic"):
        sw.compare(step, *SHAPES, mesh=MESH, roles=ROLES, tactics="dp:data")
    with pytest.raises(sw.DecisionError, match="no tactic is called 'auto'"):
        sw.compare(step, *SHAPES, mesh=MESH, roles=ROLES, tactics="auto")
