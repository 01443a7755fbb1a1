"""Lists that are worked out item by item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """A list whose items are worked out when first asked for, one at a time. Those that nobody asks for take no space."""

    def __init__(self, count: int, compute: Callable[[int], T]):
        self._items: dict[int, T] = {}
        self._count, self._compute = count, compute

    def __getitem__(self, index: int) -> T:  # type: ignore[override]
        item = self._items.get(index)
        if item is None:
            if not 0 <= index < self._count:
                raise IndexError(index)
            item = self._items[index] = self._compute(index)
        return item

    def __len__(self) -> int:
        return self._count
