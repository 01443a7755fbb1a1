"""Shardings of values, and the collectives that lead from one to another.

A sharding gives every dimension its mesh axes, major first, and names the axes over which the value is *partial*: each
device holds an addend, and the value is their sum (or maximum, …).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.rule import Kind as FactorKind
from shardwise.ir.rule import Rule

Axes = tuple[int, ...]


class _Fields(NamedTuple):
    dims: tuple[Axes, ...]
    partial: Axes = ()


class Sharding(_Fields):
    """Axes by dimension, and the axes over which the value is partial. Equal ones are one object, hashed by its address:
    lowering looks up by many of them at a time."""

    __slots__ = ()
    __hash__ = object.__hash__
    _all: ClassVar[dict[tuple[tuple[Axes, ...], Axes], Sharding]] = {}

    def __new__(cls, dims: tuple[Axes, ...], partial: Axes = ()) -> Sharding:
        found = cls._all.get((dims, partial))
        return found if found is not None else cls._all.setdefault((dims, partial), super().__new__(cls, dims, partial))

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> Sharding:  # type: ignore[override]
        return cls(*fields)

    @staticmethod
    def whole(rank: int) -> Sharding:
        return Sharding(((),) * rank)

    def axes(self) -> frozenset[int]:
        return frozenset(a for dim in self.dims for a in dim)

    def place(self, axis: int) -> int | None:
        return next((d for d, axes in enumerate(self.dims) if axis in axes), None)

    def shards(self, mesh: MeshAxes) -> int:
        count = 1
        for dim in self.dims:
            for axis in dim:
                count *= mesh.sizes[axis]
        return count

    def text(self, mesh: MeshAxes) -> str:
        dims = ",".join("·".join(mesh.names[a] for a in dim) or "-" for dim in self.dims)
        return f"[{dims}]" + "".join(f" partial {mesh.names[a]}" for a in self.partial)


class Kind(enum.Enum):
    """What moves. A slice is local."""

    SLICE = "slice"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"


#: These add up what devices have.
REDUCING: Final = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
#: After these a device has less.
_SHRINKING: Final = (Kind.SLICE, Kind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over one or several axes. ``bytes_in`` and ``bytes_out`` are those of one device; ``near`` where a
    permute goes to neighbours only (a halo); ``crossing`` where it acts along several dimensions, so that pieces arrive in
    another order than that of the array; ``minor`` where it acts along any dimension but the first, ``last`` along the last."""

    kind: Kind
    axes: Axes
    bytes_in: float
    bytes_out: float
    near: bool = False
    crossing: bool = False
    minor: bool = False
    last: bool = False

    @property
    def nbytes(self) -> float:
        """The larger side, which is how collectives are counted in the compiled program as well."""
        return max(self.bytes_in, self.bytes_out)


def reshard(nbytes: float, source: Sharding, target: Sharding, mesh: MeshAxes) -> tuple[Collective, ...]:
    """The collectives from ``source`` to ``target``: what makes the value smaller first, gathers last.

    ``nbytes`` is the size of the whole value. Axes of one kind that act together are one collective.
    """
    if source is target:
        return ()
    size = nbytes / source.shards(mesh)
    steps: list[Collective] = []
    for kind, axes, factor, *where in _course(source, target, mesh.sizes):
        out = size * factor if kind is Kind.ALL_GATHER else size / factor if kind in _SHRINKING else size
        steps.append(Collective(kind, axes, size, out, False, *where))
        size = out
    return tuple(steps)


@cache
def _course(
    source: Sharding, target: Sharding, sizes: tuple[int, ...]
) -> tuple[tuple[Kind, Axes, int, bool, bool, bool], ...]:
    """The steps of a reshard whatever the size: kind, axes, how many devices take part, and whether along several
    dimensions, along another than the first, and along the last of several."""
    steps: list[tuple[Kind, Axes, int, bool, bool, bool]] = []
    before = {a: d for d, axes in enumerate(source.dims) for a in axes}
    after = {a: d for d, axes in enumerate(target.dims) for a in axes}

    def take(kind: Kind, axes: Sequence[int]) -> None:
        if axes:
            along = {place[a] for place in (before, after) for a in axes if a in place}
            size = math.prod(sizes[a] for a in axes)
            furthest = max(along, default=0)
            where = len(along) > 1, furthest > 0, furthest == len(source.dims) - 1 > 0
            steps.append((kind, tuple(axes), size, *where))

    reduced = [a for a in source.partial if a not in target.partial]
    take(Kind.SLICE, [a for a in after if a not in before and a not in source.partial])
    take(Kind.REDUCE_SCATTER, [a for a in reduced if a in after])
    take(Kind.ALL_TO_ALL, [a for a in after if a in before and after[a] != before[a]])
    take(Kind.ALL_REDUCE, [a for a in reduced if a not in after])
    # Axes come and go at the minor end of a dimension. Elsewhere whole shards have to change places.
    kept = [[a for a in own if after.get(a) == d] for d, own in enumerate(source.dims)]
    both = zip(source.dims, target.dims, kept, strict=True)
    take(Kind.PERMUTE, sorted({a for s, t, k in both if not _starts(s, k) or not _starts(t, k) for a in (*s, *t)}))
    take(Kind.ALL_GATHER, [a for a in before if a not in after])
    return tuple(steps)


def _starts(axes: Axes, kept: list[int]) -> bool:
    return list(axes[: len(kept)]) == kept


def is_moved(source: Sharding, target: Sharding, mesh: MeshAxes) -> bool:
    """Does it take more than slices to bring a value from one sharding to another?"""
    if source is target:
        return False
    return any(kind is not Kind.SLICE for kind, *_ in _course(source, target, mesh.sizes))


def tensor_sharding(majors: tuple[int, ...], assigned: Sequence[Axes]) -> Sharding:
    return Sharding(tuple([assigned[m] if m >= 0 else () for m in majors]))


def result_sharding(rule: Rule, result: int, assigned: Sequence[Axes], passing: Axes) -> Sharding:
    dims = tuple([assigned[m] if m >= 0 else () for m in rule.result_majors[result]])
    made = {a for f in _summed(rule, result) for a in assigned[f]}
    return Sharding(dims, tuple(sorted(made.union(passing))))


@cache
def _summed(rule: Rule, result: int) -> tuple[int, ...]:
    """The factors that leave a result partial."""
    present = {f for dim in rule.results[result] for f in dim}
    leave = (FactorKind.REDUCTION, FactorKind.INDEXED)
    return tuple(f for f, factor in enumerate(rule.factors) if f not in present and factor.kind in leave)
