"""A running search: its budget, the best state so far, the log of improvements, and its result."""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from shardwise.errors import ShardwiseError
from shardwise.ir.collector import collector_paused
from shardwise.lowering.decisions import Decision
from shardwise.search.problem import Actions, Problem, Scored

#: States that are evaluated between two checks of the clock.
_BATCH: Final = 256
#: An improvement by a smaller share does not renew the patience. A problem with fewer actions has the patience of this many.
_LITTLE: Final = 0.001
_FEWEST: Final = 12
#: Where further improvements are likely, the patience is multiplied: where the best state is faster than the best seed by this
#: share, since the strategies were not close to the optimum; where it takes this many times as long as perfect scaling; and
#: where it does not fit. It is multiplied by more where memory is the goal, unless the peak is close to its lower bound: with
#: ``_MORE`` peaks were up to 10% larger (convolutions), and steps of equal peaks up to 10% longer (an LSTM).
_MUCH: Final = 0.01
_ROOM: Final = 1.5
_MORE: Final = 3
_MORE_MEMORY: Final = 6


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop, whichever comes first. ``evaluations`` counts new states. ``patience`` is the number of new states without
    an improvement, for each action of the problem. ``seconds`` is a cap, which a default search rarely reaches: without it the
    result is the same on every machine."""

    seconds: float = 60.0
    evaluations: int = 100_000
    patience: float = 8.0


class Ended(enum.Enum):
    """Why a search stopped."""

    CONVERGED = "nothing better turned up"
    EXHAUSTED = "all states were tried"
    SECONDS = "time budget exhausted"
    EVALUATIONS = "evaluation budget exhausted"
    INTERRUPTED = "it was interrupted"
    NOTHING = "there is nothing to decide"
    INFEASIBLE = "no state can fit"


@dataclass(frozen=True, slots=True)
class Improvement:
    """A state that was better than all before it. ``decisions`` are those of the state, where the log has them; ``words`` the
    same as text."""

    seconds: float
    evaluations: int
    best: Scored
    decisions: tuple[Decision, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best state, the log of improvements, and why the search ended. ``decisions`` are those that the search adds to what
    was decided before it."""

    best: Scored
    fits: bool
    ended: Ended
    seconds: float
    evaluations: int
    log: tuple[Improvement, ...]
    decisions: tuple[Decision, ...] = ()


#: Called at every improvement with the improvement and the share of the budget that is spent.
Progress = Callable[[Improvement, float], None]


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
        more = (_MORE_MEMORY if self.problem.goal.memory else _MORE) if self._may_improve() else 1
        patience = more * self.budget.patience * max(_FEWEST, len(self.problem.actions))
        if self.spent - self._improved >= patience and not patient:
            raise Stop(Ended.CONVERGED)
        return self.budget.evaluations - self.spent

    def extend(self, evaluations: int) -> None:
        """Renews the patience, and allows this number of further evaluations."""
        self._improved = self.spent
        self.budget = replace(self.budget, evaluations=self.spent + evaluations)

    def _may_improve(self) -> bool:
        """Returns whether further improvements are likely."""
        rank = self.problem.rank(self.best)
        if rank[0] or is_better(rank, self._first_rank, _MUCH):
            return True
        if self.problem.goal.memory:
            return self.best.cost.peak_bytes > (1 + _MUCH) * self.problem.least_bytes
        return self.best.cost.time_ps > _ROOM * self.problem.perfect_ps

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
            if is_better(self.problem.rank(self.best), before):
                self._improved = self.spent
            self.note()

    def note(self) -> None:
        """Writes the best state into the log."""
        improvement = Improvement(self.seconds, self.spent, self.best)
        self.log.append(improvement)
        if self._progress is not None:
            limit = self.budget.seconds
            self._progress(improvement, min(1.0, improvement.seconds / limit) if limit else 1.0)


def is_better(rank: tuple[int, ...], than: tuple[int, ...], share: float = _LITTLE) -> bool:
    """Returns whether a state is better than another by a share, or fits where that does not."""
    return rank[0] < than[0] or rank[1] < (1 - share) * than[1]


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
