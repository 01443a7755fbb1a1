"""Which of two states is better, and which ones no other beats."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.cost.model import Cost
from shardwise.plans.search_log import MOST_TRADES
from shardwise.search.goal import FASTEST, Goal, pareto, thinned
from tests.planner.test_plan_search import planned

POINTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)
# Other jobs on the machine must not fail a test.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


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


def test_room_in_memory_is_worth_a_little_time() -> None:
    tight, roomy, slow = cost(1, 95), cost(1.02, 80), cost(1.05, 80)
    assert FASTEST.rank(roomy, 100) < FASTEST.rank(tight, 100) < FASTEST.rank(slow, 100)
    assert FASTEST.rank(tight, 200) < FASTEST.rank(roomy, 200)


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


@BUSY
@given(POINTS, st.integers(1, 60))
def test_it_is_what_nothing_beats(points: list[tuple[int, int]], cut: int) -> None:
    front = pareto([*pareto(points[:cut]), *points[cut:]])
    best = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert list(front) == sorted(best, key=lambda p: p[1])


@BUSY
@given(POINTS, st.integers(4, 8), st.integers(1, 40))
def test_a_thin_one_keeps_its_ends_and_what_fits(points: list[tuple[int, int]], most: int, usable: int) -> None:
    front = pareto(points)
    thin = thinned(front, most, usable)
    assert len(thin) <= most and set(thin) <= set(front)
    assert thin[0] == front[0] and thin[-1] == front[-1]
    assert [p for p in front if p[1] <= usable][-1:] == [p for p in thin if p[1] <= usable][-1:]


def test_a_plan_keeps_the_front_of_its_mesh() -> None:
    made = planned()
    assert made.search is not None
    front = made.search.front
    assert 0 < len(front) <= MOST_TRADES
    for one, other in itertools.pairwise(front):
        assert one.peak_bytes < other.peak_bytes and one.time_s > other.time_s
    assert all(t.fits == (t.peak_bytes <= made.predicted.usable_bytes) for t in front)
    own = [i for i in made.search.improvements if i.mesh == made.mesh]
    for seen in own:
        assert any(t.time_s <= seen.time_s and t.peak_bytes <= seen.peak_bytes * 1.001 for t in front), "evaluated, too"
    assert planned().search == made.search


def test_every_method_has_one() -> None:
    for method in ("greedy", "beam", "random", "exhaustive"):
        made = planned(method=method)
        assert made.search is not None and made.search.front, method
