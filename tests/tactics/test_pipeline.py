"""The tactic ``Pipeline``, and pipelines among the variants of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import Pipeline
from shardwise.cli.main import main
from shardwise.errors import DecisionError, MeshError, PlanError, VariantError
from shardwise.tactics.text import as_tactics, tactic_text

W, X = (jax.ShapeDtypeStruct(s, "float32") for s in [(8, 256, 256), (64, 256)])
ROLES = {"batch": "x", "params": "w"}


def deep(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def plan(tactics: Any, mesh: Any = None, **options: Any) -> Any:
    return shardwise.plan(deep, W, X, mesh=mesh or {"stage": 4, "data": 2}, tactics=tactics, roles=ROLES, **options)


def test_as_an_object_and_as_text() -> None:
    (tactic,) = as_tactics("pipeline:stage")
    assert tactic == Pipeline("stage") and tactic_text(tactic) == "pipeline:stage"
    one = plan([Pipeline("stage", microbatches=8), "dp:data"])
    other = plan("pipeline:stage,dp:data", microbatches=8)
    assert one.spec("w") == other.spec("w") == jax.P("stage") and one.spec("x") == jax.P("data")
    assert one.variant == other.variant and (one.variant.stages, one.variant.microbatches) == (4, 8)


def test_several_axes_are_one_row_of_stages() -> None:
    made = plan([Pipeline(("stage", "data"), microbatches=8)])
    assert made.variant.stages == 8 and made.spec("w") == jax.P(("stage", "data"))


def test_without_a_number_some_numbers_of_micro_batches_are_tried() -> None:
    made = plan("pipeline:stage,dp:data")
    assert made.variant.stages == 4 and made.variant.microbatches % 4 == 0


def test_a_plan_says_what_flows_and_how_long_stages_wait(tmp_path: Path) -> None:
    made = plan("pipeline:stage", microbatches=16)
    text = " ".join(str(made).split())
    assert "4 stages: 16 micro-batches of x flow through them, and a stage waits for 16% of the time" in text
    assert "Parameters: layers over stage" in text
    made.save(tmp_path / "plan.json")
    assert shardwise.load_plan(tmp_path / "plan.json").variant == made.variant


def test_circular_stages_wait_less(tmp_path: Path) -> None:
    made = plan([Pipeline("stage", microbatches=16, circular=2)])
    assert made.variant.bubble == 3 / 35 and str(made.variant) == "2 times 4 stages, 16 micro-batches"
    text = " ".join(str(made).split())
    assert "16 micro-batches of x flow through them 2 times, and a stage waits for 9% of the time" in text
    made.save(tmp_path / "plan.json")
    assert shardwise.load_plan(tmp_path / "plan.json").variant == made.variant


def test_a_search_plans_the_other_axes() -> None:
    made = plan([Pipeline("stage", microbatches=8), shardwise.Auto("data")], budget_evals=200)
    assert made.spec("w")[0] == "stage" and any(c.axes == ("data",) for c in made.collectives)


def wide(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        def layer(x: Any, p: Any) -> Any:
            return x + jnp.tanh(x @ p[0]) @ p[1], None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def test_a_search_keeps_a_pipeline_where_it_is_predicted_faster() -> None:
    """Over slow links: gradients take longer from slice to slice than the activations of micro-batches."""
    up, down = (jax.ShapeDtypeStruct(s, "bfloat16") for s in [(64, 4096, 16384), (64, 16384, 4096)])
    x = jax.ShapeDtypeStruct((16384, 4096), "bfloat16")
    roles = {"batch": "x", "params": "params"}
    made = shardwise.plan(
        wide,
        (up, down),
        x,
        topology="4*v5e:4x4",
        mesh={"slice": 4, "chip": 16},
        roles=roles,
        budget_evals=300,
        pipeline="auto",
    )
    tried = {one.variant: one.time_s for one in made.search.variants}
    assert made.variant.stages == 4 and made.spec("params/0")[0] == "slice"
    assert made.predicted.time_s < 0.8 * tried["as it is"]
    assert f"Without a pipeline the best plan takes {1e3 * tried['as it is']:.0f} ms: as it is" in str(made)


def test_a_search_keeps_the_program_as_it_is_where_that_is_faster() -> None:
    made = plan(None, pipeline="auto", budget_evals=100)
    assert made.variant.stages == 1 and any("stages" in tried.variant for tried in made.search.variants)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "zoo:llama3:tiny,layers=4", "--topology", "v5e:2x4", "--mesh", "stage=4,data=2", "--remat", "no"]
    assert main([*command, "--tactics", "pipeline:stage,dp:data", "--microbatches", "8"]) == 0
    assert "A pipeline of 4 stages: 8 micro-batches" in capsys.readouterr().out
    assert main([*command, "--tactics", "dp:data", "--pipeline", "no"]) == 1
    assert "pipeline is a number of stages or 'auto', not 'no'" in capsys.readouterr().err


def test_what_cannot_be_done() -> None:
    with pytest.raises(PlanError, match="pipeline=2, but the axes of Pipeline have 4 devices"):
        plan("pipeline:stage", pipeline=2)
    with pytest.raises(VariantError, match="a pipeline needs at least two micro-batches"):
        plan(None, pipeline=2, microbatches=1)
    with pytest.raises(VariantError, match="circular is a whole number above zero, not 0"):
        plan([Pipeline("stage", circular=0)], microbatches=4)
    with pytest.raises(VariantError, match="pipeline is a number of stages or 'auto', not 'all'"):
        plan(None, pipeline="all")
    with pytest.raises(VariantError, match="the batch of 6 examples cannot be cut into 4"):
        x = jax.ShapeDtypeStruct((6, 256), "float32")
        shardwise.plan(deep, W, x, mesh={"stage": 4}, tactics="pipeline", roles=ROLES)
    with pytest.raises(VariantError, match="cannot be computed in a pipeline of 4 stages: there is no loop over"):
        shardwise.plan(lambda w, x: x @ w[0], W, X, mesh={"stage": 4}, tactics="pipeline", roles=ROLES, microbatches=4)
    with pytest.raises(MeshError, match="Pipeline over stage: the number of stages has to be known"):
        plan("pipeline:stage", mesh={"stage": None, "data": None}, topology="v5e:2x4")
    plain = shardwise.plan(deep, W, X, mesh={"stage": 4}, tactics=[], roles=ROLES)
    with pytest.raises(DecisionError, match="the program has no stages"):
        Pipeline("stage").decide(plain.inquiry.context, ())


def test_sharding_inside_of_layers_with_weights_that_are_converted() -> None:
    """The backward pass reads converted weights: Megatron has to know them as weights, and no tick may copy them."""
    w = [jax.ShapeDtypeStruct(s, "float32") for s in [(8, 256, 1024), (8, 1024, 256)]]

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            def layer(x: Any, p: Any) -> Any:
                up, down = (a.astype(jnp.bfloat16) for a in p)
                return x + jnp.tanh(x @ up) @ down, None

            return jnp.sum(jax.lax.scan(layer, x.astype(jnp.bfloat16), w)[0].astype(jnp.float32) ** 2)

        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))

    tactics = [Pipeline("stage", microbatches=8), "megatron:model"]
    made = shardwise.plan(step, w, X, mesh={"stage": 4, "model": 2}, tactics=tactics, roles=ROLES)
    assert made.spec("w/0") == jax.P("stage", None, "model")
    program = made.inquiry.analysis.program
    carried = [program.values[v] for op in program.ops if op.kind == "scan.carry" for v in op.results]
    assert not [v for v in carried if v.dtype == "bfloat16" and v.shape in ((2, 4, 256, 1024), (2, 4, 1024, 256))]
