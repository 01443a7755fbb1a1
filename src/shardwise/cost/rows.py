"""Rows of costs by key, and sums of them: the store of ``shardwise.cost.evaluator``."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]
#: Stands for a row that must be looked up under the wide key.
WIDE: Final = 0
_CHUNK_BYTES: Final = 4 << 20


class Rows:
    """Rows by key: an open hash table over growing arrays. Equal curves are kept once."""

    def __init__(self, points: int):
        self._keys = np.zeros(1 << 12, np.uint64)
        self._at = np.full(1 << 12, -1, np.int32)
        self._count = 1  # row 0 points to the wide key
        self._taken = 0
        self._times = np.zeros((256, 3), np.int64)
        self._curve = np.zeros(256, np.int32)
        self._curves = np.zeros((64, points), np.int64)
        self._seen: dict[bytes, int] = {}

    def find(self, keys: Array) -> Array:
        """Row numbers, -1 where there is none."""
        flat = keys.ravel()
        last = np.uint64(len(self._keys) - 1)
        slot = flat & last
        rows: Array = self._at[slot]
        open_ = np.flatnonzero((rows >= 0) & (self._keys[slot] != flat))
        while len(open_):
            slot[open_] = (slot[open_] + np.uint64(1)) & last
            rows[open_] = self._at[slot[open_]]
            open_ = open_[(rows[open_] >= 0) & (self._keys[slot[open_]] != flat[open_])]
        return rows.reshape(keys.shape)

    def add(self, times_ps: tuple[int, ...], curve: Array) -> int:
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

    def put(self, key: np.uint64, row: int) -> None:
        """Says under which key a row is found; row 0 where a narrow key does not tell enough."""
        if self._taken * 4 >= len(self._keys):
            self._grow()
        self._taken += 1
        slot = int(key) & (len(self._keys) - 1)
        while self._at[slot] >= 0:
            slot = (slot + 1) & (len(self._keys) - 1)
        self._keys[slot], self._at[slot] = key, row

    def _grow(self) -> None:
        used = self._at >= 0
        keys, rows = self._keys[used], self._at[used]
        self._keys = np.zeros(2 * len(self._keys), np.uint64)
        self._at = np.full(len(self._keys), -1, np.int32)
        self._taken = 0
        for key, row in zip(keys, rows, strict=True):
            self.put(key, int(row))

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
