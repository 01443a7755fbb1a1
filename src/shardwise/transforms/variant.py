"""A transformation of a program before planning: the same function, with less memory and more time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Variant:
    """``microbatches``: the number of parts in which the batch is computed, one after the other; ``batch``: the paths of its
    arguments, whose first dimension is the examples. ``remat``: whether loops and repeated blocks are computed again in the
    backward pass, except the candidates in ``but``, numbered from 1, first the loops and then the families of blocks."""

    microbatches: int = 1
    batch: tuple[str, ...] = ()
    remat: bool = False
    but: tuple[int, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """Returns a description, empty for the unchanged program."""
        lines = []
        if self.microbatches > 1:
            more = f" and {len(self.batch) - 1} more" if len(self.batch) > 1 else ""
            lines.append(f"{self.microbatches} micro-batches of {self.batch[0]}{more}, one after the other")
        if self.remat:
            lines.append(f"loops and repeated blocks{self._exception} keep what they carry, and compute the rest again")
        return tuple(lines)

    def __str__(self) -> str:
        parts = f"{self.microbatches} micro-batches" if self.microbatches > 1 else ""
        again = f"rematerialised{self._exception}" if self.remat else ""
        return ", ".join(filter(None, (parts, again))) or "as it is"

    @property
    def _exception(self) -> str:
        return f" but the {' and the '.join(map(ordinal, self.but))}" if self.but else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "microbatches": self.microbatches,
            "batch": list(self.batch),
            "remat": self.remat,
            "but": list(self.but),
        }


def ordinal(number: int) -> str:
    """
    >>> ordinal(1), ordinal(2), ordinal(11), ordinal(23)
    ('1st', '2nd', '11th', '23rd')
    """
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


#: The unchanged program.
AS_IS: Final = Variant()


def read_variant(data: Any, arguments: Collection[str]) -> Variant:
    """Returns a variant from plain data; raises KeyError, TypeError or ValueError where it is none for these arguments."""
    count, batch, remat = data["microbatches"], data["batch"], data["remat"]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"microbatches is a whole number above zero, not {count!r}")
    if not isinstance(remat, bool):
        raise TypeError(f"remat is true or false, not {remat!r}")
    if not isinstance(batch, list) or (count > 1) != bool(batch):
        raise ValueError("batch lists the arguments that micro-batches are cut from, where there are any")
    unknown = [path for path in batch if path not in arguments]
    if unknown:
        raise ValueError(f"batch has no argument {unknown[0]!r}")
    but = data["but"]
    if not isinstance(but, list) or (but and not remat) or any(type(k) is not int or k < 1 for k in but):
        raise ValueError(
            "but lists loops and repeated blocks, by their numbers from 1, that are not rematerialised where others are"
        )
    return Variant(count, tuple(batch), remat, tuple(but))
