"""What makes one state better than another.

A state that fits is better than one that does not. Of two that fit the faster is better, or with ``objective="memory"`` the
smaller, as long as its step takes at most ``step_time_s``. Of two that do not fit the smaller is better. Ties go to the other
figure. Peaks of states that fit are equal if their first bits are: a state that is smaller by less than a percent is not worth
a step that takes twice as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shardwise.cost.model import Cost

#: The bits of a peak that count, so that peaks that differ by less than 0.8% may be equal.
_BITS: Final = 8


@dataclass(frozen=True, slots=True)
class Goal:
    """The shortest time, or with ``memory`` the smallest peak of states that take at most ``step_time_s``."""

    memory: bool = False
    step_time_s: float = math.inf

    def figure(self, cost: Cost) -> int:
        """Returns what is minimized: the time, or the peak rounded up to some bits."""
        if not self.memory:
            return cost.time_ps
        unit = 1 << max(0, cost.peak_blocks.bit_length() - _BITS)
        return -(-cost.peak_blocks // unit) * unit

    def excess(self, cost: Cost, usable_blocks: int) -> float:
        """Returns the memory and the time as a share of what is allowed, the larger of both."""
        return max(cost.peak_blocks / max(1, usable_blocks), cost.time_s / self.step_time_s)

    def rank(self, cost: Cost, usable_blocks: int) -> tuple[int, int, int]:
        """Returns a key for sorting: the better state has the smaller one, and a good one begins with zero."""
        if cost.peak_blocks > usable_blocks:
            return 2, cost.peak_blocks, cost.time_ps
        if cost.time_s > self.step_time_s:
            return 1, cost.time_ps, cost.peak_blocks
        return 0, self.figure(cost), cost.time_ps if self.memory else cost.peak_blocks


FASTEST: Final = Goal()
