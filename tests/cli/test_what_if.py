"""``shardwise what-if``: the library's answer, on a saved plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise
from shardwise import zoo
from shardwise.cli.main import main
from shardwise.tactics.strategies import DataParallel

TARGET = "zoo:mlp:tiny,width=2048,batch=65536"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = zoo.parse(TARGET.removeprefix("zoo:"))
    where = {"mesh": {"data": 4}, "topology": "v5e:1x4", "roles": {"batch": "batch"}}
    path = tmp_path_factory.mktemp("plans") / "dp.json"
    shardwise.plan(program.fn, *program.args, tactics=[DataParallel("data")], **where).save(path)
    return path


def test_figures_are_the_librarys(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(saved), TARGET, "--without", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    program = zoo.parse(TARGET.removeprefix("zoo:"))
    found = shardwise.load_plan(saved).bind(program.fn, *program.args).what_if(without=1)
    assert data == json.loads(json.dumps(found.to_json()))
    assert main(["what-if", str(saved), TARGET, "--shard", "params/first/kernel,1,data"]) == 0
    out = capsys.readouterr().out
    assert "step time" in out and max(map(len, out.splitlines())) <= 80
    assert main(["what-if", str(saved), TARGET, "--topology", "v5p:1x2x2"]) == 0
    assert "on v5p:1x2x2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "--without, --tactics, --shard, --keep or --topology; the decisions are:\n  1. batch/{inputs[0]"),
        (["--without", "7"], "no decision 7"),
        (["--shard", "params/w"], "write --shard PATH,DIM,AXIS"),
        (["--shard", "params/first/kernel,a,data"], "'a' is no dimension"),
        (["--keep", "params/first/kernal,data"], "did you mean"),
        (["--keep", "params/first/kernel,nowhere"], "nowhere"),
        (["--topology", "v5e:2x4"], "v5e:2x4"),
    ],
)
def test_what_is_wrong_is_said(saved: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", str(saved), TARGET, *options]) == 1
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out and "Traceback" not in shown.err
