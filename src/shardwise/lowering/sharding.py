"""Shardings of values, and the collectives that lead from one to another. A value can be *partial* over axes: each device holds
an addend, and the value is their sum (or maximum, …)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.rule import Kind as FactorKind
from shardwise.ir.rule import Rule, Symbol
from shardwise.lowering.padding import block

Axes = tuple[int, ...]


class _Fields(NamedTuple):
    dims: tuple[Axes, ...]
    partial: Axes = ()


class Sharding(_Fields):
    """Mesh axes by dimension, major first, and those over which the value is partial. Equal ones are one object."""

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

    def shards(self, mesh: MeshAxes) -> int:
        count = 1
        for dim in self.dims:
            for axis in dim:
                count *= mesh.sizes[axis]
        return count

    def parts(self, shape: Sequence[int], mesh: MeshAxes) -> float:
        """How many times an array is larger than its block: the number of shards, or less where a dimension is padded."""
        sharded = ((size, mesh.pieces(axes)) for size, axes in zip(shape, self.dims, strict=True) if axes)
        return math.prod(size / block(size, pieces) for size, pieces in sharded)

    def local_shape(self, shape: Sequence[int], mesh: MeshAxes) -> tuple[int, ...]:
        """The shape of one device's block."""
        sizes = zip(shape, self.dims, strict=True)
        return tuple([block(size, mesh.pieces(axes)) if axes else size for size, axes in sizes])

    def spec(self, mesh: MeshAxes) -> tuple[tuple[str, ...], ...]:
        """The names of the axes by dimension."""
        return tuple(tuple(mesh.names[a] for a in dim) for dim in self.dims)


class Kind(Symbol):
    """What moves. A slice is local."""

    SLICE = "slice"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"


#: These add up what devices have.
REDUCING: Final = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
#: Reducers that ``all-reduce`` and ``reduce-scatter`` compute, and those that ``all-reduce`` alone does. Parts under any other
#: reducer are gathered, and each device combines them.
_SCATTERED: Final = ("sum",)
_REDUCED: Final = ("sum", "max", "min", "and", "or")
#: Reducers of pairs: the values are reduced first, then the positions of those that won.
PAIRED: Final = ("argmax", "argmin")


#: A row of a tile of a TPU: 128 numbers of 32 bits.
_ROW_BYTES: Final = 512


class Ring(Symbol):
    """Which reductions into shards are rings of permutes: none; those for which the compiler has no reduce-scatter; or all,
    since other work can run beside them."""

    NEVER = "never"
    MISSING = "missing"
    ALWAYS = "always"


#: Bytes per element of what a product reads of float32 arrays on devices that round (``Profile.rounds``), and its type.
ROUNDED_BYTES: Final = 2.0
ROUNDED: Final = "bfloat16"


class ArrayType(NamedTuple):
    """What a reshard depends on besides the two shardings. ``paired_itemsize``: bytes per element of the values that an
    ``argmax`` compares. ``narrow``: bytes per element of a shorter type in which the array moves where nothing is added up; 0
    for none. ``uniform``: all elements are the same, so that every device can make any part of the array."""

    shape: tuple[int, ...]
    itemsize: float
    reducer: str = "sum"
    paired_itemsize: float = 0.0
    ring: Ring = Ring.NEVER
    narrow: float = 0.0
    uniform: bool = False

    @property
    def nbytes(self) -> float:
        return math.prod(self.shape) * self.itemsize

    @property
    def rounded(self) -> ArrayType:
        """The same array as an operand of a product that reads bfloat16."""
        return self if self.narrow else self._replace(narrow=ROUNDED_BYTES)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective. ``bytes_in`` and ``bytes_out`` are those of one device; ``near``: a permute to neighbors; ``crossing``:
    it acts along several dimensions, so that pieces arrive in another order; ``minor``: along any dimension but the first,
    ``last``: along the last. ``after``: the sharding that it leaves. ``hops``: how often it runs where a ring of permutes
    stands for a reduce-scatter; ``beside``: whether other work can run beside that."""

    kind: Kind
    axes: Axes
    bytes_in: float
    bytes_out: float
    near: bool = False
    crossing: bool = False
    minor: bool = False
    last: bool = False
    after: Sharding = Sharding(())  # noqa: RUF009  (equal ones are one object)
    hops: int = 0
    beside: bool = False

    @property
    def nbytes(self) -> float:
        """The larger side, which is how collectives are counted in the compiled program as well."""
        return max(self.bytes_in, self.bytes_out)

    @property
    def count(self) -> int:
        """How many collectives stand in the program."""
        return max(1, self.hops)

    @property
    def purpose(self) -> Kind:
        """What it does to the array: a ring of permutes is a reduce-scatter."""
        return Kind.REDUCE_SCATTER if self.hops else self.kind


def reshard(array: ArrayType, source: Sharding, target: Sharding, mesh: MeshAxes) -> tuple[Collective, ...]:
    """The collectives from ``source`` to ``target``: what makes the value smaller first, gathers last.

    This is the one place that says how a reshard is done: the cost model adds up these steps, and ``shardwise.spmd`` emits
    them. Each step leads from one sharding to the next by one primitive of JAX:

    - axes join and leave a dimension at its minor end only. Where the order has to change, blocks change places (a permute);
    - gathers over several axes are one collective, and so are all-to-alls. Reduce-scatters take one axis after another: over
      two axes of a torus XLA would all-reduce the whole array;
    - a dimension whose size is not divided by its old and new axes together is gathered first. So is one that is padded
      before or after; a padded dimension that is gathered is cut to its size.
    """
    if source is target or is_made_anew(array, source, target):
        return ()
    steps: list[Collective] = []
    narrower = array.narrow / array.itemsize if is_narrowed(array, source) else 1.0
    nbytes = array.nbytes * narrower
    padded = is_padded(array.shape, source, mesh) or is_padded(array.shape, target, mesh)
    for kind, axes, before, after, combined, crossing, minor, last in _course(
        source, target, mesh.sizes, _tight(array.shape, source, target, mesh.sizes), array.reducer
    ):
        if padded:
            nbytes = array._replace(shape=padded_shape(array.shape, before, after, mesh)).nbytes * narrower
        size, out = (nbytes / s.shards(mesh) for s in (before, after))
        if combined:  # parts are gathered, and combined on every device
            out = size * mesh.pieces(axes)
        if kind is Kind.REDUCE_SCATTER and _is_ring(array, before, after, mesh):
            (axis,) = axes
            where = (False, crossing, minor, last, after, mesh.sizes[axis] - 1, array.ring is Ring.ALWAYS)
            steps.append(Collective(Kind.PERMUTE, axes, out, out, *where))
            continue
        if kind is Kind.ALL_REDUCE and array.reducer in PAIRED:
            pair = size / array.itemsize * array.paired_itemsize
            steps.append(Collective(kind, axes, pair, pair, False, crossing, minor, last, before))
        steps.append(Collective(kind, axes, size, out, False, crossing, minor, last, after))
    return tuple(steps)


def is_made_anew(array: ArrayType, source: Sharding, target: Sharding) -> bool:
    """Does a device fill its part of an array itself, since all elements are equal?"""
    movable = source is not target and not source.partial and not target.partial
    return array.uniform and movable and all(array.shape)


def is_rounded(array: ArrayType, source: Sharding) -> bool:
    """Does an operand of a product that reads bfloat16 move in another type than for other ops?"""
    return not array.narrow and is_narrowed(array.rounded, source)


def is_narrowed(array: ArrayType, source: Sharding) -> bool:
    """Does an array move in a shorter type? Partial sums do not, since they are to be added up."""
    return bool(array.narrow) and not source.partial


def _is_ring(array: ArrayType, before: Sharding, after: Sharding, mesh: MeshAxes) -> bool:
    """Is a reduce-scatter a ring of permutes? XLA's TPU compiler has reduce-scatters along the first dimension of several
    elements and along the last two, if pieces are rows of ``_ROW_BYTES`` or more (tests/verification/test_tpu.py)."""
    if array.ring is not Ring.MISSING:
        return array.ring is Ring.ALWAYS
    (dim,) = (d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new)
    shards = [tuple(map(mesh.pieces, s.dims)) for s in (before, after)]
    if dim == len(array.shape) - 1 > 0:
        return array.shape[dim] // shards[1][dim] * array.itemsize < _ROW_BYTES
    lead = zip(array.shape[:dim], shards[0][:dim], strict=True)
    return dim < len(array.shape) - 2 and any(size > count for size, count in lead)


def is_padded(shape: tuple[int, ...], sharding: Sharding, mesh: MeshAxes) -> bool:
    """Is a dimension padded?"""
    return any(size % mesh.sizes[axes[0]] for size, axes in zip(shape, sharding.dims, strict=True) if axes)


def padded_shape(shape: tuple[int, ...], before: Sharding, after: Sharding, mesh: MeshAxes) -> tuple[int, ...]:
    """The shape of an array during a step from one sharding to another, with the padding of both."""
    padded = []
    for size, old, new in zip(shape, before.dims, after.dims, strict=True):
        for pieces in (mesh.pieces(old), mesh.pieces(new)):
            size = block(size, pieces) * pieces
        padded.append(size)
    return tuple(padded)


def _tight(
    shape: tuple[int, ...], source: Sharding, target: Sharding, sizes: tuple[int, ...]
) -> tuple[tuple[int, Axes], ...]:
    """Dimensions that their old and new axes together do not divide, each with the axes that it can keep until the end."""
    found = []
    for d, (old, new) in enumerate(zip(source.dims, target.dims, strict=True)):
        if old != new and old and new and shape[d] % math.prod(sizes[a] for a in {*old, *new}):
            padded = any(shape[d] % math.prod(sizes[a] for a in axes) for axes in (old, new))
            found.append((d, () if padded else tuple(a for a in old if a in new)))
    return tuple(found)


#: Kind, axes, the shardings before and after, whether parts are gathered to be combined; whether it acts along several
#: dimensions, along another than the first, and along the last of several.
_Step = tuple[Kind, Axes, Sharding, Sharding, bool, bool, bool, bool]


@cache
def _course(
    source: Sharding, target: Sharding, sizes: tuple[int, ...], tight: tuple[tuple[int, Axes], ...], reducer: str
) -> tuple[_Step, ...]:
    """The steps of a reshard, whatever the size of the array."""
    steps: list[_Step] = []
    now = source
    goal = {a: d for d, axes in enumerate(target.dims) for a in axes}

    def take(kind: Kind, dims: Sequence[Sequence[int]], partial: Axes | None = None, combined: bool = False) -> None:
        nonlocal now
        after = Sharding(tuple(map(tuple, dims)), now.partial if partial is None else partial)
        if after is now:
            return
        old, new = ({a: d for d, axes in enumerate(s.dims) for a in axes} for s in (now, after))
        if kind is Kind.PERMUTE:
            moved = [a for s, t in zip(now.dims, after.dims, strict=True) if s != t for a in s]
        else:
            moved = [
                a
                for a in (*old, *now.partial)
                if old.get(a) != new.get(a) or (a in now.partial) != (a in after.partial)
            ]
            moved += [a for a in new if a not in old and a not in now.partial]
        along = {place[a] for place in (old, new) for a in moved if a in place}
        furthest = max(along, default=0)
        where = len(along) > 1, furthest > 0, furthest == len(source.dims) - 1 > 0
        steps.append((kind, tuple(dict.fromkeys(moved)), now, after, combined, *where))
        now = after

    def placed(dims: Sequence[Axes], axes: Sequence[int]) -> list[Axes]:
        """The dimensions with some axes added at the minor ends where the target has them."""
        return [(*old, *(a for a in target.dims[d] if a in axes)) for d, old in enumerate(dims)]

    def leaving(d: int) -> list[int]:
        return [a for a in now.dims[d] if a not in target.dims[d]]

    if tight:
        kept = dict(enumerate(now.dims)) | dict(tight)
        take(Kind.PERMUTE, [(*kept[d], *(a for a in axes if a not in kept[d])) for d, axes in enumerate(now.dims)])
        take(Kind.ALL_GATHER, list(kept.values()))
    sharded = {a for axes in now.dims for a in axes}
    take(Kind.SLICE, placed(now.dims, [a for a in goal if a not in sharded and a not in source.partial]))
    reduced = [a for a in source.partial if a not in target.partial]
    if reducer in _SCATTERED:
        for a in (a for axes in target.dims for a in axes if a in reduced):
            take(Kind.REDUCE_SCATTER, placed(now.dims, [a]), tuple(p for p in now.partial if p != a))
    while moving := [a for d, axes in enumerate(now.dims) for a in axes if goal.get(a, d) != d]:
        # An axis leaves a dimension at its minor end, and before others come there, or the pieces would not be contiguous.
        full = {d for d, axes in enumerate(now.dims) for a in axes if a in moving}
        batch = [a for a in moving if goal[a] not in full] or moving[:1]
        ordered = []
        for axes in now.dims:
            last = tuple(a for a in axes if a in batch)
            ordered.append((*(a for a in axes if a not in last), *last))
        take(Kind.PERMUTE, ordered)
        take(Kind.ALL_TO_ALL, placed([tuple(a for a in axes if a not in batch) for axes in now.dims], batch))
    rest = tuple(a for a in now.partial if a in target.partial)
    take(
        Kind.ALL_REDUCE if reducer in (*_REDUCED, *PAIRED) else Kind.ALL_GATHER,
        now.dims,
        rest,
        reducer not in (*_REDUCED, *PAIRED),
    )
    sharded = {a for axes in now.dims for a in axes}
    take(Kind.SLICE, placed(now.dims, [a for a in reduced if a in goal and a not in sharded]))
    take(
        Kind.PERMUTE,
        [
            axes if axes[: len(t)] == t else (*t, *leaving(d))
            for d, (axes, t) in enumerate(zip(now.dims, target.dims, strict=True))
        ],
    )
    take(Kind.ALL_GATHER, target.dims)
    return tuple(steps)


def is_moved(source: Sharding, target: Sharding, mesh: MeshAxes) -> bool:
    """Does it take more than slices to bring a value from one sharding to another?"""
    if source is target:
        return False
    return any(kind is not Kind.SLICE for kind, *_ in _course(source, target, mesh.sizes, (), "sum"))


def tensor_sharding(majors: tuple[int, ...], assigned: Sequence[Axes]) -> Sharding:
    return Sharding(tuple([assigned[m] if m >= 0 else () for m in majors]))


def result_sharding(rule: Rule, result: int, assigned: Sequence[Axes], passing: Axes) -> Sharding:
    dims = tuple([assigned[m] if m >= 0 else () for m in rule.result_majors[result]])
    partial = {a for f in _summed(rule, result) for a in assigned[f]}
    return Sharding(dims, tuple(sorted(partial.union(passing))))


def partial_need(need: Sharding, given: Sharding, passed: Axes) -> Sharding:
    """The sharding in which an operand is needed, where partial sums are passed on over some axes."""
    return Sharding(need.dims, tuple([a for a in given.partial if a in passed])) if passed and given.partial else need


def target_sharding(computed: Sharding, stored: Sharding, waiting: frozenset[int], stays: bool) -> Sharding:
    """The sharding to which a result is brought: its storage, without the axes on which its reduction waits; or as computed."""
    if not computed.partial:
        return computed if stays and computed.axes() == stored.axes() else stored
    wait = tuple([a for a in computed.partial if a in waiting])
    return Sharding(tuple(tuple(a for a in axes if a not in wait) for axes in stored.dims), wait) if wait else stored


@cache
def _summed(rule: Rule, result: int) -> tuple[int, ...]:
    """The factors that leave a result partial."""
    present = {f for dim in rule.results[result] for f in dim}
    leave = (FactorKind.REDUCTION, FactorKind.INDEXED)
    return tuple(f for f, factor in enumerate(rule.factors) if f not in present and factor.kind in leave)
