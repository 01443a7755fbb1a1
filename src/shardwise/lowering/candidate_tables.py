"""The compute rule over many states: which candidates of an op are the fastest.

The problem. The rule adds up, for every candidate, its own time and the reshards of every operand and result. A search asks for
thousands of states, and no two of them allow an op quite the same candidates.

The idea. A table has all candidates that any state can allow to ops that are alike, ordered by time without reshards. What
recurs is computed once: which candidates a state allows, as a set of bits, and the times of reshards. Candidates that compute
the results in their storage come first. A candidate is given up as soon as its sum is above the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.lowering.candidates import Candidate, Candidates
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.sharding import ArrayType, Axes, Collective, Sharding, partial_need, reshard, target_sharding

_T = TypeVar("_T")

#: Candidates that differ by no more than this share take the same time.
SAME: Final = 1e-9
#: The type of a literal.
_SCALAR: Final = ArrayType((), 0.0)
#: By factor the axes that it can take, and the axes on which partial sums can be passed on.
Reach = tuple[tuple[Axes, ...], Axes]
#: The times of reshards by endpoint, by candidate its endpoint, and how many ops share the reshard.
Moves = tuple[dict[int, float], Sequence[int], int]


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


class Lazy(dict[int, _T]):
    """Items by number, each computed when it is first read. ``compute`` must not refer to the owner of this table, so that
    both are freed as soon as nobody refers to them; without that a plan waits for the garbage collector."""

    def __init__(self, compute: Callable[[int], _T]):
        self._compute = compute

    def __missing__(self, number: int) -> _T:
        self[number] = item = self._compute(number)
        return item


class Endpoints:
    """The shardings in which candidates need an operand (with the axes on which they pass sums on) or compute a result, and the
    times of reshards there or from there, by number."""

    def __init__(self, items: tuple[Any, ...], array: ArrayType, mover: ReshardTimes):
        self._items, self._array, self._mover = items, array, mover
        self._times: dict[Hashable, Lazy[float]] = {}

    def arriving(self, given: Sharding, early: bool) -> dict[int, float]:
        """The times for an operand that comes in a sharding."""
        times = self._times.get((given, early))
        if times is None:
            items, array, mover = self._items, self._array, self._mover

            def seconds(end: int) -> float:
                need, passed = items[end]
                return mover.seconds(array, given, partial_need(need, given, passed), early)

            times = self._times[given, early] = Lazy(seconds)
        return times

    def leaving(self, stored: Sharding, waiting: frozenset[int], stays: bool) -> dict[int, float]:
        """The times for a result (``target_sharding``)."""
        key = (stored, waiting, stays)
        times = self._times.get(key)
        if times is None:
            items, array, mover = self._items, self._array, self._mover

            def seconds(end: int) -> float:
                return mover.seconds(array, items[end], target_sharding(items[end], *key))

            times = self._times[key] = Lazy(seconds)
        return times


class CandidateTable:
    """The candidates of ops that are alike. ``needs`` by operand and ``results`` by result: the endpoints of reshards, and each
    candidate's; ``in_order``: the candidates in the order of axes and factors."""

    def __init__(
        self,
        candidates: list[Candidate],
        arrays: Sequence[ArrayType],
        shared: dict[Hashable, Endpoints],
        mover: ReshardTimes,
    ):
        order = sorted(range(len(candidates)), key=lambda n: candidates[n].seconds)
        self.in_order = sorted(range(len(candidates)), key=order.__getitem__)
        self.candidates = candidates = [candidates[n] for n in order]
        self.replicated = next((c for c in candidates if not c.passed and not any(c.assigned)), candidates[0])
        self._seconds = [c.seconds for c in candidates]
        self._by_results: dict[tuple[Sharding, ...], list[int]] = {}
        for n, candidate in enumerate(candidates):
            self._by_results.setdefault(candidate.results, []).append(n)

        def ends(items: list[Any], array: ArrayType, kind: str) -> tuple[Endpoints, list[int]]:
            numbers: dict[Any, int] = {}
            place = [numbers.setdefault(item, len(numbers)) for item in items]
            different = tuple(numbers)
            return shared.setdefault((kind, array, different), Endpoints(different, array, mover)), place

        first = candidates[0]
        count = len(first.needs)
        self.needs = [ends([(c.needs[k], c.passed) for c in candidates], arrays[k], "operand") for k in range(count)]
        self.results = [
            ends([c.results[r] for c in candidates], arrays[count + r], "result") for r in range(len(first.results))
        ]
        taken = [_bits([c.assigned[f] for c in candidates]) for f in range(len(first.assigned))]
        self._taken = [(f, bits, dict[Axes, int]()) for f, bits in enumerate(taken) if len(bits) > 1]
        passed = _bits([c.passed for c in candidates])
        self._passed = [(passed, dict[Axes, int]())] if len(passed) > 1 else []
        self._all_passing: dict[Axes, int] = {}

    def allowed(self, given: tuple[Axes, ...], passing: Axes) -> int:
        """The bits of the candidates that use only axes that are ``given`` to their factors, and pass sums on over
        ``passing``."""
        bits = (1 << len(self.candidates)) - 1
        for f, taken, memo in self._taken:
            bits &= memo[given[f]] if given[f] in memo else _allowed(taken, given[f], memo)
        for passed, memo in self._passed:
            bits &= memo[passing] if passing in memo else _allowed(passed, passing, memo)
        return bits

    def passing(self, axes: Axes) -> int:
        """The bits of the candidates that pass sums on over all of some axes."""
        if axes not in self._all_passing:
            wanted = set(axes)
            bits = [1 << n for n, candidate in enumerate(self.candidates) if wanted.issubset(candidate.passed)]
            self._all_passing[axes] = sum(bits)
        return self._all_passing[axes]

    def times(
        self, allowed: int, arriving: Sequence[Moves], leaving: Sequence[Moves], stored: Sequence[Sharding]
    ) -> tuple[float, dict[int, float]]:
        """The least time of the candidates whose bits are set, and the times of those that might have it."""
        least = most = math.inf
        times: dict[int, float] = {}
        moves = (*arriving, *leaving)
        first = sum([1 << n for n in self._by_results.get(tuple(stored), ())]) & allowed
        for some in (first, allowed & ~first):
            while some:
                bit = some & -some
                n = bit.bit_length() - 1
                some ^= bit
                time = self._seconds[n]
                if time > most:
                    break
                for seconds, ends, sharers in moves:
                    time += seconds[ends[n]] / sharers
                    if time > most:
                        break
                else:
                    times[n] = time
                    if time < least:
                        least, most = time, time * (1 + 2 * SAME)
        return least, times

    def time(self, candidate: int, moves: Sequence[Moves]) -> float:
        """The time of a candidate with some of its reshards."""
        return self._seconds[candidate] + sum([times[ends[candidate]] / sharers for times, ends, sharers in moves])

    def beats(self, candidate: int, arriving: Sequence[Moves], leaving: Sequence[Moves], least: float) -> bool:
        """Does a candidate with all its reshards take less time than this?"""
        return self._seconds[candidate] < least and self.time(candidate, (*arriving, *leaving)) < least


class CandidateTables:
    """The tables of a program's ops. ``reach``: what states can allow to an op; without it every state has its own."""

    def __init__(self, candidates: Candidates, mover: ReshardTimes, reach: Callable[[Op], Reach] | None):
        self._candidates, self._mover, self._reach = candidates, mover, reach
        self._tables: dict[Hashable, CandidateTable] = {}
        self._ends: dict[Hashable, Endpoints] = {}

    def table(self, op: Op, given: tuple[Axes, ...], passing: Axes) -> CandidateTable:
        """The table of an op whose factors can take these axes, or of all axes in reach."""
        key = op.id if self._reach is not None else (self._candidates.structure.alike[op.id], given, passing)
        table = self._tables.get(key)
        if table is None:
            reach = self._reach(op) if self._reach is not None else (given, passing)
            table = self._tables[key] = self._table(op, *reach)
        return table

    def _table(self, op: Op, given: tuple[Axes, ...], passing: Axes) -> CandidateTable:
        structure = self._candidates.structure
        key = (structure.alike[op.id], given, passing)
        if key not in self._tables:
            mesh_axes = range(len(self._candidates.mesh.sizes))
            able = tuple((-1, *(f for f, axes in enumerate(given) if a in axes)) for a in mesh_axes)
            order = given if self._reach is None else (None,) * len(given)
            arrays = [self._candidates.operand(op, k) if v >= 0 else _SCALAR for k, v in enumerate(op.operands)]
            arrays += [self._candidates.arrays[v] if v >= 0 else _SCALAR for v in op.results]
            self._tables[key] = CandidateTable(
                self._candidates.of(op, able, order, passing), arrays, self._ends, self._mover
            )
        return self._tables[key]


def _bits(items: Sequence[Axes]) -> dict[Axes, int]:
    """By axes the bits of the candidates that use them."""
    bits: dict[Axes, int] = {}
    for n, axes in enumerate(items):
        bits[axes] = bits.get(axes, 0) | 1 << n
    return bits


def _allowed(bits: dict[Axes, int], given: Axes, memo: dict[Axes, int]) -> int:
    """The bits of the candidates that use some of the available axes, in this order."""
    memo[given] = sum(some for axes, some in bits.items() if axes == tuple(a for a in given if a in axes))
    return memo[given]
