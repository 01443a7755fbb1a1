"""Rows of costs, the parts that they are made of, and sums of them: the store of ``shardwise.cost.evaluator``."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from shardwise.cost.index import Array
from shardwise.cost.model import Figures, Term

_SEED: Final = 20260316
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


class Parts:
    """Parts by number, in growing arrays. ``keys`` tells them apart."""

    def __init__(self, points: int):
        self._points, self._rng = points, np.random.default_rng(_SEED)
        self.keys = np.zeros(0, np.uint64)
        self._count = self._used = 0
        self._times = np.zeros((0, 3), np.int64)
        self._start = np.zeros((0, 2), np.int64)  # of a part's changes, and how many there are
        self._changes = np.zeros((1 << 12, 2), np.int64)  # point, blocks

    def add(self, part: Part) -> int:
        """A new part."""
        changes = part.changes
        if self._count == len(self.keys):
            more = max(256, self._count)
            self.keys = np.concatenate([self.keys, self._rng.integers(0, 2**64, more, dtype=np.uint64)])
            self._times = np.concatenate([self._times, np.zeros((more, 3), np.int64)])
            self._start = np.concatenate([self._start, np.zeros((more, 2), np.int64)])
        length = sum(len(at) for at, _ in changes)
        while self._used + length > len(self._changes):
            self._changes = np.concatenate([self._changes, np.zeros_like(self._changes)])
        self._times[self._count] = part.times_ps
        self._start[self._count] = self._used, length
        for at, blocks in changes:
            self._changes[self._used : self._used + len(at)] = np.stack([at, np.full(len(at), blocks)], axis=1)
            self._used += len(at)
        self._count += 1
        return self._count - 1

    def sums(self, parts: Array) -> tuple[Array, Array]:
        """For every column of parts their sum: times, and the blocks alive at each point."""
        columns, width = parts.shape[1], self._points + 1
        start, length = self._start[parts.ravel()].T
        first = np.cumsum(length) - length
        at = np.repeat(start - first, length) + np.arange(length.sum())
        column = np.repeat(np.arange(parts.size) % columns, length)
        points, blocks = self._changes[at].T
        change = np.bincount(column * width + points, blocks, columns * width).reshape(columns, width)
        return self._times[parts].sum(axis=0), np.cumsum(change.astype(np.int64), axis=1)[:, :-1]
