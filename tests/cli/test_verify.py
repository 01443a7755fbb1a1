"""``shardwise verify``: a saved plan against the compiled program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise import zoo
from shardwise.cli.main import main
from shardwise.tactics.strategies import DataParallel


def test_verify_a_saved_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first time in a new process, which has no devices yet."""
    program = zoo.parse("mlp:tiny")
    where = {"mesh": {"data": 8}, "roles": {"batch": "batch"}}
    plan = shardwise.plan(program.fn, *program.args, tactics=[DataParallel("data")], **where)
    file = tmp_path / "plan.json"
    plan.save(file)
    command = [sys.executable, "-m", "shardwise.cli.main", "verify", str(file), "zoo:mlp:tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiled for host" in done.stdout and "100.0% of bytes as predicted" in done.stdout
    assert main(["verify", str(file), "zoo:mlp:tiny", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["matched"] == 1 and data["mesh"] == {"data": 8} and data["backend"] == "host"
    assert {(row["kind"], tuple(row["axes"])) for row in data["collectives"]} == set(plan.moved())
    assert data["outputs"] is None  # shapes alone are compiled and not run
    assert main(["verify", str(file), "zoo:mlp:tiny,batch=64"]) == 1
    said = capsys.readouterr().err
    assert "plan again" in said and "Traceback" not in said
    assert main(["verify", str(tmp_path / "none.json"), "zoo:mlp:tiny"]) == 1
    assert "cannot read" in capsys.readouterr().err
