"""The times of reshards as the compute rule asks for them: of an operand to the sharding in which a candidate needs it, and of
a result from the sharding in which a candidate computes it. Each is computed when first asked for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.sharding import ArrayType, Axes, Collective, Sharding, reshard


class ReshardTimes:
    """Reshards on a mesh and their times."""

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


def partial_need(need: Sharding, given: Sharding, passed: Axes) -> Sharding:
    """The sharding in which an operand is needed, where partial sums are passed on over some axes."""
    return Sharding(need.dims, tuple([a for a in given.partial if a in passed])) if passed and given.partial else need


def target_sharding(computed: Sharding, stored: Sharding, waiting: frozenset[int], stays: bool) -> Sharding:
    """The sharding to which a result is brought: its storage, without the axes on which its reduction waits; or none other than
    the one in which it is computed, if it stays."""
    if not computed.partial:
        return computed if stays and computed.axes() == stored.axes() else stored
    wait = tuple([a for a in computed.partial if a in waiting])
    return Sharding(tuple(tuple(a for a in axes if a not in wait) for axes in stored.dims), wait) if wait else stored


class Endpoints:
    """The different shardings in which candidates need an operand (with the axes on which they pass partial sums on) or compute
    a result, and the times of the reshards there or from there, by number."""

    def __init__(self, items: tuple[Any, ...], array: ArrayType, mover: ReshardTimes):
        self.items, self.array, self.mover = items, array, mover
        self._times: dict[Hashable, dict[int, float]] = {}

    def arriving(self, given: Sharding, early: bool) -> dict[int, float]:
        """The times for an operand that comes in a sharding."""
        times = self._times.get((given, early))
        if times is None:
            times = self._times[given, early] = _Arriving(self, given, early)
        return times

    def leaving(self, stored: Sharding, waiting: frozenset[int], stays: bool) -> dict[int, float]:
        """The times for a result (``target_sharding``)."""
        key = (stored, waiting, stays)
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = _Leaving(self, *key)
        return times


class _Arriving(dict[int, float]):
    __slots__ = ("_early", "_ends", "_given")

    def __init__(self, ends: Endpoints, given: Sharding, early: bool):
        self._ends, self._given, self._early = ends, given, early

    def __missing__(self, end: int) -> float:
        need = partial_need(self._ends.items[end][0], self._given, self._ends.items[end][1])
        self[end] = seconds = self._ends.mover.seconds(self._ends.array, self._given, need, self._early)
        return seconds


class _Leaving(dict[int, float]):
    __slots__ = ("_ends", "_where")

    def __init__(self, ends: Endpoints, *where: Any):
        self._ends, self._where = ends, where

    def __missing__(self, end: int) -> float:
        computed = self._ends.items[end]
        target = target_sharding(computed, *self._where)
        self[end] = seconds = self._ends.mover.seconds(self._ends.array, computed, target)
        return seconds
