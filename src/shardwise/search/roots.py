"""One search by several processes: each from a root of its own, with a seed of its own; the best state wins.

The budget in evaluations is shared, that in seconds is everybody's. States that cost the same are in the order of their
actions, so that it does not matter who comes first. The log is put together as if all roots had gone in step: an improvement of
one of ``n`` roots after ``k`` evaluations of its own came after ``n k`` of all.

Weak: roots do not talk to each other, and each makes the tables that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.decisions import Decision
from shardwise.dims.analysis import Analysis
from shardwise.search.crew import Crew, StoppedError
from shardwise.search.front import Front
from shardwise.search.result import Ended, Found, Improvement
from shardwise.search.tasks import Better, Done, Started, Task

#: Between the seeds of two roots.
_APART: Final = 1_000_003

#: Of several ends, the one that says most.
_ENDS: Final = (Ended.SECONDS, Ended.EVALUATIONS, Ended.INFEASIBLE, Ended.CONVERGED, Ended.EXHAUSTED, Ended.NOTHING)

#: An improvement, its rank, and whether it fits.
Logged = tuple[Improvement, tuple[int, ...], bool]


@dataclass(frozen=True, slots=True)
class Searched:
    """The decisions that a search took, after those that were there, and how it came to them."""

    decisions: tuple[Decision, ...]
    found: Found


class Roots:
    """A search under way. ``say`` is told of improvements as they come (with their ranks, and the evaluations of all roots),
    ``wait`` of seconds that do not count."""

    def __init__(
        self,
        crew: Crew,
        analysis: Analysis,
        task: Task,
        say: Callable[[Improvement, tuple[int, ...], int], None],
        wait: Callable[[float], None],
    ):
        self._crew, self._analysis, self._say, self._wait = crew, analysis, say, wait
        self._tasks = self._roots(task)
        self._heard: list[Better] = []
        self._spent = {own.root: 0 for own in self._tasks}
        self._start = time.perf_counter()
        self._counting = False

    def _roots(self, task: Task) -> list[Task]:
        """One in a lane, else as many as the crew has."""
        if self._crew.own_lane is not None:
            return [replace(task, root=self._crew.own_lane)]
        total = task.budget.evaluations
        count = min(self._crew.roots, max(1, total))
        return [
            replace(
                task,
                root=k,
                seed=task.seed + _APART * k,
                budget=replace(task.budget, evaluations=total // count + (k < total % count)),
            )
            for k in range(count)
        ]

    def search(self) -> tuple[Searched, list[Logged]]:
        """What all roots came to; after an interrupt, to what they had."""
        try:
            return self._merged(self._crew.search(self._analysis, self._tasks, self._hear))
        except (KeyboardInterrupt, StoppedError):
            self._crew.stop()
            if not self._heard:
                raise KeyboardInterrupt from None
        best = min(self._heard, key=lambda one: (one.rank, one.made.best.state, one.root))
        spent = sum(self._spent.values())
        found = Found(best.made.best, best.fits, Ended.INTERRUPTED, self._seconds, spent, ())
        return Searched(best.decisions, found), self._log(spent)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _hear(self, message: Better | Started) -> None:
        if isinstance(message, Started):
            if not self._counting:
                self._counting = True
                self._wait(self._seconds)
            return
        self._heard.append(message)
        self._spent[message.root] = message.made.evaluations
        self._say(message.made, message.rank, sum(self._spent.values()))

    def _merged(self, done: list[Done]) -> tuple[Searched, list[Logged]]:
        best = min(done, key=lambda one: (one.rank, one.found.best.state, one.root))
        spent = sum(one.found.evaluations for one in done)
        ended = min((one.found.ended for one in done), key=_ENDS.index)
        front = Front().merged(one.found.front for one in done)
        found = replace(best.found, ended=ended, evaluations=spent, seconds=self._seconds, front=front)
        return Searched(best.decisions, found), self._log(spent)

    def _log(self, spent: int) -> list[Logged]:
        found: list[Logged] = []
        for one in sorted(self._heard, key=lambda one: (one.made.evaluations, one.root)):
            if not found or one.rank < found[-1][1]:
                evaluations = min(spent, one.made.evaluations * len(self._tasks))
                found.append((replace(one.made, evaluations=evaluations), one.rank, one.fits))
        return found
