"""Steps that change the decisions about one group on several axes at once.

The problem: on a mesh of several axes a group is often sharded over all of them or over none, since sharding over ``a`` and
``b`` is sharding over ``a·b``. The states between cost more than both, so that a search which changes one axis at a time ends
too early.

The idea: an action is taken on all axes where it is free; a group is taken from all its axes; or another group takes its place
on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from shardwise.lowering.decisions import Decision
from shardwise.search.problem import Actions, Problem


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
