"""The state of a running search: the budget, the best state so far, and the log of improvements."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from shardwise.errors import ShardwiseError
from shardwise.ir.collector import collector_paused
from shardwise.search.budget import Budget
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.result import Ended, Improvement, Progress, SearchResult

#: States that are evaluated between two checks of the clock.
_BATCH: Final = 256
#: An improvement by a smaller share does not renew the patience. A problem with fewer actions has the patience of this many.
_LITTLE: Final = 0.001
_FEWEST: Final = 12
#: Where the best state is faster than the best seed by this share, the patience is multiplied: the strategies were not close to
#: the optimum, and further improvements are likely.
_MUCH: Final = 0.01
_MORE: Final = 3


class SearchError(ShardwiseError):
    """A problem cannot be searched with these options."""


class Stop(Exception):
    """Ends a search from inside of its functions."""

    def __init__(self, why: Ended):
        self.why = why


class Method(Protocol):
    """Returns the best state that it finds. Deterministic under a seed and a budget in evaluations; an interrupt ends it with
    the best state so far."""

    def __call__(
        self, problem: Problem, budget: Budget | None = None, seed: int = 0, progress: Progress | None = None
    ) -> SearchResult: ...


class Run:
    """A search while it runs. It starts from the best of the problem's seeds. Evaluations count new states other than the
    seeds, and are never more than the budget allows."""

    def __init__(self, problem: Problem, budget: Budget, progress: Progress | None):
        self.problem, self.budget, self._progress = problem, budget, progress
        self._start = time.perf_counter()
        starts = ((), *problem.seeds)
        self.best = min(map(Scored, starts, problem.costs(starts)), key=problem.rank)
        self._first = problem.evaluations
        self._improved, self._first_rank = 0, problem.rank(self.best)
        self.log: list[Improvement] = []

    @property
    def spent(self) -> int:
        return self.problem.evaluations - self._first

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def left(self, patient: bool = False) -> int:
        """Returns the evaluations that are left; stops the search where the budget is exhausted. A ``patient`` method goes on
        however long nothing improves."""
        if self.seconds > self.budget.seconds:
            raise Stop(Ended.SECONDS)
        if self.spent >= self.budget.evaluations:
            raise Stop(Ended.EVALUATIONS)
        more = _MORE if self._beats(self._first_rank, _MUCH) else 1
        patience = more * self.budget.patience * max(_FEWEST, len(self.problem.actions))
        if self.spent - self._improved >= patience and not patient:
            raise Stop(Ended.CONVERGED)
        return self.budget.evaluations - self.spent

    def score(self, states: Sequence[Actions]) -> list[Scored]:
        """Returns the states with their costs, and logs the best where it is an improvement."""
        scored: list[Scored] = []
        while len(scored) < len(states):
            part = states[len(scored) : len(scored) + min(_BATCH, self.left())]
            scored += map(Scored, part, self.problem.costs(part))
            self.offer(min(scored[-len(part) :], key=self.problem.rank))
        return scored

    def offer(self, scored: Scored) -> None:
        """Takes a state that is better than the best so far."""
        before = self.problem.rank(self.best)
        if self.problem.rank(scored) < before:
            self.best = scored
            if self._beats(before, _LITTLE):
                self._improved = self.spent
            self.note()

    def _beats(self, rank: tuple[int, int, int, int], share: float) -> bool:
        """Returns whether the best state is better than this rank by a share, or fits where that does not."""
        best = self.problem.rank(self.best)
        return best[0] < rank[0] or best[1] < (1 - share) * rank[1]

    def note(self) -> None:
        """Writes the best state into the log."""
        improvement = Improvement(self.seconds, self.spent, self.best)
        self.log.append(improvement)
        if self._progress is not None:
            limit = self.budget.seconds
            self._progress(improvement, min(1.0, improvement.seconds / limit) if limit else 1.0)


@collector_paused()
def searched(
    problem: Problem, budget: Budget | None, progress: Progress | None, explore: Callable[[Run], Ended]
) -> SearchResult:
    """Runs a search until it ends, its budget is exhausted, or it is interrupted."""
    run = Run(problem, budget or Budget(), progress)
    try:
        run.note()
        ended = explore(run) if problem.actions else Ended.NOTHING
    except Stop as stop:
        ended = stop.why
    except KeyboardInterrupt:
        ended = Ended.INTERRUPTED
    return SearchResult(run.best, problem.fits(run.best.cost), ended, run.seconds, run.spent, tuple(run.log))


def method(explore: Callable[[Run, int], Ended]) -> Method:
    """Makes a search method of a function that explores states in a ``Run`` under a seed."""

    @functools.wraps(explore)
    def search(
        problem: Problem, budget: Budget | None = None, seed: int = 0, progress: Progress | None = None
    ) -> SearchResult:
        return searched(problem, budget, progress, lambda run: explore(run, seed))

    return search
