"""All states of a small problem: what the best of them costs, to measure how far others are from it.

The problem: millions of sequences of actions are far fewer states, since the order of most decisions does not matter, and
remembering all that were seen takes more memory than evaluating them takes time.

The idea. Two actions commute that share neither an axis nor a unit, or whose units no value or op rests on both of; sequences
up to such exchanges are *traces* (Mazurkiewicz, 1977). A trace has one sequence that is the first in alphabetical order, and it
is built letter by letter: a letter may not follow if it could have stood before a larger one (Anisimov and Knuth, 1979). So
every state is made once and none is remembered. For each sequence and letter one bit is carried along, whether it could: a new
letter clears the bits of those it does not commute with, and sets those of the smaller ones that it does.

All of it is done for thousands of sequences at a time, deeper ones first, so that few wait. What limits the speed is the
evaluator, to which most of these states are new: some thousands a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from shardwise.search.budget import Budget
from shardwise.search.problem import Problem, Scored
from shardwise.search.result import Ended, Found, Progress
from shardwise.search.run import Run, SearchError, searched

Array = np.ndarray[Any, Any]
#: More states than this are refused.
MOST: Final = 5_000_000
_CHUNK: Final = 4096


class _Words(NamedTuple):
    """Sequences of one length: (sequence, place); and which letters may not follow: (sequence, letter)."""

    letters: Array
    early: Array  # it could have stood before a larger one
    used: Array  # its unit has the axis already

    def rows(self, rows: slice) -> _Words:
        return _Words(self.letters[rows], self.early[rows], self.used[rows])


class _Alphabet:
    """Which actions exclude each other, and which commute."""

    def __init__(self, problem: Problem):
        actions = problem.evaluator.actions[: len(problem.actions)]
        count = len(actions)
        units = range(len(problem.space.units))
        sets = problem.evaluator.dependencies.unit_sets()
        meet = np.array([[any({u, w} <= own for own in sets) for w in units] for u in units])
        self.excludes = np.eye(count, dtype=bool)
        self.ordered = np.eye(count, dtype=bool)
        for i, one in enumerate(actions):
            for j, other in enumerate(actions):
                if one.slot >= 0 and other.slot >= 0:
                    self.excludes[i, j] = one.slot == other.slot
                    same_axis = one.axis == other.axis and meet[one.unit, other.unit]
                    self.ordered[i, j] = one.unit == other.unit or same_axis
        self.larger = np.arange(count)[:, None] > np.arange(count)

    def empty(self) -> _Words:
        none = np.zeros((1, len(self.larger)), bool)
        return _Words(np.zeros((1, 0), np.int16), none, none)

    def longer(self, words: _Words) -> _Words:
        """All sequences that are one letter longer."""
        word, letter = np.nonzero(~(words.early | words.used))
        letters = np.concatenate([words.letters[word], letter[:, None].astype(np.int16)], axis=1)
        early = (words.early[word] | self.larger[letter]) & ~self.ordered[letter]
        return _Words(letters, early, words.used[word] | self.excludes[letter])


def all_states(problem: Problem) -> Iterator[Array]:
    """Every state once, in arrays of states of one length."""
    alphabet = _Alphabet(problem)
    waiting = [alphabet.empty()]
    while waiting:
        words = waiting.pop()
        yield words.letters
        more = alphabet.longer(words)
        waiting += [more.rows(slice(k, k + _CHUNK)) for k in range(0, len(more.letters), _CHUNK)]


def count_states(problem: Problem, most: int = MOST) -> int:
    """How many states there are; ``most + 1`` where there are more than ``most``."""
    count = 0
    for states in all_states(problem):
        count += len(states)
        if count > most:
            return most + 1
    return count


def exhaustive(
    problem: Problem,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    most: int = MOST,
) -> Found:
    """The best of all states. The seed is not used; a problem with more than ``most`` states is refused."""
    if count_states(problem, most) > most:
        raise SearchError(
            f"exhaustive search: {len(problem.actions)} actions on {problem.mesh} make more than {most:,} states; search "
            "fewer axes (axes=), decide something beforehand (base=), or use another method, such as mcts"
        )

    def explore(run: Run) -> Ended:
        for states in all_states(problem):
            while len(states):
                part, states = np.split(states, [run.left()])
                costs = problem.costs_once(part.tolist())
                scored = (Scored(tuple(state), cost) for state, cost in zip(part.tolist(), costs, strict=True))
                run.offer(min(scored, key=problem.rank))
        return Ended.EXHAUSTED

    return searched(problem, budget, progress, explore)
