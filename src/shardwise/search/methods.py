"""All methods by name. Each takes a problem and a budget, and gives the best state that it found."""

from __future__ import annotations

from typing import Final, Protocol

from shardwise.search.budget import Budget
from shardwise.search.exhaustive import exhaustive
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.result import Found, Progress
from shardwise.search.simple import beam, greedy, random


class Method(Protocol):
    """Deterministic under a seed and a budget in evaluations; on interrupt it gives the best state so far."""

    def __call__(
        self, problem: Problem, budget: Budget | None = None, seed: int = 0, progress: Progress | None = None
    ) -> Found: ...


METHODS: Final[dict[str, Method]] = {
    "mcts": mcts,
    "greedy": greedy,
    "beam": beam,
    "random": random,
    "exhaustive": exhaustive,
}
