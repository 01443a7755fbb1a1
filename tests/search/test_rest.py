"""Steps that take many decisions: what is left to shard, and openings of all axes together."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.decisions import Keep, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.budget import Budget
from shardwise.search.mcts import mcts
from shardwise.search.openings import find_openings
from shardwise.search.problem import Problem
from shardwise.search.rest import Rest
from shardwise.search.run import Run
from tests.search.test_mcts import analyzed

WIDTHS = (1024, 1536, 2048, 2560, 3072, 3584)


def many_sizes(batch: int = 16384) -> Problem:
    """A step with Adam's moments whose layers all have other sizes, and small biases."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for w, b in params:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean(x**2)

    def step(params, first, second, x):
        grads = jax.grad(loss)(params, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g, second, grads)
        return jax.tree.map(lambda p, m, v: p - m / jnp.sqrt(v + 1), params, first, second), first, second

    shape = jax.ShapeDtypeStruct
    params = [(shape((m, n), "float32"), shape((n,), "float32")) for m, n in itertools.pairwise(WIDTHS)]
    analysis = analyzed(step, [params, params, params, shape((batch, WIDTHS[0]), "float32")])
    return Problem(CostModel.of(analysis, HardwareCost(place(MeshAxes.of({"x": 2, "y": 4}), topology("v5e:2x4")))))


@pytest.fixture(scope="module")
def made() -> Problem:
    return many_sizes()


def test_the_rest_shards_every_large_argument_and_keeps_the_small_ones(made: Problem) -> None:
    program, structure = made.analysis.program, made.model.structure
    steps = Rest(made).steps(())
    needed, every = steps[0], steps[1]
    assert set(needed) < set(every), "two neighbouring layers share a size"
    for step in steps:
        *shards, last = (made.evaluator.actions[n].decision for n in step)
        assert isinstance(last, Keep) and all(isinstance(d, Shard) for d in shards)
        assert len({getattr(d, "axis", "") for d in (*shards, last)}) == 1
        colors = {c for d in shards if isinstance(d, Shard) for c in d.colors}
        for a in program.arguments:
            large = len(program.values[a.value].shape) > 1
            assert large != (a.value in last.values)
            assert not large or colors.intersection(structure.colors[a.value])


def test_nothing_is_left_of_the_rest(made: Problem) -> None:
    rest = Rest(made)
    first, _, second, every = rest.steps(())
    assert rest.steps((*first, *second)) == []
    assert rest.steps(first) == [second, every]


def test_openings_of_all_axes_together(made: Problem) -> None:
    """One of the first axis and then one of the second, or both axes with every decision."""
    found = find_openings(Run(made, Budget(math.inf, 500), None))
    assert set(found) == {(0,), (1,), (0, 1)}
    combined = {(*one, *other) for one in found[0,] for other in found[1,]}
    for state in found[0, 1]:
        pairs = [tuple(made.evaluator.actions[n] for n in state[k : k + 2]) for k in range(0, len(state), 2)]
        assert state in combined or all(
            (one.axis, other.axis) == (0, 1) and one.unit == other.unit for one, other in pairs
        )


def test_axes_with_strategies_that_are_second_best_alone() -> None:
    """Every second width over one axis and the others over the other: each is the best on its axis only beside the other."""
    program = zoo.load("mlp", layers=4)
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, JitOptions(donate_argnums=(0, 1)))))
    cost = HardwareCost(place(MeshAxes.of({"x": 4, "y": 4}), topology("v5e:4x4")))
    problem = Problem(CostModel.of(analysis, cost))
    width = {c: problem.model.structure.colors[analysis.program.paths[f"params/hidden/{c}/bias"]][0] for c in range(4)}
    first = problem.model.structure.colors[analysis.program.paths["params/first/bias"]][0]
    wanted = [(width[0], "y"), (first, "x"), (first, "y"), (width[3], "x"), (width[3], "y"), (width[1], "x")]
    decisions = [a.decision for a in problem.evaluator.actions]
    board = tuple(
        next(n for n, d in enumerate(decisions) if isinstance(d, Shard) and color in d.colors and d.axis == axis)
        for color, axis in wanted
    )
    found, both = find_openings(Run(problem, Budget(math.inf, 500), None)), problem.cost(board).time_ps
    assert len({state[0] for state in found[0,] if state}) > 1, "led by different decisions"
    assert min(problem.cost(state).time_ps for state in found[0, 1]) <= 1.01 * both, "and combined"


def test_the_search_is_no_worse_than_any_one_decision_with_its_rest() -> None:
    problem = many_sizes(batch=131072)
    found = mcts(problem, Budget(math.inf, 400), seed=0)
    rest = Rest(problem)
    complete = [(n, *step) for n in problem.actions for step in rest.steps((n,))]
    assert found.best.cost.time_ps <= 1.005 * min(c.time_ps for c in problem.costs(complete))
