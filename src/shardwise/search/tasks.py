"""What a search in another process is told, and what it tells: plain data, and no JAX on the way.

A person's function cannot be sent, and need not be: a search asks for the analysis of the program, the costs of the hardware
and the decisions taken before. Source lines, which are read from tracebacks when somebody asks, stay behind.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost.decisions import Decision
from shardwise.cost.local import HardwareCost
from shardwise.dims.analysis import Analysis
from shardwise.errors import ShardwiseError
from shardwise.ir.program import Source, Sources
from shardwise.search.infeasible import unless_hopeless
from shardwise.search.methods import METHODS
from shardwise.search.problem import Problem
from shardwise.search.result import Budget, Found, Improvement


@dataclass(frozen=True, slots=True)
class Program:
    """The program of the tasks that follow."""

    number: int
    analysis: Analysis


@dataclass(frozen=True, slots=True)
class Task:
    """A search: of which program, by whom (``searcher``, ``root``: one who comes again pays for no state twice), and how."""

    program: int
    searcher: int
    root: int
    cost: HardwareCost
    base: tuple[Decision, ...]
    axes: tuple[str, ...]
    method: str
    seed: int
    budget: Budget


@dataclass(frozen=True, slots=True)
class Started:
    """The tables are made: from here on seconds count."""

    root: int


@dataclass(frozen=True, slots=True)
class Better:
    """An improvement of one root; ``rank`` as of ``Problem.rank``."""

    root: int
    made: Improvement
    rank: tuple[int, ...]
    fits: bool
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What a root came to; ``log`` has its improvements."""

    root: int
    found: Found
    rank: tuple[int, ...]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a task came to nothing."""

    root: int
    error: ShardwiseError | str


class Desk:
    """Where tasks are done: the programs and the problems that are known."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._problems: dict[object, Problem] = {}

    def take(self, program: Program) -> None:
        """A new program: what was known of the one before is of no use."""
        self._program, self._problems = program, {}

    def forget(self, searcher: int) -> None:
        """This searcher will not come again."""
        self._problems = {key: own for key, own in self._problems.items() if key[0] != searcher}  # type: ignore[index]

    def do(self, task: Task, send: Callable[[Any], None]) -> None:
        """Searches, and sends what there is to tell."""
        try:
            send(self._done(task, send))
        except ShardwiseError as error:
            send(Failed(task.root, error))
        except Exception as error:
            send(Failed(task.root, f"{type(error).__name__}: {error}"))

    def _done(self, task: Task, send: Callable[[Any], None]) -> Done:
        assert self._program is not None and self._program.number == task.program
        key = (task.searcher, task.root, task.base, task.axes)
        if key not in self._problems:
            self._problems[key] = Problem(self._program.analysis, task.cost, task.base, task.axes)
        problem = self._problems[key]
        send(Started(task.root))

        def decisions(state: tuple[int, ...]) -> tuple[Decision, ...]:
            return problem.decisions(state)[len(problem.base) :]

        def tell(made: Improvement, share: float) -> None:
            best = made.best
            send(Better(task.root, made, problem.rank(best), problem.fits(best.cost), decisions(best.state)))

        def search(budget: Budget) -> Found:
            return METHODS[task.method](problem, budget, task.seed, tell)

        found = unless_hopeless(problem, search, task.budget)
        found = replace(found, log=(), front=problem.front.points)
        return Done(task.root, found, problem.rank(found.best), decisions(found.best.state))


def dumped(message: Any) -> bytes:
    """A message as bytes."""
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(message)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Sources):
            return Sources, (_nowhere, len(thing))
        return NotImplemented


def _nowhere(index: int) -> Source:
    return Source()
