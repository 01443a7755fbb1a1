"""The verdict and what stands out: the figures are the plan's, and what is said to be checked holds in the cost model."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.planner.asked import read_bytes
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.data import report_data
from shardwise.report.insights import insights, memory_by_kind
from shardwise.report.plan_text import plan_page
from shardwise.report.verdict import dimension_names, verdict
from shardwise.units import binary, seconds


def planned(**options: Any) -> Plan:
    program = zoo.load("t2b", "tiny")
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "budget_evals": 60}
    return shardwise.plan(program.fn, *program.args, **where | options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def test_the_headline_has_the_figures(plan: Plan) -> None:
    p = plan.predicted
    head = verdict(plan).headline
    assert head.startswith(f"{seconds(p.time_s)} a step, {p.utilization:.0%} MFU, fits ({binary(p.peak_bytes)} of ")
    over = replace(plan, predicted=replace(p, usable_bytes=p.peak_bytes - 1))
    assert "does not fit" in verdict(over).headline
    tight = replace(plan, predicted=replace(p, usable_bytes=p.peak_bytes + 1))
    assert ": tight)" in verdict(tight).headline


@pytest.mark.parametrize(
    ("slower", "fits", "says"),
    [
        (1.0, True, "As fast as the best baseline"),
        (1.1, True, "10% faster than the best baseline"),
        (1.5, True, "1.50 times as fast as the best baseline"),
        (0.5, True, "2.00 times as slow as the best baseline"),
        (1.5, False, "No named strategy else fits"),
    ],
)
def test_it_is_compared_with_the_best_baseline(plan: Plan, slower: float, fits: bool, says: str) -> None:
    other = replace(plan)
    best = replace(plan.baselines[0], time_s=slower * plan.predicted.time_s, fits=fits)
    object.__setattr__(other, "baselines", (best,))
    assert verdict(other).compared.startswith(says)


def test_baselines_are_the_best_three_that_differ(plan: Plan) -> None:
    rows = verdict(plan).baselines
    assert len({(row.time_s, row.peak_bytes) for row in rows}) == len(rows) == 3
    assert rows[0] == plan.baselines[0] and list(rows) == sorted(rows, key=lambda row: row.rank)


def test_what_is_sharded_is_said_by_role() -> None:
    def sharded(tactics: Any) -> str:
        made = planned(tactics=tactics)
        object.__setattr__(made, "baselines", ())  # their costs are not said here
        return verdict(made).sharded

    text = sharded("dp:data,megatron:model")
    assert text.startswith("Batch over data. Parameters and optimizer state: ")
    assert "inner width of params/layers/mlp over model" in text
    assert sharded([]) == "Nothing is sharded: all 8 devices compute the same."
    zero = sharded("zero1:data")
    assert "Parameters: replicated. Optimizer state: width over data" in zero


def test_dimensions_are_named_by_structure_alone(plan: Plan) -> None:
    """The same program under other paths: its dimensions are called the same, up to the paths."""
    program = zoo.load("t2b", "tiny")
    hidden = lambda a, b, c: program.fn(b, c, a)  # noqa: E731
    params, state, batch = program.args
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "tactics": "fsdp:data"}
    names = [
        dimension_names(shardwise.plan(f, *args, **where)).values()
        for f, args in (
            (program.fn, program.args),
            (hidden, (batch, params, state)),
        )
    ]
    words = {"batch", "sequence", "vocabulary", "width"}
    assert words <= set(names[0]) and words <= set(names[1])


def test_the_same_words_in_terminal_notebook_and_page(plan: Plan) -> None:
    lines = [*verdict(plan).lines, *insights(plan)]
    assert report_data(plan)["verdict"] + report_data(plan)["insights"] == lines
    text = " ".join(plan_page(plan).text().split())
    shown = html.unescape(re.sub(r"\s+", " ", re.sub(r"</?span[^>]*>", "", plan._repr_html_())))
    for line in lines:
        assert line in text, line
        assert line in shown, line


def test_memory_by_kind_adds_up(plan: Plan) -> None:
    memory = memory_by_kind(plan)
    assert (sum(memory.kinds.values()) == memory.curve).all()
    assert sum(memory.peak.values()) == plan.predicted.peak_bytes == memory.curve.max()


def test_donation_is_advised_where_it_helps_and_checked() -> None:
    shape = jax.ShapeDtypeStruct

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    args = shape((32768, 32768), "float32"), shape((16, 32768), "float32")
    where: dict[str, Any] = {"mesh": {"data": 1}, "topology": "v5e:1", "tactics": [], "allow_infeasible": True}
    plain = shardwise.plan(step, *args, **where)
    (said,) = [line for line in insights(plain) if line.startswith("Donating w ")]
    donated = shardwise.plan(step, *args, **where, donate_argnums=0)
    assert f"the peak is {binary(donated.predicted.peak_bytes)} instead of" in said
    assert not any(line.startswith("Donating") for line in insights(donated))


def test_rematerialization_is_checked_under_the_same_decisions() -> None:
    program = zoo.load("t2b", "tiny", layers=12, seq=256, batch=64)
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "tactics": "fsdp:data"}
    where |= {"memory_limit": "200MiB", "allow_infeasible": True}
    (said,) = [line for line in shardwise.plan(program.fn, *program.args, **where).insights if "remat=True" in line]
    again = shardwise.plan(program.fn, *program.args, **where, remat=True)
    assert not any("remat=True" in line for line in again.insights)
    p = again.predicted
    assert f"takes {seconds(p.time_s)} and the peak is {binary(p.peak_bytes)} instead of" in said


def test_a_line_in_chunks_is_named_where_its_arrays_are_short_lived() -> None:
    """The logits of a loss are; what unrolled layers keep for the backward pass is not, and chunks would not free it."""
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "tactics": "dp:data"}
    where |= {"memory_limit": "1GiB", "allow_infeasible": True}
    wide = zoo.load("t2b", "tiny", vocab=2**17, batch=32, seq=128, scan=False)
    (said,) = [line for line in shardwise.plan(wide.fn, *wide.args, **where).insights if "chunks" in line]
    found = re.search(r"(\d+)% of .* is ([\d.]+ \wiB) instead of ([\d.]+ \wiB)", said)
    assert found is not None and int(found[1]) >= 20
    lower, before = read_bytes(found[2]), read_bytes(found[3])
    assert before * (1 - (int(found[1]) + 1) / 100) < lower < before
    deep = zoo.load("t2b", "tiny", layers=3, batch=64, seq=512, scan=False)
    assert not any("chunks" in line for line in shardwise.plan(deep.fn, *deep.args, **where).insights)


def test_moments_in_bfloat16_are_checked() -> None:
    small = planned(memory_limit="4MiB", allow_infeasible=True, tactics="dp:data")
    (said,) = [line for line in insights(small) if "moments" in line]
    lower, before = re.findall(r"([\d.]+) MiB", said)
    assert float(lower) < float(before)


def test_a_loaded_plan_has_a_verdict_without_comparison(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    found = verdict(loaded)
    assert found.headline == verdict(plan).headline and not found.compared and found.sharded
    assert insights(loaded) == ()
