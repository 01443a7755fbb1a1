"""Steps of several decisions, by which the tree search grows beside single decisions.

The problem: decisions that pay only together are not found one by one.

- Openings. With two axes there are as many states as pairs of states of one axis, and most of them are poor. People choose a
  strategy for each axis, such as data parallelism and Megatron, and combine them. An opening is a seed: of those that use the
  same axes, the Pareto front of time and memory, thinned to a few.
- Joint steps. On a mesh of several axes a group is often sharded over all of them or over none, since sharding over ``a`` and
  ``b`` is sharding over ``a·b``, and the states between cost more than both. An action is taken on all axes where it is free; a
  group is taken from all its axes; or another group takes its place on each of them.
- The rest. A model with many sizes needs a decision for each of them before its parameters and moments are sharded, and each
  gains little. As Automap infers the rest of a plan, one step takes for an axis the fewest groups that shard every argument but
  the small ones, which are kept, or all groups that shard one, those that cover most bytes first. What does not pay is dropped
  later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from shardwise.evaluator.evaluator import Array
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard
from shardwise.lowering.sharding import Axes
from shardwise.search.goal import pareto
from shardwise.search.problem import Actions, Problem, Scored

#: The most openings for some axes.
_MOST: Final = 8


def find_openings(problem: Problem) -> dict[Axes, list[Actions]]:
    """Returns, by axes, the openings on them, the fastest first."""
    by_axes: dict[Axes, list[Actions]] = {}
    for seed in problem.seeds:
        axes = tuple(sorted({problem.evaluator.actions[n].axis for n in seed}))
        by_axes.setdefault(axes, []).append(seed)
    openings: dict[Axes, list[Actions]] = {}
    for axes, seeds in by_axes.items():
        shortest: dict[tuple[int, int], Actions] = {}
        for seed in sorted(seeds, key=len):
            shortest.setdefault(Scored(seed, problem.cost(seed)).point, seed)
        front = [shortest[point] for point in reversed(pareto(shortest))]
        if len(front) > _MOST:
            front = [front[round(k * (len(front) - 1) / (_MOST - 1))] for k in range(_MOST)]
        if axes:
            openings[axes] = front
    return openings


class Edit(NamedTuple):
    """A state, and the actions that were added to get there."""

    state: Actions
    added: Actions


class Joint:
    """Finds changes on several axes."""

    def __init__(self, problem: Problem):
        self._problem = problem
        alike: dict[Decision, dict[int, int]] = {}  # actions that differ only in the axis, by axis
        for n in problem.actions:
            action = problem.evaluator.actions[n]
            alike.setdefault(replace(action.decision, axis=""), {})[action.axis] = n
        self._alike = [by_axis for by_axis in alike.values() if len(by_axis) > 1]

    def added(self, state: Actions) -> Iterator[Edit]:
        """Yields the states with an action on all axes where it is free, if these are two or more."""
        free = set(self._problem.allowed(state))
        for by_axis in self._alike:
            step = tuple(n for n in by_axis.values() if n in free)
            if len(step) > 1:
                yield Edit((*state, *step), step)

    def replaced(self, state: Actions) -> Iterator[Edit]:
        """Yields the states without a group that is sharded on several axes, and with others in its place."""
        units: dict[int, dict[int, int]] = {}
        for n in state:
            action = self._problem.evaluator.actions[n]
            if action.slot >= 0:
                units.setdefault(action.unit, {})[action.axis] = n
        for old in (by_axis for by_axis in units.values() if len(by_axis) > 1):
            rest = tuple(n for n in state if n not in old.values())
            yield Edit(rest, ())
            free = set(self._problem.allowed(rest))
            for by_axis in self._alike:
                if all(by_axis.get(axis) in free for axis in old):
                    new = {n: by_axis[axis] for axis, n in old.items()}
                    yield Edit(tuple(new.get(n, n) for n in state), tuple(new.values()))


class _Axis(NamedTuple):
    """``actions`` that shard a group, each group once; ``covers`` which of them shards which argument; ``taken`` which
    arguments the base shards; ``nbytes`` of the arguments, zero for those that the base keeps."""

    actions: list[int]
    covers: Array
    taken: Array
    nbytes: Array


class Rest:
    """Finds what is left to shard, by state and axis."""

    def __init__(self, problem: Problem):
        self._problem, program = problem, problem.analysis.program
        self._arguments = [program.values[a.value] for a in program.arguments]
        self._places: dict[int, list[tuple[int, int]]] = {}  # by color: the arguments that have it, and its size there
        for k, v in enumerate(self._arguments):
            for size, color in zip(v.shape, problem.analysis.value_colors[v.id], strict=True):
                self._places.setdefault(color, []).append((k, size))
        self._covers = {n: self._covered(problem.evaluator.actions[n].decision) for n in problem.actions}
        self._axes = [self._axis(name) for name in problem.mesh.names]

    def _axis(self, name: str) -> _Axis:
        decisions = [action.decision for action in self._problem.evaluator.actions]
        actions = [n for n in self._problem.actions if decisions[n].axis == name and _is_plain(decisions[n])]
        keeps = [d for d in self._problem.base if isinstance(d, Keep) and d.axis == name]
        kept = {v for d in keeps for v in d.values}
        nbytes = np.array([0.0 if v.id in kept else v.nbytes for v in self._arguments])
        base = [self._covered(d) for d in self._problem.base if not isinstance(d, Pin) and d.axis == name]
        taken = np.logical_or.reduce([np.zeros(len(nbytes), bool), *base])
        return _Axis(actions, np.array([self._covers[n] for n in actions]), taken, nbytes)

    def _covered(self, decision: Decision) -> Array:
        """Returns, by argument, whether it has a dimension that the decision shards."""
        covered, mesh = np.zeros(len(self._arguments), bool), self._problem.mesh
        if isinstance(decision, Shard):
            pieces = mesh.sizes[mesh.index(decision.axis)]
            places = (place for color in decision.colors for place in self._places.get(color, ()))
            covered[[k for k, size in places if size % pieces == 0]] = True
        return covered

    def steps(self, state: Actions) -> list[Actions]:
        """Returns, for every axis on which two decisions or more are left, those that are needed and all of them."""
        steps = (step for axis in range(len(self._axes)) for step in self._steps(state, axis))
        return [step for step in dict.fromkeys(steps) if len(step) > 1]

    def _steps(self, state: Actions, number: int) -> Iterator[Actions]:
        axis, actions = self._axes[number], self._problem.evaluator.actions
        if not axis.actions:
            return
        taken = [self._covers[n] for n in state if n in self._covers and actions[n].axis == number]
        left = ~np.logical_or.reduce([axis.taken, *taken])
        worth: Array = (axis.covers & left) @ axis.nbytes
        every = [axis.actions[k] for k in np.argsort(-worth, kind="stable") if worth[k] > 0]
        fewest: list[int] = []
        while worth.max() > 0:
            most = int(np.argmax(worth))
            fewest.append(axis.actions[most])
            left &= ~axis.covers[most]
            worth = (axis.covers & left) @ axis.nbytes
        yield from (tuple(step) for step in (fewest, every) if step)


def _is_plain(decision: Decision) -> bool:
    """Returns whether a decision shards a group as it is, and resolves no conflict to its second side."""
    return isinstance(decision, Shard) and not decision.padded and not any(side for _, side in decision.sides)
