"""Plans and analyses at the end of a notebook's cell, and progress in one."""

from __future__ import annotations

import html
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import nbformat
import pytest
from nbclient import NotebookClient

import shardwise
from shardwise.plans.plan import Plan
from shardwise.report.html import page_html
from shardwise.report.plan_text import plan_page
from shardwise.report.progress import ProgressLine
from shardwise.search.searcher import Journal, Options
from shardwise.units import binary, seconds
from tests.report.test_page import HOSTILE, _Reader, plan

__all__ = ["plan"]

LIMIT_S = 120

SETUP = """
import os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, shardwise
x = jax.ShapeDtypeStruct((4096, 512), "float32")
w = jax.ShapeDtypeStruct((512, 512), "float32")
fn = lambda w, x: jnp.tanh(x @ w)
"""

PLANNED = """
shardwise.plan(fn, w, x, mesh={"data": 4}, budget_evals=50, progress="auto")
"""

ANALYZED = "shardwise.analyze(fn, w, x)"


def _words(text: str) -> str:
    """What a fragment says, without its style."""
    plain = re.sub(r"</?span[^>]*>", "", re.sub(r"<style>.*?</style>", "", text, flags=re.S))
    return html.unescape(re.sub(r"<[^>]+>", " ", plain))


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")

    def execute(*sources: str) -> list[list[Any]]:
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source.strip()) for source in sources])
        done = NotebookClient(made, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
        return [cell["outputs"] for cell in done.execute().cells]

    return execute


def test_a_plan_says_what_the_terminal_says(plan: Plan) -> None:
    shown, p = _words(plan._repr_html_()), plan.predicted
    for part in (plan.function, str(plan.mesh), seconds(p.time_s), seconds(p.comm_s), binary(p.peak_bytes)):
        assert part in shown
    for array in plan.arguments:
        assert array.path in shown
    assert all(m.kind in shown for m in p.collectives) and str(plan.search) in shown
    assert "it does not fit" not in shown
    small = replace(plan, predicted=replace(p, usable_bytes=1))
    assert "it does not fit" in _words(small._repr_html_())


def test_a_fragment_needs_nothing_and_cannot_be_broken_out_of(plan: Plan) -> None:
    arrays = (replace(plan.arguments[0], path=HOSTILE), *plan.arguments[1:])
    text = replace(
        plan, function=HOSTILE, arguments=arrays, choices=(replace(plan.choices[0], what=HOSTILE),), notes=(HOSTILE,)
    )._repr_html_()
    page = _Reader(text)
    assert "b" not in page.tags and "script" not in page.tags
    assert page.addresses == [] and page.ids == [] and "http" not in text and "url(" not in text
    replace(plan, function="\ud800")._repr_html_().encode()


def test_thousands_of_arguments_are_not_put_into_a_cell(plan: Plan) -> None:
    many = tuple(replace(plan.arguments[0], path=f"w{k}") for k in range(5000))
    text = replace(plan, arguments=many)._repr_html_()
    assert len(text) < 60_000 and "and 4900 more" in text


def test_an_analysis_says_what_the_terminal_says() -> None:
    shape = jax.ShapeDtypeStruct((16, 16), "float32")
    made = shardwise.analyze(lambda x, w: (x @ w) @ w, shape, shape)
    shown = _words(made._repr_html_())
    for part in ("What can be sharded: 2 groups", "Conflicts: 3 places in 1 family, 1 bit to decide", "No opaque ops"):
        assert part in str(made) and part in re.sub(r"\s+", " ", shown)


def test_a_notebook_shows_both_forms_and_progress(cells: Any) -> None:
    _, planned, analyzed = cells(SETUP, PLANNED, ANALYZED)
    progress, shown = planned
    assert progress["output_type"] == "display_data" and "evaluated, best" in progress["data"]["text/plain"]
    for made, words in ((shown, "on data 4"), (analyzed[0], "What can be sharded")):
        assert made["output_type"] == "execute_result"
        assert words in _words(made["data"]["text/html"]) and words in made["data"]["text/plain"]


UP, ERASED = "\x1b[1A", "\x1b[2K"


class _Terminal:
    def __init__(self, real: bool):
        self.real, self.text = real, ""

    def isatty(self) -> bool:
        return self.real

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("real", [True, False])
def test_a_line_of_the_terminal_is_gone_afterwards(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal(real)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    shape = jax.ShapeDtypeStruct((4096, 64), "float32")
    shardwise.plan(lambda x: x * 2, shape, mesh={"data": 4}, budget_evals=20, progress="auto")
    if real:
        assert "evaluated, best" in screen.text and "x[0] over data" in screen.text
        assert screen.text.endswith(f"\r{UP}{ERASED}{UP}{ERASED}")
    else:
        assert screen.text == ""


def test_a_line_of_the_terminal_moves_between_improvements(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn anew a few times in a second, whatever is found, with what is evaluated and what is left."""
    screen = _Terminal(True)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    line = ProgressLine()
    with line:
        line.begin()
        journal = Journal(Options(budget_s=100, progress=line))
        assert "tracing and analyzing" in screen.text
        journal.stage = "3 of 7 meshes left"
        for count in (10, 20):
            journal.evaluations, before = count, screen.text.count(f" {count} evaluated")
            deadline = time.monotonic() + 10
            while screen.text.count(f" {count} evaluated") < before + 2 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert screen.text.count(f" {count} evaluated") >= 2
    assert "3 of 7 meshes left" in screen.text and re.search(r"at most (99|100) s left", screen.text)


def test_a_search_tells_how_far_it_is() -> None:
    seen: list[tuple[int, str]] = []

    class Watching:
        def watch(self, journal: Journal) -> None:
            self.journal = journal

        def __call__(self, *_: object) -> None:
            seen.append((self.journal.evaluated, self.journal.stage))

    x = jax.ShapeDtypeStruct((4096, 512), "float32")
    w = jax.ShapeDtypeStruct((512, 512), "float32")
    made = shardwise.plan(lambda w, x: x @ w @ w.T, w, x, topology="v5e:2x4", progress=Watching())
    assert made.search is not None and len(made.search.meshes) > 1
    counts = [count for count, _ in seen]
    assert counts == sorted(counts) and counts[-1] <= made.search.evaluations
    assert any(re.fullmatch(r"looking at mesh \d+ of \d+|\d+ of \d+ meshes left", stage) for _, stage in seen)


def test_axes_have_their_colors_where_these_are_shown(plan: Plan) -> None:
    page = plan_page(plan)
    plain, colored = page.text(), page.text(colored=True)
    assert "\x1b" not in plain and re.sub(r"\x1b\[[\d;]*m", "", colored) == plain
    headline = colored.splitlines()[2]
    assert (
        headline == f"\x1b[1m{plain.splitlines()[2]}\x1b[0m"
        and f'<p class="strong">{plan.verdict.headline}' in plan._repr_html_()
    )
    assert "\x1b[1;38;5;68mdata\x1b[0m" in colored and "\x1b[1;38;5;172mmodel\x1b[0m" in colored
    assert "#4c8ed9" in plan._repr_html_() and "--axis-0: #4c8ed9" in page_html(plan)


def test_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal(False)
    monkeypatch.setattr("sys.stderr", screen)
    shape = jax.ShapeDtypeStruct((4096, 64), "float32")
    with ProgressLine(shown=False, lines=True) as line:
        made = shardwise.plan(lambda x: x * 2, shape, mesh={"data": 4}, budget_evals=20, progress=line)
    assert made.search is not None
    assert screen.text.count("evaluated, best") == screen.text.count("\n") == len(made.search.improvements)


def test_an_end_without_a_beginning_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal(True)
    monkeypatch.setattr("sys.stderr", screen)
    with ProgressLine():
        pass
    assert screen.text == ""
