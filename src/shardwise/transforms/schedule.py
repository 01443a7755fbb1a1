"""The order in which the stages of a pipeline work on micro-batches.

With ``rounds`` the layers are cut into as many times more pieces, and a stage has one piece of each round: layers go around the
stages several times (interleaved, or circular, stages). A tick then is a fraction of the work, and so is the bubble, of
``stages - 1`` ticks. Micro-batches go in groups, one for each stage: a group passes all rounds before the next one begins, so
that what leaves the last stage enters the first one in the next tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardwise.errors import VariantError


class Task(NamedTuple):
    """What the stages do in a tick: whether they have a micro-batch, which, and in which round, None if there is one."""

    busy: Any
    part: Any
    at: Any


@dataclass(frozen=True, slots=True)
class Schedule:
    """Micro-batches, stages and rounds; ``reverse``: from the last stage to the first. Stage ``s`` has task ``t - s`` at tick
    ``t``."""

    parts: int
    stages: int
    rounds: int = 1
    reverse: bool = False

    def __post_init__(self) -> None:
        if self.rounds > 1 and self.parts % self.stages:
            raise VariantError(
                f"circular stages need a multiple of {self.stages} micro-batches, one for each stage, not {self.parts}"
            )

    @property
    def tasks(self) -> int:
        return self.parts * self.rounds

    @property
    def ticks(self) -> int:
        return self.tasks + self.stages - 1

    @property
    def first(self) -> int:
        """The stage that micro-batches enter."""
        return self.stages - 1 if self.reverse else 0

    @property
    def last(self) -> int:
        return 0 if self.reverse else self.stages - 1

    @property
    def first_round(self) -> int:
        return self.rounds - 1 if self.reverse else 0

    @property
    def last_round(self) -> int:
        return 0 if self.reverse else self.rounds - 1

    @property
    def first_tick(self) -> int:
        """The tick in which the loop begins."""
        return self.first + (self.tasks - 1 if self.reverse else 0)

    @property
    def part_zero(self) -> int:
        """The tick in which micro-batch 0 enters."""
        return self.first + self.first_round * self.stages

    def task(self, number: Any) -> Task:
        """Returns the task of a number; there is none below zero and after the last."""
        busy, number = (number >= 0) & (number < self.tasks), jnp.clip(number, 0, self.tasks - 1)
        if self.rounds == 1:
            return Task(busy, number, None)
        group, rest = number // (self.rounds * self.stages), number % (self.rounds * self.stages)
        return Task(busy, group * self.stages + rest % self.stages, rest // self.stages)

    def by_round(self, rows: Any) -> Any:
        """Returns rows by round and micro-batch, from rows by task."""
        if self.rounds == 1:
            return rows[None]
        rows = rows.reshape(-1, self.rounds, self.stages, *rows.shape[1:])
        return jnp.swapaxes(rows, 0, 1).reshape(self.rounds, self.parts, *rows.shape[3:])
