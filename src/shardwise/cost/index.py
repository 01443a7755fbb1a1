"""Numbers by 64-bit key, looked up and put many at a time: an open hash table in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Index:
    """Keys are random: their low bits say where they are."""

    def __init__(self) -> None:
        self._keys = np.zeros(1 << 12, np.uint64)
        self._at = np.full(1 << 12, -1, np.int32)
        self._taken = 0
        self._waiting: list[tuple[Array, Array]] = []

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

    def look(self, keys: Array, make: Callable[[int], int]) -> Array:
        """Numbers; where there is none ``make`` gives it, from the place of the first such key."""
        found = self.find(keys)
        flat = found.ravel()
        missing = np.flatnonzero(flat < 0)
        if len(missing):
            new, first, which = np.unique(keys.ravel()[missing], return_index=True, return_inverse=True)
            made = np.array([make(n) for n in missing[first].tolist()])
            self.put(new, made)
            flat[missing] = made[which]
        return found

    def put_later(self, keys: Array, numbers: Array) -> None:
        """As ``put``, but nothing is found there before ``flush``: one long call takes less time than many short ones."""
        self._waiting.append((keys, numbers))

    def flush(self) -> None:
        if self._waiting:
            keys, numbers = (np.concatenate(own) for own in zip(*self._waiting, strict=True))
            self._waiting.clear()
            self.put(keys, numbers)

    def put(self, keys: Array, numbers: Array) -> None:
        """Says which numbers are found under keys that are new, each once."""
        self._more(len(keys))
        self._insert(keys, numbers)

    def put_one(self, key: np.uint64, number: int) -> None:
        """As ``put``."""
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


class Things:
    """Objects by number, each with a random 64-bit number of its own."""

    def __init__(self, seed: int) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[Hashable, int] = {}
        self._rng = np.random.default_rng(seed)
        self.random = self.more(1 << 10)

    def more(self, *shape: int) -> Array:
        """Random numbers."""
        return self._rng.integers(0, 2**64, shape, dtype=np.uint64)

    def number(self, thing: Hashable) -> int:
        found = self._numbers.setdefault(thing, len(self.objects))
        if found == len(self.objects):
            self.objects.append(thing)
            if found == len(self.random):
                self.random = np.concatenate([self.random, self.more(found)])
        return found


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of some rows each."""

    rows: Array
    starts: Array

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> Sums:
        ends = np.cumsum([len(own) for own in rows])
        return Sums(np.array([row for own in rows for row in own]), np.array([0, *ends[:-1]]))

    def __call__(self, values: Array, columns: Array | None = None) -> Array:
        """For all columns, or for some."""
        own = values[self.rows] if columns is None else values[self.rows[:, None], columns]
        found: Array = np.add.reduceat(own, self.starts, axis=0)
        return found
