"""The result of a search, and why it ended."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.lowering.decisions import Decision
from shardwise.search.problem import Scored


class Ended(enum.Enum):
    """Why a search stopped."""

    CONVERGED = "nothing better was found for a while"
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
