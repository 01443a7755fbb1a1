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
from shardwise.lowering.decisions import Shard
from shardwise.planner.asked import read_bytes
from shardwise.plans.load import load_plan
from shardwise.plans.plan import Plan
from shardwise.report.data import report_data
from shardwise.report.insights import insights, memory_by_kind
from shardwise.report.plan_text import decided, plan_page
from shardwise.report.verdict import dimension_names, strategy_words, verdict
from shardwise.tactics.named import PARTS
from shardwise.units import binary, seconds

P = jax.sharding.PartitionSpec


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
    assert head.startswith(
        f"{seconds(p.time_s)} per step, fits ({binary(p.peak_bytes)} of "
    )  # MFU is below one percent
    assert ", 64% MFU, fits" in verdict(replace(plan, predicted=replace(p, utilization=0.64))).headline
    over = replace(plan, predicted=replace(p, usable_bytes=p.peak_bytes - 1))
    assert "does not fit" in verdict(over).headline
    tight = replace(plan, predicted=replace(p, usable_bytes=p.peak_bytes + 1))
    assert f"tight ({binary(p.peak_bytes)} to " in verdict(tight).headline


@pytest.mark.parametrize(
    ("slower", "fits", "says"),
    [
        (1.0, True, "As fast as the best baseline"),
        (1.1, True, "10% faster than the best baseline"),
        (1.5, True, "1.50 times as fast as the best baseline"),
        (0.5, True, "2.00 times as slow as the best baseline"),
        (1.5, False, "No named strategy was found that fits"),
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


@pytest.mark.parametrize(
    ("name", "variant", "words"),
    [
        ("fsdp:data+model", "", "FSDP over all 8 devices"),
        (
            "dp:data,megatron:model,sequence:model",
            "",
            "data parallelism over data, Megatron and sequence parallelism over model",
        ),
        ("replicated", "4 micro-batches", "everything replicated, 4 micro-batches"),
    ],
)
def test_strategies_in_words(plan: Plan, name: str, variant: str, words: str) -> None:
    assert strategy_words(replace(plan.baselines[0], name=name, variant=variant), plan.mesh) == words


def test_every_named_strategy_has_words(plan: Plan) -> None:
    """``vocabulary`` and ``edges`` are words already."""
    for name in set(PARTS) - {"vocabulary", "edges", "pipeline"}:
        row = replace(plan.baselines[0], name=f"{name}:data", variant="")
        assert strategy_words(row, plan.mesh) not in (f"{name} over data", "")


def test_one_device_is_compared_with_nothing() -> None:
    one = shardwise.plan(lambda w, x: x @ w, jnp.ones((8, 8)), jnp.ones((64, 8)), mesh={"data": 1}, topology="v5e:1")
    found = verdict(one)
    assert found.sharded == "One device: there is nothing to shard." and not found.compared and not found.baselines
    assert "named strateg" not in plan_page(one).text()


def test_what_is_sharded_is_said_by_role() -> None:
    def sharded(tactics: Any) -> str:
        made = planned(tactics=tactics)
        object.__setattr__(made, "baselines", ())  # their costs are not said here
        return verdict(made).sharded

    text = sharded("dp:data,megatron:model")
    assert text.startswith("Batch over data. Parameters and optimizer state: ")
    assert "inner width of params/layers/mlp over model" in text and "heads over model" in text
    assert sharded([]) == "Nothing is sharded: all 8 devices compute the same."
    zero = sharded("zero1:data")
    assert "Parameters: replicated. Optimizer state: width over data" in zero


def test_the_batch_says_what_of_it_is_replicated() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return jnp.sum((x @ w - y) ** 2)

    args = jnp.ones((8, 8)), jnp.ones((64, 8)), jnp.ones((64, 8))
    made = shardwise.plan(
        step, *args, mesh={"data": 2, "model": 2}, pins={"y": P(("data", "model")), "x": P("data")}, tactics=[]
    )
    assert verdict(made).sharded.startswith("Batch over data (50%), over all 4 devices (50%). ")


def test_the_dimensions_of_a_cache_and_of_images_are_named() -> None:
    """A cache by its own places, not by those of parameters; rows and columns of an image are no sequence."""
    program = zoo.load("itx", "tiny")
    where: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}}
    text = verdict(shardwise.plan(program.fn, *program.args, **where, tactics="megatron:model")).sharded
    assert "Cache: params" not in text
    net = zoo.load("unet", "tiny")
    names = dimension_names(shardwise.plan(net.fn, *net.args, **where, tactics="dp:data")).values()
    assert "spatial dimension" in names and "sequence" not in names


def test_arguments_without_a_role_are_said_too() -> None:
    made = shardwise.plan(lambda x: x + 1, jnp.zeros(4096), mesh={"data": 4}, tactics=[shardwise.Shard("x", 0, "data")])
    assert not made.roles and verdict(made).sharded == "Arguments: x[0] over all 4 devices."
    shapes = (jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((512, 64), "float32"))
    shard = [shardwise.Shard("state/w", 1, "data")]
    with_roles = shardwise.plan(
        lambda state, x: x @ state["w"], {"w": shapes[0]}, shapes[1], mesh={"data": 4}, tactics=shard
    )
    assert verdict(with_roles).sharded == "Batch replicated. Parameters: state/w[1] over all 4 devices."


def test_a_program_with_a_callback_has_a_verdict() -> None:
    def step(w: Any, x: Any) -> Any:
        jax.debug.print("{}", x.sum())
        return x @ w

    shapes = (jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((512, 64), "float32"))
    made = shardwise.plan(step, *shapes, mesh={"data": 4}, tactics="dp:data")
    assert verdict(made).sharded.startswith("Batch over all 4 devices.")


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
    words = {"batch", "sequence", "vocabulary", "width", "heads"}
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


def test_a_step_that_is_bound_by_memory_says_what_of_it_is_used() -> None:
    program = zoo.load("itx", "tiny")
    plan = shardwise.plan(program.fn, *program.args, topology="v5e:1", tactics=[])
    (said,) = [line for line in plan.insights if "reads and writes" in line]
    found = re.search(r"reads and writes ([\d.]+ \wiB) .* (\d+)% of", said)
    assert found is not None
    rate = plan.inquiry.model.cost.profile.memory_bytes_per_s
    assert int(found[2]) == pytest.approx(100 * read_bytes(found[1]) / rate / plan.predicted.time_s, abs=1)
    arguments = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(program.args))
    assert read_bytes(found[1]) >= 0.9 * arguments


def test_decisions_about_other_dimensions_are_other_rows(plan: Plan) -> None:
    """Also where repeated layers give them the same text."""
    choices = tuple(Shard(c, axis, what="w/*[0]") for c, axis in (((1,), "data"), ((2,), "data"), ((1,), "model")))
    rows, _ = decided(replace(plan, choices=choices, small=()))
    assert rows == [("1, 3", ["data", "model"], "w/*[0]"), ("2", ["data"], "w/*[0]")]


def test_a_loaded_plan_has_a_verdict_without_comparison(tmp_path: Path) -> None:
    plan = planned(tactics="fsdp:data")
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    found = verdict(loaded)
    assert found.headline == verdict(plan).headline and not found.compared
    assert found.sharded == verdict(plan).sharded and "width" in found.sharded
    assert load_plan(tmp_path / "plan.json").to_json() == plan.to_json()
    assert insights(loaded) == ()
