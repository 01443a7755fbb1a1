"""What makes one state better than another.

A state that fits is better than one that does not. Of two that fit the faster is better, or with ``objective="memory"`` the
smaller, as long as its step takes at most ``step_time_s``. Of two that do not fit the smaller is better. Ties go to the other
figure. Peaks of states that fit are equal if their first bits are: a state that is smaller by less than a percent is not worth
a step that takes twice as long. A state that fits by the lower end of its peak only (``shardwise.cost.uncertainty``) may be
refused by the compiler: one with more room is better if it is nearly as fast.

``pareto`` is the front of time and memory: the states that no other beats in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shardwise.cost.model import Cost
from shardwise.cost.uncertainty import ABOVE

#: The bits of a peak that count, so that peaks that differ by less than 0.8% may be equal.
_BITS: Final = 8
#: Two peaks are equal if they differ by this share at most; the bits cut near the smallest one anywhere.
EQUAL: Final = 2.0 ** (1 - _BITS)
#: A state that may not fit has to be faster by this share than one that has room.
TIGHT: Final = 0.03
#: States that differ by less than this in time and memory are shown as one.
_SAME: Final = 0.001

#: (time in ps, peak in blocks), the smallest peak first.
Points = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Goal:
    """The shortest time, or with ``memory`` the smallest peak of states that take at most ``step_time_s``."""

    memory: bool = False
    step_time_s: float = math.inf

    def figure(self, cost: Cost, exact: bool = False) -> int:
        """Returns what is minimized: the time, or the peak, which is rounded up to some bits unless it is ``exact``."""
        if exact or not self.memory:
            return cost.peak_blocks if self.memory else cost.time_ps
        unit = 1 << max(0, cost.peak_blocks.bit_length() - _BITS)
        return -(-cost.peak_blocks // unit) * unit

    def excess(self, cost: Cost, usable_blocks: int) -> float:
        """Returns the memory and the time as a share of what is allowed, the larger of both."""
        return max(cost.peak_blocks / max(1, usable_blocks), cost.time_s / self.step_time_s)

    def rank(self, cost: Cost, usable_blocks: int, exact: bool = False) -> tuple[int, int, int]:
        """Returns a key for sorting: the better state has the smaller one, and a good one begins with zero. With ``exact`` any
        difference of two peaks counts: many small ones make a large one, so that a search climbs by them."""
        if cost.peak_blocks > usable_blocks:
            return 2, cost.peak_blocks, cost.time_ps
        if cost.time_s > self.step_time_s:
            return 1, cost.time_ps, cost.peak_blocks
        if self.memory:
            return 0, self.figure(cost, exact), cost.time_ps
        is_tight = cost.peak_blocks * (1 + ABOVE) > usable_blocks
        return 0, int(cost.time_ps * (1 + TIGHT * is_tight)), cost.peak_blocks

    def most_blocks(self, costs: Iterable[Cost], usable_blocks: int) -> int:
        """Returns the largest peak that equals the smallest of good states; zero without such a state."""
        good = (cost.peak_blocks for cost in costs if not self.rank(cost, usable_blocks)[0])
        return int(min(good, default=0) * (1 + EQUAL))


FASTEST: Final = Goal()


def pareto(points: Iterable[tuple[int, int]]) -> Points:
    """Returns the points that no other beats in both time and memory.

    >>> pareto([(9, 1), (5, 2), (7, 2), (4, 3)])
    ((9, 1), (5, 2), (4, 3))
    """
    front: list[tuple[int, int]] = []
    for time, peak in sorted(points, key=lambda point: point[::-1]):
        if not front or time < front[-1][0]:
            front.append((time, peak))
    return tuple(front)


def thinned(points: Points, most: int, usable_blocks: int) -> Points:
    """Returns at most ``most`` points, evenly over the front, and one of several that are nearly equal. Both ends and the
    fastest point that fits are always among them.

    >>> thinned(tuple((9 - k, k + 1) for k in range(9)), 3, usable_blocks=6)
    ((9, 1), (4, 6), (1, 9))
    >>> thinned(((7000, 4000), (6999, 4001), (5000, 8000)), 3, usable_blocks=9000)
    ((7000, 4000), (5000, 8000))
    """
    fitting = [k for k, (_, peak) in enumerate(points) if peak <= usable_blocks]
    wanted = {0, *fitting[-1:], len(points) - 1} if points else set()
    kept: list[int] = []
    for k, (time, peak) in enumerate(points):
        last = points[kept[-1]] if kept else (0, 0)
        near = bool(kept) and last[0] <= time * (1 + _SAME) and peak <= last[1] * (1 + _SAME)
        if k in wanted or not near:
            kept.append(k)
    if len(kept) > most:
        even = {kept[round(j * (len(kept) - 1) / (most - 1))] for j in range(most)}
        missing = wanted - even
        spare = sorted(even - wanted, key=lambda k: min((abs(k - m), k) for m in missing)) if missing else []
        kept = sorted(even - set(spare[: len(missing)]) | missing)
    return tuple(points[k] for k in kept)
