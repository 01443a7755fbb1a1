"""``Auto`` among other tactics: it searches the axes that it is given, and what was decided before holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

import shardwise
from shardwise.lowering.decisions import Keep as KeepDecision
from shardwise.search.run import Ended
from shardwise.tactics.auto import Auto
from shardwise.tactics.strategies import DataParallel, Keep, Replicate, Shard
from tests.planner.test_plan_search import shapes, small_memory, step

P = jax.sharding.PartitionSpec
PATHS = ("params/up", "params/down", "moments/up", "moments/down")


def planned(tactics: list[Any], args: list[Any] | None = None, **asked: Any) -> shardwise.Plan:
    """By default a wide model of a small batch: sharding its width is best."""
    where: dict[str, Any] = {"mesh": {"data": 2, "model": 2}, "topology": "v5e:2x2", "roles": {"batch": "x"}}
    where |= {"budget_evals": 200, "donate_argnums": (0, 1)} | asked
    return shardwise.plan(step, *(args or shapes(65536, 512)), tactics=tactics, **where)


def axes(plan: shardwise.Plan, path: str) -> set[str]:
    return {axis for own in plan.array(path).spec for axis in own}


def test_it_searches_its_axes_on_top_of_what_was_decided() -> None:
    plan = planned([DataParallel("data"), Auto("model")])
    assert plan.array("x").spec[0][0] == "data"
    assert plan.array("params/up").spec == ((), ("model",)) and plan.array("params/down").spec == (("model",), ())
    assert plan.decisions[0].axis == "data" and plan.search is not None
    assert not any(d.axis == "data" for d in plan.choices[1:])


def test_without_axes_it_takes_those_that_are_left() -> None:
    named, rest = planned([DataParallel("data"), Auto("model")]), planned([DataParallel("data"), Auto()])
    assert replace(named, schedule=()).to_json() == replace(rest, schedule=()).to_json()
    assert [applied.tactic for applied in named.schedule[1:]] == ["dp:data", "auto:model"]
    with pytest.raises(shardwise.ShardwiseError, match=r"every axis is taken .*; Auto\('data', 'model'\) searches"):
        planned([DataParallel("data"), DataParallel("model"), Auto()])


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(shardwise.ShardwiseError, match="the mesh has no axis 'modle'; its axes are data, model"):
        planned([Auto("modle")])


def test_an_axis_that_has_something_may_be_given_more() -> None:
    """Data parallel over all devices does not fit: on top of it parameters are sharded on the same axis."""
    tight = small_memory("v5e:2x2", 1.5 * 2**30)
    plan = planned([DataParallel("x"), Auto("x")], mesh={"x": 4}, topology=tight)
    assert plan.predicted.fits and plan.array("x").spec[0] == ("x",)
    assert sum(d.what.startswith("x[0]") for d in plan.decisions) == 1, "it is not decided twice"
    assert any(axes(plan, path) for path in PATHS)


@pytest.mark.parametrize("spec", [P(), P("model"), P(None, "data")])
def test_pins_hold(spec: Any) -> None:
    plan = planned([Auto()], pins={"params/up": spec})
    want = tuple((axis,) if axis else () for axis in (*spec, None, None))[:2]
    assert plan.array("params/up").spec == want and plan.search is not None and plan.search.evaluations > 1


def test_what_is_replicated_stays_whole() -> None:
    args = shapes(4096, 16384, 4096)
    free = planned([Auto()], args)
    assert axes(free, "params/up") and axes(free, "params/down"), "a free search shards them"
    plan = planned([Replicate("params"), Auto()], args)
    assert not axes(plan, "params/up") and not axes(plan, "params/down")
    assert not axes(plan, "out/0/up") and not axes(plan, "out/0/down")
    usual = planned([Replicate("params"), DataParallel("data"), DataParallel("model")], args)
    assert plan.predicted.time_s <= usual.predicted.time_s
    small = planned([Replicate("params"), Auto()], args, objective="memory")
    assert axes(small, "moments/up") == {"data", "model"} and not axes(small, "params/up")


def test_what_is_kept_on_an_axis_is_whole_there() -> None:
    plan = planned([Keep("params/up", "model"), Auto()])
    assert "model" not in axes(plan, "params/up") | axes(plan, "out/0/up")


def test_tactics_after_it_apply_to_what_it_found() -> None:
    plan = planned([Auto("model"), Shard("x", 0, "data")])
    assert plan.array("x").spec[0][0] == "data" and axes(plan, "params/up") == {"model"}


def test_several_share_the_budget() -> None:
    plan = planned([Auto("model"), Auto("data")], budget_evals=120, method="greedy")
    assert plan.search is not None and plan.search.evaluations <= 120
    times = [i.time_s for i in plan.search.improvements]
    assert times == sorted(times, reverse=True)


def test_an_interrupt_ends_all_of_them() -> None:
    def stop(improvement: object, share: float) -> None:
        raise KeyboardInterrupt

    plan = planned([Auto("model"), Auto("data")], progress=stop)
    assert plan.search is not None and plan.search.ended is Ended.INTERRUPTED


def test_it_decides_about_some_arguments_only() -> None:
    """The rows of ``up`` are a dimension of ``x`` and ``down`` too; its columns are the rows of ``down``."""
    everything = planned([Auto("model")])
    some = planned([Auto("model", only="x")])
    assert axes(everything, "params/down") == axes(everything, "params/up") == {"model"}
    assert everything.array("params/up").spec == ((), ("model",))
    assert some.array("params/up").spec != ((), ("model",)), "the width is no dimension of x"
    assert some.search is not None and 0 < some.search.evaluations < everything.search.evaluations  # type: ignore[union-attr]
    for decision in some.choices:
        if not isinstance(decision, KeepDecision):
            assert decision.what.startswith(("x[", "params/up[0]", "params/down[1]")), decision


def test_other_arguments_stay_as_they_are() -> None:
    """The columns of ``up`` are the rows of ``down``: sharding the first does not store the second sharded."""
    tactics = [DataParallel("data"), Auto("model", only="params/up")]
    plan = planned(tactics)
    assert axes(plan, "params/up") == axes(plan, "moments/up") == {"model"}, "moments follow"
    assert not axes(plan, "params/down") and not axes(plan, "moments/down") and axes(plan, "x") == {"data"}
    (kept,) = [d for d in plan.choices if isinstance(d, KeepDecision)]
    assert kept.axis == "model" and "the search is about others only" in str(kept)


def test_what_was_decided_before_it_holds_for_other_arguments() -> None:
    plan = planned([Shard("params/down", 0, "model"), Auto("model", only="x")])
    assert axes(plan, "params/down") == {"model"}


def test_what_it_decides_about_is_given_by_paths() -> None:
    one = planned([DataParallel("data"), Auto("model", only="params/up")])
    both = planned([DataParallel("data"), Auto("model", only=["params/up", "params/down"])])
    text = planned("dp:data,auto:model@params/up+params/down")  # type: ignore[arg-type]
    assert both.to_json() == text.to_json() and axes(one, "params/up") == {"model"}
    with pytest.raises(shardwise.QueryError, match="params/upp"):
        planned([Auto(only="params/upp")])
    for wrong in ("dp:data@params", "auto@", "auto+dp@params"):
        with pytest.raises(shardwise.DecisionError, match="paths for auto alone, such as auto:model@params/mlp"):
            planned(wrong)  # type: ignore[arg-type]


def test_a_search_of_some_arguments_is_not_worse_than_a_strategy_for_them() -> None:
    best = planned([DataParallel("data"), Auto("model", only="params")], budget_evals=0)
    megatron = planned("dp:data,megatron:model")  # type: ignore[arg-type]
    assert best.predicted.time_s <= megatron.predicted.time_s
