"""Searches as a plan asks for them: with options of a person, on top of what was decided, one after another on one budget.

A plan may take several searches: tactics may ask for more than one, and where the mesh is open each mesh is searched, the
better ones again and again (``shardwise.search.mesh``). They share a budget (``Purse``) and a log (``Journal``); what was
worked out on a mesh is kept (``Searcher``).

An interrupt ends the search that is under way with the best state so far, and the searches after it do nothing.
"""

from __future__ import annotations

import difflib
import math
import numbers
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from shardwise.cost.decisions import Decision
from shardwise.cost.local import HardwareCost
from shardwise.cost.model import Cost
from shardwise.dims.analysis import Analysis
from shardwise.hardware.mesh import MeshAxes
from shardwise.search.infeasible import unless_hopeless
from shardwise.search.methods import METHODS
from shardwise.search.problem import Problem, Scored
from shardwise.search.result import Budget, Ended, Found, Improvement, Progress
from shardwise.search.run import SearchError

#: Ends after which the same search with a larger budget would find the same.
SETTLED: Final = (Ended.CONVERGED, Ended.EXHAUSTED, Ended.NOTHING, Ended.INFEASIBLE)


@dataclass(frozen=True, slots=True)
class Options:
    """How to search. Without a budget, a few seconds; with one in evaluations alone the result is the same on every machine."""

    method: str = "mcts"
    seed: int = 0
    budget_s: float | None = None
    budget_evals: int | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.method not in METHODS:
            near = difflib.get_close_matches(str(self.method), METHODS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"method is one of {', '.join(METHODS)}, not {self.method!r}{hint}")
        if not _whole(self.seed) or self.seed < 0:
            problems.append(f"seed is a whole number that is not negative, not {self.seed!r}")
        if self.budget_s is not None and not (_real(self.budget_s) and self.budget_s > 0):
            problems.append(f"budget_s is a number of seconds above zero, not {self.budget_s!r}")
        if self.budget_evals is not None and not (_whole(self.budget_evals) and self.budget_evals > 0):
            problems.append(f"budget_evals is a whole number of evaluations above zero, not {self.budget_evals!r}")
        progress: Any = self.progress
        if progress is not None and not callable(progress):
            problems.append(f"progress is called at every improvement; {type(progress).__name__} cannot be called")
        if problems:
            raise SearchError("the search cannot be made: " + "; ".join(problems))

    def budget(self, default_s: float = Budget().seconds) -> Budget:
        """The budget, ``default_s`` where none was given."""
        if self.budget_s is None and self.budget_evals is None:
            return Budget(seconds=default_s)
        seconds = math.inf if self.budget_s is None else float(self.budget_s)
        return Budget(seconds, sys.maxsize if self.budget_evals is None else int(self.budget_evals), least=0)


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def _real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and not math.isnan(value)


class Purse:
    """A budget that is spent piece by piece; seconds go by themselves."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._end = time.perf_counter() + budget.seconds
        self._evaluations = budget.evaluations

    @property
    def seconds(self) -> float:
        return max(0.0, self._end - time.perf_counter())

    @property
    def empty(self) -> bool:
        return self._evaluations <= 0 or self.seconds <= 0.0

    def part(self, parts: int) -> Budget:
        """One of so many equal parts of what is left."""
        evaluations, least = (-(-n // parts) for n in (self._evaluations, self._budget.least))
        return replace(self._budget, seconds=self.seconds / parts, evaluations=evaluations, least=least)

    def spend(self, evaluations: int) -> None:
        self._evaluations -= evaluations

    def wait(self, seconds: float) -> None:
        """So many seconds went by that do not count."""
        self._end += seconds

    def share(self, evaluations: int = 0) -> float:
        """The share that is spent, with so many evaluations more."""
        left = (self._evaluations - evaluations) / self._budget.evaluations
        if math.isfinite(self._budget.seconds):
            left = min(left, self.seconds / self._budget.seconds)
        return min(1.0, max(0.0, 1.0 - left))


@dataclass(frozen=True, slots=True)
class Step:
    """A state that was better than all before, on whichever mesh, and when it was found."""

    seconds: float
    evaluations: int
    mesh: MeshAxes
    cost: Cost
    fits: bool


class Journal:
    """What the searches of one plan have spent, and each state that was better than all before."""

    def __init__(self, options: Options, purse: Purse):
        self.options, self.purse = options, purse
        self.steps: list[Step] = []
        self.evaluations = 0
        self.interrupted = False
        self._start = time.perf_counter()
        self._best: tuple[int, ...] | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def note(self, problem: Problem, made: Improvement) -> None:
        """Writes down an improvement of one search if it is one over all, and says so."""
        rank = problem.rank(made.best)[:2]
        if self._best is not None and rank >= self._best:
            return
        self._best = rank
        evaluations = self.evaluations + made.evaluations
        self.steps.append(Step(self.seconds, evaluations, problem.mesh, made.best.cost, problem.fits(made.best.cost)))
        if self.options.progress is not None:
            share = self.purse.share(made.evaluations)
            self.options.progress(Improvement(self.seconds, evaluations, made.best), share)

    def close(self, found: Found) -> None:
        self.evaluations += found.evaluations
        self.purse.spend(found.evaluations)
        self.interrupted |= found.ended is Ended.INTERRUPTED


@dataclass(frozen=True, slots=True)
class Searched:
    """The decisions that a search took, after those that were there, and how it came to them."""

    decisions: tuple[Decision, ...]
    found: Found


class Searcher:
    """Searches on one mesh. Its problems are kept: taken up again, a search pays for no state twice."""

    def __init__(self, analysis: Analysis, cost: HardwareCost, journal: Journal):
        self.analysis, self.cost, self.journal = analysis, cost, journal
        self.done: list[Searched] = []
        self._problems: dict[tuple[tuple[Decision, ...], tuple[str, ...]], Problem] = {}
        self._purse, self._left, self._method = journal.purse, 1, journal.options.method

    @staticmethod
    def alone(analysis: Analysis, cost: HardwareCost, options: Options | None = None) -> Searcher:
        """A searcher with a purse and a journal of its own."""
        asked = options or Options()
        return Searcher(analysis, cost, Journal(asked, Purse(asked.budget())))

    def begin(self, budget: Budget, searches: int, method: str | None = None) -> None:
        """The next searches share a budget; ``method`` where it is not the one that was asked for."""
        self._purse, self._left, self.done = Purse(budget), searches, []
        self._method = method or self.journal.options.method

    def search(self, base: Sequence[Decision], axes: Sequence[str]) -> Searched | None:
        """The best decisions found for some axes, on top of a base. None after an interrupt."""
        if self.journal.interrupted:
            return None
        key = (tuple(base), tuple(axes))
        if key not in self._problems:
            start = time.perf_counter()
            self._problems[key] = Problem(self.analysis, self.cost, base, axes)
            # Tables of a large program take seconds: a search must not be over before it has begun.
            self._purse.wait(time.perf_counter() - start)
        problem = self._problems[key]
        purse = Purse(self._purse.part(max(1, self._left)))
        found = unless_hopeless(problem, partial(self._run, problem), purse.part(1))
        self.journal.close(found)
        self._purse.spend(found.evaluations)
        self._left -= 1
        made = Searched(problem.decisions(found.best.state)[len(problem.base) :], found)
        self.done.append(made)
        return made

    def _run(self, problem: Problem, budget: Budget) -> Found:
        options, first, start = self.journal.options, problem.evaluations, time.perf_counter()
        seen: list[Scored] = []

        def watch(made: Improvement, share: float) -> None:
            seen.append(made.best)
            self.journal.note(problem, made)

        try:
            return METHODS[self._method](problem, budget, int(options.seed), watch)
        except KeyboardInterrupt:  # before a method's own loop, or after it
            if not seen:
                raise
            spent = time.perf_counter() - start, problem.evaluations - first
            return Found(seen[-1], problem.fits(seen[-1].cost), Ended.INTERRUPTED, *spent, ())
