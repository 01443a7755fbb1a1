"""When a search stops: evaluations, patience, seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop, whichever comes first. ``evaluations`` counts new states. ``patience`` is the number of new states without
    an improvement, for each action of the problem. ``seconds`` is a cap, which a default search rarely reaches: without it the
    result is the same on every machine."""

    seconds: float = 60.0
    evaluations: int = 100_000
    patience: float = 8.0
