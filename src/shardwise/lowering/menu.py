"""The compute rule over many states: of all ways to compute an op, which are the fastest.

Problem: the rule adds up, for every way, its own time and the moves of every operand and result. A search asks it for
thousands of states, and no two of them leave an op quite the same ways.

Idea. A *menu* has all the ways that any state in question might leave to ops that are alike, in the order of their own times.
What recurs is worked out once: which ways take only axes that a factor was given, as a set of bits; the times of moves
(``shardwise.lowering.moves``). A way that makes its results as they are stored is tried first: its operands mostly lie well,
too. Others are tried as long as their own time, or that with their results, is no more than the best so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

from shardwise.ir.program import Op
from shardwise.lowering.moves import Ends, Mover
from shardwise.lowering.sharding import ArrayType, Axes, Sharding
from shardwise.lowering.ways import Way, Ways

#: Ways that differ by no more than this share take the same time.
SAME: Final = 1e-9
#: A number that is written into the program.
_SCALAR: Final = ArrayType((), 0.0)
#: By factor the axes that it may be given, and the axes over which partial values may be passed on.
Reach = tuple[tuple[Axes, ...], Axes]
#: The times of moves by end, by way its end, and how many share the move.
Moves = tuple[dict[int, float], Sequence[int], int]


class Menu:
    """Ways to compute ops that are alike. ``needs`` by operand and ``made`` by result: the ends, and by way the number of its
    own. ``in_order``: the ways in the order of axes and factors."""

    def __init__(self, ways: list[Way], arrays: Sequence[ArrayType], shared: dict[Hashable, Ends], mover: Mover):
        order = sorted(range(len(ways)), key=lambda n: ways[n].seconds)
        self.in_order = sorted(range(len(ways)), key=order.__getitem__)
        self.ways = ways = [ways[n] for n in order]
        self.whole = next((w for w in ways if not w.passed and not any(w.assigned)), ways[0])
        self._seconds = [w.seconds for w in ways]
        self._making: dict[tuple[Sharding, ...], list[int]] = {}
        for n, way in enumerate(ways):
            self._making.setdefault(way.made, []).append(n)

        def ends(items: list[Any], array: ArrayType, kind: str) -> tuple[Ends, list[int]]:
            numbers: dict[Any, int] = {}
            place = [numbers.setdefault(item, len(numbers)) for item in items]
            different = tuple(numbers)
            return shared.setdefault((kind, array, different), Ends(different, array, mover)), place

        first = ways[0]
        count = len(first.needs)
        self.needs = [ends([(w.needs[k], w.passed) for w in ways], arrays[k], "needed") for k in range(count)]
        self.made = [ends([w.made[r] for w in ways], arrays[count + r], "made") for r in range(len(first.made))]
        taken = [_bits([w.assigned[f] for w in ways]) for f in range(len(first.assigned))]
        self._taken = [(f, own, dict[Axes, int]()) for f, own in enumerate(taken) if len(own) > 1]
        passed = _bits([w.passed for w in ways])
        self._passed = [(passed, dict[Axes, int]())] if len(passed) > 1 else []

    def left(self, given: tuple[Axes, ...], passing: Axes) -> int:
        """The bits of the ways that take only axes that their factors were ``given``, in this order, and pass on only those of
        ``passing``."""
        bits = (1 << len(self.ways)) - 1
        for f, taken, known in self._taken:
            bits &= known[given[f]] if given[f] in known else _left(taken, given[f], known)
        for passed, known in self._passed:
            bits &= known[passing] if passing in known else _left(passed, passing, known)
        return bits

    def times(
        self, left: int, arriving: Sequence[Moves], leaving: Sequence[Moves], stored: Sequence[Sharding]
    ) -> tuple[float, dict[int, float]]:
        """The least time of the ways that are left, and the times of those that might have it."""
        least = most = math.inf
        found: dict[int, float] = {}
        moves = (*arriving, *leaving)
        first = sum([1 << n for n in self._making.get(tuple(stored), ())]) & left
        for some in (first, left & ~first):
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
                    found[n] = time
                    if time < least:
                        least, most = time, time * (1 + 2 * SAME)
        return least, found

    def time(self, way: int, arriving: Sequence[Moves], leaving: Sequence[Moves]) -> float:
        """Of one way, with some of its moves."""
        seconds = self._seconds[way]
        for moves, ends, sharers in arriving:
            seconds += moves[ends[way]] / sharers
        for moves, ends, _ in leaving:
            seconds += moves[ends[way]]
        return seconds


class Menus:
    """The menus of a program's ops. ``reach`` says what any state in question may leave to an op. Without it every state has
    menus of its own: less to work out if there is one state, more if there are many."""

    def __init__(self, ways: Ways, mover: Mover, reach: Callable[[Op], Reach] | None):
        self._ways, self._mover, self._reach = ways, mover, reach
        self._known: dict[Hashable, Menu] = {}
        self._ends: dict[Hashable, Ends] = {}

    def menu(self, op: Op, given: tuple[Axes, ...], passing: Axes) -> Menu:
        """Of the ways to compute an op whose factors were given these axes, or of all that are in reach."""
        key = op.id if self._reach is not None else (self._ways.structure.alike[op.id], given, passing)
        found = self._known.get(key)
        if found is None:
            reach = self._reach(op) if self._reach is not None else (given, passing)
            found = self._known[key] = self._menu(op, *reach)
        return found

    def _menu(self, op: Op, given: tuple[Axes, ...], passing: Axes) -> Menu:
        structure = self._ways.structure
        key = (structure.alike[op.id], given, passing)
        if key not in self._known:
            axes = range(len(self._ways.mesh.sizes))
            able = tuple((-1, *(f for f, own in enumerate(given) if a in own)) for a in axes)
            order = given if self._reach is None else (None,) * len(given)
            arrays = [self._ways.operand(op, k) if v >= 0 else _SCALAR for k, v in enumerate(op.operands)]
            arrays += [self._ways.arrays[v] if v >= 0 else _SCALAR for v in op.results]
            self._known[key] = Menu(self._ways.ways(op, able, order, passing), arrays, self._ends, self._mover)
        return self._known[key]


def _bits(items: Sequence[Axes]) -> dict[Axes, int]:
    """By axes the bits of the ways that have them."""
    found: dict[Axes, int] = {}
    for n, axes in enumerate(items):
        found[axes] = found.get(axes, 0) | 1 << n
    return found


def _left(bits: dict[Axes, int], given: Axes, known: dict[Axes, int]) -> int:
    """The ways that have some of the axes that are given, in this order."""
    known[given] = sum(own for axes, own in bits.items() if axes == tuple(a for a in given if a in axes))
    return known[given]
