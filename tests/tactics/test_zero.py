"""The three ZeRO stages: what is whole at rest, and what becomes of the gradients."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.plans.parts import ArrayPlan
from shardwise.plans.plan import Plan
from shardwise.tactics.strategies import FSDP, DataParallel, Shard, ZeRO1, ZeRO2
from tests.dims.programs import shape

ROLES = {"batch": "batch", "params": "params"}


def adam(params, moments, batch):
    def loss(p):
        hidden = jax.nn.relu(batch["x"] @ p["in"] + p["bias"])
        return jnp.mean((hidden @ p["out"] - batch["y"]) ** 2)

    grads = jax.grad(loss)(params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["mean"], grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, moments["square"], grads)
    new = jax.tree.map(lambda p, m, v: p - 0.1 * m / (jnp.sqrt(v) + 1e-3), params, mean, square)
    return new, {"mean": mean, "square": square}


def arguments() -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def draw(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes)

    params = {"in": draw(16, 64), "bias": draw(64), "out": draw(64, 8)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, {"mean": zeros, "square": zeros}, {"x": draw(512, 16), "y": draw(512, 8)}


def zoo_arguments(target: str) -> tuple[Any, tuple[Any, ...]]:
    program = zoo.parse(target)
    return program.fn, program.make_args()


def large(array: ArrayPlan) -> bool:
    """Small arguments may be kept whole whatever the tactic."""
    return math.prod(array.shape) > 256


def bytes_of(plan: Plan, kind: str) -> float:
    return plan.moved().get((kind, ("data",)), (0, 0.0))[1]


@pytest.mark.parametrize("target", ["mlp", "llama3:tiny"])
def test_zero1_reduces_gradients_whole_and_gathers_parameters_once(target: str) -> None:
    fn, args = (adam, arguments()) if target == "mlp" else zoo_arguments(target)
    plan = shardwise.plan(fn, *args, mesh={"data": 8}, tactics=[ZeRO1("data")], roles=ROLES)
    params = [a for a in plan.arguments if a.path.startswith("params") and large(a)]
    moments = [a for a in plan.arguments if not a.path.startswith(("params", "batch")) and large(a)]
    assert len(moments) == 2 * len(params) > 2
    assert not any(any(a.spec) for a in params), "parameters are whole at rest"
    assert all(any(a.spec) for a in moments), "moments are sharded"
    assert not bytes_of(plan, "reduce-scatter")
    reduced = [c for c in plan.collectives if c.kind == "all-reduce" and c.nbytes > 4]
    assert len(reduced) >= len(params) - 1, "one all-reduce for every gradient but a looked-up table's"
    gathered = Counter(c.value for c in plan.collectives if c.kind == "all-gather")
    assert all(gathered[a.path] == 1 for a in plan.outputs if a.path.startswith("out/0/") and large(a))

    found = shardwise.verify(plan, fn, *args)
    assert found.agrees
    # An all-reduce of which only slices are used is what a backend may compile as a reduce-scatter.
    reductions = [r for r in found.rows if r.kind in ("all-reduce", "reduce-scatter")]
    assert sum(r.compiled_bytes for r in reductions) == pytest.approx(bytes_of(plan, "all-reduce"), rel=0.02)


def test_the_stages_differ_in_what_they_say() -> None:
    args = arguments()
    plans = {
        tactic: shardwise.plan(adam, *args, mesh={"data": 8}, tactics=[tactic("data")], roles=ROLES)
        for tactic in (DataParallel, ZeRO1, ZeRO2, FSDP)
    }
    one, two = plans[ZeRO1], plans[ZeRO2]
    assert [a.spec for a in one.arguments] == [a.spec for a in two.arguments]
    gradients = 4 * (16 * 64 + 64 + 64 * 8)
    assert bytes_of(one, "all-reduce") == bytes_of(plans[DataParallel], "all-reduce") == gradients
    assert bytes_of(two, "reduce-scatter") == gradients and not bytes_of(two, "all-reduce")
    assert any(plans[FSDP].array("params/in").spec) and not any(two.array("params/in").spec)
    (kept,) = [d for d in one.decisions if d not in two.decisions]
    assert str(kept).startswith("%") and "replicated on data" in str(kept), "inner values are named by what made them"


def test_zero1_after_another_tactic_on_another_axis() -> None:
    tactics = [Shard("params/in", 1, "model"), ZeRO1("data")]
    args = arguments()
    plan = shardwise.plan(adam, *args, mesh={"data": 4, "model": 2}, tactics=tactics, roles=ROLES)
    assert plan.array("params/in").spec == ((), ("model",)) and not bytes_of(plan, "reduce-scatter")
    assert "data" in {axis for axes in plan.array("moments/mean/in").spec for axis in axes}
    assert shardwise.verify(plan, adam, *args).agrees


@pytest.mark.parametrize("tactic", [FSDP, ZeRO1, ZeRO2])
def test_the_stages_need_their_roles(tactic: Any) -> None:
    with pytest.raises(
        shardwise.ShardwiseError, match=f"^{tactic.__name__} needs to know which arguments are the batch"
    ):
        shardwise.plan(lambda x: x * 2, shape(8, 8), mesh={"data": 4}, tactics=[tactic("data")])
