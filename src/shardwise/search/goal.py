"""What makes one state better than another.

A state that fits is better than one that does not. Of two that fit the faster is better, or with ``objective="memory"`` the
smaller, as long as its step takes at most ``step_time_s``. Of two that do not fit the smaller is better. Ties go to the other
figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shardwise.cost.model import Cost


@dataclass(frozen=True, slots=True)
class Goal:
    """The shortest time, or with ``memory`` the smallest peak of states that take at most ``step_time_s``."""

    memory: bool = False
    step_time_s: float = math.inf

    def figure(self, cost: Cost) -> int:
        """Returns what is minimized."""
        return cost.peak_blocks if self.memory else cost.time_ps

    def excess(self, cost: Cost, usable_blocks: int) -> float:
        """Returns the memory and the time as a share of what is allowed, the larger of both."""
        return max(cost.peak_blocks / max(1, usable_blocks), cost.time_s / self.step_time_s)

    def rank(self, cost: Cost, usable_blocks: int) -> tuple[int, int, int]:
        """Returns a key for sorting: the better state has the smaller one, and a good one begins with zero."""
        by_time, by_memory = (cost.time_ps, cost.peak_blocks), (cost.peak_blocks, cost.time_ps)
        if cost.peak_blocks > usable_blocks:
            return 2, *by_memory
        if cost.time_s > self.step_time_s:
            return 1, *by_time
        return 0, *(by_memory if self.memory else by_time)


FASTEST: Final = Goal()
