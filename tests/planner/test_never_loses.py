"""A plan is never worse than a named strategy, at any budget, and the same on every machine."""

from __future__ import annotations

import functools
import itertools
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.report.verdict import strategy_words
from shardwise.search.run import Budget
from tests.planner.test_plan_search import small_memory

WHERE: dict[str, Any] = {"topology": "v5e:2x4", "mesh": {"data": 2, "model": 4}}


def rank(figures: Any) -> tuple[bool, float]:
    return not figures.fits, figures.time_s if figures.fits else figures.peak_bytes


def loses(plan: shardwise.Plan, rows: Any) -> list[str]:
    """The strategies that are better than a plan."""
    fits, figure = rank(plan.predicted)
    return [row.name for row in rows if rank(row) < (fits, figure * (1 - 1e-9))]


#: Those whose strategies are costed once more by ``compare``, to the same figures.
COMPARED = ("itx:tiny-step", "mlp", "gns", "wresnet")
SEARCHED = ("t2b", "gns", "gpt", "mlp", "t5", "ssm", "dlrm", "vit", "unet:tiny,levels=1", "wresnet")


@pytest.mark.parametrize(
    ("name", "evaluations"),
    [("mixtral", 0), ("itx:tiny-step", 0), *((name, 40) for name in SEARCHED)],
)
def test_no_strategy_of_compare_is_better(name: str, evaluations: int) -> None:
    program = zoo.parse(name if ":" in name else f"{name}:tiny")
    jit = {"donate_argnums": program.donate_argnums}
    plan = shardwise.plan(program.fn, *program.args, budget_evals=evaluations, **WHERE, **jit)
    assert len(plan.baselines) > 3 and not loses(plan, plan.baselines)
    if name in COMPARED:
        assert list(plan.baselines) == shardwise.compare(program.fn, *program.args, **WHERE, **jit).ranked


def random_step(seed: int) -> tuple[Any, list[Any]]:
    """Layers of random widths with skips and norms, and a training step with momentum or without."""
    rng = random.Random(seed)
    widths = [rng.choice([64, 96, 256, 1024]) for _ in range(rng.randint(2, 5))]
    batch = rng.choice([8, 12, 4096])
    norms, momentum = [rng.random() < 0.5 for _ in widths], rng.random() < 0.5

    def forward(params: Any, x: jax.Array) -> jax.Array:
        for w, norm in zip(params, norms, strict=False):
            y = jax.nn.relu(x @ w)
            y = y / (1 + jnp.sqrt(jnp.mean(y * y, -1, keepdims=True))) if norm else y
            x = x + y if y.shape == x.shape else y
        return jnp.mean(x**2)

    def step(params: Any, moments: Any, x: jax.Array) -> Any:
        grads = jax.grad(forward)(params, x)
        if momentum:
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, moments if momentum else grads), moments

    shape = jax.ShapeDtypeStruct
    params = [shape((a, b), "float32") for a, b in itertools.pairwise(widths)]
    return step, [params, params, shape((batch, widths[0]), "float32")]


@pytest.mark.parametrize("seed", range(40))
def test_no_strategy_is_better_for_random_programs(seed: int) -> None:
    step, args = random_step(seed)
    for evaluations in (0, 15) if seed % 4 == 0 else (15,):  # without a search a plan is the best strategy
        plan = shardwise.plan(step, *args, budget_evals=evaluations, **WHERE)
        assert plan.baselines and not loses(plan, plan.baselines)


#: A search of this length still fits; strategies are costed before it, and a longer one could only hide a missing one.
TIGHT: dict[str, Any] = {"microbatches": "auto", "remat": "auto", "budget_evals": 120}
SQUARE = {"data": 2, "model": 2}


@functools.cache
def tight() -> tuple[Any, tuple[Any, ...], dict[str, Any], Any, shardwise.Plan]:
    """A program with its arguments and options, a topology with too little memory for it as it is, and the plan on a mesh."""
    program = zoo.parse("t2b:tiny")
    fn, args, jit = program.fn, program.args, {"donate_argnums": program.donate_argnums}
    whole = shardwise.plan(fn, *args, tactics="fsdp", topology="v5e:2x2", mesh=SQUARE, **jit).predicted.peak_bytes
    topology = small_memory("v5e:2x2", 0.9 * whole)
    return fn, args, jit, topology, shardwise.plan(fn, *args, topology=topology, mesh=SQUARE, **TIGHT, **jit)


def test_no_strategy_in_any_variant_is_better() -> None:
    fn, args, jit, topology, plan = tight()
    where = {"topology": topology, "mesh": SQUARE}
    assert plan.predicted.fits
    for microbatches in (1, 4):
        for remat in (False, True):
            changed = {"microbatches": microbatches, "remat": remat, "allow_infeasible": True}
            other = shardwise.plan(fn, *args, tactics="fsdp:data+model", **changed, **where, **jit)
            rows = {row.name: rank(row) for row in other.baselines}
            assert {"dp:data,megatron:model", "fsdp:data+model", "fsdp:data,megatron:model"} <= rows.keys()
            assert rank(plan.predicted) <= min(rank(other.predicted), *rows.values()), changed


def test_strategies_are_listed_at_their_best_variant() -> None:
    """On a mesh that is given, and on one that is searched for, whose axes get other names. The cost is that of the strategy as
    a plan; states of other variants are not evaluated for it."""
    fn, args, jit, topology, given = tight()
    searched = shardwise.plan(fn, *args, topology=topology, **TIGHT, **jit)
    for mesh, plan in ((SQUARE, given), (None, searched)):
        before = [p.evaluations for r in plan.asked.rivals for p, _ in r.inquiry.problems.values()]
        rows = plan.baselines
        assert before == [p.evaluations for r in plan.asked.rivals for p, _ in r.inquiry.problems.values()]
        assert (
            plan.predicted.fits
            and (before or mesh is None)
            and not loses(plan, rows)
            and strategy_words(rows[0], plan.mesh) in " ".join(str(plan).split())
        )
        assert len({row.name for row in rows}) == len(rows) and len({row.variant for row in rows}) > 1
        last = next(r for r in reversed(rows) if r.variant != rows[0].variant and r.name != "replicated")
        for row in (rows[0], last):
            count, remat = row.variant.partition(" micro-batches")[0], "rematerialized" in row.variant
            changed = {"microbatches": int(count) if count.isdigit() else 1, "remat": remat}
            there = plan.asked.cost.placement
            alone = shardwise.plan(fn, *args, tactics=row.name, topology=there, **changed, **jit).predicted
            assert (alone.time_s, alone.peak_bytes) == pytest.approx((row.time_s, row.peak_bytes)), row


def test_a_slow_machine_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is advanced by each reading: on the slow machine by 200 times as much, though the cap is not reached."""
    program = zoo.parse("t2b:layers=2,d=512,heads=8,head=64,ffn=2048,vocab=1024,batch=32,seq=256")
    plans = []
    for tick_s in (0.001, 0.2):
        readings = itertools.count()
        monkeypatch.setattr(time, "perf_counter", lambda: tick_s * next(readings))  # noqa: B023
        where = {"topology": "v5e:2x2", "donate_argnums": program.donate_argnums}
        plans.append(shardwise.plan(program.fn, *program.args, **where))
        assert 50 < next(readings) < Budget().seconds / 0.2
    fast, slow = plans
    assert slow.to_json() == fast.to_json()
    assert slow.search is not None and slow.search.evaluations > 50
