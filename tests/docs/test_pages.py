"""What pages show as output is what their code prints; pictures are what is drawn; every command has its section.

Pages that are notebooks show what comes out when ``make docs`` runs them, so that there is nothing to compare; here their code
is run, the quick start always and the others among the slow tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import linecache
import os
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType

import jax
import pytest

import shardwise
from shardwise.cli.main import _parser, main
from shardwise.plans.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
PINNED = re.search(r"^jax==(.*)$", (DOCS.parent / "requirements.txt").read_text(), flags=re.M)[1]  # type: ignore[index]
CELL = re.compile(r"^```{code-cell} ipython3\n(?::tags:[^\n]*\n\n)?(.*?)^```$", flags=re.DOTALL | re.M)
NOTEBOOKS = sorted(page for page in DOCS.rglob("*.md") if CELL.search(page.read_text()))
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", flags=re.DOTALL | re.M)


def printed(page: Path, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Runs the Python of a page, block by block, and gives (shown, printed) wherever a block of text follows."""
    monkeypatch.chdir(folder)
    scope: dict[str, object] = {"__name__": name.removesuffix(".py")}
    pairs, out = [], ""
    for language, code in BLOCK.findall(page.read_text()):
        if language == "text":
            pairs.append((code, out))
            continue
        linecache.cache.setdefault(name, (len(code), None, code.splitlines(keepends=True), name))
        with redirect_stdout(io.StringIO()) as stream:
            exec(compile(code, name, "exec"), scope)
        out = stream.getvalue()
    return pairs


def without_figures(line: str) -> str:
    """Another JAX traces a program to a few other ops, which cost a little more or less."""
    return re.sub(r" *[\d.]+", "#", line)


@pytest.mark.parametrize(
    ("page", "name", "outputs"),
    [
        ("analysis.md", "attention.py", 3),
        ("cost.md", "train.py", 1),
        ("search.md", "train.py", 0),
        ("device-program.md", "train.py", 1),
    ],
)
def test_what_is_shown_is_printed(
    page: str, name: str, outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = printed(DOCS / page, name, tmp_path, monkeypatch)
    assert len(pairs) == outputs
    for shown, out in pairs:
        lines = [line.rstrip() for line in out.split("\n")]
        if jax.__version__ == PINNED:
            assert shown.split("\n") == lines
        else:
            assert list(map(without_figures, shown.split("\n"))) == list(map(without_figures, lines))


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=() if p.stem == "quickstart" else pytest.mark.slow) for p in NOTEBOOKS],
)
def test_the_code_of_notebooks_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell, as a reader does; the last expression of a cell is shown by a notebook alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    module = ModuleType(f"notebook_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with redirect_stdout(io.StringIO()) as printed_text:
        for number, code in enumerate(CELL.findall(page.read_text())):
            name = f"{page.stem}_{number}.py"
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
            exec(compile(code, name, "exec"), vars(module))
    assert printed_text.getvalue().strip()


def test_all_notebooks_are_known() -> None:
    assert {"quickstart", "cli", "inference", "moe", "tpu-slice"} <= {page.stem for page in NOTEBOOKS}


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    try:
        return runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    finally:
        sys.modules.pop("attention", None)


def test_pictures_are_as_drawn(drawing: dict) -> None:
    pictures = drawing["pictures"]()
    assert sorted(pictures) == sorted(p.name for p in (DOCS / "pictures").glob("*.svg"))
    for name, svg in pictures.items():
        assert (DOCS / "pictures" / name).read_text() == svg, f"python docs/pictures/draw.py makes {name} anew"


def test_the_function_of_the_pictures_is_that_of_the_page(drawing: dict) -> None:
    source = inspect.getsource(drawing["attention"])
    assert source in (DOCS / "analysis.md").read_text()


def test_every_command_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = set(re.findall(r"^    ([a-z]+(?:-[a-z]+)*)\b", capsys.readouterr().out, flags=re.M))
    assert {"plan", "inspect"} <= commands
    sections = re.findall(r"^## ([\w-]+)$", (DOCS / "cli.md").read_text(), flags=re.M)
    assert set(sections) == commands - {"COMMAND"}


PAGES = [DOCS.parent / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.stem != "changelog")]


def test_names_on_pages_exist() -> None:
    """Also in code that no test runs, and in the text."""
    members = {*dir(Plan), *(field.name for field in dataclasses.fields(Plan))}
    wrong, seen = [], 0
    for page in PAGES:
        for owner, name in re.findall(r"\b(sw|plan)\.(?!json\b|html\b|py\b)([a-zA-Z_]\w*)", page.read_text()):
            seen += 1
            if not (hasattr(shardwise, name) if owner == "sw" else name in members):
                wrong.append(f"{page.name}: {owner}.{name}")
    assert seen > 100 and not wrong


def test_options_on_pages_exist() -> None:
    """Each belongs to the command that stands before it."""

    def options(parser: argparse.ArgumentParser) -> Iterator[str]:
        for action in parser._actions:
            yield from action.option_strings
            for inner in action.choices.values() if isinstance(action.choices, dict) else ():
                yield from options(inner)

    (commands,) = (action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    known = {name: set(options(command)) for name, command in commands.items()}
    lines = [(page, line) for page in PAGES for line in page.read_text().splitlines()]
    uses = [
        (p, *use) for p, line in lines for use in re.findall(r"shardwise ([a-z-]+) ([^`#|;]*)", line) if use[0] in known
    ]
    words = [(p, name, word) for p, name, rest in uses for word in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)]
    assert len(words) > 30
    assert not [(p.name, name, word) for p, name, word in words if word not in known[name]]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_every_page_is_on_the_site(page: Path) -> None:
    name = page.relative_to(DOCS).with_suffix("").as_posix()
    assert name == "index" or re.search(rf"^{re.escape(name)}$", (DOCS / "index.md").read_text(), flags=re.M)
