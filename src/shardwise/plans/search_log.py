"""How a plan was found: the part of it that is kept with the plan.

What depends on the machine, seconds, is not saved: a search under a seed and a budget in evaluations gives the same file on
every machine.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.search.result import Ended

#: States of a front that are kept.
MOST_TRADES: Final = 48


@dataclass(frozen=True, slots=True)
class Improved:
    """A state that was better than all before: after how many evaluations, on which mesh, and what it is predicted to take."""

    evaluations: int
    mesh: MeshAxes
    time_s: float
    peak_bytes: int
    fits: bool
    seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class MeshTried:
    """A mesh that could have been chosen: the best found on it, or in ``why`` the reason that there is nothing."""

    mesh: MeshAxes
    time_s: float | None = None
    peak_bytes: int | None = None
    fits: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class VariantTried:
    """A variant that could have been chosen: the best found for it, or in ``why`` the reason that it is not possible. Without a
    time none of its plans can fit, and the peak is the least that they take."""

    variant: str
    time_s: float | None = None
    peak_bytes: int | None = None
    fits: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Trade:
    """A state of the plan's mesh that no other that was looked at beats in both time and memory."""

    time_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class SearchLog:
    """A plan's search. ``meshes`` is empty where the mesh was given, ``variants`` where they were; ``front`` has at most
    ``MOST_TRADES``, the smallest peak first; seconds are None in a plan that was loaded."""

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
        return f"{self.method}: {self.evaluations:,} evaluations{variants}{meshes}{took}; {self.ended.value}"

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "seed": self.seed,
            "ended": self.ended.name.lower(),
            "evaluations": self.evaluations,
            "improvements": [
                {
                    "evaluations": i.evaluations,
                    "mesh": _sizes(i.mesh),
                    "time_s": i.time_s,
                    "peak_bytes": i.peak_bytes,
                    "fits": i.fits,
                }
                for i in self.improvements
            ],
            "meshes": [
                {
                    "mesh": _sizes(m.mesh),
                    "time_s": m.time_s,
                    "peak_bytes": m.peak_bytes,
                    "fits": m.fits,
                    "why": m.why,
                }
                for m in self.meshes
            ],
            "variants": [asdict(v) for v in self.variants],
            "front": [asdict(t) for t in self.front],
        }


def read_search(data: Any) -> SearchLog | None:
    """From plain data; raises KeyError, TypeError, ValueError or MeshError where that is no log."""
    if data is None:
        return None
    names = {ended.name.lower(): ended for ended in Ended}
    if data["ended"] not in names:
        raise ValueError(f"ended is one of {', '.join(names)}, not {data['ended']!r}")
    return SearchLog(
        _text(data["method"]),
        _count(data["seed"]),
        names[data["ended"]],
        _count(data["evaluations"]),
        tuple(_improved(row) for row in _rows(data["improvements"])),
        tuple(_mesh(row) for row in _rows(data["meshes"])),
        tuple(_variant(row) for row in _rows(data["variants"])),
        _front(data["front"]),
    )


def _improved(row: dict[str, Any]) -> Improved:
    figures = _seconds(row["time_s"]), _count(row["peak_bytes"]), _flag(row["fits"])
    return Improved(_count(row["evaluations"]), MeshAxes.of(row["mesh"]), *figures)


def _mesh(row: dict[str, Any]) -> MeshTried:
    return MeshTried(MeshAxes.of(row["mesh"]), *_outcome(row))


def _variant(row: dict[str, Any]) -> VariantTried:
    return VariantTried(_text(row["variant"]), *_outcome(row))


def _front(data: Any) -> tuple[Trade, ...]:
    rows = _rows(data)
    if len(rows) > MOST_TRADES:
        raise ValueError(f"a front has at most {MOST_TRADES} states, not {len(rows)}")
    found = tuple(Trade(_seconds(r["time_s"]), _count(r["peak_bytes"]), _flag(r["fits"])) for r in rows)
    if any(b.time_s >= a.time_s or b.peak_bytes <= a.peak_bytes for a, b in itertools.pairwise(found)):
        raise ValueError("along a front memory grows and time falls")
    return found


def _outcome(row: dict[str, Any]) -> tuple[float | None, int | None, bool, str]:
    time_s = None if row["time_s"] is None else _seconds(row["time_s"])
    peak = None if row["peak_bytes"] is None else _count(row["peak_bytes"])
    return time_s, peak, _flag(row["fits"]), _text(row["why"])


def _sizes(mesh: MeshAxes) -> dict[str, int]:
    return dict(zip(mesh.names, mesh.sizes, strict=True))


def _rows(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, not {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {value!r}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, not {value!r}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a whole number that is not negative, not {value!r}")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"expected seconds, not {value!r}")
    return float(value)
