"""What every method keeps while it runs: the budget, the best state so far, and the log of improvements."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from shardwise.errors import ShardwiseError
from shardwise.search.budget import Budget
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.result import Ended, Found, Improvement, Progress

#: States between two looks at the clock.
_BATCH: Final = 256


class SearchError(ShardwiseError):
    """A problem cannot be searched in the way that was asked for."""


class Stop(Exception):
    """Ends a search from wherever it is."""

    def __init__(self, why: Ended):
        self.why = why


class Run:
    """One search under way. Evaluations are those of new states, and never more than the budget has."""

    def __init__(self, problem: Problem, budget: Budget, progress: Progress | None):
        self.problem, self.budget, self._progress = problem, budget, progress
        self._start, self._first = time.perf_counter(), problem.evaluations
        self.best = Scored((), problem.cost(()))
        self.log: list[Improvement] = []

    @property
    def spent(self) -> int:
        return self.problem.evaluations - self._first

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def left(self) -> int:
        """The evaluations that are left; ends the search where nothing is."""
        if self.budget.spent(self.seconds, self.spent, len(self.problem.actions)):
            raise Stop(Ended.SECONDS)
        if self.spent >= self.budget.evaluations:
            raise Stop(Ended.EVALUATIONS)
        return self.budget.evaluations - self.spent

    def score(self, states: Sequence[Actions]) -> list[Scored]:
        """The costs of states; the best of them are noted."""
        found: list[Scored] = []
        while len(found) < len(states):
            part = states[len(found) : len(found) + min(_BATCH, self.left())]
            costs = self.problem.costs(part)
            found += [Scored(s, c) for s, c in zip(part, costs, strict=True)]
            self.offer(min(found[-len(part) :], key=self.problem.rank))
        return found

    def offer(self, scored: Scored) -> bool:
        """Notes a state if it is the best so far."""
        better = self.problem.rank(scored) < self.problem.rank(self.best)
        if better:
            self.best = scored
            self.note()
        return better

    def note(self) -> None:
        """Writes the best state into the log."""
        made = Improvement(self.seconds, self.spent, self.best)
        self.log.append(made)
        if self._progress is not None:
            limit = self.budget.seconds
            self._progress(made, min(1.0, made.seconds / limit) if limit else 1.0)

    def found(self, ended: Ended) -> Found:
        fits = self.problem.fits(self.best.cost)
        return Found(self.best, fits, ended, self.seconds, self.spent, tuple(self.log))


def searched(
    problem: Problem, budget: Budget | None, progress: Progress | None, explore: Callable[[Run], Ended]
) -> Found:
    """Runs a search to its end, its budget's end or an interrupt."""
    run = Run(problem, budget or Budget(), progress)
    try:
        run.note()
        with _without_collector():
            ended = explore(run) if problem.actions else Ended.NOTHING
    except Stop as stop:
        ended = stop.why
    except KeyboardInterrupt:
        ended = Ended.INTERRUPTED
    return run.found(ended)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Nearly all that a search makes stays: looking for garbage in it again and again would take longer than making it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
