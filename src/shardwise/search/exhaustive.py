"""Exhaustive search: evaluates all states of a small problem, as a reference for other methods.

The problem: most decisions can be exchanged, so that millions of sequences of actions are far fewer states. A set of all
evaluated states would take too much memory.

The idea. Two actions commute that share neither an axis nor a unit, or whose units no value or op depends on both of. Sequences
up to such exchanges are *traces* (Mazurkiewicz, 1977). A trace has one sequence that is the first in alphabetical order, and it
is built letter by letter: a letter may not follow if it could have come before a larger one (Anisimov and Knuth, 1979). So
every state is generated once. Each sequence carries two sets of letters, as bits of an integer: ``early``, those that could
have come before a larger one, and ``used``, those whose unit has the axis already. A new letter removes from ``early`` those
that it does not commute with, and adds the smaller ones that it does.

Sequences are extended thousands at a time, the longest first, so that few are waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Final

from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.run import Ended, Run, SearchError, method

#: Problems with more states are refused.
MOST: Final = 5_000_000
_CHUNK: Final = 4096


def _following(problem: Problem) -> Callable[[int, int], list[tuple[int, int, int]]]:
    """Returns a function from the two sets of a sequence to the letters that may follow, each with the two sets after it."""
    actions = problem.evaluator.actions[: len(problem.actions)]
    sets = problem.evaluator.dependencies.unit_sets()
    units = range(len(problem.space.units))
    meet = [[any({u, w} <= together for together in sets) for w in units] for u in units]
    excludes, ordered = [], []  # by action: those that it excludes, and those that it does not commute with
    for i, one in enumerate(actions):
        excluded = after = 1 << i
        for j, other in enumerate(actions):
            if one.slot >= 0 and other.slot >= 0:
                same_axis = one.axis == other.axis and meet[one.unit][other.unit]
                excluded |= (one.slot == other.slot) << j
                after |= (one.unit == other.unit or same_axis) << j
        excludes.append(excluded)
        ordered.append(after)

    @cache
    def following(early: int, used: int) -> list[tuple[int, int, int]]:
        return [
            (n, (early | (1 << n) - 1) & ~ordered[n], used | excludes[n])
            for n in problem.actions
            if not (early | used) >> n & 1
        ]

    return following


def all_states(problem: Problem) -> Iterator[list[Actions]]:
    """Yields every state once, in lists of states of one length."""
    following = _following(problem)
    waiting: list[list[tuple[Actions, int, int]]] = [[((), 0, 0)]]
    while waiting:
        words = waiting.pop()
        yield [letters for letters, _, _ in words]
        longer = [((*letters, n), e, u) for letters, early, used in words for n, e, u in following(early, used)]
        waiting += [longer[k : k + _CHUNK] for k in range(0, len(longer), _CHUNK)]


def count_states(problem: Problem) -> int:
    """Returns the number of states; a number above ``MOST`` where there are more than that."""
    following = _following(problem)

    @cache
    def count(early: int, used: int) -> int:
        total = 1
        for _, *sets in following(early, used):
            total += count(*sets)
            if total > MOST:
                break
        return total

    return count(0, 0)


@method
def exhaustive(run: Run, seed: int) -> Ended:
    """Evaluates all states; a problem with more than ``MOST`` is refused. The seed is not used."""
    problem = run.problem
    if count_states(problem) > MOST:
        raise SearchError(
            f"exhaustive search: {len(problem.actions)} actions on {problem.mesh} make more than {MOST:,} states; search "
            "fewer axes, decide more by tactics, or use another method, such as mcts"
        )
    for states in all_states(problem):
        while states:
            left = run.left(patient=True)
            part, states = states[:left], states[left:]
            run.offer(min(map(Scored, part, problem.costs_once(part)), key=problem.rank))
    return Ended.EXHAUSTED
