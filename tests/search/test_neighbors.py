"""Neighbors of a state are listed once each, in small neighborhoods first."""

from __future__ import annotations

import itertools

from shardwise.search.neighbors import Neighbors
from shardwise.search.problem import Actions
from shardwise.search.steps import Joint, Rest
from tests.search.test_mcts import problem


def listed(state: Actions, gains: dict[Actions, float] | None = None) -> list[Actions]:
    made = problem(width=4096, batch=512, x=2, y=2)
    neighbors = Neighbors(made, Joint(made), Rest(made))
    near = neighbors.of(state, lambda step: (gains or {}).get(step, 0.0))
    keys = [made.canonical(n.state) for n in near]
    assert len(set(keys)) == len(keys) and made.canonical(state) not in keys
    for n in near:
        assert not n.added or sorted(n.state) == sorted((*state, *n.added))
    return [n.state for n in near]


def pair() -> Actions:
    """Two actions on one axis, whose order matters."""
    made = problem(width=4096, batch=512, x=2, y=2)
    both = itertools.combinations(made.actions, 2)
    return next((a, b) for a, b in both if made.canonical((a, b)) != made.canonical((b, a)) and b in made.allowed((a,)))


def test_every_change_of_one_decision_is_a_neighbor() -> None:
    made = problem(width=4096, batch=512, x=2, y=2)
    state = pair()
    keys = {made.canonical(s) for s in listed(state)}
    shorter = [state[1:], state[:1]]
    exchanged = [(n, state[1]) for n in made.allowed(state[1:])] + [(state[0], n) for n in made.allowed(state[:1])]
    longer = [(*state[:k], n, *state[k:]) for n in made.allowed(state) for k in range(3)]
    wanted = {made.canonical(s) for s in [*shorter, *exchanged, *longer, state[::-1]]} - {made.canonical(state)}
    assert wanted <= keys


def test_small_neighborhoods_come_first() -> None:
    state = pair()
    near = listed(state)
    position = near.index
    assert position(state[:1]) < position(state[::-1])
    at_the_end = [s for s in near if s[:2] == state and len(s) == 3]
    inside = [s for s in near if len(s) == 3 and s[0] == state[0] and s[2] == state[1]]
    assert at_the_end and max(map(position, at_the_end)) < min(map(position, inside), default=len(near))


def test_what_gained_most_comes_first() -> None:
    made = problem(width=4096, batch=512, x=2, y=2)
    n = made.allowed(())[-1]
    assert next(s for s in listed((), {(n,): 0.5}) if len(s) == 1) == (n,)
