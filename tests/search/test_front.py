"""The front of a search: what no evaluated state beats, whoever evaluated it."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.plans.search_log import MOST_TRADES
from shardwise.search.front import pareto, thinned
from tests.planner.test_plan_search import planned

POINTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)
# Other jobs on the machine must not fail a test.
BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
