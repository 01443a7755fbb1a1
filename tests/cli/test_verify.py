"""``shardwise verify``: a saved plan against the compiled program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import shardwise
from shardwise import zoo
from shardwise.tactics.strategies import DataParallel


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise.cli.main", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_verify_a_saved_plan(tmp_path: Path) -> None:
    program = zoo.parse("mlp:tiny")
    where = {"mesh": {"data": 8}, "roles": {"batch": "batch"}}
    plan = shardwise.plan(program.fn, *program.args, tactics=[DataParallel("data")], **where)
    file = tmp_path / "plan.json"
    plan.save(file)
    done = run(str(file), "zoo:mlp:tiny")
    assert done.returncode == 0, done.stderr
    assert "compiled for host" in done.stdout and "100.0% of bytes as predicted" in done.stdout
    data = json.loads(run(str(file), "zoo:mlp:tiny", "--json").stdout)
    assert data["matched"] == 1 and data["mesh"] == {"data": 8} and data["backend"] == "host"
    assert {(row["kind"], tuple(row["axes"])) for row in data["collectives"]} == set(plan.moved())
    assert data["outputs"] is None  # shapes alone are compiled and not run
    other = run(str(file), "zoo:mlp:tiny,batch=64")
    assert other.returncode == 1 and "plan again" in other.stderr and "Traceback" not in other.stderr
    missing = run(str(tmp_path / "none.json"), "zoo:mlp:tiny")
    assert missing.returncode == 1 and "cannot read" in missing.stderr
