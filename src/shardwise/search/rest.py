"""Steps that shard all remaining arguments on an axis, with several decisions at once.

The problem: a model with many sizes needs a decision for each of them before its parameters and moments are sharded. Each gains
little, so that a search which adds them one by one ends too early.

The idea. As Automap infers the rest of a plan, one step takes them all: for an axis the fewest groups that shard every argument
but the small ones, which are kept, or all groups that shard one, those that cover most bytes first. What does not pay is
dropped later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardwise.evaluator.evaluator import Array
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard
from shardwise.search.problem import Actions, Problem


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
        if not isinstance(decision, Shard):
            return np.zeros(len(self._arguments), bool)
        mesh, colors, value_colors = self._problem.mesh, set(decision.colors), self._problem.analysis.value_colors
        size = mesh.sizes[mesh.index(decision.axis)]
        dims = (zip(v.shape, value_colors[v.id], strict=True) for v in self._arguments)
        return np.array([any(c in colors and s % size == 0 for s, c in pairs) for pairs in dims], bool)

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
