"""Rows of costs, and sums of them: the store of ``shardwise.evaluator.evaluator``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from shardwise.cost.model import Figures, Term
from shardwise.evaluator.index import Array

_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """What the terms of a class cost, in sum: the times, and at which points so many blocks are taken or given back."""

    times_ps: tuple[int, int, int]
    changes: tuple[tuple[Array, int], ...]


@dataclass(frozen=True, slots=True)
class Class:
    """Terms that are alike under every state: one of them, how many there are, for each of its points those of all of them;
    which of what its table reads it reads itself, and what it costs where this has come out so and so."""

    term: Term
    count: int
    points: dict[int, Array]
    read: Callable[[tuple[Any, ...]], Hashable]
    known: dict[Hashable, Part] = field(default_factory=dict)

    def part(self, figures: Figures) -> Part:
        count, points = self.count, self.points
        times = count * figures.compute_ps, count * figures.comm_ps, count * figures.hidden_ps
        ends = [((points[a.first], a.blocks), (points[a.last] + 1, -a.blocks)) for a in figures.allocations]
        return Part(times, tuple([change for both in ends for change in both]))


class Rows:
    """Rows in growing arrays. Equal curves are kept once."""

    def __init__(self, points: int):
        self._count = 1  # the first stands for no row
        self._times = np.zeros((256, 3), np.int64)
        self._curve = np.zeros(256, np.int32)
        self._curves = np.zeros((64, points), np.int64)
        self._seen: dict[bytes, int] = {}

    def add(self, times_ps: Array | tuple[int, ...], curve: Array) -> int:
        """A new row."""
        if self._count == len(self._times):
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._curve = np.concatenate([self._curve, np.zeros_like(self._curve)])
        number = self._seen.setdefault(curve.tobytes(), len(self._seen))
        if number == len(self._curves):
            self._curves = np.concatenate([self._curves, np.zeros_like(self._curves)])
        if number == len(self._seen) - 1:
            self._curves[number] = curve
        self._times[self._count] = times_ps
        self._curve[self._count] = number
        self._count += 1
        return self._count - 1

    def sums(self, rows: Array, moving: Array) -> tuple[Array, Array, Array, Array]:
        """For every state the sums of its rows: three times, and the peak of the curves. Only ``moving`` columns have some."""
        times = self._times[rows].sum(axis=1)
        curve = self._curve[rows[:, moving]]
        points = self._curves.shape[1]
        peak = np.zeros(len(rows), np.int64)
        step = max(1, _CHUNK_BYTES // (16 * points))
        for k in range(0, len(rows), step):
            part = curve[k : k + step]
            total = np.zeros((len(part), points), np.int64)
            for column in range(part.shape[1]):
                total += self._curves[part[:, column]]
            peak[k : k + step] = total.max(axis=1, initial=0)
        return times[:, 0], times[:, 1], times[:, 2], peak
