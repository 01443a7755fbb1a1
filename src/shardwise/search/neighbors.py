"""The neighbors of a state: the states that hill climbing looks at, in turn.

The problem: a state with eight decisions of forty has two thousand neighbors, most of them poor, and a climb takes the first
that is better.

The idea is that of variable neighborhood descent (Hansen and Mladenović, 2001). Small neighborhoods come first:

1. a decision less; one more at the end, or one for several axes; a group on several axes exchanged for another; all that is
   left to shard on an axis;
2. a decision exchanged for another; one more at the front; a decision moved to the front or to the end: the order matters
   where two decisions want one axis for one value;
3. every other position.

In each the changes come first that have gained most wherever they were made so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardwise.search.problem import Actions, Problem
from shardwise.search.steps import Joint, Rest

#: What the decisions of a step have gained so far.
Gain = Callable[[Actions], float]


class Neighbor(NamedTuple):
    """A state, and the decisions that were added to get there, if there are no other changes."""

    state: Actions
    added: Actions = ()


class Neighbors:
    """Lists the neighbors of states."""

    def __init__(self, problem: Problem, joint: Joint, rest: Rest):
        self._problem, self._joint, self._rest = problem, joint, rest

    def of(self, state: Actions, gain: Gain) -> list[Neighbor]:
        """Returns the neighbors of a state, each once, the most promising first."""
        kinds = self._small(state, gain), self._medium(state, gain), self._large(state, gain)
        unique: dict[object, Neighbor] = {}
        for pairs in kinds:
            for _, neighbor in sorted(pairs, key=lambda pair: -pair[0]):
                unique.setdefault(self._problem.canonical(neighbor.state), neighbor)
        unique.pop(self._problem.canonical(state), None)
        return list(unique.values())

    def _small(self, state: Actions, gain: Gain) -> Iterator[tuple[float, Neighbor]]:
        for step in self._rest.steps(state):
            yield 1.0, Neighbor((*state, *step), step)
        for rest in _shorter(state):
            yield 1.0, Neighbor(rest)
        for edit in self._joint.added(state):
            yield gain(edit.added), Neighbor(edit.state, edit.added)
        for edit in self._joint.replaced(state):
            yield gain(edit.added), Neighbor(edit.state)
        for n in self._problem.allowed(state):
            yield gain((n,)), Neighbor((*state, n), (n,))

    def _medium(self, state: Actions, gain: Gain) -> Iterator[tuple[float, Neighbor]]:
        for n in self._problem.allowed(state):
            yield gain((n,)), Neighbor((n, *state), (n,))
        for k, rest in enumerate(_shorter(state)):
            yield 0.0, Neighbor((state[k], *rest))
            yield 0.0, Neighbor((*rest, state[k]))
            for n in self._problem.allowed(rest):
                if n != state[k]:
                    yield gain((n,)), Neighbor((*rest[:k], n, *rest[k:]))

    def _large(self, state: Actions, gain: Gain) -> Iterator[tuple[float, Neighbor]]:
        for n in self._problem.allowed(state):
            for k in range(len(state) - 1, 0, -1):
                yield gain((n,)), Neighbor((*state[:k], n, *state[k:]), (n,))
        for k, rest in enumerate(_shorter(state)):
            for j in range(1, len(rest)):
                yield 0.0, Neighbor((*rest[:j], state[k], *rest[j:]))


def _shorter(state: Actions) -> list[Actions]:
    return [state[:k] + state[k + 1 :] for k in range(len(state))]
