"""``shardwise doctor``: on a machine that is well, and where JAX is missing, broken, silent or without its backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.report import installation
from shardwise.report.installation import probe

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, which a test may change, whatever the metadata of this checkout say."""
    there = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4", "scipy": "1.17", "flax": "0.12.0"}
    there |= {"libtpu": "0.0.42", "optax": "0.2.5"}
    monkeypatch.setattr(installation, "_requirements", lambda: {"jax": ">=0.9", "numpy": ">=2.0"})
    monkeypatch.setattr(installation, "_version", lambda name: there.get(name, ""))
    monkeypatch.setattr(installation, "probe", lambda: ([("cpu", "cpu")], ""))
    return there


def test_a_machine_that_is_well() -> None:
    command = [sys.executable, "-m", "shardwise.cli.main", "doctor", "--json"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    data = json.loads(done.stdout)
    assert done.returncode == 0 and not done.stderr and data["problems"] == []
    assert data["works"] and len(data["devices"]) == 2
    versions = {p["name"]: p["version"] for p in data["packages"]}
    assert versions["jax"] == metadata.version("jax") and {"jaxlib", "numpy", "scipy"} <= set(versions)


def test_a_backend_that_cannot_start_is_one_line_of_it() -> None:
    command = [sys.executable, "-m", "shardwise.cli.main", "doctor"]
    environment = {**os.environ, "JAX_PLATFORMS": "nonsense"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr
    assert "problem: JAX cannot start: RuntimeError: " in done.stdout and "JAX_PLATFORMS=nonsense" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_missing_packages_come_with_the_line_that_installs_them(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "probe", lambda: pytest.fail("there is nothing to probe"))
    del versions["jax"]
    assert main(["doctor"]) == 1
    assert 'problem: jax is missing: pip install "jax>=0.9"' in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["works"] is False


def test_an_old_version_is_a_problem(versions: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    versions["jax"] = "0.8.1"
    assert main(["doctor"]) == 1
    assert 'problem: jax is 0.8.1: pip install "jax>=0.9"' in capsys.readouterr().out


def test_a_missing_extra_is_no_problem(versions: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "missing" not in capsys.readouterr().out
    del versions["flax"], versions["libtpu"]
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert 'extra tpu       libtpu missing: pip install "shardwise[tpu]"' in out
    assert 'extra zoo       flax missing: pip install "shardwise[zoo]"' in out and "all well" in out


DEVICES = """print('{"devices": [["tpu", "TPU v5e"]]}', flush=True)"""


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("import nothing_like_this", "JAX cannot start: ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("import os; os.abort()", "JAX cannot start: ended by signal 6"),
        ("import time; time.sleep(60)", "JAX cannot start: no answer within 1 s"),
        (f"{DEVICES}; 1 / 0", "a tiny plan cannot be made and run here: ZeroDivisionError: division by zero"),
        (f"""{DEVICES}; print('{{"works": false}}')""", "a tiny plan gave other numbers than the plain program"),
        (f"""{DEVICES}; print("noise"); print('{{"works": true}}')""", ""),
    ],
)
def test_whatever_the_probe_does_is_said(code: str, trouble: str) -> None:
    assert probe((sys.executable, "-c", code), timeout_s=1 if "sleep" in code else 60)[1] == trouble


def test_the_range_of_jax_is_the_one_in_the_documentation() -> None:
    assert installation._TESTED_JAX in (ROOT / "docs" / "dependencies.md").read_text()
