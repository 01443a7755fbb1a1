"""The times of moves, as the compute rule asks for them: of an operand from how it comes to how a way to compute needs it, of a
result from how a way makes it to where it goes. Each is worked out when first asked for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.sharding import ArrayType, Axes, Collective, Sharding, reshard


class Mover:
    """Reshards on a mesh, and their seconds."""

    def __init__(self, mesh: MeshAxes, cost: LocalCost):
        self._mesh, self._cost = mesh, cost
        self._steps: dict[Hashable, tuple[Collective, ...]] = {}
        self._seconds: dict[Hashable, float] = {}

    def steps(self, array: ArrayType, source: Sharding, target: Sharding) -> tuple[Collective, ...]:
        """The collectives that bring an array from one sharding to another."""
        if source is target:
            return ()
        key = (array, source, target)
        if key not in self._steps:
            self._steps[key] = reshard(array, source, target, self._mesh)
        return self._steps[key]

    def seconds(self, array: ArrayType, source: Sharding, target: Sharding, early: bool = False) -> float:
        if source is target:
            return 0.0
        key = (array, source, target, early)
        if key not in self._seconds:
            self._seconds[key] = self._cost.communication_s(self.steps(array, source, target), early)
        return self._seconds[key]


def still_partial(need: Sharding, given: Sharding, passed: Axes) -> Sharding:
    """What is needed of an operand that comes in a sharding, where partial values are passed on over some axes."""
    return Sharding(need.dims, tuple([a for a in given.partial if a in passed])) if passed and given.partial else need


def goes(made: Sharding, stored: Sharding, waiting: frozenset[int], stays: bool) -> Sharding:
    """Where a result goes: to storage, or, where its reduction over some axes may wait, to storage without them; or, if it may
    stay as it is made, nowhere."""
    if not made.partial:
        return made if stays and made.axes() == stored.axes() else stored
    wait = tuple([a for a in made.partial if a in waiting])
    return Sharding(tuple(tuple(a for a in axes if a not in wait) for axes in stored.dims), wait) if wait else stored


class Ends:
    """The different shardings in which some ways need an operand (with the axes that they pass on) or make a result, and the
    seconds of the moves there or from there, by number."""

    def __init__(self, items: tuple[Any, ...], array: ArrayType, mover: Mover):
        self.items, self.array, self.mover = items, array, mover
        self._known: dict[Hashable, dict[int, float]] = {}

    def arriving(self, given: Sharding, early: bool) -> dict[int, float]:
        """Of an operand that comes in a sharding."""
        known = self._known.get((given, early))
        if known is None:
            known = self._known[given, early] = _Arriving(self, given, early)
        return known

    def leaving(self, stored: Sharding, waiting: frozenset[int], stays: bool) -> dict[int, float]:
        """Of a result, see ``goes``."""
        key = (stored, waiting, stays)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Leaving(self, *key)
        return known


class _Arriving(dict[int, float]):
    __slots__ = ("_early", "_ends", "_given")

    def __init__(self, ends: Ends, given: Sharding, early: bool):
        self._ends, self._given, self._early = ends, given, early

    def __missing__(self, end: int) -> float:
        need = still_partial(self._ends.items[end][0], self._given, self._ends.items[end][1])
        self[end] = found = self._ends.mover.seconds(self._ends.array, self._given, need, self._early)
        return found


class _Leaving(dict[int, float]):
    __slots__ = ("_ends", "_where")

    def __init__(self, ends: Ends, *where: Any):
        self._ends, self._where = ends, where

    def __missing__(self, end: int) -> float:
        made = self._ends.items[end]
        self[end] = found = self._ends.mover.seconds(self._ends.array, made, goes(made, *self._where))
        return found
