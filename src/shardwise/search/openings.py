"""Openings: strategies for some axes that a search over several axes can take as one step.

The problem: with two axes there are as many states as pairs of states of one axis, and most of them are poor. People choose a
strategy for each axis, such as data parallelism and Megatron, and combine them.

The idea: of the seeds that use the same axes, the Pareto front of time and memory, thinned to a few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardwise.lowering.sharding import Axes
from shardwise.search.front import pareto
from shardwise.search.problem import Actions, Problem, Scored

#: The most openings for some axes.
_MOST: Final = 8


def find_openings(problem: Problem) -> dict[Axes, list[Actions]]:
    """Returns, by axes, lists of actions on them, the fastest first."""
    by_axes: dict[Axes, list[Scored]] = {}
    for seed in problem.seeds:
        axes = tuple(sorted({problem.evaluator.actions[n].axis for n in seed}))
        by_axes.setdefault(axes, []).append(Scored(seed, problem.cost(seed)))
    return {axes: _front(scored) for axes, scored in by_axes.items() if axes}


def _front(scored: Sequence[Scored]) -> list[Actions]:
    """Returns the states of the Pareto front, the fastest first; of a long front, states at even distances."""
    shortest: dict[tuple[int, int], Actions] = {}
    for s in sorted(scored, key=lambda s: len(s.state)):
        shortest.setdefault(s.point, s.state)
    front = [shortest[point] for point in reversed(pareto(shortest))]
    if len(front) > _MOST:
        front = [front[round(k * (len(front) - 1) / (_MOST - 1))] for k in range(_MOST)]
    return front
