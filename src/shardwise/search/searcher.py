"""The searches of one plan, which share a budget and a log.

A plan may take several searches: tactics may ask for more than one, and where the mesh is open each mesh is searched, the
better ones again and again (``shardwise.planner.racing``). They share a budget (``SharedBudget``) and a log (``Journal``); a
``Searcher`` keeps the problems of one mesh.

An interrupt ends the running search with the best state so far, and the searches after it do nothing.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

import numpy as np

from shardwise.cost.model import Cost, CostModel
from shardwise.dims.analysis import Analysis
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision
from shardwise.search.goal import FASTEST, Goal, Points, pareto
from shardwise.search.methods import METHODS, PROBLEMS
from shardwise.search.problem import Actions, Problem
from shardwise.search.run import Budget, Ended, Improvement, Progress, SearchError, SearchResult

#: The patience of a search with a stated budget (``Budget``).
_PATIENCE: Final = 40.0
#: States that are evaluated where no state can fit.
_HOPELESS: Final = 200


@dataclass(frozen=True, slots=True)
class Options:
    """How to search. Without a budget a search takes a few seconds. With a budget in evaluations alone the result is the same
    on every machine. The caller replaces ``progress="auto"``."""

    method: str = "mcts"
    seed: int = 0
    budget_s: float | None = None
    budget_evals: int | None = None
    progress: Progress | Literal["auto"] | None = None
    goal: Goal = FASTEST

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
            raise SearchError("invalid search options: " + "; ".join(problems))

    def budget(self) -> Budget:
        """Returns the stated budget, which has more patience, or else the default one."""
        if self.budget_s is None and self.budget_evals is None:
            return Budget()
        seconds = math.inf if self.budget_s is None else float(self.budget_s)
        return Budget(seconds, sys.maxsize if self.budget_evals is None else int(self.budget_evals), _PATIENCE)


def _whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


def _real(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and not math.isnan(value)


class SharedBudget:
    """A budget that several searches share."""

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
        """Returns one of several equal parts of what is left."""
        return replace(self._budget, seconds=self.seconds / parts, evaluations=-(-self._evaluations // parts))

    def spend(self, evaluations: int) -> None:
        self._evaluations -= evaluations

    def wait(self, seconds: float) -> None:
        """Adds seconds that do not count."""
        self._end += seconds

    def share(self, evaluations: int = 0) -> float:
        """Returns the share of the budget that is spent, counting some more evaluations."""
        left = (self._evaluations - evaluations) / max(1, self._budget.evaluations)
        if math.isfinite(self._budget.seconds):
            left = min(left, self.seconds / self._budget.seconds)
        return min(1.0, max(0.0, 1.0 - left))


#: The text of decisions for people.
Describe = Callable[[Analysis, Sequence[Decision]], str]


class Journal:
    """The log of the searches of one plan: evaluations, and each state that was better than all before it. ``stage`` says in
    words what is left to do. A progress that has a method ``watch`` is given the journal, to look at it at any time."""

    def __init__(self, options: Options, describe: Describe | None = None):
        self.options, self.budget, self._describe = options, SharedBudget(options.budget()), describe
        self.evaluations = 0
        self.interrupted = False
        self.steps: list[tuple[MeshAxes, Improvement]] = []
        self.fronts: dict[MeshAxes, Points] = {}
        self.stage = ""
        self._start = time.perf_counter()
        self._best: tuple[int, ...] | None = None
        self._running: tuple[Problem, int] | None = None
        if callable(watch := getattr(options.progress, "watch", None)):
            watch(self)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @property
    def evaluated(self) -> int:
        """Evaluations so far, those of the running search included."""
        running = self._running
        return self.evaluations + (running[0].evaluations - running[1] if running else 0)

    @property
    def share(self) -> float:
        """The share of the budget that is spent."""
        return self.budget.share(self.evaluated - self.evaluations)

    def begin(self, problem: Problem) -> None:
        """Counts the evaluations of a problem from here on as those of the running search."""
        self._running = problem, problem.evaluations

    def note(self, problem: Problem, improvement: Improvement, _share: float) -> None:
        """Logs an improvement of one search if it is one over all searches, and reports it."""
        rank = problem.rank(improvement.best)[:2]
        if self._best is not None and rank >= self._best:
            return
        self._best, evaluations = rank, improvement.evaluations
        decisions = problem.decisions(improvement.best.state)
        total = self.evaluations + evaluations
        improvement = replace(improvement, seconds=self.seconds, evaluations=total, decisions=decisions)
        self.steps.append((problem.mesh, improvement))
        if callable(self.options.progress):
            words = self._describe(problem.analysis, decisions) if self._describe is not None else ""
            self.options.progress(replace(improvement, words=words), self.budget.share(evaluations))

    def close(self, problem: Problem, result: SearchResult) -> None:
        """Counts a search that has ended."""
        self._running = None
        self.evaluations += result.evaluations
        self.budget.spend(result.evaluations)
        self.interrupted |= result.ended is Ended.INTERRUPTED
        self.fronts[problem.mesh] = pareto([*self.fronts.get(problem.mesh, ()), *(s.point for s in problem.front)])


class Starts(Protocol):
    """The states from which searches start: the named strategies (``tactics/baselines.py``)."""

    @property
    def decisions(self) -> Iterable[Decision]: ...

    def seeds(self, problem: Problem, quick: bool) -> Iterable[Actions]: ...


#: The decisions before a search, the axes that it decides about, and the arguments if it does not decide about all.
Key = tuple[tuple[Decision, ...], tuple[str, ...], tuple[int, ...] | None]
#: The problems of a placed mesh, with the states from which searches start, if these are not only the unsharded one.
Problems = dict[Key, tuple[Problem, Starts | None]]


class Searcher:
    """Searches on one mesh. It keeps its problems, so that a search that is continued evaluates no state twice."""

    def __init__(self, model: CostModel, journal: Journal, problems: Problems | None = None):
        self.model, self.journal = model, journal
        self._problems: Problems = {} if problems is None else problems
        self._last: Problem | None = None

    @staticmethod
    def alone(model: CostModel, options: Options | None = None) -> Searcher:
        """Returns a searcher for one search, with a separate budget."""
        options = options or Options()
        searcher = Searcher(model, Journal(options))
        searcher.begin(options.budget(), 1)
        return searcher

    def begin(
        self, budget: Budget, searches: int, quick: bool = False, states: Sequence[Sequence[Decision]] = ()
    ) -> None:
        """Sets the budget that the next searches share. They start from the strategies, ``quick`` ones from some of them, and
        from some further states, without the decisions of these that are no actions."""
        self._shared, self._left, self._quick, self._states = SharedBudget(budget), searches, quick, states
        self.done: list[SearchResult] = []

    def front(self) -> list[tuple[tuple[Decision, ...], Cost]]:
        """Returns the Pareto front of the states that the last problem evaluated, as decisions and costs."""
        last = self._last
        return [] if last is None else [(last.decisions(scored.state), scored.cost) for scored in last.front]

    def curve(self, decisions: Sequence[Decision]) -> np.ndarray | None:
        """Returns the blocks in use at each point under the decisions of a state of the last problem; None without one."""
        last = self._last
        state = None if last is None else last.state(decisions[len(last.decided) :])
        return None if last is None or state is None else last.evaluator.curve(state)

    @property
    def unsharded(self) -> Cost | None:
        """The cost of the last problem if nothing is sharded."""
        return None if self._last is None else self._last.cost(())

    def search(
        self,
        base: Sequence[Decision],
        axes: Sequence[str],
        starts: Callable[[], Starts],
        only: Sequence[int] | None = None,
    ) -> SearchResult | None:
        """Returns the best decisions for some axes (and about ``only`` some arguments), on top of a base; None after an
        interrupt."""
        if self.journal.interrupted:
            return None
        begun = time.perf_counter()
        problem = self._problem((tuple(base), tuple(axes), None if only is None else tuple(only)), starts)
        # The tables of a large program take seconds, which are not the search's.
        for budget in (self._shared, self.journal.budget):
            budget.wait(time.perf_counter() - begun)
        options = self.journal.options
        self.journal.begin(problem)

        def run(budget: Budget) -> SearchResult:
            watch = functools.partial(self.journal.note, problem)
            return METHODS[options.method](problem, budget, int(options.seed), watch)

        result = unless_hopeless(problem, run, self._shared.part(max(1, self._left)))
        result = replace(result, decisions=problem.decisions(result.best.state)[len(problem.decided) :])
        self.journal.close(problem, result)
        self._shared.spend(result.evaluations)
        self._left -= 1
        self.done.append(result)
        return result

    def _problem(self, key: Key, starts: Callable[[], Starts]) -> Problem:
        options, (base, axes, only) = self.journal.options, key
        if key not in self._problems:
            kind = PROBLEMS.get(options.method, Problem)
            start = starts() if kind.seeded else None
            extra = () if start is None else start.decisions
            self._problems[key] = kind(self.model, base, axes, extra=extra, only=only, goal=options.goal), start
        self._last, start = self._problems[key]
        seeds = () if start is None else start.seeds(self._last, self._quick)
        self._last.start_from([*seeds, *map(self._last.able, self._states)])
        return self._last


def unless_hopeless(problem: Problem, search: Callable[[Budget], SearchResult], budget: Budget) -> SearchResult:
    """Searches a problem; where it is proven that no state fits, only shortly, for a state with little memory."""
    if problem.least_bytes <= problem.model.cost.profile.usable_bytes:
        return search(budget)
    result = search(replace(budget, evaluations=min(budget.evaluations, _HOPELESS)))
    return result if result.ended is Ended.INTERRUPTED else replace(result, ended=Ended.INFEASIBLE)
