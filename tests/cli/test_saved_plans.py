"""``shardwise diff`` and ``shardwise explain``: saved plans in words, and exit codes that scripts can rely on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import shardwise
from shardwise import zoo
from shardwise.cli.main import main
from shardwise.report.difference import difference_data, difference_text
from shardwise.tactics.strategies import FSDP, DataParallel

ROLES = {"batch": "batch", "params": "params"}


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    program = zoo.parse("mlp:tiny,width=2048,batch=65536")
    for name, tactic, devices in (("dp", DataParallel, 4), ("fsdp", FSDP, 4), ("dp2", DataParallel, 2)):
        where = {"mesh": {"data": devices}, "topology": f"v5e:1x{devices}", "roles": ROLES}
        shardwise.plan(program.fn, *program.args, tactics=[tactic("data")], **where).save(folder / f"{name}.json")
    shapes = [jax.ShapeDtypeStruct(sizes, "float32") for sizes in ((256, 256), (65536, 256))]
    where = {"mesh": {"data": 4}, "roles": {"batch": "x", "params": "w"}}
    shardwise.plan(product, *shapes, tactics=[FSDP("data")], **where).save(folder / "product.json")
    (folder / "broken.json").write_text("{")
    return folder


@pytest.fixture(autouse=True)
def here(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)


def test_the_same_plan_is_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "dp.json", "dp.json"]) == 0
    assert capsys.readouterr().out == "the plans are the same\n"
    assert main(["diff", "dp.json", "dp.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True


def test_how_a_plan_was_found_is_no_difference() -> None:
    one = shardwise.load_plan("dp.json")
    assert difference_data(one, replace(one, versions=(("jax", "0.0"),)))["same"]


def test_whatever_is_done_otherwise_is_a_difference_that_is_named() -> None:
    one = shardwise.load_plan("fsdp.json")
    moved = replace(one.sharded, passed=((0,), *one.sharded.passed[1:]))
    donated = tuple(replace(a, donated=a.path.startswith("params/first")) for a in one.arguments)
    for other, words in (
        (replace(one, device_order=(1, 0, 2, 3)), "device order: 0 1 2 3 | 1 0 2 3"),
        (replace(one, arguments=donated), "donated: nothing more | params/first/bias and 1 more"),
        (replace(one, sharded=moved), "ops computed on other axes: 1"),
        (replace(one, fingerprint="0" * 16), f"program: {one.fingerprint[:12]} | 000000000000"),
    ):
        assert not difference_data(one, other)["same"] and words in difference_text(one, other, ("a", "b"))


def test_what_differs_is_said_in_words_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "dp.json", "fsdp.json"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("dp.json | fsdp.json\n")
    assert "params/first/kernel: float32[48, 2048] | float32[48" in out.replace("\n  ", " ")
    assert "all-gather over data: 0 B | " in out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80


def test_the_figures_in_json_are_those_of_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "dp.json", "dp2.json", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    one, other = shardwise.load_plan("dp.json"), shardwise.load_plan("dp2.json")
    assert (data["one"]["time_s"], data["other"]["time_s"]) == (one.predicted.time_s, other.predicted.time_s)
    assert (data["one"]["mesh"], data["other"]["mesh"]) == ({"data": 4}, {"data": 2})
    assert {"what": "devices", "one": "v5e:1x4", "other": "v5e:1x2"} in data["facts"]


@pytest.mark.parametrize("file", ["none.json", "broken.json"])
def test_trouble_is_two_for_diff_and_one_line(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "dp.json", file]) == 2
    caught = capsys.readouterr()
    assert not caught.out and caught.err.startswith("shardwise: ") and caught.err.count("\n") == 1


def test_an_argument_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "product.json", "w"]) == 0
    out = capsys.readouterr().out
    assert "4 shards" in out and "all-gather over data" in out and "test_saved_plans.py:" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["explain", "product.json", "w", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["shape"] == [256, 256] and ["data"] in data["spec"]
    assert any(c["kind"] == "all-gather" for c in data["collectives"])


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_wrong_path_gets_near_ones(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "dp.json", "params/first/kernl", *options]) == 1
    caught = capsys.readouterr()
    assert not caught.out
    assert "no argument or output has the path 'params/first/kernl'; did you mean params/first/kernel" in caught.err


def test_with_its_program_a_saved_plan_tells_what_a_new_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    target = "zoo:mlp:tiny,width=2048,batch=65536"
    assert main(["explain", "dp.json", "batch/inputs"]) == 0
    assert "without it" not in capsys.readouterr().out
    assert main(["explain", "dp.json", "batch/inputs", target]) == 0
    assert "without it" in capsys.readouterr().out
    pages = []
    for command in (["report", "dp.json", "--json"], ["report", "dp.json", target, "--json"]):
        assert main(command) == 0
        pages.append(json.loads(capsys.readouterr().out))
    bare, whole = pages
    assert not bare["effects"] and not bare["baselines"] and bare["memory"] is None
    assert (
        whole["effects"]
        and whole["baselines"]
        and whole["memory"]["points"]
        and len(whole["lines"]) > len(bare["lines"])
    )
    assert main(["report", "dp.json", "zoo:mlp:tiny"]) == 1
    assert "the plan is for other shapes" in capsys.readouterr().err


def test_the_device_local_program_of_a_saved_plan(capsys: pytest.CaptureFixture[str]) -> None:
    target = "zoo:mlp:tiny,width=2048,batch=65536"
    assert main(["explain", "fsdp.json", target, "--program"]) == 0
    out = capsys.readouterr().out
    saved = shardwise.load_plan("fsdp.json")
    assert out.startswith(f"{saved.function} on data 4, one device of 4\n") and "all_gather(" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["explain", "fsdp.json", target, "--program", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    moved = {(c["kind"], tuple(c["axes"])): (c["count"], c["nbytes"]) for c in data["collectives"]}
    assert moved == saved.moved() != {}
    assert any(line["function"] == "psum_scatter" and line["axes"] == ["data"] for line in data["lines"])


def test_with_its_program_an_argument_has_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    target = "zoo:mlp:tiny,width=2048,batch=65536"
    assert main(["explain", "fsdp.json", "batch/inputs"]) == 0
    assert "device-local" not in capsys.readouterr().out
    assert main(["explain", "fsdp.json", "batch/inputs", target]) == 0
    _, _, lines = capsys.readouterr().out.partition("  in the device-local program:\n")
    assert lines.splitlines()[0].split() == ["batch/inputs", "f32[16384·data,48]"]
    assert 1 < len(lines.splitlines()) <= 14 and max(map(len, lines.splitlines())) <= 80


def test_the_program_is_that_of_all_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "dp.json", "batch/inputs", "zoo:mlp:tiny", "--program"])
    assert "leave PATH out" in capsys.readouterr().err
    assert main(["explain", "dp.json", "batch/inputs", "--program"]) == 1
    assert "'batch/inputs' is no target" in capsys.readouterr().err
