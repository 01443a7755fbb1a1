"""Numbers by 64-bit key, looked up many at a time: an open hash table in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Index:
    """Keys are random: their low bits say where they are."""

    def __init__(self) -> None:
        self._keys = np.zeros(1 << 12, np.uint64)
        self._at = np.full(1 << 12, -1, np.int32)
        self._taken = 0

    def find(self, keys: Array) -> Array:
        """Numbers, -1 where there is none."""
        flat = keys.ravel()
        last = np.uint64(len(self._keys) - 1)
        slot = flat & last
        found: Array = self._at[slot]
        open_ = np.flatnonzero((found >= 0) & (self._keys[slot] != flat))
        while len(open_):
            slot[open_] = (slot[open_] + np.uint64(1)) & last
            found[open_] = self._at[slot[open_]]
            open_ = open_[(found[open_] >= 0) & (self._keys[slot[open_]] != flat[open_])]
        return found.reshape(keys.shape)

    def put_one(self, key: np.uint64, number: int) -> None:
        """Says which number is found under a key that is new."""
        self._more(1)
        slot = int(key) & (len(self._keys) - 1)
        while self._at[slot] >= 0:
            slot = (slot + 1) & (len(self._keys) - 1)
        self._keys[slot], self._at[slot] = key, number

    def _more(self, count: int) -> None:
        """Makes room."""
        self._taken += count
        while self._taken * 4 >= len(self._keys):
            used = self._at >= 0
            old, at = self._keys[used], self._at[used]
            self._keys = np.zeros(2 * len(self._keys), np.uint64)
            self._at = np.full(len(self._keys), -1, np.int32)
            self._insert(old, at)

    def _insert(self, keys: Array, numbers: Array) -> None:
        last = np.uint64(len(self._keys) - 1)
        slot = keys & last
        while len(keys):
            free = self._at[slot] < 0
            self._keys[slot[free]], self._at[slot[free]] = keys[free], numbers[free]
            # Of several that want one slot the last has it.
            left = ~free | (self._keys[slot] != keys)
            keys, numbers, slot = keys[left], numbers[left], (slot[left] + np.uint64(1)) & last
