"""The Python of docs/hardware.md runs, and its example profile loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwise.hardware.load import ENVIRONMENT, load_profile
from shardwise.hardware.topology import topology

PAGE = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_python_runs() -> None:
    scope: dict[str, object] = {}
    for block in blocks("python"):
        exec(block, scope)
    assert scope["order"].shape == (4, 16)  # type: ignore[attr-defined]


def test_the_example_profile_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks("toml")
    (tmp_path / "h100-cloud.toml").write_text(block)
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path))
    profile = load_profile("h100-cloud")
    assert profile.usable_share == 0.92 and profile.links[1].bytes_per_s == 1.25e10
    assert topology("h100-cloud:8x4").devices == 32


def test_topologies_in_the_table_parse() -> None:
    table = PAGE.split("## Topologies")[1].split("\n## ")[0]
    texts = [t for row in re.findall(r"^\| (`.*?) \|", table, re.M) for t in re.findall(r"`([^`]+)`", row)]
    assert len(texts) >= 8
    for text in texts:
        if ".toml" not in text:
            assert topology(text).devices >= 1
