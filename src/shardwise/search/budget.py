"""When a search stops: seconds, evaluations, patience."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: whichever comes first. ``patience`` is in expansions without an improvement.

    On a slow machine, or with many actions, seconds would end a search that has hardly begun. So the limit in seconds is three
    times as long until there were ``least`` evaluations for every pair of actions.
    """

    seconds: float = 3.0
    evaluations: int = 100_000
    patience: int = 40
    least: float = 1.0

    def spent(self, seconds: float, evaluations: int, actions: int) -> bool:
        """Are the seconds spent, in a search with this number of actions?"""
        return seconds > (self.seconds if evaluations >= self.least * actions**2 else 3 * self.seconds)
