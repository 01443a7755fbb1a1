"""The states that none beats in both time and memory: what a search could have given for more memory, or for less.

Only costs are kept, not the states: the front is there to be looked at.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shardwise.cost.model import Cost

#: States that differ by less in both are shown as one.
_SAME: Final = 0.001

#: (time in ps, peak in blocks), the smallest peak first, so that times fall.
Points = tuple[tuple[int, int], ...]


@dataclass
class Front:
    """The front of all costs that were added so far.

    >>> Front(((9, 1), (5, 2))).merged([((7, 2), (4, 3))])
    ((9, 1), (5, 2), (4, 3))
    """

    points: Points = ()

    def add(self, costs: Iterable[Cost]) -> None:
        """Adds more states, nearly all of which are beaten by a known one."""
        for cost in costs:
            before = bisect.bisect_right(self.points, cost.peak_blocks, key=lambda point: point[1])
            if not before or cost.time_ps < self.points[before - 1][0]:
                self.points = self.merged([[(cost.time_ps, cost.peak_blocks)]])

    def merged(self, others: Iterable[Iterable[tuple[int, int]]]) -> Points:
        """The front of this one and of others."""
        found: list[tuple[int, int]] = []
        every = {*self.points, *(point for other in others for point in other)}
        for time, peak in sorted(every, key=lambda point: point[::-1]):
            if not found or time < found[-1][0]:
                found.append((time, peak))
        return tuple(found)


def thinned(points: Points, most: int, usable_blocks: int) -> Points:
    """At most so many, evenly over the front: its ends stay, and the fastest that fits; of states that are next to equal one.

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
