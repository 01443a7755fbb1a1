"""The log of a search. Seconds are not saved: under a seed and a budget in evaluations every machine writes the same file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.search.run import Ended
from shardwise.units import binary

#: States of a front that are kept.
MOST_TRADES: Final = 48
#: What is said without a proof.
NOT_FOUND: Final = "nothing was found that fits"


@dataclass(frozen=True, slots=True)
class Improved:
    """A state that was better than all before: after how many evaluations, on which mesh, and its predicted cost."""

    evaluations: int
    mesh: MeshAxes
    time_s: float
    peak_bytes: int
    fits: bool
    seconds: float | None = field(default=None, compare=False)


class _Tried:
    """What a mesh and a variant have in common: with a peak, but without a time, no plan needs less memory than that."""

    __slots__ = ()
    time_s: float | None
    peak_bytes: int | None

    @property
    def proven(self) -> bool:
        """Whether it is proven that no plan fits."""
        return self.time_s is None and self.peak_bytes is not None

    @property
    def peak_text(self) -> str:
        """The peak memory, which is a lower bound where it is proven that no plan fits; empty where there is none."""
        return "" if self.peak_bytes is None else f"{'at least ' if self.proven else ''}{binary(self.peak_bytes)}"


@dataclass(frozen=True, slots=True)
class MeshTried(_Tried):
    """A mesh that could have been chosen: the best state on it, or in ``why`` the reason that there is none. ``why`` also says
    it if nothing was found that fits. Without a time, but with a peak, it is proven that none of its plans fits."""

    mesh: MeshAxes
    time_s: float | None = None
    peak_bytes: int | None = None
    fits: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class VariantTried(_Tried):
    """A variant that could have been chosen: the best state for it, or in ``why`` the reason that there is none. ``why`` also
    says it if nothing was found that fits. Without a time, but with a peak, it is proven that none of its plans fits.
    ``stages``: those of its pipeline."""

    variant: str
    time_s: float | None = None
    peak_bytes: int | None = None
    fits: bool = False
    why: str = ""
    stages: int = 1


@dataclass(frozen=True, slots=True)
class Trade:
    """A state of the plan's mesh that no other evaluated state beats in both time and memory."""

    time_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class SearchLog:
    """A plan's search. ``meshes`` and ``variants`` are empty where they were fixed; ``front`` begins with the smallest peak."""

    method: str
    seed: int
    ended: Ended
    evaluations: int
    improvements: tuple[Improved, ...]
    meshes: tuple[MeshTried, ...] = ()
    variants: tuple[VariantTried, ...] = ()
    front: tuple[Trade, ...] = ()
    seconds: float | None = field(default=None, compare=False)

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        meshes = f" on {len(self.meshes)} meshes" if len(self.meshes) > 1 else ""
        variants = f" of {len(self.variants)} variants" if len(self.variants) > 1 else ""
        return f"{self.method}: {self.evaluations:,} evaluations{variants}{meshes}{took}; stopped: {self.ended.value}"
