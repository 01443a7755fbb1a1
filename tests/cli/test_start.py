"""Starting: help, versions and the list of programs do not wait for JAX, and end well whoever reads them."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

import shardwise
from shardwise import zoo
from shardwise.cli.main import main

LIGHT = [["--help"], ["--version"], ["zoo"], ["zoo", "--json"], ["plan", "--help"], ["compare", "--help"], ["nope"]]
LIGHT += [["completion", shell] for shell in ("bash", "zsh", "fish")]


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    code = f"""
import sys
from shardwise.cli.main import main
try:
    main({words!r})
except SystemExit:
    pass
heavy = {{"jax", "numpy", "scipy", "rich"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    out = capsys.readouterr().out
    assert not stop.value.code
    for command in "plan inspect explain what-if compare diff verify report zoo hardware doctor completion".split():
        assert f"    {command}" in out


def test_the_list_of_programs_is_that_of_the_zoo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["programs"]
    assert {p["name"]: tuple(p["configs"]) for p in listed} == {name: zoo.configs(name) for name in zoo.names()}
    assert main(["zoo"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for program in listed:
        assert f"{program['name']:8} {' '.join(program['configs'])}\n" in out and program["description"] in out


@pytest.mark.parametrize("words", ["--help", "zoo", "plan --help"])
def test_a_reader_that_has_gone_is_no_error(words: str) -> None:
    # The reader closes before anything is written.
    command = f"set -o pipefail; (sleep 0.5; exec {sys.executable} -m shardwise.cli.main {words}) | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'jax'", name="jax.numpy")

    monkeypatch.setattr("shardwise.cli.programs.load_target", missing)
    assert main(["inspect", "zoo:mlp:tiny"]) == 1
    assert "the package jax.numpy is missing; 'shardwise doctor' says what else" in capsys.readouterr().err


def test_public_names_are_found_listed_and_pickled() -> None:
    assert set(shardwise.__all__) <= set(dir(shardwise))
    for name in shardwise.__all__:
        thing = getattr(shardwise, name)
        assert pickle.loads(pickle.dumps(thing)) is thing
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = shardwise.nothing_like_this
