"""The backward pass gathers parameters again: fewer copies are alive, the numbers are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.capture.trace import JitOptions
from shardwise.errors import PlanError, VariantError
from shardwise.tactics.strategies import FSDP
from shardwise.transforms.flat import Flat
from shardwise.transforms.gathers import find_barriers
from shardwise.transforms.variants import GATHERS, Variant, trace_variant
from tests.planner.test_plan_search import small_memory
from tests.transforms.test_blocks import ROLES, batch, layers, mlp, trained

WIDE = 1024


def wide(count: int = 12, rows: int = 4096) -> tuple[Any, ...]:
    """Shapes of layers whose parameters are larger than their activations."""
    square = jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32)
    return [{"up": square, "down": square}] * count, jax.ShapeDtypeStruct((rows, WIDE), jnp.float32)


def planned(args: Any, **asked: Any) -> shardwise.Plan:
    options: dict[str, Any] = {"mesh": {"data": 4}, "tactics": [FSDP("data")], "roles": ROLES, "donate_argnums": 0}
    options["topology"] = "v5e:2x2"
    return shardwise.plan(trained(mlp), *args, **options | asked)


def test_copies_of_parameters_are_not_kept_for_the_backward_pass() -> None:
    kept, again = planned(wide()), planned(wide(), remat=GATHERS)
    parameters = 24 * WIDE * WIDE * 2  # products read them rounded to bfloat16
    assert kept.predicted.peak_bytes - again.predicted.peak_bytes > 0.75 * parameters, "all but those near the turn"
    gathered = [plan.moved()["all-gather", ("data",)][1] for plan in (kept, again)]
    assert 1.8 * gathered[0] < gathered[1] <= 2 * gathered[0]
    assert "The backward pass gathers parameters again" in str(again)


def test_parameters_near_the_turn_are_gathered_once() -> None:
    traced = trace_variant(trained(mlp), wide(), {}, JitOptions(), Variant())
    flat = Flat(traced.jaxpr)
    behind = [v for blocks in find_barriers(flat).values() for block in blocks for v in block.inputs]
    assert 18 <= len(set(behind) & set(flat.inputs[:24])) < 24
    assert flat.inputs[0] in behind and flat.inputs[22] not in behind


@pytest.mark.parametrize("count", [None, 2])
def test_sharded_it_computes_the_same(count: int | None) -> None:
    plan = planned((layers(), batch()), remat=GATHERS, microbatches=count)
    assert plan.variant.remat == GATHERS and shardwise.verify(plan, trained(mlp), layers(), batch()).agrees


@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_programs_of_the_zoo_compute_the_same(name: str) -> None:
    program = zoo.load(name, "tiny", scan=False)
    asked: dict[str, Any] = {"mesh": {"data": 4}, "tactics": [FSDP("data")], "roles": ROLES, "remat": GATHERS}
    plan = shardwise.plan(program.fn, *program.args, **asked)
    assert shardwise.verify(plan, program.fn, *program.make_args()).agrees


def test_the_search_chooses_it_where_it_is_the_fastest_that_fits(tmp_path: Path) -> None:
    """It needs 192 MiB as it is, and 152 MiB with parameters gathered again."""
    asked: dict[str, Any] = {"topology": small_memory("v5e:2x2", 170 << 20), "tactics": None, "budget_evals": 50}
    plan = planned(wide(), remat="auto", **asked)
    assert plan.predicted.fits and plan.variant == Variant(remat=GATHERS) and plan.search is not None
    assert plan.search.variants[0].fits is False
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json")
    assert loaded.variant == plan.variant and loaded.sharded == plan.sharded


def test_a_file_with_another_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned(wide(), remat=GATHERS).save(path)
    path.write_text(path.read_text().replace('"gathers"', '"gather"'))
    with pytest.raises(PlanError):
        shardwise.load_plan(path)


def test_scanned_layers_gather_again_anyway() -> None:
    program = zoo.load("gpt", "tiny")
    with pytest.raises(VariantError, match="no parameter that products of the forward and of the backward pass"):
        shardwise.plan(program.fn, *program.args, mesh={"data": 4}, tactics=[FSDP("data")], remat=GATHERS)


def test_it_is_tried_where_nothing_fits_otherwise() -> None:
    where = small_memory("v5e:2x2", 170 << 20)
    assert planned(wide(), topology=where).variant.remat == GATHERS
    kept = planned(wide(), topology=where, remat=False)
    assert kept.variant == Variant() and not kept.predicted.fits
