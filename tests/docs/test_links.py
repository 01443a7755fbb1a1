"""Links to a heading, of this page or another, lead to one. That files are there is tested in ``tests/test_docs.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.*?) *$", without_code(page.read_text()), flags=re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count, unique = 0, slug
        while unique in found:
            count += 1
            unique = f"{slug}-{count}"
        found.add(unique)
    return found


def links(page: Path) -> list[tuple[str, str]]:
    """(file, anchor) of the links that have an anchor."""
    return re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", without_code(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_anchors_are_headings(page: Path) -> None:
    for file, anchor in links(page):
        if "://" not in file:
            target = page.parent / file if file else page
            assert target.is_file(), f"{file} is not there"
            assert anchor in anchors(target), f"{target.name} has no heading for #{anchor}"


def test_a_wrong_anchor_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One, and *two*\n\n## Same\n\n## Same\n\n```\n# no heading\n```\n\n[x](#one-and-two) [y](page.md#three)\n"
    )
    assert anchors(page) == {"one-and-two", "same", "same-1"}
    assert links(page) == [("", "one-and-two"), ("page.md", "three")]
