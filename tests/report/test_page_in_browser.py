"""The page in headless Chromium: every tab opens, nothing is complained about, and what is shown is the data."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.plans.plan import Plan
from shardwise.report.data import report_data
from shardwise.report.html import TABS
from shardwise.report.units import seconds
from tests.report.test_page import HOSTILE, plan

__all__ = ["plan"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as running:
        made = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a plan's page at a width; whatever the page complains about fails the test."""
    problems: list[str] = []
    contexts = []

    def opened(shown: Plan, width: int = 1400) -> Any:
        shown.report(tmp_path / "plan.html")
        context = browser.new_context(viewport={"width": width, "height": 800}, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((tmp_path / "plan.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("width", [375, 800, 1400])
def test_every_tab_opens_and_fits_the_width(plan: Plan, show: Any, width: int) -> None:
    page = show(plan, width)
    for tab in TABS:
        page.click(f"#tab-{tab.name}")
        assert page.locator("[role=tabpanel]:visible").evaluate_all("all => all.map(p => p.id)") == [tab.name]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.url.endswith("#search")


def test_keys_move_between_tabs(plan: Plan, show: Any) -> None:
    page = show(plan)
    page.focus("#tab-summary")
    for key, name in (("ArrowRight", "plan"), ("End", "search"), ("ArrowRight", "summary"), ("ArrowLeft", "search")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{name}"
        assert page.get_attribute(f"#tab-{name}", "aria-selected") == "true"
        assert page.is_visible(f"#{name}")
    page.keyboard.press("Home")
    assert page.is_visible("#summary")


def test_figures_are_the_data(plan: Plan, show: Any) -> None:
    page, data = show(plan), report_data(plan)
    assert page.inner_text("#summary dd") == seconds(data["predicted"]["time_s"])
    page.click("#tab-plan")
    shown = page.locator("#arrays tbody tr").evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.innerText))")
    keys = ("path", "role", "text", "shards", "device_bytes_text")
    assert shown == [[str(a[k]) for k in keys] for a in data["arrays"]]
    page.click("#tab-program")
    assert page.locator("#program tbody th").count() == len(data["lines"])


def test_a_table_of_5000_rows_is_searched_and_sorted(plan: Plan, show: Any) -> None:
    many = tuple(replace(plan.arguments[0], path=f"params/{k:04}/{HOSTILE}") for k in range(5000))
    page = show(replace(plan, arguments=many, outputs=()))
    page.click("#tab-plan")
    assert page.locator("#arrays tbody tr").count() == 200
    start = page.evaluate("performance.now()")
    page.click("#arrays button[data-key=path]")
    page.click("#arrays button[data-key=path]")
    assert page.inner_text("#arrays tbody th").startswith("params/4999/</script><b>")
    assert page.get_attribute("#arrays th", "aria-sort") == "descending"
    page.fill("#find", "ARAMS/123 float32")
    assert page.locator("#arrays tbody tr").count() == 10
    assert page.evaluate("performance.now()") - start < 5000
    page.fill("#find", "")
    page.click("#more")
    assert page.locator("#arrays tbody tr").count() == 5000


def test_the_mesh_shows_where_shards_are(plan: Plan, show: Any) -> None:
    array = replace(plan.arguments[0], path="w", shape=(8, 8), spec=(("model",), ("data",)))
    page = show(replace(plan, arguments=(array,), outputs=(), device_order=(0, 2, 1, 3)))
    page.click("#tab-mesh")
    cells = page.locator("#devices tbody td:not(.none)").evaluate_all("all => all.map(c => c.innerText.split(/\\n+/))")
    assert cells == [
        ["device 0", "[0, 0]"],
        ["device 2", "[1, 0]"],
        ["device 1", "[0, 1]"],
        ["device 3", "[1, 1]"],
    ]
    assert "4 shards of [4, 4], on one device each" in page.inner_text("#shards")
