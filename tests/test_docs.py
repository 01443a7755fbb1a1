"""What the README and the docs say is run, and their links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    try:
        for block in blocks(ROOT / "README.md", "python"):
            exec(block, scope)
    finally:
        shardwise.unregister_rule("pallas_call:flash_attention")
    out = capsys.readouterr().out
    assert "What can be sharded: 4 groups of 4 colors" in out
    assert "dot_general" in out


@pytest.mark.parametrize("block", blocks(ROOT / "README.md", "console"))
def test_the_output_in_the_readme_is_what_the_command_prints(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *shown = block.strip().splitlines()
    assert command.startswith("$ shardwise ")
    assert main(command.removeprefix("$ shardwise ").split()) == 0
    printed = capsys.readouterr().out.splitlines()
    position = 0
    for line in shown:
        if line == "…":
            continue
        assert line.rstrip() in printed[position:], f"the README shows {line!r}"
        position = printed.index(line.rstrip(), position) + (line != "")


def test_what_the_readme_asks_a_plan_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a plan of a smaller step with the same paths. ``verify`` needs libtpu, and a process that has no devices yet."""
    monkeypatch.chdir(tmp_path)
    small = "zoo:t2b:layers=2,d=256,heads=4,head=64,ffn=512,vocab=256,batch=16,seq=64"
    commands = [c.partition("#")[0].split() for b in blocks(ROOT / "README.md", "sh") for c in b.splitlines()]
    ours = [[small if word == "zoo:t2b:2b,remat" else word for word in c[1:]] for c in commands if c[0] == "shardwise"]
    where = ["--topology", "v5e:4x4", "--mesh", "data=4,model=4", "--evaluations", "100", "--output", "plan.json"]
    assert main(["plan", small, *where]) == 0
    assert [c[0] for c in ours] == ["code", "explain", "what-if", "compare", "verify", "report"]
    for command in ours:
        if command[0] != "verify":
            assert main(command) == 0, capsys.readouterr().err
        elif importlib.util.find_spec("libtpu"):
            done = subprocess.run([sys.executable, "-m", "shardwise", *command], capture_output=True, text=True)
            assert done.returncode == 0 and "of bytes as predicted" in done.stdout, done.stderr
    assert (tmp_path / "plan.html").exists()


def test_the_demo_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``make demo`` does once everything is installed."""
    monkeypatch.chdir(tmp_path)
    (recipe,) = re.findall(r"^demo:.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert main(recipe.removeprefix("$(BIN)/shardwise ").split()) == 0
    assert "Page: plan.html" in capsys.readouterr().out and (tmp_path / "plan.html").exists()


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(
            r"`?make ([a-z][a-z-]*)`?", " ".join(re.findall(r"`[^`]*`|^make .*", page.read_text(), re.M))
        ):
            assert re.search(rf"^{target}:", makefile, re.M), (page.name, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link
