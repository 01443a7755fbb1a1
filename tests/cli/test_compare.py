"""``shardwise compare``: strategies and saved plans side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise
from shardwise import zoo
from shardwise.cli.main import main
from shardwise.tactics.strategies import FSDP

WHERE = ("--topology", "v5e:2x2", "--mesh", "data=4")
COMMAND = ("compare", "zoo:mlp:tiny", *WHERE)
FILE = """
import jax, jax.numpy as jnp
def shape(*sizes): return jax.ShapeDtypeStruct(sizes, "float32")
def make(): return (lambda w, x: jnp.tanh(x @ w)), (shape(64, 64), shape(4096, 64))
"""


def save(file: Path, target: str = "mlp:tiny", **where: object) -> str:
    program = zoo.parse(target)
    made = shardwise.plan(
        program.fn,
        *program.args,
        tactics=[FSDP("data")],
        roles={"batch": "batch", "params": "params"},
        donate_argnums=program.donate_argnums,
        **{"mesh": {"data": 4}, "topology": "v5e:2x2", **where},
    )
    made.save(file)
    return str(file)


def test_the_best_is_first_within_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = save(tmp_path / "mine.json")
    assert main([*COMMAND, "--tactics", "dp,fsdp,zero2", "--plans", plan, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    times = [row["time_s"] for row in data["rows"]]
    assert times == sorted(times) and all(row["fits"] for row in data["rows"])
    rows = {row["name"]: row for row in data["rows"]}
    assert set(rows) == {"replicated", "dp:data", "fsdp:data", "zero2:data", f"plan {plan}"}
    predicted = shardwise.load_plan(plan).predicted
    assert rows[f"plan {plan}"]["time_s"] == predicted.time_s
    assert rows["replicated"]["comm_s"] == 0 < rows["dp:data"]["comm_s"]
    assert main([*COMMAND, "--tactics", "dp,fsdp,zero2", "--plans", plan]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on data 4: v5e:2x2, ") and "fsdp:data" in out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80


def test_devices_and_mesh_are_those_of_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = save(Path("mine.json"))
    assert main(["compare", "zoo:mlp:tiny", "--tactics", "fsdp", "--plans", plan, plan]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step on data 4: v5e:2x2, ") and out.count("mine.json") == 1


def test_what_does_not_fit_comes_last(capsys: pytest.CaptureFixture[str]) -> None:
    large = ("compare", "zoo:mlp:full,layers=2", *WHERE, "--tactics", "dp,fsdp", "--json")
    assert main(large) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert [row["name"] for row in rows if row["peak_bytes"] == max(r["peak_bytes"] for r in rows)] == ["replicated"]


def test_all_says_why_a_strategy_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--tactics", "dp,expert"]) == 0
    assert "1 combination not possible: --all or .refused says why" in capsys.readouterr().out
    assert main([*COMMAND, "--tactics", "dp,expert", "--all"]) == 0
    out = capsys.readouterr().out
    assert "expert:data: expert: the program has no parameter" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_file_says_what_its_batch_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(FILE)
    command = ["compare", f"{tmp_path}/model.py:make", *WHERE, "--tactics", "dp"]
    assert main(command) == 0
    inferred = capsys.readouterr().out
    assert main([*command, "--batch", "y"]) == 1
    assert "no argument has the path 'y'" in capsys.readouterr().err
    assert main([*command, "--batch", "x", "--params", "w"]) == 0
    assert "dp:data" in inferred and capsys.readouterr().out == inferred


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            {"target": "mlp:tiny,batch=32"},
            "other shapes: batch/inputs is float32[32, 48] there and float32[16, 48] here",
        ),
        ({"target": "t2b:tiny"}, "is for another program: params/"),
        ({"topology": "v5p:2x2x1"}, "is a plan for v5p:2x2x1, and strategies are compared on v5e:2x2"),
    ],
)
def test_plans_of_something_else_are_refused(
    made: dict[str, str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = save(tmp_path / "other.json", **made)
    assert main([*COMMAND, "--tactics", "dp", "--plans", plan]) == 1
    caught = capsys.readouterr()
    assert says in caught.err and not caught.out and caught.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [*COMMAND, "--tactics", "dp,fsdpp"],
            "no tactic is called 'fsdpp' (did you mean 'fsdp'?); there are pipeline, edges, dp, fsdp",
        ),
        ([*COMMAND, "--tactics", ""], "'' is no list of tactics"),
        ([*COMMAND, "--plans", "nowhere.json"], "cannot read nowhere.json"),
        (["compare", "zoo:nope", *WHERE], "nope"),
        (["compare", "zoo:mlp:tiny", "--mesh", "data=?"], "give all its sizes"),
        (["compare", "zoo:mlp:tiny"], "say what to compare on: mesh="),
        (["compare", "zoo:mlp:tiny", "--topology", "v5e:2x2", "--mesh", "data=3"], "devices"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    caught = capsys.readouterr()
    assert says in caught.err and not caught.out and "Traceback" not in caught.err
