"""The command line where things are not as they should be: odd files, poor terminals, full disks, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

# -P: the folder of the targets is not on the path of Python itself, as with the installed command.
COMMAND = [sys.executable, "-P", "-m", "shardwise.cli.main", "inspect"]

TARGETS = """
import functools, sys
import jax, jax.numpy as jnp
def shape(*sizes): return jax.ShapeDtypeStruct(sizes, "float32")
def step(w, x, *, scale=1.0):
    print("under trace")
    return jnp.tanh(x @ w) * scale
def make(): return step, (shape(4, 8), shape(2, 4))
def make_jitted(): return jax.jit(step, donate_argnums=0), (shape(4, 8), shape(2, 4))
def make_partial(): return functools.partial(step, scale=3.0), (shape(4, 8), shape(2, 4))
def make_keywords(): return step, (), {"w": shape(4, 8), "x": shape(2, 4)}
def make_late():
    import beside
    return step, (beside.WEIGHTS, shape(2, 4))
def make_generator(): yield step
def make_list(): return [step, (shape(4, 8), shape(2, 4))]
def make_exit(): sys.exit(0)
def make_argument(a): return a
def make_slow():
    import time
    print("started", file=sys.stderr, flush=True)
    time.sleep(60)
def make_deaf():
    import gc, time
    def callback(*_):
        gc.callbacks.remove(callback)
        make_slow()
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)
def make_long():
    return (lambda größe: jax.tree.map(jnp.sin, größe)), ({"a_long_name_" * 9: shape(4, 8)}, shape(2))[:1]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a folder with spaces")
    (folder / "targets.py").write_text(TARGETS, encoding="utf-8")
    (folder / "beside.py").write_text("from targets import shape\nWEIGHTS = shape(4, 8)\n")
    (folder / "argparse.py").write_text(TARGETS, encoding="utf-8")
    (folder / "script.py").write_text(
        "import argparse, sys\nprint('hello')\nassert len(sys.argv) == 1\nfrom targets import make\n"
    )
    package = folder / "package" / "inner"
    package.mkdir(parents=True)
    for part in (package, package.parent):
        (part / "__init__.py").write_text("")
    (package.parent / "shapes.py").write_text("import jax\nX = jax.ShapeDtypeStruct((4, 8), 'float32')\n")
    (package / "model.py").write_text("from ..shapes import X\ndef make(): return (lambda x: x @ x.T), (X,)\n")
    return folder


def inspect(folder: Path, target: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, target, *options],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


#: Several commands in one process, since JAX takes a second to import.
SEVERAL = """
import contextlib, io, json, sys
from shardwise.cli.main import main
options, targets, results = sys.argv[1].split(), sys.argv[2:], []
for target in targets:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["inspect", target, *options])
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


def inspect_several(folder: Path, targets: Sequence[str], options: str = "") -> list[tuple[int, str, str]]:
    """The exit status, output and errors for each target."""
    command = [sys.executable, "-P", "-c", SEVERAL, options, *targets]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def test_targets_in_odd_places(folder: Path) -> None:
    targets = (
        "targets.py:make",
        "./targets.py:make_jitted",
        f"../{folder.name}/targets.py:make_partial",
        "targets.py:make_keywords",
        "targets.py:make_late",
        "package/inner/model.py:make",
    )
    for target, (code, out, err) in zip(targets, inspect_several(folder, targets, "--json"), strict=True):
        assert code == 0, (target, err)
        assert json.loads(out)["counts"]["colors"] >= 2, target


def test_what_a_target_prints_is_not_output(folder: Path) -> None:
    done = inspect(folder, "script.py:make", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["program"]["name"] == "step"
    assert "hello" in done.stderr and "under trace" in done.stderr


def test_a_file_may_be_called_like_a_module(folder: Path) -> None:
    done = inspect(folder, "argparse.py:make")
    assert done.returncode == 0 and done.stdout.startswith("step: "), done.stderr


def test_targets_that_do_not_work(folder: Path) -> None:
    messages = {
        "targets.py:make_exit": "targets.py:make_exit failed: it called sys.exit(0) (line 17 of targets.py)",
        "targets.py:make_argument": "takes arguments; a target is a function without any that returns",
        "targets.py:make_generator": "must return the function and its arguments",
        "targets.py:make_list": "must return the function and its arguments",
    }
    for message, (code, out, err) in zip(messages.values(), inspect_several(folder, [*messages]), strict=True):
        assert code == 1 and not out
        assert err.startswith("shardwise: ") and message in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("options", [(), ("--program",), ("--json",), ("--why", "größe/{name}:0", "out/{name}:0")])
def test_a_terminal_without_unicode(folder: Path, options: tuple[str, ...]) -> None:
    named = [o.format(name="a_long_name_" * 9) for o in options]
    done = inspect(folder, "targets.py:make_long", *named, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and done.stdout


def test_output_that_cannot_be_written(folder: Path) -> None:
    command = f"'{sys.executable}' -P -m shardwise.cli.main inspect targets.py:make"
    for redirect, reason in ((">/dev/full", "No space left on device"), (">&-", "standard output is closed")):
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirect}"], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"shardwise: the output cannot be written: {reason}"
        assert "Traceback" not in done.stderr


#: A background job of a shell is started deaf to interruptions, and so is what it starts: the tests may be one.
LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from shardwise.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("target", ["make_slow", "make_deaf"])
def test_an_interruption_is_one_line(folder: Path, target: str) -> None:
    """Also where it falls into a callback of the garbage collector, from which nothing can be raised."""
    command = [sys.executable, "-P", "-c", LISTENING, "inspect", f"targets.py:{target}"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            assert running.stderr.readline() == "started\n"
            time.sleep(0.2)
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 130 and said == "shardwise: interrupted\n"


def test_an_error_nobody_listens_to_is_no_output(folder: Path) -> None:
    command = f"'{sys.executable}' -P -m shardwise.cli.main inspect targets.py:make_exit"
    for redirect in ("2>&-", "2>/dev/full"):
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirect}"], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and not done.stdout and not done.stderr


def test_the_whole_traceback_is_there_for_who_asks(folder: Path) -> None:
    raises = {
        "targets.py:make_argument": "TypeError: missing a required argument: 'a'",
        "targets.py:make_exit": "SystemExit: 0",
    }
    found = inspect_several(folder, [*raises], "--verbose")
    for raised, (code, out, err) in zip(raises.values(), found, strict=True):
        *lines, last = err.splitlines()
        assert code == 1 and last.startswith("shardwise: targets.py:") and not out
        assert lines[0].startswith("Traceback") and lines[-1].startswith(raised)


def test_a_missing_extra_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "flax.py").write_text("raise ModuleNotFoundError(\"No module named 'flax'\", name='flax')")
    done = inspect(folder, "zoo:vit:tiny", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == "shardwise: zoo program vit needs the package flax: pip install flax\n"
