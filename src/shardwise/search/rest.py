"""Sharding what is left: the decisions that give an axis to every argument that does not have it yet.

Problem: a model with many sizes needs a decision for each of them before its parameters and moments are sharded. Each gains
little, and a search that takes them one by one ends before it has them.

Idea. As Automap infers the rest of a plan, one step takes them all: for an axis the fewest groups that shard every argument
but the small ones, which are kept, or all groups that shard one, those that cover most bytes first. What of it does not pay is
dropped later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from shardwise.evaluator.evaluator import Array
from shardwise.lowering.decisions import Decision, Keep, Shard
from shardwise.search.problem import Actions, Problem


class Rest:
    """What is left to shard, by state and axis."""

    def __init__(self, problem: Problem):
        self._problem = problem
        program = problem.analysis.program
        self._arguments = [program.values[a.value] for a in program.arguments]
        self._axes = {axis: self._plain(axis) for axis in range(len(problem.mesh.sizes))}
        self._nbytes = {axis: self._large(axis) for axis in self._axes}
        self._covers = {n: self._covered(self._decision(n)) for n in problem.actions}
        self._given = {
            axis: self._any(self._covered(d) for d in problem.base if self._is_on(d, axis)) for axis in self._axes
        }

    def steps(self, state: Actions) -> list[Actions]:
        """For every axis on which two decisions or more are left: those that are needed, and all of them."""
        found = (step for axis, plain in self._axes.items() if plain for step in self._steps(state, axis))
        return [step for step in dict.fromkeys(found) if len(step) > 1]

    def _steps(self, state: Actions, axis: int) -> Iterator[Actions]:
        own = (self._covers[n] for n in state if n in self._covers and self._is_on(self._decision(n), axis))
        left, plain, taken = ~self._any([self._given[axis], *own]), self._axes[axis], list[int]()
        covers = np.array([self._covers[n] for n in plain])
        worth: Array = (covers & left) @ self._nbytes[axis]
        every = [plain[k] for k in np.argsort(-worth, kind="stable") if worth[k] > 0]
        while worth.max() > 0:
            most = int(np.argmax(worth))
            taken.append(plain[most])
            left &= ~covers[most]
            worth = (covers & left) @ self._nbytes[axis]
        keeping = self._problem.keeping.get(axis)
        last = () if keeping is None or keeping in state else (keeping,)
        for step in (taken, every):
            if step:
                yield (*step, *last)

    def _decision(self, action: int) -> Decision:
        return self._problem.evaluator.actions[action].decision

    def _is_on(self, decision: Decision, axis: int) -> bool:
        return isinstance(decision, Shard) and self._problem.mesh.index(decision.axis) == axis

    def _plain(self, axis: int) -> list[int]:
        """The actions on an axis, each group once."""
        actions = [(n, self._decision(n)) for n in self._problem.actions]
        return [n for n, d in actions if self._is_on(d, axis) and not any(side for _, side in getattr(d, "sides", ()))]

    def _large(self, axis: int) -> Array:
        """The bytes of the arguments, nothing for those that are small on an axis."""
        number = self._problem.keeping.get(axis)
        kept = self._decision(number) if number is not None else None
        small = set(kept.values) if isinstance(kept, Keep) else set()
        return np.array([0.0 if v.id in small else v.nbytes for v in self._arguments])

    def _covered(self, decision: Decision) -> Array:
        """Which arguments have a dimension of its groups that the axis divides?"""
        if not isinstance(decision, Shard):
            return np.zeros(len(self._arguments), bool)
        mesh, structure, colors = self._problem.mesh, self._problem.model.structure, set(decision.colors)
        size = mesh.sizes[mesh.index(decision.axis)]
        dims = (zip(v.shape, structure.colors[v.id], strict=True) for v in self._arguments)
        return np.array([any(c in colors and s % size == 0 for s, c in own) for own in dims], bool)

    def _any(self, found: Iterable[Array]) -> Array:
        both: Array = np.logical_or.reduce([np.zeros(len(self._arguments), bool), *found])
        return both
