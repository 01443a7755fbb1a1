"""The integer program against trying everything, and against lowered states: none that fits costs less than its bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.search.ilp import Option, ilp, local_s, options, shardings
from benchmarks.search.ilp_state import ilp_state
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.memory import blocks
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.candidates import Candidates
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.sharding import Sharding, reshard
from shardwise.search.exhaustive import exhaustive
from shardwise.search.problem import Problem
from shardwise.search.run import Budget, SearchError

shape = jax.ShapeDtypeStruct


def product(x: jax.Array, up: jax.Array) -> jax.Array:
    return x @ up


def forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ up) @ down


def sums(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Two partial products whose reductions may wait for their sum."""
    hidden = jnp.tanh(x @ up)
    return hidden @ down + (hidden * 2) @ down


def step(x: jax.Array, up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
    grads = jax.grad(lambda u, d: jnp.sum((jnp.tanh(x @ u) @ d) ** 2), argnums=(0, 1))(up, down)
    return up - grads[0], down - grads[1]


@cache
def analyzed(fn: Callable[..., Any], hidden: int = 4096) -> Analysis:
    sizes = [(512, 1024), (1024, hidden), (hidden, 1024)][: 2 if fn is product else 3]
    args = tuple(shape(s, "float32") for s in sizes)
    return analyze_program(lower(trace(fn, args, {}, JitOptions())))


def model_of(analysis: Analysis, **mesh: int) -> tuple[CostModel, MeshAxes]:
    axes = MeshAxes.of(mesh)
    return CostModel.of(analysis, HardwareCost(place(axes, topology("v5e:2x2")))), axes


def assignment_s(model: CostModel, mesh: MeshAxes, lies: dict[int, Sharding], chosen: dict[int, Option]) -> float:
    """What an assignment costs, added up edge by edge."""
    structure, cost = model.structure, model.cost
    total, paid, ways = 0.0, set(), Candidates(structure, mesh, cost)
    for op in structure.program.schedule:
        if op.rule is None:
            continue
        option, runs = chosen[op.id], float(structure.program.runs[op.region])
        total += runs * option.seconds
        edges = [
            (v, ways.operand(op, k), need)
            for k, (v, need) in enumerate(zip(op.operands, option.needs, strict=True))
            if v >= 0
        ]
        for v, array, need in edges:
            if (v, array, op.region, need) not in paid:
                paid.add((v, array, op.region, need))
                total += runs * cost.communication_s(reshard(array, lies[v], need, mesh), structure.early[v])
        for v, made in zip(op.results, option.results, strict=True):
            total += runs * cost.communication_s(reshard(ways.arrays[v], made, lies[v], mesh), False)
    return total


def test_it_is_the_best_of_all_assignments() -> None:
    model, mesh = model_of(analyzed(product), x=4)
    ops = [op for op in model.structure.program.schedule if op.rule is not None]
    ways = Candidates(model.structure, mesh, model.cost)
    values = [v for op in ops for v in op.results]
    lies = [shardings(model.structure.program.values[v].shape, mesh, model.structure.waits[v]) for v in values]
    least = min(
        assignment_s(
            model, mesh, dict(zip(values, where, strict=True)), dict(zip([o.id for o in ops], how, strict=True))
        )
        for where in itertools.product(*lies)
        for how in itertools.product(*(options(ways, op) for op in ops))
    )
    found = ilp(model, mesh)
    assert found.local_s == pytest.approx(least) == pytest.approx(found.bound_s)


@pytest.mark.parametrize("fn", [forward, sums, step])
@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}])
def test_a_solution_costs_what_it_says(fn: Callable[..., Any], mesh: dict[str, int]) -> None:
    model, axes = model_of(analyzed(fn), **mesh)
    found = ilp(model, axes)
    assert found.local_s == pytest.approx(assignment_s(model, axes, found.lies, found.options), rel=1e-6)
    assert found.bound_s * (1 - 1e-12) <= found.local_s <= found.bound_s * 1.001


@pytest.mark.parametrize("fn", [forward, sums, step])
@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}])
def test_no_state_costs_less_than_the_bound(fn: Callable[..., Any], mesh: dict[str, int]) -> None:
    analysis = analyzed(fn)
    model, axes = model_of(analysis, **mesh)
    problem = Problem(model, keeps=False)  # so that some of few random states are good
    bound = ilp(model, axes).bound_s
    rng, times = random.Random(0), []
    for _ in range(150):
        state: tuple[int, ...] = ()
        while (allowed := problem.allowed(state)) and rng.random() < 0.8:
            state = (*state, rng.choice(allowed))
        times.append(local_s(model, problem.evaluator.lowered(state)))
    assert bound <= min(times) * (1 + 1e-6)
    assert min(times) <= bound * 1.2 < local_s(model, problem.evaluator.lowered(()))


def test_less_memory_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest keeps the parameters whole; where there is no room for that, they are gathered."""
    model, mesh = model_of(analyzed(step, 256), x=4)
    free = ilp(model, mesh)
    parameters = [a.value for a in model.structure.program.arguments][1:]
    assert any(not free.lies[v].axes() for v in parameters)
    live, profile = model.life.live, model.cost.profile
    sizes = {v: blocks(model.structure.program.values[v], free.lies[v], mesh, profile) for v in live}
    peak = max(sum(sizes[v] for v in live if live[v][0] <= at <= live[v][1]) for at in range(model.life.points))
    for room in (peak, peak - 1):
        monkeypatch.setattr(CostModel, "usable_blocks", property(lambda self, room=room: room))
        tight = ilp(model, mesh)
        assert (tight.bound_s > free.bound_s * 1.0001) is (room < peak)


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(SearchError, match="ilp: no sharding of the stored values over x 4 fits"):
        ilp(*model_of(analyzed(step, 1 << 23), x=4))


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}])
def test_the_nearest_state_is_near_the_best(mesh: dict[str, int]) -> None:
    analysis, budget = analyzed(step), Budget(seconds=600, evaluations=10**6)
    model, _ = model_of(analysis, **mesh)
    found = ilp_state(Problem(model), budget)
    best = exhaustive(Problem(model, keeps=False), budget).best.cost.time_s
    assert found.best.cost.time_s <= 1.15 * best
    assert found.evaluations < 200
