"""A transformation of a program before planning: the same function, with less memory and more time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Variant:
    """``microbatches``: the number of parts in which the batch is computed, one after the other; ``batch``: the paths of its
    arguments, whose first dimension is the examples. ``remat``: whether loops and repeated blocks are computed again in the
    backward pass."""

    microbatches: int = 1
    batch: tuple[str, ...] = ()
    remat: bool = False

    def lines(self) -> tuple[str, ...]:
        """Returns a description, empty for the unchanged program."""
        lines = []
        if self.microbatches > 1:
            more = f" and {len(self.batch) - 1} more" if len(self.batch) > 1 else ""
            lines.append(f"{self.microbatches} micro-batches of {self.batch[0]}{more}, one after the other")
        if self.remat:
            lines.append("loops and repeated blocks keep their carry, and compute the rest again")
        return tuple(lines)

    def __str__(self) -> str:
        parts = [f"{self.microbatches} micro-batches"] if self.microbatches > 1 else []
        again = ["rematerialized"] if self.remat else []
        return ", ".join(parts + again) or "as it is"


#: The unchanged program.
AS_IS: Final = Variant()
