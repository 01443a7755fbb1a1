"""One emitter for each kind of collective, and for the permutes of windowed ops.

The problem. ``shardwise.lowering.sharding.reshard`` says by which steps a value goes from one sharding to another. Here each
step becomes one collective of ``jax.lax`` on the local block, so that what is emitted is what was counted.

Blocks are numbered by the axes of a dimension, major first. A gather or an all-to-all over axes of several dimensions is one
collective over all of them; the pieces are then put where they belong by transposing. A permute is a bijection of devices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.halo import Fetch
from shardwise.lowering.sharding import PAIRED, Axes, Collective, Kind, Sharding


def block_index(axes: Axes, mesh: MeshAxes) -> Any:
    """The number of this device's block along some axes, major first."""
    index: Any = np.int32(0)
    for a in axes:
        index = index * np.int32(mesh.sizes[a]) + jax.lax.axis_index(mesh.names[a])
    return index


def pieces(axes: Axes, mesh: MeshAxes) -> int:
    """How many blocks some axes make."""
    return math.prod(mesh.sizes[a] for a in axes)


def emit(arrays: list[Any], step: Collective, before: Sharding, reducer: str, mesh: MeshAxes) -> list[Any]:
    """The arrays after one step of a reshard. There is one, or, where positions of a maximum are reduced, a second with the
    values."""
    after = step.after
    assert after is not None
    names = tuple(mesh.names[a] for a in step.axes)
    if step.kind is Kind.SLICE:
        return [_slice(x, before, after, mesh) for x in arrays]
    if step.kind is Kind.ALL_REDUCE:
        return _reduce(arrays, names, reducer, after is before)
    (x,) = arrays
    if step.kind is Kind.REDUCE_SCATTER:
        (dim,) = (d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new)
        return [jax.lax.psum_scatter(x, names[0], scatter_dimension=dim, tiled=True)]
    if step.kind is Kind.ALL_GATHER:
        combined = before.dims == after.dims
        return [_combine(x, names, reducer) if combined else _gather(x, before, after, mesh)]
    if step.kind is Kind.ALL_TO_ALL:
        return [_all_to_all(x, before, after, mesh)]
    if step.hops:
        return [_ring(x, step.axes[0], before, after, mesh)]
    return [_permute(x, before, after, mesh)]


def _ring(x: Any, axis: int, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    """A sum over devices of which each keeps a block. Each block goes once round, and every device adds its part: unlike a
    reduce-scatter, permutes can run beside other work."""
    (dim,) = (d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new)
    count, index = mesh.sizes[axis], block_index((axis,), mesh)
    size = x.shape[dim] // count

    def part(hop: int) -> Any:
        """This device's part of the block that it holds after some hops: its own after the last."""
        block = jnp.mod(index - np.int32(1 + hop), np.int32(count))
        return jax.lax.dynamic_slice_in_dim(x, block * np.int32(size), size, dim)

    pairs = [(k, (k + 1) % count) for k in range(count)]
    total = part(0)
    for hop in range(1, count):
        total = jax.lax.ppermute(total, mesh.names[axis], pairs) + part(hop)
    return total


def _slice(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    """This device's part along the axes that a dimension gets."""
    for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        added = new[len(old) :]
        if added:
            size = x.shape[d] // pieces(added, mesh)
            x = jax.lax.dynamic_slice_in_dim(x, block_index(added, mesh) * np.int32(size), size, d)
    return x


def _reduce(arrays: list[Any], names: tuple[str, ...], reducer: str, values_first: bool) -> list[Any]:
    """All devices' parts combined. Of positions and the values there, the values are reduced first."""
    if reducer in PAIRED:
        positions, values = arrays
        if values_first:
            best: Any = jax.lax.pmax if reducer == "argmax" else jax.lax.pmin
            return [positions, values == best(values, names)]
        last = jnp.iinfo(positions.dtype).max
        return [jax.lax.pmin(jnp.where(values, positions, last), names)]
    (x,) = arrays
    if reducer == "sum":
        return [
            jax.lax.psum(x.astype(jnp.uint8), names).astype(x.dtype) if x.dtype == jnp.bool_ else jax.lax.psum(x, names)
        ]
    most = reducer in ("max", "or")
    reduce: Any = jax.lax.pmax if most else jax.lax.pmin
    if x.dtype == jnp.bool_:
        return [reduce(x.astype(jnp.uint8), names).astype(x.dtype)]
    return [reduce(x, names)]


def _combine(x: Any, names: tuple[str, ...], reducer: str) -> Any:
    """Parts of all devices under a reducer that no collective computes."""
    parts = jax.lax.all_gather(x, names, axis=0, tiled=False)
    return functools.reduce(_COMBINED[reducer], list(parts))


_COMBINED: Final = {
    "prod": jax.lax.mul,
    "xor": jax.lax.bitwise_xor,
    "gathered and": jax.lax.bitwise_and,
    "gathered or": jax.lax.bitwise_or,
    "gathered max": jax.lax.max,
    "gathered min": jax.lax.min,
}


def _gather(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    gone = [own[len(after.dims[d]) :] for d, own in enumerate(before.dims)]
    along = [d for d, axes in enumerate(gone) if axes]
    axes = [a for d in along for a in gone[d]]
    names = tuple(mesh.names[a] for a in axes)
    if len(along) == 1:
        return jax.lax.all_gather(x, names, axis=along[0], tiled=True)
    parts = jax.lax.all_gather(x, names, axis=0, tiled=False)
    return _spread(parts.reshape(*(pieces(gone[d], mesh) for d in along), *x.shape), along)


def _spread(parts: Any, along: Sequence[int]) -> Any:
    """Moves each leading dimension, which numbers blocks, in front of the dimension of ``along`` that it belongs to."""
    rank = parts.ndim - len(along)
    order: list[int] = []
    for d in range(rank):
        order += [along.index(d)] if d in along else []
        order.append(len(along) + d)
    shape = [parts.shape[len(along) + d] * (parts.shape[along.index(d)] if d in along else 1) for d in range(rank)]
    return parts.transpose(order).reshape(shape)


def _all_to_all(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    old = {a: d for d, axes in enumerate(before.dims) for a in axes}
    new = {a: d for d, axes in enumerate(after.dims) for a in axes}
    moving = [a for d in range(len(before.dims)) for a in before.dims[d] if new[a] != d]
    sources, targets = {old[a] for a in moving}, {new[a] for a in moving}
    arriving = [a for d in range(len(after.dims)) for a in after.dims[d] if old[a] != d]
    names = tuple(mesh.names[a] for a in moving)
    if len(sources) == 1 and len(targets) == 1 and moving == arriving:
        return jax.lax.all_to_all(x, names, split_axis=targets.pop(), concat_axis=sources.pop(), tiled=True)
    # The blocks for the others, in the order of the devices in front.
    shape: list[int] = []
    place: dict[int, int] = {}
    for d, size in enumerate(x.shape):
        for a in after.dims[d]:
            if old[a] != d:
                place[a] = len(shape)
                shape.append(mesh.sizes[a])
                size //= mesh.sizes[a]
        shape.append(size)
    rest = [k for k in range(len(shape)) if k not in place.values()]
    parts = x.reshape(shape).transpose([place[a] for a in moving] + rest)
    local = parts.shape[len(moving) :]
    parts = parts.reshape(-1, *local)
    parts = jax.lax.all_to_all(parts, names, split_axis=0, concat_axis=0, tiled=True)
    # What came is in the order of where it came from, which is that of the dimensions that lose axes.
    along = sorted(sources)
    return _spread(
        parts.reshape(*(pieces(tuple(a for a in moving if old[a] == d), mesh) for d in along), *local), along
    )


def _permute(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    changed = [d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new]
    axes = sorted({a for d in changed for a in before.dims[d]})
    return _ppermute(x, tuple(axes), device_pairs(before, after, changed, axes, mesh), mesh)


def device_pairs(
    before: Sharding, after: Sharding, changed: Sequence[int], axes: Sequence[int], mesh: MeshAxes
) -> list[tuple[int, int]]:
    """(from, to) numbers of devices, among those that differ in ``axes``, so that each gets the block of its new place."""
    sizes = [mesh.sizes[a] for a in axes]

    def blocks(coordinates: Sequence[int], sharding: Sharding) -> tuple[int, ...]:
        at = dict(zip(axes, coordinates, strict=True))
        found = []
        for d in changed:
            index = 0
            for a in sharding.dims[d]:
                index = index * mesh.sizes[a] + at[a]
            found.append(index)
        return tuple(found)

    devices = list(itertools.product(*(range(n) for n in sizes)))
    holder = {blocks(c, before): n for n, c in enumerate(devices)}
    return [(holder[blocks(c, after)], n) for n, c in enumerate(devices)]


def _ppermute(x: Any, axes: Axes, pairs: Sequence[tuple[int, int]], mesh: MeshAxes) -> Any:
    """Sends blocks, numbered by the axes with the first as the major one. ``lax.ppermute`` numbers devices in the order of the
    mesh, whatever the order of the names."""
    order = sorted(axes)
    sizes = [mesh.sizes[a] for a in axes]
    place = [order.index(a) for a in axes]

    def number(block: int) -> int:
        at = np.unravel_index(block, sizes)
        own = [0] * len(axes)
        for k, position in zip(place, at, strict=True):
            own[k] = int(position)
        return int(np.ravel_multi_index(own, [mesh.sizes[a] for a in order]))

    return jax.lax.ppermute(x, tuple(mesh.names[a] for a in order), [(number(a), number(b)) for a, b in pairs])


def fetch(x: Any, own: Fetch, axes: Axes, mesh: MeshAxes) -> Any:
    """The positions of one dimension that this device needs, some of them from others. What stands outside of the array is
    not said: see ``fill_outside``."""
    dim, count = own.dim, pieces(axes, mesh)
    index = block_index(axes, mesh)
    arrived = []
    for r in own.rounds:
        sent = _at(x, _by_block(r.starts, index), r.length, dim)
        arrived.append(_ppermute(sent, axes, r.pairs, mesh))
    ahead = {start - k * own.block for k, start in enumerate(own.starts)}
    first, last = min(ahead), max(ahead) + own.width
    inside = -own.block <= first < own.block and 0 < last <= 2 * own.block
    if len(ahead) == 1 and inside and all(r.near for r in own.rounds):
        return _beside(x, own, arrived, ahead.pop(), index, dim)
    return _assembled(x, own, arrived, index, count, dim)


def fill_outside(x: Any, own: Fetch, axes: Axes, mesh: MeshAxes, fill: Any) -> Any:
    """What was fetched along a dimension, with ``fill`` where it stands outside of the array."""
    total = own.block * pieces(axes, mesh)
    if min(own.starts) >= 0 and max(own.starts) + own.width <= total:
        return x
    at = _by_block(own.starts, block_index(axes, mesh)) + jnp.arange(own.width, dtype=jnp.int32)
    valid = ((at >= 0) & (at < total)).reshape([-1 if d == own.dim else 1 for d in range(x.ndim)])
    return jnp.where(valid, x, jnp.asarray(fill, x.dtype))


def _by_block(table: Sequence[int], index: Any) -> Any:
    """The entry of this device's block: a constant where all are equal, arithmetic where they are evenly spaced."""
    steps = {b - a for a, b in itertools.pairwise(table)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 0
        return np.int32(table[0]) + (index * np.int32(step) if step else np.int32(0))
    return jnp.asarray(np.array(table, np.int32))[index]


def _at(x: Any, start: Any, size: int, dim: int) -> Any:
    return x if size == x.shape[dim] else jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _beside(x: Any, own: Fetch, arrived: list[Any], ahead: int, index: Any, dim: int) -> Any:
    """Halos on both sides of what the device has, which are the same for all devices."""
    parts: dict[int, Any] = {}
    for r, piece in zip(own.rounds, arrived, strict=True):
        hops = {source - to for source, to in r.pairs}
        for hop in hops:
            taking = [to for source, to in r.pairs if source - to == hop]
            # Of two devices each sends to the other in one round.
            parts[hop] = piece if len(hops) == 1 else jnp.where(index == taking[0], piece, jnp.zeros_like(piece))
    stop = ahead + own.width
    middle = jax.lax.slice_in_dim(x, max(ahead, 0), min(stop, own.block), axis=dim)
    found = [middle]
    if ahead < 0:
        size = parts[-1].shape[dim]
        found.insert(0, jax.lax.slice_in_dim(parts[-1], size + ahead, size, axis=dim))
    if stop > own.block:
        found.append(jax.lax.slice_in_dim(parts[1], 0, stop - own.block, axis=dim))
    return jnp.concatenate(found, dim) if len(found) > 1 else middle


def _assembled(x: Any, own: Fetch, arrived: list[Any], index: Any, count: int, dim: int) -> Any:
    """What a device needs, put together from its own block and from pieces that start at different places on each."""
    start = _by_block(own.starts, index)
    found = jnp.zeros([own.width if d == dim else n for d, n in enumerate(x.shape)], x.dtype)
    sources: list[tuple[Any, Any, int, list[bool]]] = [(x, index * np.int32(own.block), own.block, [True] * count)]
    for r, piece in zip(own.rounds, arrived, strict=True):
        first, takes = [0] * count, [False] * count
        for sender, to in r.pairs:
            first[to], takes[to] = sender * own.block + r.starts[sender], True
        sources.append((piece, _by_block(first, index), r.length, takes))
    at = jnp.arange(own.width, dtype=jnp.int32)
    for piece, first_at, length, takes in sources:
        shift = start - first_at
        widths = [(own.width, own.width, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        padded = jax.lax.pad(piece, np.zeros((), x.dtype), widths)
        begin = jnp.clip(shift + np.int32(own.width), 0, length + own.width)
        moved = jax.lax.dynamic_slice_in_dim(padded, begin, own.width, dim)
        valid = (at + shift >= 0) & (at + shift < length)
        if not all(takes):
            valid &= jnp.asarray(np.array(takes))[index]
        found = jnp.where(valid.reshape([-1 if d == dim else 1 for d in range(x.ndim)]), moved, found)
    return found
