"""Steps that change one group on several axes at once."""

from __future__ import annotations

import pytest

from shardwise.lowering.decisions import Shard
from shardwise.search.joint import Joint
from shardwise.search.problem import Problem
from tests.search.test_mcts import problem


@pytest.fixture
def made() -> Problem:
    return problem(width=4096, batch=512, x=2, y=2)


def both(made: Problem) -> list[tuple[int, ...]]:
    """The actions of each group on both axes."""
    shards: dict[tuple[int, ...], list[int]] = {}
    for n in made.actions:
        decision = made.evaluator.actions[n].decision
        if isinstance(decision, Shard):
            shards.setdefault(decision.colors, []).append(n)
    return [tuple(pair) for pair in shards.values() if len(pair) == 2]


def test_a_group_is_added_on_all_axes_where_it_is_free(made: Problem) -> None:
    one, other = both(made)[:2]
    added = [edit.added for edit in Joint(made).added((one[0],))]
    assert other in added and one not in added
    assert all(len(step) == 2 for step in added)


def test_a_group_leaves_all_its_axes_or_another_takes_its_place_there(made: Problem) -> None:
    one, other, third = both(made)[:3]
    states = {edit.state: edit.added for edit in Joint(made).replaced((one[0], other[0], one[1]))}
    assert states[other[0],] == ()
    assert states[third[0], other[0], third[1]] == third
    assert not any(other[1] in state for state in states), "the other group has one of the axes"


def test_a_mesh_with_one_axis_has_no_such_steps() -> None:
    made = problem(width=4096, batch=512, x=4)
    joint, state = Joint(made), tuple(made.actions[:1])
    assert not [*joint.added(()), *joint.added(state), *joint.replaced(state)]
