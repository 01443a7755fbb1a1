"""Shardings of values, and the collectives that lead from one to another.

A sharding gives every dimension its mesh axes, major first, and names the axes over which the value is *partial*: each
device holds an addend, and the value is their sum (or maximum, …).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.rule import Kind as FactorKind
from shardwise.ir.rule import Rule

Axes = tuple[int, ...]


class Sharding(NamedTuple):
    """Axes by dimension, and the axes over which the value is partial. A tuple: lowering hashes and compares many."""

    dims: tuple[Axes, ...]
    partial: Axes = ()

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


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over one or several axes. ``bytes_in`` and ``bytes_out`` are those of one device; ``near`` where a
    permute goes to neighbours only (a halo)."""

    kind: Kind
    axes: Axes
    bytes_in: float
    bytes_out: float
    near: bool = False

    @property
    def nbytes(self) -> float:
        """The larger side, which is how collectives are counted in the compiled program as well."""
        return max(self.bytes_in, self.bytes_out)


def reshard(nbytes: float, source: Sharding, target: Sharding, mesh: MeshAxes) -> tuple[Collective, ...]:
    """The collectives from ``source`` to ``target``: what makes the value smaller first, gathers last.

    ``nbytes`` is the size of the whole value. Axes of one kind that act together are one collective.
    """
    if source == target:
        return ()
    size = nbytes / source.shards(mesh)
    steps: list[Collective] = []
    before = {a: d for d, axes in enumerate(source.dims) for a in axes}
    after = {a: d for d, axes in enumerate(target.dims) for a in axes}

    def take(kind: Kind, axes: Sequence[int], grow: bool) -> None:
        nonlocal size
        if not axes:
            return
        factor = 1
        for a in axes:
            factor *= mesh.sizes[a]
        out = (
            size * factor
            if grow
            else size
            if kind in (Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.PERMUTE)
            else size / factor
        )
        steps.append(Collective(kind, tuple(axes), size, out))
        size = out

    reduced = [a for a in source.partial if a not in target.partial]
    take(Kind.SLICE, [a for a in after if a not in before and a not in source.partial], False)
    take(Kind.REDUCE_SCATTER, [a for a in reduced if a in after], False)
    moved = [a for a in after if a in before and after[a] != before[a]]
    take(Kind.ALL_TO_ALL, moved, False)
    take(Kind.ALL_REDUCE, [a for a in reduced if a not in after], False)
    take(Kind.ALL_GATHER, [a for a in before if a not in after], True)
    if not steps and source.dims != target.dims:
        # The same axes on the same dimensions in another order: whole shards change places.
        take(Kind.PERMUTE, sorted(after), False)
    return tuple(steps)


def tensor_sharding(majors: tuple[int, ...], assigned: Sequence[Axes]) -> Sharding:
    return Sharding(tuple(assigned[m] if m >= 0 else () for m in majors))


def result_sharding(rule: Rule, result: int, assigned: Sequence[Axes], passing: Axes) -> Sharding:
    own = tensor_sharding(rule.result_majors[result], assigned)
    present = {f for dim in rule.results[result] for f in dim}
    made = [a for f, axes in enumerate(assigned) for a in axes if f not in present and _leaves_partial(rule, f)]
    return Sharding(own.dims, tuple(sorted({*made, *passing})))


def _leaves_partial(rule: Rule, factor: int) -> bool:
    return rule.factors[factor].kind in (FactorKind.REDUCTION, FactorKind.INDEXED)
