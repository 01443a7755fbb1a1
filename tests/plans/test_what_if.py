"""What a plan would take with something decided otherwise: the same as planning so, and the parts add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen
import jax
import pytest

import shardwise
from shardwise import zoo
from shardwise.errors import PlanError, QueryError
from shardwise.tactics.strategies import FSDP, DataParallel, Keep, Megatron, Shard

MESH = {"data": 4, "model": 4}
ROLES = {"batch": "batch", "params": "params"}
TACTICS = (FSDP("data"), Megatron("model"))
P = jax.sharding.PartitionSpec


@pytest.fixture(scope="module")
def program() -> Any:
    return zoo.parse("t2b:layers=2,d=512,heads=8,head=64,ffn=2048,vocab=1024,batch=32,seq=256")


def planned(program: Any, *tactics: Any, topology: str = "v5e:4x4", **options: Any) -> shardwise.Plan:
    where = {"mesh": MESH, "topology": topology, "roles": ROLES, "donate_argnums": program.donate_argnums}
    return shardwise.plan(program.fn, *program.args, tactics=tactics, **where, **options)


@pytest.fixture(scope="module")
def plan(program: Any) -> shardwise.Plan:
    return planned(program, *TACTICS)


def test_a_change_takes_what_a_plan_with_it_takes(program: Any, plan: shardwise.Plan) -> None:
    for changes, other in (
        ({}, planned(program, *TACTICS)),
        ({"topology": "v5p:4x4"}, planned(program, *TACTICS, topology="v5p:4x4")),
        (
            {"pins": {"params/embed": P("model", None)}},
            planned(program, *TACTICS, pins={"params/embed": P("model", None)}),
        ),
    ):
        found = plan.what_if(**changes)
        assert found.before == plan.predicted and found.after == other.predicted
        assert {s.path: s.after for s in found.specs} == {
            b.path: b.spec
            for a, b in zip((*plan.arguments, *plan.outputs), (*other.arguments, *other.outputs), strict=True)
            if a.spec != b.spec
        }
    vocabulary = Shard("params/embed", 0, "model")
    assert plan.what_if(vocabulary).after == planned(program, *TACTICS, vocabulary).predicted


def test_the_seconds_by_cause_add_up(plan: shardwise.Plan) -> None:
    found = plan.what_if(without=1)
    change = found.after.serial_s - found.before.serial_s
    assert change and sum(c.change for c in found.times) == pytest.approx(change, rel=1e-9)
    # Rows that do not change are left out, and of the peaks all is told.
    assert all(c.change for c in (*found.times, *found.memory))
    change = found.after.peak_bytes - found.before.peak_bytes
    assert change and sum(c.change for c in found.memory) == change


def test_decisions_are_left_out_by_number_and_by_words(plan: shardwise.Plan) -> None:
    by_number = plan.what_if(without=len(plan.choices))
    words = plan.choices[-1]
    assert plan.what_if(without=words).after == plan.what_if(without=str(words)).after == by_number.after
    assert by_number.changes == (f"without {words}",) and len(by_number.decisions) == len(plan.choices) - 1
    everything = plan.what_if(without=range(1, len(plan.choices) + 1))
    assert not everything.decisions and not any(axes for spec in everything.specs for axes in spec.after)
    for wrong in (0, len(plan.choices) + 1, "no such words"):
        with pytest.raises(PlanError, match=r"has no decision .*; it has:\n  1\. "):
            plan.what_if(without=wrong)


def test_what_is_wrong_with_a_change_is_said(plan: shardwise.Plan) -> None:
    with pytest.raises(QueryError, match="did you mean params/embed"):
        plan.what_if(Keep("params/embedd", "data"))


def test_effects_are_what_each_decision_is_worth(plan: shardwise.Plan) -> None:
    assert [e.decision for e in plan.effects] == list(plan.decisions[: len(plan.choices)])
    for k, effect in enumerate(plan.effects, 1):
        after = plan.what_if(without=k).after
        assert (effect.time_s, effect.peak_bytes, effect.fits) == (after.time_s, after.peak_bytes, after.fits)


def test_a_loaded_plan_is_asked_with_its_function(program: Any, plan: shardwise.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json")
    assert loaded == plan and loaded.choices == plan.choices and loaded.effects == ()
    with pytest.raises(PlanError, match=r"plan\.bind\(fn, \*args\)"):
        loaded.what_if(without=1)
    bound = loaded.bind(program.fn, *program.args)
    assert bound == plan and bound.in_specs == plan.in_specs
    one, other = bound.what_if(without=1), plan.what_if(without=1)
    assert (one.before, one.after, one.times) == (other.before, other.after, other.times)
    assert bound.what_if(DataParallel("model")).after == plan.what_if(DataParallel("model")).after
    smaller = zoo.parse("t2b:tiny")
    with pytest.raises(PlanError, match="params/embed is float32"):
        loaded.bind(smaller.fn, *smaller.args)


def test_the_text_names_figures_and_causes(plan: shardwise.Plan) -> None:
    text = str(plan.what_if(without=1))
    assert "step time" in text and "by what changes most" in text and "Arrays with another sharding" in text
    assert max(map(len, text.splitlines())) <= 80


def test_rules_give_the_specs_under_flax(plan: shardwise.Plan) -> None:
    rules = plan.rules()
    assert not rules.others
    for array in plan.arguments:
        made = flax.linen.logical_to_mesh_axes(rules.names[array.path], rules.rules)
        spec = [axes[0] if len(axes) == 1 else axes or None for axes in array.spec]
        assert list(made) == spec, array.path


def test_rules_for_names_that_a_model_has(plan: shardwise.Plan) -> None:
    given = {"params/layers/mlp/up": ("layers", "embed", "mlp"), "params/layers/mlp/down": ("layers", "mlp", "embed")}
    rules = plan.rules(given)
    assert dict(rules.rules)["mlp"] == "model" and dict(rules.rules)["layers"] is None and not rules.others
    same = plan.rules(dict.fromkeys(given, ("one", "one", "one")))
    assert len(same.others) == 2 and all("the rules make it" in text for text in same.others)
    with pytest.raises(PlanError, match="has 3 dimensions, and 1 names") as error:
        plan.rules({"params/layers/mlp/up": ("layers",), "params/x": ()})
    assert "no argument has the path 'params/x'" in str(error.value)


def test_explain_says_which_decision_and_what_moves(plan: shardwise.Plan) -> None:
    text = plan.explain("params/layers/mlp/up")
    assert "over model: decision" in text and "; without it" in text
    assert "as bfloat16[512,2048], for dot_general at" in text  # the gather of a cast


def test_decisions_are_data_with_text(plan: shardwise.Plan, tmp_path: Path) -> None:
    assert plan.decisions == (*plan.choices, *plan.small) and all(str(d) for d in plan.decisions)
    first = plan.decisions[0]
    assert first.axis == "data" and str(first) == f"{first.what} over data" and first.what.endswith("(size 32)")
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json")
    assert list(map(str, loaded.decisions)) == list(map(str, plan.decisions)) and loaded.decisions == plan.decisions
    effect = plan.effects[0]
    assert effect.decision is first and plan.what_if(without=[first]).after.time_s == effect.time_s
    assert str(plan.what_if(shardwise.Keep("params/embed", "model")).decisions[-1]).endswith("replicated on model")
    with pytest.raises(PlanError, match="the plan has no decision Shard"):
        plan.what_if(without=type(first)((99,), "data"))
