"""Lists that are worked out item by item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """A list whose items are worked out when first asked for, one at a time."""

    def __init__(self, count: int, work_out: Callable[[int], T]):
        self._items: list[T | None] = [None] * count
        self._work_out = work_out

    def __getitem__(self, index: int) -> T:  # type: ignore[override]
        item = self._items[index]
        if item is None:
            item = self._items[index] = self._work_out(index)
        return item

    def __len__(self) -> int:
        return len(self._items)
