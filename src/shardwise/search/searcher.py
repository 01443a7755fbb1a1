"""Searches as a plan asks for them: with options of a person, on top of what was decided, one after another on one budget.

A plan may take several searches: tactics may ask for more than one, and where the mesh is open each mesh is searched, the
better ones again and again (``shardwise.planner.racing``). They share a budget (``Purse``) and a log (``Journal``); what was
worked out on a mesh is kept (``Searcher``).

An interrupt ends the search that is under way with the best state so far, and the searches after it do nothing.
"""

from __future__ import annotations

import difflib
import math
import numbers
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from shardwise.cost.model import Cost, CostModel
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision
from shardwise.search.bounds import peak_bound
from shardwise.search.budget import Budget
from shardwise.search.front import Front, Points
from shardwise.search.methods import DEFAULT_S, METHODS
from shardwise.search.problem import Problem, Scored
from shardwise.search.result import Ended, Found, Improvement, Progress
from shardwise.search.run import SearchError

#: States that are evaluated where none can fit.
_HOPELESS: Final = 200
#: Ends after which the same search with a larger budget would find the same.
SETTLED: Final = (Ended.CONVERGED, Ended.EXHAUSTED, Ended.NOTHING, Ended.INFEASIBLE)


@dataclass(frozen=True, slots=True)
class Options:
    """How to search. Without a budget, a few seconds; with one in evaluations alone the result is the same on every machine.
    ``progress`` may be ``"auto"`` until somebody who can show it takes its place."""

    method: str = "mcts"
    seed: int = 0
    budget_s: float | None = None
    budget_evals: int | None = None
    progress: Progress | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.method not in METHODS:
            near = difflib.get_close_matches(str(self.method), METHODS, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.append(f"method is one of {', '.join(METHODS)}, not {self.method!r}{hint}")
        if not _whole(self.seed) or self.seed < 0:
            problems.append(f"seed is a whole number that is not negative, not {self.seed!r}")
        if self.budget_s is not None and not (_real(self.budget_s) and self.budget_s >= 0):
            problems.append(f"budget_s is a number of seconds, not {self.budget_s!r}")
        if self.budget_evals is not None and not (_whole(self.budget_evals) and self.budget_evals >= 0):
            problems.append(f"budget_evals is a whole number of evaluations, not {self.budget_evals!r}")
        progress: Any = self.progress
        if progress is not None and progress != "auto" and not callable(progress):
            problems.append(
                f"progress is 'auto' or called at every improvement; {type(progress).__name__} cannot be called"
            )
        if problems:
            raise SearchError("the search cannot be made: " + "; ".join(problems))

    def budget(self, default_s: float = Budget().seconds) -> Budget:
        """The budget, ``default_s`` where none was given; a method that takes longer by its nature has more."""
        if self.budget_s is None and self.budget_evals is None:
            return Budget(seconds=max(default_s, DEFAULT_S.get(self.method, 0.0)))
        # With none at all the first state is looked at all the same: that in which nothing is sharded.
        seconds = math.inf if self.budget_s is None else max(1e-3, float(self.budget_s))
        return Budget(seconds, sys.maxsize if self.budget_evals is None else max(1, int(self.budget_evals)), least=0)


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
        evaluations, least = -(-self._evaluations // parts), self._budget.least / parts
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


@dataclass(frozen=True, slots=True)
class Searched:
    """The decisions that a search took, after those that were there, and how it came to them."""

    decisions: tuple[Decision, ...]
    found: Found


class Record:
    """What one search has told."""

    def __init__(self, mesh: MeshAxes):
        self.mesh = mesh
        self.steps: list[tuple[Step, tuple[int, ...]]] = []
        self.evaluations = 0
        self.front: Points = ()


class Journal:
    """What the searches of one plan have spent, and each state that was better than all before."""

    def __init__(self, options: Options, purse: Purse):
        self.options, self.purse = options, purse
        self.evaluations = 0
        self.interrupted = False
        self._start = time.perf_counter()
        self._best: tuple[int, ...] | None = None
        self._records: list[Record] = []

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def open(self, mesh: MeshAxes) -> Record:
        """The record of a new search."""
        self._records.append(Record(mesh))
        return self._records[-1]

    def note(self, record: Record, made: Improvement, rank: tuple[int, ...], fits: bool) -> None:
        """Writes down an improvement of one search, and says it if it is one over all."""
        record.steps.append((Step(self.seconds, made.evaluations, record.mesh, made.best.cost, fits), rank[:2]))
        self.say(made, rank, made.evaluations)

    def say(self, made: Improvement, rank: tuple[int, ...], evaluations: int) -> None:
        """Tells whoever listens of an improvement, after so many evaluations of its search, if it is one over all."""
        if self._best is not None and rank[:2] >= self._best:
            return
        self._best = rank[:2]
        if callable(self.options.progress):
            improvement = replace(made, seconds=self.seconds, evaluations=self.evaluations + evaluations)
            self.options.progress(improvement, self.purse.share(evaluations))

    def close(self, record: Record, found: Found) -> None:
        record.evaluations, record.front = found.evaluations, found.front
        self.evaluations += found.evaluations
        self.purse.spend(found.evaluations)
        self.interrupted |= found.ended is Ended.INTERRUPTED

    @property
    def steps(self) -> list[Step]:
        """The improvements over all searches."""
        found: list[Step] = []
        best: tuple[int, ...] | None = None
        before = 0
        for record in self._records:
            for step, rank in record.steps:
                if best is None or rank < best:
                    best = rank
                    found.append(replace(step, evaluations=before + step.evaluations))
            before += record.evaluations
        return found

    def front(self, mesh: MeshAxes) -> Points:
        """What none of the states on a mesh beats, of all searches there."""
        return Front().merged(record.front for record in self._records if record.mesh == mesh)


class Searcher:
    """Searches on one mesh. Its problems are kept: taken up again, a search pays for no state twice."""

    def __init__(self, model: CostModel, journal: Journal):
        self.model, self.journal = model, journal
        self.done: list[Searched] = []
        self._problems: dict[tuple[tuple[Decision, ...], tuple[str, ...]], Problem] = {}
        self._purse, self._left, self._method = journal.purse, 1, journal.options.method

    @staticmethod
    def alone(model: CostModel, options: Options | None = None) -> Searcher:
        """A searcher with a purse and a journal of its own."""
        asked = options or Options()
        return Searcher(model, Journal(asked, Purse(asked.budget())))

    def begin(self, budget: Budget, searches: int, method: str | None = None) -> None:
        """The next searches share a budget; ``method`` where it is not the one that was asked for."""
        self._purse, self._left, self.done = Purse(budget), searches, []
        self._method = method or self.journal.options.method

    def search(self, base: Sequence[Decision], axes: Sequence[str]) -> Searched | None:
        """The best decisions found for some axes, on top of a base. None after an interrupt."""
        if self.journal.interrupted:
            return None
        made = self._run_once(tuple(base), tuple(axes))
        self._purse.spend(made.found.evaluations)
        self._left -= 1
        self.done.append(made)
        return made

    @property
    def _budget(self) -> Budget:
        return Purse(self._purse.part(max(1, self._left))).part(1)

    def _run_once(self, base: tuple[Decision, ...], axes: tuple[str, ...]) -> Searched:
        key = (base, axes)
        if key not in self._problems:
            start = time.perf_counter()
            self._problems[key] = Problem(self.model, base, axes)
            # Tables of a large program take seconds: a search must not be over before it has begun.
            self._purse.wait(time.perf_counter() - start)
        problem = self._problems[key]
        record = self.journal.open(problem.mesh)
        found = unless_hopeless(problem, partial(self._run, problem, record), self._budget)
        found = replace(found, front=problem.front.points)
        self.journal.close(record, found)
        return Searched(problem.decisions(found.best.state)[len(problem.base) :], found)

    def _run(self, problem: Problem, record: Record, budget: Budget) -> Found:
        options, first, start = self.journal.options, problem.evaluations, time.perf_counter()
        seen: list[Scored] = []

        def watch(made: Improvement, share: float) -> None:
            seen.append(made.best)
            made = replace(made, decisions=problem.decisions(made.best.state))
            self.journal.note(record, made, problem.rank(made.best), problem.fits(made.best.cost))

        try:
            found = METHODS[self._method](problem, budget, int(options.seed), watch)
        except KeyboardInterrupt:  # before a method's own loop, or after it
            if not seen:
                raise
            spent = time.perf_counter() - start, problem.evaluations - first
            return Found(seen[-1], problem.fits(seen[-1].cost), Ended.INTERRUPTED, *spent, ())
        return found


def unless_hopeless(problem: Problem, search: Callable[[Budget], Found], budget: Budget) -> Found:
    """Searches a problem; if no state can fit, whatever is decided later on other axes, only for a state that is small."""
    if peak_bound(problem.model, problem.base).peak_bytes <= problem.model.cost.profile.usable_bytes:
        return search(budget)
    found = search(replace(budget, evaluations=min(budget.evaluations, _HOPELESS)))
    return found if found.ended is Ended.INTERRUPTED else replace(found, ended=Ended.INFEASIBLE)
