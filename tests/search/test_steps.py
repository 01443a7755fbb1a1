"""Steps that take many decisions: one group on several axes, what is left to shard, openings of all axes together."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import pytest

from shardwise.cost.model import CostModel
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.decisions import Keep, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem, Scored
from shardwise.search.run import Budget
from shardwise.search.steps import Joint, Rest, find_openings
from tests.search.test_mcts import analyzed
from tests.search.test_mcts import problem as problem_of

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
        shards = [made.evaluator.actions[n].decision for n in step]
        assert all(isinstance(d, Shard) for d in shards)
        (axis,) = {d.axis for d in shards}
        (last,) = [d for d in made.base if isinstance(d, Keep) and d.axis == axis]
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


def test_openings_are_the_front_of_the_seeds_by_axes(made: Problem) -> None:
    on = {axis: [n for n in made.actions if made.evaluator.actions[n].axis == axis] for axis in (0, 1)}
    seeds = [(on[0][0],), (on[0][1],), (on[1][0],), (on[0][0], on[1][0])]
    made.start_from(seeds)
    found = find_openings(made)
    assert set(found) == {(0,), (1,), (0, 1)} and found[1,] == [seeds[2]] and found[0, 1] == [seeds[3]]
    for state in seeds[:2]:
        point = Scored(state, made.cost(state)).point
        beaten = any(Scored(s, made.cost(s)).point <= point for s in found[0,] if s != state)
        assert state in found[0,] or beaten
    made.start_from(())


def test_the_search_is_no_worse_than_any_one_decision_with_its_rest() -> None:
    problem = many_sizes(batch=131072)
    found = mcts(problem, Budget(math.inf, 400), seed=0)
    rest = Rest(problem)
    complete = [(n, *step) for n in problem.actions for step in rest.steps((n,))]
    assert found.best.cost.time_ps <= 1.005 * min(c.time_ps for c in problem.costs(complete))


@pytest.fixture
def square() -> Problem:
    return problem_of(width=4096, batch=512, x=2, y=2)


def both(square: Problem) -> list[tuple[int, ...]]:
    """The actions of each group on both axes."""
    shards: dict[tuple[int, ...], list[int]] = {}
    for n in square.actions:
        decision = square.evaluator.actions[n].decision
        if isinstance(decision, Shard):
            shards.setdefault(decision.colors, []).append(n)
    return [tuple(pair) for pair in shards.values() if len(pair) == 2]


def test_a_group_is_added_on_all_axes_where_it_is_free(square: Problem) -> None:
    one, other = both(square)[:2]
    added = [edit.added for edit in Joint(square).added((one[0],))]
    assert other in added and one not in added
    assert all(len(step) == 2 for step in added)


def test_a_group_leaves_all_its_axes_or_another_takes_its_place_there(square: Problem) -> None:
    one, other, third = both(square)[:3]
    states = {edit.state: edit.added for edit in Joint(square).replaced((one[0], other[0], one[1]))}
    assert states[other[0],] == ()
    assert states[third[0], other[0], third[1]] == third
    assert not any(other[1] in state for state in states), "the other group has one of the axes"


def test_a_mesh_with_one_axis_has_no_such_steps() -> None:
    made = problem_of(width=4096, batch=512, x=4)
    joint, state = Joint(made), tuple(made.actions[:1])
    assert not [*joint.added(()), *joint.added(state), *joint.replaced(state)]
