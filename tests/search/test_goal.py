"""Which of two states is better."""

from __future__ import annotations

import math

import pytest

from shardwise.cost.model import Cost
from shardwise.search.goal import FASTEST, Goal


def cost(time_s: float, blocks: int) -> Cost:
    return Cost(round(time_s * 1e12), 0, 0, blocks)


SMALL, QUICK, LARGE, BOTH = cost(4, 10), cost(1, 90), cost(0.5, 200), cost(4, 20)


@pytest.mark.parametrize(
    ("goal", "order"),
    [
        (FASTEST, [QUICK, SMALL, BOTH, LARGE]),
        (Goal(memory=True), [SMALL, BOTH, QUICK, LARGE]),
        (Goal(memory=True, step_time_s=2), [QUICK, SMALL, BOTH, LARGE]),
        (Goal(memory=True, step_time_s=0.1), [QUICK, SMALL, BOTH, LARGE]),
    ],
)
def test_the_better_state_comes_first(goal: Goal, order: list[Cost]) -> None:
    assert sorted((order[k] for k in (2, 0, 3, 1)), key=lambda c: goal.rank(c, 100)) == order


def test_nearly_equal_peaks_are_ties() -> None:
    slow, quick, larger = cost(2, 10_000), cost(1, 10_001), cost(1, 10_100)
    goal = Goal(memory=True)
    assert goal.rank(quick, 20_000) < goal.rank(slow, 20_000) < goal.rank(larger, 20_000)
    assert FASTEST.rank(quick, 20_000) < FASTEST.rank(larger, 20_000) < FASTEST.rank(slow, 20_000)
    assert all(n <= goal.figure(cost(1, n)) <= 1.008 * n for n in range(1, 5000, 7))


def test_only_good_states_exceed_nothing() -> None:
    for goal in (FASTEST, Goal(memory=True), Goal(memory=True, step_time_s=2)):
        for one in (SMALL, QUICK, LARGE, BOTH):
            assert (goal.rank(one, 100)[0] == 0) is (goal.excess(one, 100) <= 1)
    assert math.isclose(Goal(memory=True, step_time_s=2).excess(SMALL, 100), 2)
