"""When a search stops: seconds, evaluations, patience."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: whichever comes first. ``patience`` is in expansions without an improvement.

    Where there is much to decide, or the machine is slow or busy, seconds would end a search that has hardly begun: up to
    ``least`` evaluations for every pair of actions they count for a third.
    """

    seconds: float = 3.0
    evaluations: int = 100_000
    patience: int = 40
    least: float = 1.0

    def spent(self, seconds: float, evaluations: int, actions: int) -> bool:
        """Are the seconds spent, in a search among so many actions?"""
        return seconds > (self.seconds if evaluations >= self.least * actions**2 else 3 * self.seconds)
