"""How a search ended, and what it found."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.lowering.decisions import Decision
from shardwise.search.front import Points
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
    """A best state when it was found. ``decisions`` is what it stands for, where that is known; ``words`` the same for
    people."""

    seconds: float
    evaluations: int
    best: Scored
    decisions: tuple[Decision, ...] = ()
    words: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """The best state, how the search came to it, and why it ended. ``notes``: what a method has to say beside it; ``front``: of
    the states that were evaluated, those that none beats in both time and memory."""

    best: Scored
    fits: bool
    ended: Ended
    seconds: float
    evaluations: int
    log: tuple[Improvement, ...]
    notes: tuple[str, ...] = ()
    front: Points = ()


#: Told of every improvement and now and then: (improvement, share of the budget that is spent).
Progress = Callable[[Improvement, float], None]
