"""The command line as a person uses it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.cli.main import main

GOOD = """
import jax, jax.numpy as jnp
def step(w, x, *, scale):
    return jnp.tanh(x @ w) * scale
def make():
    return step, (jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((2, 4), "float32")), {"scale": 2.0}
def make_flat():
    return (lambda w, x: x @ w), jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((2, 4), "float32")
def fails():
    return [][1]
def nothing():
    return 3
number = 3
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    file = tmp_path / "my_model.py"
    file.write_text(GOOD)
    return file


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("function", ["make", "make_flat"])
def test_inspect_a_file(target: Path, function: str, capsys) -> None:
    code, out, err = run("inspect", f"{target}:{function}", capsys=capsys)
    assert code == 0 and not err
    assert "What can be sharded: 3 groups of 3 colors" in out
    assert "No conflicts" in out and "No opaque ops" in out


def test_inspect_zoo_fits_eighty_columns_without_control_characters(capsys) -> None:
    code, out, _ = run("inspect", "zoo:t2b:tiny", capsys=capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "1 bit to decide" in out and "batch/inputs[0]" in out


def test_json_is_json_and_agrees_with_the_text(capsys) -> None:
    _, out, _ = run("inspect", "zoo:mlp:tiny", "--json", capsys=capsys)
    data = json.loads(out)
    assert data["schema"] == 1
    _, text, _ = run("inspect", "zoo:mlp:tiny", capsys=capsys)
    assert f"{data['counts']['groups_that_matter']} groups" in text


def test_why_and_program(target: Path, capsys) -> None:
    code, out, _ = run("inspect", f"{target}:make", "--why", "w:0", "x:1", capsys=capsys)
    assert code == 0 and "dot_general at my_model.py:4" in out
    _, out, _ = run("inspect", f"{target}:make", "--program", capsys=capsys)
    assert "dot_general" in out and "(i,k),(k,j)->(i,j); sum k" in out


@pytest.mark.parametrize(
    ("target_text", "message"),
    [
        ("nonsense", "'nonsense' is no target: use zoo:NAME"),
        ("{file}", "needs a function: use {file}:NAME, one of make, "),
        ("no/such/file.py:make", "there is no file"),
        ("{file}:mak", "has no 'mak'; did you mean make"),
        ("{file}:fails", r"IndexError: list index out of range (line 10 of my_model.py)"),
        ("{file}:nothing", "must return the function and its arguments"),
        ("{file}:number", "is int, not a function"),
        ("zoo:nope", "nope"),
        ("zoo:t2bb", "t2b"),
        ("zoo:t2b:wrong", "wrong"),
    ],
)
def test_bad_targets_give_one_line(target: Path, target_text: str, message: str, capsys) -> None:
    code, out, err = run("inspect", target_text.format(file=target), capsys=capsys)
    assert code == 1 and not out
    assert err.startswith("shardwise: ") and message.format(file=target) in err
    assert "Traceback" not in err


def test_a_failure_names_the_line_of_the_file_and_where_it_was_raised(tmp_path: Path, capsys) -> None:
    file = tmp_path / "bad.py"
    file.write_text("import json\n\ndef make():\n    return json.loads('{')\n")
    _, _, err = run("inspect", f"{file}:make", capsys=capsys)
    assert "(line 4 of bad.py; raised in line " in err and "of decoder.py)" in err


@pytest.mark.parametrize("broken", ["import nothing_like_this", "def (", "1/0"])
def test_files_that_do_not_import(tmp_path: Path, broken: str, capsys) -> None:
    file = tmp_path / "broken.py"
    file.write_text(broken)
    code, _, err = run("inspect", f"{file}:make", capsys=capsys)
    assert code == 1 and "cannot be imported" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nope", "argument COMMAND: there is no 'nope'; "),
        ("pln zoo:mlp", "argument COMMAND: there is no 'pln'; did you mean plan"),
        ("hardware lst", "argument ACTION: there is no 'lst'; did you mean list?"),
        ("inspect", "the following arguments are required: TARGET; see 'shardwise inspect --help'"),
        ("inspect zoo:mlp:tiny --why a", "argument --why: expected 2 arguments"),
        ("plan zoo:mlp:tiny --topolgy v5e:2x2", "unknown argument --topolgy (did you mean --topology?)"),
        ("plan zoo:mlp:tiny more", "unknown argument more; see 'shardwise plan --help'"),
        ("hardware show v5e --jsn=1", "unknown argument --jsn=1 (did you mean --json?)"),
        ("plan zoo:mlp:tiny --seed x", "argument --seed: invalid int value: 'x'"),
        ("completion tcsh", "argument SHELL: there is no 'tcsh'; did you mean zsh"),
    ],
)
def test_wrong_commands_are_one_line_and_exit_with_two(words: str, says: str, capsys) -> None:
    code, out, err = run(*words.split(), capsys=capsys)
    assert code == 2 and not out
    assert err.startswith("shardwise: ") and says in err and err.count("\n") == 1


def test_a_wrong_dimension_is_said(capsys) -> None:
    code, _, err = run("inspect", "zoo:mlp:tiny", "--why", "a", "b:0", capsys=capsys)
    assert code == 1 and "write PATH:DIM" in err


def test_zoo_lists_programs(capsys) -> None:
    code, out, _ = run("zoo", capsys=capsys)
    assert code == 0 and "t2b" in out and "llama3" in out


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m shardwise.cli.main inspect zoo:t2b:tiny --program | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("program") and not done.stderr


def test_help_starts_fast_and_without_jax() -> None:
    code = "import sys; from shardwise.cli.main import _parser; _parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "shardwise.cli.main", "--help"], check=True, capture_output=True)
    assert time.perf_counter() - start < 2  # 0.06 s on an idle machine; the bound leaves room for a busy one
