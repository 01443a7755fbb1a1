"""The page in headless Chromium: every tab opens, nothing is complained about, and what is shown is the data."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.code import STYLES, code_text
from shardwise.report.data import report_data
from shardwise.report.html import TABS, page_html
from shardwise.report.verdict import verdict
from shardwise.tactics.strategies import FSDP
from shardwise.units import binary, seconds
from tests.report.test_page import HOSTILE, plan

__all__ = ["plan"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make test-browser"),
]

#: A phone, a tablet, a desk.
WIDTHS = (390, 900, 1400)
QUICK_S = 2.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api")
    with driver.sync_playwright() as running:
        made = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a plan's page at a width; whatever the page complains about or asks the network for fails the test."""
    problems: list[str] = []
    contexts = []

    def opened(shown: Plan, width: int = 1280, scheme: str = "light") -> Any:
        shown.report(tmp_path / "plan.html")
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        own = ((tmp_path / "plan.html").as_uri(), "data:,")
        page.on("request", lambda asked: problems.append(asked.url) if asked.url not in own else None)
        page.goto(own[0])
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []


def cells(page: Any, table: str) -> list[list[str]]:
    """The words in the rows of a table."""
    rows = page.locator(f"{table} tbody tr")
    found: list[list[str]] = rows.evaluate_all("rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))")
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_every_tab_opens_and_fits_the_width(plan: Plan, show: Any, width: int) -> None:
    page = show(plan, width)
    assert page.locator("[role=tab]").count() == len(TABS)
    for tab in TABS:
        page.click(f"#tab-{tab.name}")
        assert page.locator("[role=tabpanel]:visible").evaluate_all("all => all.map(p => p.id)") == [tab.name]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), tab.name
        # What does not fit scrolls by itself, and can be reached by key.
        boxes = "all => all.filter(b => b.scrollWidth > b.clientWidth + 1 && b.tabIndex < 0).map(b => b.outerHTML)"
        assert page.locator(f"#{tab.name} .scroll").evaluate_all(boxes) == []
    assert page.url.endswith(f"#{TABS[-1].name}")


def test_keys_move_between_tabs(plan: Plan, show: Any) -> None:
    page = show(plan)
    names = [tab.name for tab in TABS]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-overview"
    steps = [("ArrowRight", name) for name in (*names[1:], "overview")]
    for key, name in (*steps, ("End", names[-1]), ("ArrowLeft", names[-2]), ("Home", "overview")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == f"tab-{name}"
        assert page.get_attribute(f"#tab-{name}", "aria-selected") == "true"
        assert page.locator("[role=tabpanel]:visible").evaluate_all("all => all.map(p => p.id)") == [name]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "overview", "from a tab to what it shows"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDTHS[0], WIDTHS[-1]])
def test_nothing_stands_in_anybodys_way(plan: Plan, show: Any, scheme: str, width: int) -> None:
    """By axe, on every tab: names, roles, contrast, focus."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = show(plan, width, scheme)
    # Colors are looked at, not half-way from one to another.
    page.emulate_media(reduced_motion="reduce", color_scheme=scheme)
    found = []
    for tab in TABS:
        page.click(f"#tab-{tab.name}")
        for problem in axe.run(page).response["violations"]:
            if problem["impact"] in ("serious", "critical"):
                found.append((tab.name, problem["id"], [node["html"][:120] for node in problem["nodes"][:3]]))
    assert found == []


def test_figures_are_the_data(plan: Plan, show: Any) -> None:
    """What is shown is what the plan's JSON has."""
    page, data = show(plan), report_data(plan)
    saved = json.loads(plan.to_json())
    p = saved["predicted"]
    shown = page.locator(".meter figcaption strong").all_inner_texts()
    assert shown == [seconds(p["time_s"]), binary(p["peak_bytes"])]
    parts = [seconds(t) for t in data["split"].values()] + [binary(b) for b in data["peak"].values()]
    assert set(page.locator(".meter li strong").all_inner_texts()) <= set(parts)
    assert page.locator(".verdict p").all_inner_texts() == data["verdict"] == list(verdict(plan).lines)
    assert page.locator(".insights li").all_inner_texts() == data["insights"]
    page.click("#tab-sharding")
    keys = ("path", "role", "text", "shards", "device_bytes_text")
    assert cells(page, "#arrays") == [[str(a[k]) for k in keys] for a in data["arrays"]]
    page.click("#tab-timeline")
    assert page.locator(".lines tbody th").count() == len(data["lines"])
    page.click("#tab-memory")
    alive = [[f"{n} × {label}" if n > 1 else label, binary(nbytes)] for label, n, nbytes in data["alive"]]
    assert [row[:2] for row in cells(page, "#alive")] == alive
    page.click("#tab-advanced")
    kinds = plan.predicted.breakdown("kind")
    assert [row[:2] for row in cells(page, "#by-kind")] == [[kind, seconds(s)] for kind, s in kinds.items()]
    figures = [[e["decision"], seconds(e["time_s"]), binary(e["peak_bytes"])] for e in data["effects"]]
    assert [[row[0], row[1], row[3]] for row in cells(page, "#effects")] == figures


def test_the_picture_of_a_part(plan: Plan, show: Any) -> None:
    page, parts = show(plan), report_data(plan)["diagram"]
    page.click("#tab-model")
    assert page.locator("#part option").count() == len(parts)
    assert page.locator("#diagram li").count() == len(parts[0]["rows"])
    row = next(k for k, row in enumerate(parts[0]["rows"]) if row["moves"])
    page.locator("#diagram .op").nth(row).click()
    told, wanted = page.inner_text("#about"), parts[0]["rows"][row]
    assert wanted["source"] in told and seconds(wanted["time_s"]) in told and wanted["moves"][0]["kind"] in told
    # A dimension lights up everywhere.
    cell = page.locator("#diagram .dim.cut").first
    color = int(cell.get_attribute("data-color"))
    cell.click()
    arrays = [a for row in parts[0]["rows"] for a in (*row["arguments"][:4], row["out"])]
    assert page.locator("#diagram .dim.lit").count() == sum(a["colors"].count(color) for a in arrays) > 1
    assert page.locator("#about .axis").count() == 1


def test_the_timeline_is_zoomed_by_key_and_button(plan: Plan, show: Any) -> None:
    page = show(plan)
    page.click("#tab-timeline")
    picture = "document.getElementById('steps').toDataURL()"
    seen = [page.evaluate(picture)]
    for act in (
        lambda: page.click("#zoom-in"),
        lambda: page.press("#steps", "ArrowRight"),
        lambda: page.press("#steps", "+"),
    ):
        act()
        seen.append(page.evaluate(picture))
    assert len(set(seen)) == 4
    page.click("#zoom-all")
    steps = report_data(plan)["timeline"]
    longest = max((e for e in steps["events"] if e[0] == 0), key=lambda e: e[4])
    end = max(e[3] + e[4] for e in steps["events"])
    width = page.locator("#steps").bounding_box()["width"]
    page.locator("#steps").hover(position={"x": (longest[3] + longest[4] / 2) / end * width, "y": 60})
    assert page.inner_text("#event").startswith(f"{steps['names'][longest[1]]} at {steps['sources'][longest[2]]}")
    with page.expect_download() as download:
        page.click("#perfetto")
    trace = json.loads(Path(download.value.path()).read_text())
    rows = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(rows) == len(plan.predicted.rows)


def test_memory_says_what_is_alive(plan: Plan, show: Any) -> None:
    page, memory = show(plan), report_data(plan)["memory"]
    page.click("#tab-memory")
    assert binary(plan.predicted.peak_bytes) in page.inner_text("#there") and "the peak" in page.inner_text("#there")
    at = memory["bytes"].index(max(memory["bytes"]))
    page.press("#curve", "ArrowLeft" if at else "ArrowRight")
    assert binary(memory["bytes"][at - 1 if at else 1]) in page.inner_text("#there")


def test_plans_are_compared(plan: Plan, show: Any) -> None:
    page, data = show(plan), report_data(plan)
    page.click("#tab-compare")
    names = [
        [", ".join(filter(None, (x["name"].replace(",", ", "), x["variant"]))), seconds(x["time_s"])]
        for x in data["baselines"]
    ]
    assert [row[:2] for row in cells(page, "#strategies")] == [
        ["this plan", seconds(plan.predicted.time_s)],
        *names[:40],
    ]
    assert page.locator("#front .point.found").count() == len(data["search"]["front"])
    assert page.locator("#front .point.plan.on").count() == 1 and "this plan" in page.inner_text("#chosen")
    assert page.locator("#chosen tr").count() == len(data["specs"])
    best = page.locator("#front .point.baseline").first
    best.focus()
    page.keyboard.press("Enter")
    assert data["baselines"][0]["name"] in page.inner_text("#chosen")
    assert page.locator("#chosen tr").count() == len(data["baselines"][0]["specs"])


def test_code_is_shown_in_each_style(plan: Plan, show: Any) -> None:
    page = show(plan)
    page.click("#tab-code")
    for style in STYLES:
        page.select_option("#style", style)
        assert page.evaluate("document.getElementById('pasted').textContent") == code_text(
            plan, style, constraints=False
        )
    page.click("#copy")
    page.wait_for_function("document.getElementById('copied').textContent")


def test_a_loaded_plan_is_shown_too(plan: Plan, show: Any, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    page = show(load_plan(tmp_path / "plan.json"))
    for name in page.locator("[role=tab]").evaluate_all("all => all.map(t => t.getAttribute('aria-controls'))"):
        page.click(f"#tab-{name}")
        assert page.is_visible(f"#{name}")


def quick(shown: Plan, show: Any) -> str:
    """Written, opened, and every tab laid out and painted, not only asked for: each in two seconds."""
    assert shown.effects is not None and shown.baselines is not None, "worked out once, before it is written"
    start = time.process_time()
    text = page_html(shown)
    assert time.process_time() - start < QUICK_S
    page = show(shown)
    assert page.evaluate("performance.now()") < 1000 * QUICK_S, "since it was asked for"
    for name in page.locator("[role=tab]").evaluate_all("all => all.map(t => t.getAttribute('aria-controls'))"):
        start = time.perf_counter()
        page.click(f"#tab-{name}")
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert time.perf_counter() - start < QUICK_S, name
    return text


@pytest.mark.slow  # seconds count, so that nothing may run beside it
def test_20000_of_everything_are_quick(plan: Plan, show: Any) -> None:
    count, p = 20_000, plan.predicted
    arrays = tuple(replace(plan.arguments[0], path=f"params/{k}") for k in range(count))
    rows = tuple(replace(p.rows[k % len(p.rows)], source=f"model.py:{k}") for k in range(count))
    curve = tuple(p.peak_bytes - k for k in range(count))
    quick(replace(plan, arguments=arrays, predicted=replace(p, rows=rows, curve=curve)), show)


@pytest.mark.slow  # seconds count here too
def test_an_unrolled_program_of_48_layers_is_quick(show: Any) -> None:
    program = zoo.load("gpt", "39b", scan=False)
    where: dict[str, Any] = {"topology": "v5e:4x4", "mesh": {"data": 16}}
    roles = {"params": "params", "batch": "batch"}
    large = shardwise.plan(program.fn, *program.args, tactics=[FSDP("data")], roles=roles, **where)
    assert len(large.predicted.curve) > 1000 and len(large.arguments) > 1000
    assert len(large.inquiry.analysis.program.ops) > 20_000
    assert len(quick(large, show).encode()) < 3_000_000


def test_a_table_of_5000_rows_is_searched_and_sorted(plan: Plan, show: Any) -> None:
    many = tuple(replace(plan.arguments[0], path=f"params/{k:04}/{HOSTILE}") for k in range(5000))
    page = show(replace(plan, arguments=many, outputs=()))
    page.click("#tab-sharding")
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
    page.click("#tab-sharding")
    cells = page.locator("#devices tbody td:not(.none)").evaluate_all("all => all.map(c => c.innerText.split(/\\n+/))")
    assert cells == [
        ["device 0", "[0, 0]"],
        ["device 2", "[1, 0]"],
        ["device 1", "[0, 1]"],
        ["device 3", "[1, 1]"],
    ]
    assert "4 shards of [4, 4], on one device each" in page.inner_text("#shards")


def test_collectives_are_shown_as_they_move(plan: Plan, show: Any) -> None:
    page, moved = show(plan), sorted(plan.predicted.collectives, key=lambda m: -m.time_s)
    page.click("#tab-sharding")
    assert [row[0] for row in cells(page, "#collectives")] == [m.kind for m in moved]
    for number, one in enumerate(moved):
        page.locator("#collectives button").nth(number).press("Enter")
        assert page.inner_text("#moving h4") == one.kind
        shown = min(4, math.prod(plan.mesh.shape[axis] for axis in one.axes))
        power = {"all-reduce": 3, "collective-permute": 1}.get(one.kind, 2)
        assert page.locator("#moving .fly").count() == shown**power
    # Who wants no motion sees where the blocks arrive.
    page.emulate_media(reduced_motion="reduce")
    style = "e => [getComputedStyle(e).animationName, getComputedStyle(e).transform]"
    name, transform = page.locator("#moving .fly").last.evaluate(style)
    assert name == "none" and transform.startswith("matrix")


def test_the_roofline_names_its_kernels(plan: Plan, show: Any) -> None:
    page, data = show(plan), report_data(plan)
    rows = [row for part in data["diagram"] for row in part["rows"]]
    assert all(row["flops"] <= 1.01 * row["time_s"] * data["device"]["flops_per_s"] for row in rows)
    page.click("#tab-timeline")
    assert 0 < page.locator("#roofline .dot").count() <= len(rows)
    page.locator("#roofline .dot").first.focus()
    longest = max(rows, key=lambda row: row["time_s"])
    assert page.inner_text("#kernel").startswith(
        f"{longest['op']} at {longest['source']}: {seconds(longest['time_s'])}"
    )


@pytest.mark.parametrize(("scheme", "ground", "text"), [("light", "#fff", "#111"), ("dark", "#111", "#e8e8e8")])
def test_a_notebook_shows_it_in_its_own_colors(plan: Plan, browser: Any, scheme: str, ground: str, text: str) -> None:
    """Fragments as they stand in a notebook: readable on its ground, and never wider than the cell."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = shardwise.analyze(lambda x: jnp.tanh(x @ x), jax.ShapeDtypeStruct((64, 64), "float32"))
    shown = (plan._repr_html_() + found._repr_html_()).replace("<details>", "<details open>")
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 800}, color_scheme=scheme)
    style = f"background:{ground};color:{text};font-family:sans-serif"
    page.set_content(f'<html lang="en"><title>Notebook</title><body style="{style}"><main>{shown}</main></body></html>')
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    problems = axe.run(page).response["violations"]
    assert [p["id"] for p in problems if p["impact"] in ("serious", "critical")] == []
    page.close()
