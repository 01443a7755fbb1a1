"""Completion, as a shell asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

#: Asks as bash does when Tab is pressed at the end of a line, and prints what it would offer.
ASK = """
set -u
eval "$(shardwise completion bash)"
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9 COMPREPLY=()
_python_argcomplete shardwise "${1##* }" ""
(( ${#COMPREPLY[@]} == 0 )) || printf '%s\\n' "${COMPREPLY[@]}"
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder")
    (folder / "train.py").touch()
    (folder / "plan.json").touch()
    command = folder / "bin" / "shardwise"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\nexec '{sys.executable}' -P -m shardwise.cli.main \"$@\"\n")
    command.chmod(0o755)
    return folder


def offered(folder: Path, line: str, **environment: str) -> list[str]:
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **environment}
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", line], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [word.rstrip() for word in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("shardwise pl", ["plan"]),
        ("shardwise hardware ", ["list", "show", "calibrate"]),
        ("shardwise plan --to", ["--topology"]),
        ("shardwise completion ", ["bash", "zsh", "fish"]),
        # Bash treats the text before a colon as a separate word.
        ("shardwise plan zoo:g", ["gpt:2.6b", "gpt:6.7b", "gpt:39b", "gpt:tiny", "gns:full", "gns:tiny"]),
        ("shardwise plan zoo:gpt:t", ["tiny"]),
        ("shardwise plan tr", ["train.py"]),
        ("shardwise plan zoo:mlp --output p", ["plan.json"]),
    ],
)
def test_bash(folder: Path, line: str, words: list[str]) -> None:
    assert offered(folder, line) == words


def test_every_option_is_offered(folder: Path) -> None:
    found = offered(folder, "shardwise plan zoo:mlp --")
    assert {"--help", "--topology", "--mesh", "--output", "--report", "--json", "--quiet", "--verbose"} <= set(found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_about_this_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwise.cli.main import main

    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "shardwise" in out and "_ARGCOMPLETE" in out and out.endswith("\n")
    if found := shutil.which(shell):
        assert subprocess.run([found, "-n"], input=out, text=True, check=False).returncode == 0


def test_tab_does_not_wait_for_jax(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX was imported')")
    assert offered(folder, "shardwise plan zoo:mlp:", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}") == [
        "full",
        "tiny",
    ]
