"""Pipelines on devices: the numbers of plain JAX, and the predicted collectives."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import shardwise
from shardwise.plans.plan import Plan
from tests.spmd.emitted import emitted, predicted
from tests.transforms.layered import ALL, one_by_one, plain

TWO = {"stage": 4, "data": 2}
THREE = {"stage": 2, "data": 2, "model": 2}


def planned(name: str, layers: int, mesh: Any, tactics: Any, remat: bool = False, **options: Any) -> tuple[Any, ...]:
    fn, args = ALL[name](layers)
    return fn, args, shardwise.plan(fn, *args, mesh=mesh, tactics=tactics, remat=remat, **options)


def kinds(plan: Plan, axis: str) -> list[str]:
    return sorted({c.kind for c in plan.collectives if axis in c.axes})


def check(fn: Any, args: Any, plan: Plan, want: Any) -> None:
    run = jax.jit(plan.jit(fn).inline)  # traced once, for its collectives and its numbers
    assert emitted(jax.make_jaxpr(run)(*args)) == predicted(plan)
    for have, expected in zip(jax.tree.leaves(run(*args)), want, strict=True):
        largest = float(np.max(np.abs(expected)))
        np.testing.assert_allclose(have, expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "name, layers, mesh, tactics, remat",
    [
        ("decoder", 4, TWO, "pipeline:stage,dp:data", False),
        ("decoder", 6, TWO, "pipeline:stage,fsdp:data", True),
        ("decoder", 4, THREE, "pipeline:stage,dp:data,megatron:model", True),
        ("translator", 4, TWO, "pipeline:stage,fsdp:data", True),
        ("translator", 3, THREE, "pipeline:stage,dp:data,megatron:model", False),
        ("experts", 4, TWO, "pipeline:stage,zero1:data", False),
        ("experts", 6, THREE, "pipeline:stage,dp:data,expert:model", True),
    ],
)
def test_the_numbers_of_plain_jax(name: str, layers: int, mesh: Any, tactics: str, remat: bool) -> None:
    fn, args, plan = planned(name, layers, mesh, tactics, remat, microbatches=4)
    assert plan.variant.stages == mesh["stage"] and plan.variant.microbatches == 4
    assert "collective-permute" in kinds(plan, "stage")
    check(fn, args, plan, plain(name, layers))


def test_circular_stages_on_devices() -> None:
    fn, args = ALL["decoder"](5)
    tactics: Any = [shardwise.Pipeline("stage", circular=2), "fsdp:data+stage,megatron:model"]
    plan = shardwise.plan(fn, *args, mesh=THREE, tactics=tactics, microbatches=4, remat=True)
    sent = [c for c in plan.collectives if c.kind == "collective-permute" and c.axes == ("stage",)]
    assert [c.times for c in sent] == [2 * 4 + 2 - 1] * 4  # on, and back to the first stage
    check(fn, args, plan, plain("decoder", 5))


def test_layers_that_are_called_one_by_one() -> None:
    fn, args = one_by_one("decoder", 5)
    tactics = "pipeline:stage,fsdp:data+stage"
    plan = shardwise.plan(fn, *args, mesh=TWO, tactics=tactics, microbatches=4, remat=True)
    assert "collective-permute" in kinds(plan, "stage")
    check(fn, args, plan, jax.tree.leaves(jax.jit(fn)(*args)))


def test_stages_are_no_experts() -> None:
    *_, plan = planned("experts", 4, THREE, "pipeline:stage,expert:model", microbatches=4)
    assert {a.path: a.spec for a in plan.arguments}["params/layers/in"] == (("stage",), ("model",), (), ())


def test_stages_have_their_own_layers_and_send_activations_on() -> None:
    """Stacked parameters and moments are sharded over the layers. Each pass sends one carry, and its end is reduced once."""
    *_, plan = planned("decoder", 8, TWO, "pipeline:stage", microbatches=8)
    stacked = [a for a in plan.arguments if "/layers/" in a.path]
    assert stacked and all(a.spec[0] == ("stage",) for a in stacked)
    sent = [c for c in plan.collectives if c.kind == "collective-permute"]
    activations = 16 // 8 * 6 * 16 * 4  # examples of a micro-batch, positions, width, bytes
    assert [(c.nbytes, c.times) for c in sent] == [(activations, 8 + 4 - 1)] * 2
    assert [(c.times, c.axes) for c in plan.collectives if c.kind != "collective-permute"] == [(1, ("stage",))] * 2
