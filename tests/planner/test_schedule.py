"""The cost after each tactic of a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.tactics.strategies import DataParallel, Keep, Megatron
from tests.planner.test_plan_search import shapes, step


def planned(tactics: Any, **asked: Any) -> shardwise.Plan:
    where: dict[str, Any] = {"mesh": {"data": 2, "model": 2}, "topology": "v5e:2x2", "budget_evals": 100}
    return shardwise.plan(step, *shapes(8192, 4096), tactics=tactics, donate_argnums=(0, 1), **where | asked)


def test_each_tactic_has_the_cost_of_the_schedule_up_to_it() -> None:
    plan = planned([DataParallel("data"), Megatron("model")])
    assert [applied.tactic for applied in plan.schedule] == ["replicated", "dp:data", "megatron:model"]
    nothing, first = planned([]).predicted, planned("dp:data").predicted
    for applied, predicted in zip(plan.schedule, (nothing, first, plan.predicted), strict=True):
        assert (applied.time_s, applied.peak_bytes, applied.fits) == (predicted.time_s, predicted.peak_bytes, True)
        assert applied.collectives == predicted.collectives
    assert not plan.schedule[0].collectives and plan.schedule[1].collectives != plan.schedule[2].collectives


def test_one_tactic_or_none_is_no_schedule() -> None:
    assert planned("dp:data").schedule == planned([]).schedule == planned(None).schedule == ()


def test_searches_pins_and_other_tactics_are_part_of_it() -> None:
    plan = planned(["dp:data", Keep("params", "model"), "auto:model@params"], pins={"x": (("data",), None)})
    assert [applied.tactic for applied in plan.schedule] == [
        "pins",
        "dp:data",
        "Keep(path='params', axes='model')",
        "auto:model@params",
    ]
    assert plan.schedule[-1].time_s == plan.predicted.time_s


def test_it_is_printed_and_saved(tmp_path: Path) -> None:
    plan = planned("dp:data,megatron:model")
    lines = str(plan).partition("After each tactic, with the collectives and bytes that it adds or removes\n\n")[2]
    head, before, *rows = lines.partition("\n\n")[0].splitlines()
    assert head.split() == ["tactic", "step", "time", "peak", "memory", "collectives"]
    assert before.startswith("replicated ") and before.rstrip().endswith("MiB")
    assert rows[0].startswith("dp:data ") and " all-gather data +" in rows[0]
    assert any(row.startswith("megatron:model ") for row in rows) and any(" all-reduce model +" in row for row in rows)
    plan.save(tmp_path / "plan.json")
    assert shardwise.load_plan(tmp_path / "plan.json").schedule == plan.schedule
    assert "After each tactic" not in str(planned("dp:data"))


def test_what_does_not_fit_on_the_way_is_said() -> None:
    plan = planned("dp:data,megatron:model", memory_limit="200MiB", allow_infeasible=True)
    assert not plan.schedule[0].fits and " MiB (over)" in str(plan)


@pytest.mark.parametrize("every", [False, True])
def test_the_summary_lists_the_largest_changes(every: bool) -> None:
    from shardwise.report.plan_text import schedule_rows

    rows = schedule_rows(planned("dp:data,megatron:model,auto:data+model"), every)
    assert all(len(row[-1].splitlines()) <= 5 for row in rows) or every
