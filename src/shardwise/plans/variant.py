"""What a program is turned into before it is planned: the same function, with less memory for more time."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Variant:
    """``microbatches``: in how many parts the batch is computed, one after the other; ``batch`` are the paths of its arguments,
    whose first dimension counts the examples. ``remat``: whether loops compute again what their backward loops need."""

    microbatches: int = 1
    batch: tuple[str, ...] = ()
    remat: bool = False

    def lines(self) -> tuple[str, ...]:
        """What it does, in words; nothing for the program as it is."""
        found = []
        if self.microbatches > 1:
            more = f" and {len(self.batch) - 1} more" if len(self.batch) > 1 else ""
            found.append(f"{self.microbatches} micro-batches of {self.batch[0]}{more}, one after the other")
        if self.remat:
            found.append("loops keep what they carry, and compute the rest again in their backward loops")
        return tuple(found)

    def __str__(self) -> str:
        parts = f"{self.microbatches} micro-batches" if self.microbatches > 1 else ""
        return ", ".join(filter(None, (parts, "rematerialised" if self.remat else ""))) or "as it is"

    def to_json(self) -> dict[str, Any]:
        return {"microbatches": self.microbatches, "batch": list(self.batch), "remat": self.remat}


#: The program itself.
AS_IS: Final = Variant()


def read_variant(data: Any, arguments: Collection[str]) -> Variant:
    """From plain data; raises KeyError, TypeError or ValueError where that is no variant for these arguments."""
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
    return Variant(count, tuple(batch), remat)
