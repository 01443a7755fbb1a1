"""All search methods by name, and the problems of those that have other actions."""

from __future__ import annotations

from typing import Final

from shardwise.search.automap import Automap
from shardwise.search.exhaustive import exhaustive
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.run import Method
from shardwise.search.simple import beam, greedy, random

METHODS: Final[dict[str, Method]] = {
    "mcts": mcts,
    "greedy": greedy,
    "beam": beam,
    "random": random,
    "exhaustive": exhaustive,
    "automap": mcts,
}
PROBLEMS: Final[dict[str, type[Problem]]] = {"automap": Automap}
