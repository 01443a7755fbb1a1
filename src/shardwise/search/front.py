"""The Pareto front of time and memory over the states that a search evaluated. Only costs are kept, not the states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: States that differ by less than this in both are shown as one.
_SAME: Final = 0.001

#: (time in ps, peak in blocks), the smallest peak first.
Points = tuple[tuple[int, int], ...]


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
