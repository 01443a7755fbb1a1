"""All search methods by name."""

from __future__ import annotations

from typing import Final

from shardwise.search.exhaustive import exhaustive
from shardwise.search.mcts import mcts
from shardwise.search.run import Method
from shardwise.search.simple import beam, greedy, random

METHODS: Final[dict[str, Method]] = {
    "mcts": mcts,
    "greedy": greedy,
    "beam": beam,
    "random": random,
    "exhaustive": exhaustive,
}
