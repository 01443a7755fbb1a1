"""The page of a plan: its figures are the plan's, nothing in it can break out, and it is written whole or not at all."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.cli.main import main
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.plans.load import load_plan
from shardwise.plans.parts import ScheduleStep
from shardwise.plans.plan import Plan
from shardwise.plans.search_log import NOT_FOUND, VariantTried
from shardwise.report.data import report_data
from shardwise.report.diagram import diagram
from shardwise.report.html import TABS, page_html
from shardwise.units import binary, seconds

HOSTILE = "</script><b>&amp;'\"{{ 7 * 7 }}"


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan with all that a page can show: a search, the effects of its decisions, strategies beside it."""

    def step(w: Any, x: Any) -> Any:
        mixed = jnp.einsum("bst,btd->bsd", jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, x)), x)
        return jnp.sum(jnp.tanh(mixed @ w["first"]) @ w["second"])

    shape = jax.ShapeDtypeStruct
    w = {"first": shape((1024, 4096), "float32"), "second": shape((4096, 1024), "float32")}
    x = shape((4, 4096, 1024), "float32")
    pins = {"x": jax.sharding.PartitionSpec(None, "data")}
    where: dict[str, Any] = {"topology": "v5e:2x2", "mesh": {"data": 2, "model": 2}, "pins": pins}
    found = shardwise.plan(jax.grad(step), w, x, budget_evals=60, seed=0, roles={"batch": "x", "params": "w"}, **where)
    p = found.predicted
    before = ScheduleStep("replicated", 1.0, 2**40, False, ())
    return replace(found, schedule=(before, ScheduleStep("auto", p.time_s, p.peak_bytes, True, p.collectives)))


@pytest.fixture
def loaded(plan: Plan, tmp_path: Path) -> Plan:
    plan.save(tmp_path / "plan.json")
    return load_plan(tmp_path / "plan.json")


class _Reader(HTMLParser):
    """The page's data, its tags, and the addresses it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.data: dict[str, Any] = {}
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [v for k in ("src", "href") if (v := found.get(k))]
        self.ids += [v for k in ("id",) if (v := found.get(k))]
        self._open = found.get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.data = json.loads(data)
            self._open = False


def test_the_page_holds_its_data_and_the_figures_are_the_plans(plan: Plan) -> None:
    text = page_html(plan)
    data = _Reader(text).data
    assert data == json.loads(json.dumps(report_data(plan)))
    saved = json.loads(plan.to_json())
    assert data["predicted"] == saved["predicted"] | {"fits": plan.predicted.fits}
    assert [a["path"] for a in data["arrays"]] == [a["path"] for a in saved["arguments"] + saved["outputs"]]
    assert [a["spec"] for a in data["arrays"]] == [a["spec"] for a in saved["arguments"] + saved["outputs"]]
    assert data["search"].items() >= saved["search"].items()
    assert data["search"]["front"]
    for shown in (seconds(plan.predicted.time_s), binary(plan.predicted.peak_bytes), str(plan.mesh)):
        assert shown in text


def test_lines_and_breakdowns_add_up_to_the_step(plan: Plan) -> None:
    data, p = report_data(plan), plan.predicted
    assert p.collectives, "the program should move something, or this tests nothing"
    assert sum(row["time_s"] for row in data["lines"]) == pytest.approx(p.serial_s)
    assert sum(row["nbytes"] for row in data["lines"]) == pytest.approx(sum(m.nbytes for m in p.collectives))
    times = [row["time_s"] for row in data["lines"]]
    assert times == sorted(times, reverse=True)
    for part in data["breakdown"]:
        assert part["seconds"] == p.breakdown(part["by"])
    assert max(data["memory"]["bytes"]) == max(p.curve) == p.peak_bytes


def test_a_long_curve_keeps_its_peak_and_its_kinds_add_up(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (600, 7):
        monkeypatch.setattr("shardwise.report.data._POINTS", most)
        memory = report_data(plan)["memory"]
        assert len(memory["bytes"]) <= most and max(memory["bytes"]) == plan.predicted.peak_bytes
        assert [sum(column) for column in zip(*memory["kinds"].values(), strict=True)] == memory["bytes"]
        at = memory["peak_at"] // memory["step"]
        there = [a for a in memory["largest"] if a["first"] <= at <= a["last"]]
        assert there[0]["nbytes"] >= 0.99 * plan.predicted.alive[0].nbytes


def test_the_timeline_is_that_of_the_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, p = report_data(plan)["timeline"], plan.predicted
    assert len(steps["events"]) == len(p.rows) and not steps["left_out"]
    lanes = [sum(e[4] for e in steps["events"] if e[0] == lane) for lane in (0, 1)]
    assert lanes == pytest.approx([p.compute_s * 1e6, p.comm_s * 1e6], rel=1e-2)
    monkeypatch.setattr("shardwise.report.data._MOST_EVENTS", 5)
    cut = report_data(plan)["timeline"]
    assert len(cut["events"]) <= 5 and len(cut["events"]) + cut["left_out"] == len(p.rows)


def test_many_lines_are_summed_up(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    before = report_data(plan)["lines"]
    monkeypatch.setattr("shardwise.report.data._MOST_SOURCES", 1)
    lines = report_data(plan)["lines"]
    assert len(lines) == 2 and lines[-1]["source"] == f"{len(before) - 1} more lines"
    assert sum(row["time_s"] for row in lines) == pytest.approx(plan.predicted.serial_s)


def test_the_picture_shows_loops_and_repeated_layers_once() -> None:
    """A scanned decoder and the same with its layers unrolled: one layer forward, one backward, and the rest."""
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}}
    for options, what in (({}, "body of a loop"), ({"scan": False, "layers": 6}, "repeated block")):
        program = zoo.load("t2b", "tiny", **options)
        planned = shardwise.plan(program.fn, *program.args, **where, tactics="dp:data,megatron:model")
        parts = diagram(planned)
        repeated = [part for part in parts if part["what"] == what]
        ways = [part["backward"] for part in repeated]
        assert parts[0] is repeated[0] and ways == sorted(ways) and set(ways) == {False, True}
        assert parts[0]["times"] == (5 if options else 2)
        shown = {row["source"] for part in repeated for row in part["rows"]}
        assert len([row for row in repeated[0]["rows"] if row["op"] == "dot_general"]) in range(7, 11), shown
        for part in parts:
            for number, row in enumerate(part["rows"]):
                assert all(0 <= other < number for other in row["from"])
        paths = [a["path"] for row in repeated[0]["rows"] for a in row["arguments"]]
        assert (
            len({re.findall(r"\d+", path)[0] for path in paths if "layers/" in path and options}) == len(options) // 2
        )
        moved = {move["kind"] for part in parts for row in part["rows"] for move in row["moves"]}
        assert moved <= {c.kind for c in planned.predicted.collectives} and "all-reduce" in moved


def test_what_is_alive_is_the_peak_and_layers_are_one() -> None:
    program = zoo.load("t2b", "tiny", scan=False, layers=4)
    plan = shardwise.plan(program.fn, *program.args, topology="v5e:2x2", mesh={"data": 4}, tactics="dp:data")
    rows = report_data(plan)["alive"]
    assert sum(nbytes for *_, nbytes in rows) == plan.predicted.peak_bytes
    assert ["params/layers/*/mlp/up", 4] in [row[:2] for row in rows] and not any("%" in row[0] for row in rows)


def test_bytes_a_device_follow_the_spec(plan: Plan) -> None:
    for array in report_data(plan)["arrays"]:
        whole = 4
        for size in array["shape"]:
            whole *= size
        assert array["device_bytes"] * array["shards"] == whole


def test_a_loaded_plan_says_what_it_does_not_keep(plan: Plan, loaded: Plan) -> None:
    data, text = report_data(loaded), page_html(loaded)
    assert not data["made_here"] and data["memory"] is data["timeline"] is None and data["diagram"] == []
    assert data["predicted"] == report_data(plan)["predicted"]
    kinds = data["breakdown"][0]["seconds"]
    assert kinds == pytest.approx(plan.predicted.breakdown("kind"))
    assert sum(row["nbytes"] for row in data["lines"]) == pytest.approx(
        sum(c.nbytes * c.times for c in plan.collectives)
    )
    assert html.unescape(text).count("A saved plan ") == 5


def test_it_needs_no_network_and_ids_are_there_once(plan: Plan) -> None:
    text = page_html(plan)
    page = _Reader(text)
    assert page.addresses == ["data:,"]
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert len(page.ids) == len(set(page.ids))
    assert {tab.name for tab in TABS} <= set(page.ids)


def test_hostile_names_stay_text(plan: Plan) -> None:
    arrays = (replace(plan.arguments[0], path=HOSTILE), *plan.arguments[1:])
    p = plan.predicted
    bad = replace(
        plan,
        function=HOSTILE,
        arguments=arrays,
        choices=(replace(plan.choices[0], what=HOSTILE), *plan.choices[1:]),
        notes=(HOSTILE,),
        predicted=replace(p, rows=tuple(replace(r, source=HOSTILE, op=HOSTILE) for r in p.rows)),
    )
    text = page_html(bad)
    page, plain = _Reader(text), _Reader(page_html(plan))
    assert page.data["arrays"][0]["path"] == page.data["function"] == HOSTILE
    assert "b" not in page.tags and page.tags.count("script") == plain.tags.count("script") == 2
    assert text.count("</script>") == 2
    page_html(replace(plan, function="\ud800")).encode()


def test_what_is_not_there_is_not_shown(plan: Plan) -> None:
    bare = replace(plan, schedule=(), search=None)
    for name in ("effects", "baselines"):
        object.__setattr__(bare, name, ())
    shown, hidden = (set(_Reader(page_html(p)).ids) for p in (plan, bare))
    assert shown - hidden == {"effects", "tactics", "improvements"}
    assert {tab.name for tab in TABS} <= hidden and "No arguments have a role" in page_html(bare)


def test_the_head_says_what_it_is(plan: Plan) -> None:
    text = html.unescape(page_html(plan, "shardwise plan 'a b'"))
    elements = report_data(plan)["parameters"]
    assert elements == 2 * 1024 * 4096 and f"{elements / 1e6:.3g}"[:3] in text
    assert "shardwise plan 'a b'" in text and plan.predicted.hardware in text
    assert "Expert" not in text


def test_the_schedule_says_what_each_tactic_adds(plan: Plan) -> None:
    before, after = report_data(plan)["schedule"]
    assert (before["tactic"], before["fits"], before["changes"]) == ("replicated", False, [])
    assert (after["tactic"], after["time_s"]) == ("auto", plan.predicted.time_s)
    assert len(after["changes"]) == len(plan.predicted.collectives) > 0
    assert all(line in html.unescape(page_html(plan)) for line in after["changes"])


def test_the_device_program_is_that_of_the_plan(plan: Plan, loaded: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _Reader(page_html(plan)).data["program"]
    kinds = [line["kind"] for line in data["lines"]]
    for kind in {c.kind for c in plan.collectives}:
        assert kinds.count(kind) == sum(c.kind == kind for c in plan.collectives) > 0
    shown = {" ".join(line["text"].split()) for line in data["lines"]}
    printed = {" ".join(line.split()) for line in plan.program(140).splitlines()}
    assert data["complete"] and shown <= printed
    assert report_data(loaded)["program"] is None and 'id="listing"' not in page_html(loaded)
    monkeypatch.setattr("shardwise.report.data._MOST_LINES", 5)
    text = page_html(plan)
    cut = _Reader(text).data["program"]
    assert len(cut["lines"]) == 5 and not cut["complete"] and "These are the first 5 lines;" in text


def test_effects_are_differences_to_the_plan(plan: Plan, loaded: Plan) -> None:
    p, rows = plan.predicted, report_data(plan)["effects"]
    assert len(rows) == len(plan.choices) > 1
    for row, words, effect in zip(rows, plan.decisions, plan.effects, strict=False):
        assert row["decision"] == str(words) and (row["time_s"], row["peak_bytes"]) == (
            effect.time_s,
            effect.peak_bytes,
        )
        assert row["slower_s"] == effect.time_s - p.time_s and row["more_bytes"] == effect.peak_bytes - p.peak_bytes
    assert any(row["slower_s"] > 0 for row in rows)
    assert report_data(loaded)["effects"] == [], "a saved plan does not know its program"


def test_what_does_not_fit_and_what_was_not_found_to_fit(plan: Plan) -> None:
    assert plan.search is not None
    proven = VariantTried("as it is", peak_bytes=2**40)
    tried = (proven, VariantTried("2 micro-batches", 1.0, 2**41, why=NOT_FOUND))
    page = page_html(replace(plan, search=replace(plan.search, variants=tried)))
    table = re.sub(r"\s*<[^>]*>\s*", "|", page.partition("<caption>Variants tried")[2].partition("</table>")[0])
    assert "|as it is||–||at least 1.00 TiB||does not fit|" in table
    assert "|2 micro-batches||1 s||2.00 TiB||nothing was found that fits|" in table


def test_one_device_and_a_plan_of_nothing(plan: Plan) -> None:
    none = replace(
        plan, mesh=MeshAxes((), ()), arguments=(), outputs=(), choices=(), small=(), placement=(), device_order=()
    )
    data = _Reader(page_html(none)).data
    assert data["mesh"]["device_order"] == [0] and data["arrays"] == []


def test_the_file_is_written_whole_or_not_at_all(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    plan.report(file)
    assert file.read_text(encoding="utf-8") == page_html(plan)
    assert os.listdir(tmp_path) == ["plan.html"]
    with pytest.raises(PlanError, match=r"cannot write .*nowhere"):
        plan.report(tmp_path / "nowhere" / "plan.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PlanError, match=r"cannot write .*folder"):
        plan.report(tmp_path / "folder")
    with pytest.raises(PlanError, match="cannot write /proc"):
        plan.report("/proc/plan.html")
    assert sorted(os.listdir(tmp_path)) == ["folder", "plan.html"]


def test_the_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    assert main(["report", str(file)]) == 0
    assert str(tmp_path / "plan.html") in capsys.readouterr().out
    assert main(["report", str(file), "--output", str(tmp_path / "other.html")]) == 0
    words = ["shardwise", "report", str(file)]
    assert (tmp_path / "plan.html").read_text() == page_html(load_plan(file), " ".join(words))
    capsys.readouterr()
    assert main(["report", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report_data(load_plan(file))))


def test_wrong_input_to_the_command_is_one_line(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    cases = (
        ([str(tmp_path / "no.json")], "cannot read"),
        ([str(file), "--output", str(tmp_path / "nowhere" / "x.html")], "cannot write"),
        ([str(file), "--output", str(file)], "take the place of the plan"),
    )
    for words, says in cases:
        assert main(["report", *words]) == 1
        caught = capsys.readouterr()
        assert says in caught.err and caught.err.count("\n") == 1 and caught.out == ""
    assert os.listdir(tmp_path) == ["plan.json"]
