"""One emitter for each kind of collective, and for the permutes of windowed ops.

Each step of ``shardwise.lowering.sharding.reshard`` becomes one collective of ``jax.lax`` on the local block, so that what is
emitted is what was counted. Blocks are numbered by the axes of a dimension, major first.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.halo import Fetch
from shardwise.lowering.padding import block
from shardwise.lowering.sharding import PAIRED, ArrayType, Axes, Collective, Kind, Sharding, padded_shape

#: The function of ``jax.lax`` for each reducer that an all-reduce computes; for positions, that of the values there.
ALL_REDUCES: Final = {
    **dict.fromkeys(("max", "or", "argmax"), "pmax"),
    **dict.fromkeys(("min", "and", "argmin"), "pmin"),
    "sum": "psum",
}


def block_index(axes: Axes, mesh: MeshAxes) -> Any:
    """Returns the number of this device's block along some axes, major first."""
    index: Any = np.int32(0)
    for a in axes:
        index = index * np.int32(mesh.sizes[a]) + jax.lax.axis_index(mesh.names[a])
    return index


def changed_dims(before: Sharding, after: Sharding) -> list[int]:
    return [d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new]


def emit(arrays: list[Any], step: Collective, before: Sharding, array: ArrayType, mesh: MeshAxes) -> list[Any]:
    """Emits one step of a reshard. There is one array, or the positions of a maximum and the values there. Padding is
    added before a step that needs it, and cut off after a step that does not keep it."""
    shape, after = array.shape, step.after
    padded = padded_shape(shape, before, after, mesh)
    changed = changed_dims(before, after) if padded != shape else []
    resized = [_resized(x, {d: padded[d] // mesh.pieces(before.dims[d]) for d in changed}) for x in arrays]
    results = _emit(resized, step, before, array.reducer, mesh)
    return [_resized(x, {d: block(shape[d], mesh.pieces(after.dims[d])) for d in changed}) for x in results]


def _resized(x: Any, sizes: dict[int, int]) -> Any:
    """Pads some dimensions at the end, with zeros, or cuts them."""
    if any(x.shape[d] != size for d, size in sizes.items()):
        widths = [(0, sizes.get(d, n) - n, 0) for d, n in enumerate(x.shape)]
        x = jax.lax.pad(x, np.zeros((), x.dtype), widths)
    return x


def _emit(arrays: list[Any], step: Collective, before: Sharding, reducer: str, mesh: MeshAxes) -> list[Any]:
    after, names = step.after, tuple(mesh.names[a] for a in step.axes)
    if step.kind is Kind.SLICE:
        return [_slice(x, before, after, mesh) for x in arrays]
    if step.kind is Kind.ALL_REDUCE:
        return _reduce(arrays, names, reducer, after is before)
    (x,) = arrays
    if step.kind is Kind.REDUCE_SCATTER:
        (dim,) = changed_dims(before, after)
        return [_reduced(x, lambda x: jax.lax.psum_scatter(x, names[0], scatter_dimension=dim, tiled=True))]
    if step.kind is Kind.ALL_GATHER and before.dims == after.dims:
        parts = jax.lax.all_gather(x, names, axis=0, tiled=False)
        return [functools.reduce(_COMBINED[reducer], list(parts))]
    if step.kind is Kind.ALL_GATHER:
        return [_gather(x, before, after, mesh)]
    if step.kind is Kind.ALL_TO_ALL:
        return [_all_to_all(x, before, after, mesh)]
    if step.hops:
        return [_ring(x, step.axes[0], before, after, mesh)]
    return [_permute(x, before, after, mesh)]


def _ring(x: Any, axis: int, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    """Emits a reduce-scatter as permutes, which can overlap compute: blocks go around a ring, and each device adds its part."""
    (dim,) = changed_dims(before, after)
    count, index = mesh.sizes[axis], block_index((axis,), mesh)
    size = x.shape[dim] // count

    def part(hop: int) -> Any:
        """Returns what this device adds to the block that it has after some hops."""
        block = jnp.mod(index - np.int32(1 + hop), np.int32(count))
        return jax.lax.dynamic_slice_in_dim(x, block * np.int32(size), size, dim)

    pairs = [(k, (k + 1) % count) for k in range(count)]
    total = part(0)
    for hop in range(1, count):
        total = jax.lax.ppermute(total, mesh.names[axis], pairs) + part(hop)
    return total


def _slice(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    """Slices out this device's part along the axes that each dimension gets."""
    for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)):
        added = new[len(old) :]
        if added:
            size = x.shape[d] // mesh.pieces(added)
            x = jax.lax.dynamic_slice_in_dim(x, block_index(added, mesh) * np.int32(size), size, d)
    return x


def _reduce(arrays: list[Any], names: tuple[str, ...], reducer: str, values_first: bool) -> list[Any]:
    """Emits an all-reduce. Of positions and the values there, the values are reduced first."""
    reduce = getattr(jax.lax, ALL_REDUCES[reducer])
    if reducer in PAIRED:
        positions, values = arrays
        if values_first:
            return [positions, values == reduce(values, names)]
        last = jnp.iinfo(positions.dtype).max
        return [jax.lax.pmin(jnp.where(values, positions, last), names)]
    return [_reduced(x, lambda x: reduce(x, names)) for x in arrays]


def _reduced(x: Any, reduce: Any) -> Any:
    """Reduces an array; JAX adds up no booleans, so they are reduced as integers."""
    return reduce(x.astype(jnp.uint8)).astype(x.dtype) if x.dtype == jnp.bool_ else reduce(x)


#: Reducers that no collective computes: the parts of all devices are gathered, and combined on each.
_COMBINED: Final = {
    "prod": jax.lax.mul,
    "xor": jax.lax.bitwise_xor,
    "gathered and": jax.lax.bitwise_and,
    "gathered or": jax.lax.bitwise_or,
    "gathered max": jax.lax.max,
    "gathered min": jax.lax.min,
}


def _gather(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    gathered = [axes[len(after.dims[d]) :] for d, axes in enumerate(before.dims)]
    along = [d for d, axes in enumerate(gathered) if axes]
    names = tuple(mesh.names[a] for axes in gathered for a in axes)
    if len(along) == 1:
        return jax.lax.all_gather(x, names, axis=along[0], tiled=True)
    parts = jax.lax.all_gather(x, names, axis=0, tiled=False)
    return _spread(parts.reshape(*(mesh.pieces(gathered[d]) for d in along), *x.shape), along)


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
    old, new = ({a: d for d, axes in enumerate(s.dims) for a in axes} for s in (before, after))
    moving = [a for a, d in old.items() if new[a] != d]
    arriving = [a for a, d in new.items() if old[a] != d]
    sources, targets = sorted({old[a] for a in moving}), sorted({new[a] for a in moving})
    names = tuple(mesh.names[a] for a in moving)
    if len(sources) == 1 and len(targets) == 1 and moving == arriving:
        return jax.lax.all_to_all(x, names, split_axis=targets[0], concat_axis=sources[0], tiled=True)
    # The blocks for the others, in the order of the devices in front.
    shape: list[int] = []
    place: dict[int, int] = {}
    for d, size in enumerate(x.shape):
        for a in (a for a in after.dims[d] if a in arriving):
            place[a] = len(shape)
            shape.append(mesh.sizes[a])
            size //= mesh.sizes[a]
        shape.append(size)
    rest = [k for k in range(len(shape)) if k not in place.values()]
    parts = x.reshape(shape).transpose([place[a] for a in moving] + rest)
    local = parts.shape[len(moving) :]
    parts = parts.reshape(mesh.pieces(tuple(moving)), *local)  # of an empty array too
    parts = jax.lax.all_to_all(parts, names, split_axis=0, concat_axis=0, tiled=True)
    # What arrives is in the order of the dimensions that it comes from.
    counts = (mesh.pieces(tuple(a for a in moving if old[a] == d)) for d in sources)
    return _spread(parts.reshape(*counts, *local), sources)


def _permute(x: Any, before: Sharding, after: Sharding, mesh: MeshAxes) -> Any:
    changed = changed_dims(before, after)
    old, new = (tuple(a for d in changed for a in sharding.dims[d]) for sharding in (before, after))
    return _ppermute(x, old, [(block, device) for device, block in enumerate(_renumbered(new, old, mesh))], mesh)


def _ppermute(x: Any, axes: Axes, pairs: Sequence[tuple[int, int]], mesh: MeshAxes) -> Any:
    """Sends blocks, numbered by the axes. ``lax.ppermute`` numbers devices in the order of the mesh instead."""
    order = tuple(sorted(axes))
    numbers = _renumbered(order, axes, mesh)
    return jax.lax.ppermute(x, tuple(mesh.names[a] for a in order), [(numbers[a], numbers[b]) for a, b in pairs])


def _renumbered(axes: Axes, order: Axes, mesh: MeshAxes) -> list[int]:
    """Returns the numbers of blocks by the axes, major first, for the same blocks numbered by the axes in another order."""
    numbers = np.arange(mesh.pieces(axes)).reshape([mesh.sizes[a] for a in axes])
    by_block: list[int] = numbers.transpose([axes.index(a) for a in order]).ravel().tolist()
    return by_block


def in_range(start: Any, size: int, length: int, dim: int, rank: int) -> Any:
    """Returns a mask along one dimension: which of ``size`` positions from ``start`` are in an array of this length."""
    at = jnp.arange(size, dtype=jnp.int32) + start
    return ((at >= 0) & (at < length)).reshape([-1 if d == dim else 1 for d in range(rank)])


def window(x: Any, start: Any, size: int, dim: int) -> Any:
    """Returns ``size`` positions of a dimension from ``start``, with zeros outside of the array."""
    widths = [(size, size, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    padded = jax.lax.pad(x, np.zeros((), x.dtype), widths)
    begin = jnp.clip(start + np.int32(size), 0, x.shape[dim] + size)
    return jax.lax.dynamic_slice_in_dim(padded, begin, size, dim)


def fetch(x: Any, needed: Fetch, axes: Axes, mesh: MeshAxes) -> Any:
    """Returns the positions of one dimension that this device needs, with any value outside of the array (``fill_outside``)."""
    dim, index = needed.dim, block_index(axes, mesh)
    arrived = []
    for r in needed.rounds:
        sent = x
        if r.length != x.shape[dim]:
            sent = jax.lax.dynamic_slice_in_dim(x, by_block(r.starts, index), r.length, dim)
        arrived.append(_ppermute(sent, axes, r.pairs, mesh))
    ahead = {start - k * needed.block for k, start in enumerate(needed.starts)}
    first, last = min(ahead), max(ahead) + needed.width
    inside = -needed.block <= first < needed.block and 0 < last <= 2 * needed.block
    if len(ahead) == 1 and inside and all(r.near for r in needed.rounds):
        return _beside(x, needed, arrived, ahead.pop(), index)
    return _assembled(x, needed, arrived, index, mesh.pieces(axes))


def fill_outside(x: Any, needed: Fetch, axes: Axes, mesh: MeshAxes, fill: Any) -> Any:
    """Writes ``fill`` at the fetched positions that are outside of the array."""
    total = needed.block * mesh.pieces(axes)
    if min(needed.starts) >= 0 and max(needed.starts) + needed.width <= total:
        return x
    start = by_block(needed.starts, block_index(axes, mesh))
    return jnp.where(in_range(start, needed.width, total, needed.dim, x.ndim), x, jnp.asarray(fill, x.dtype))


def by_block(table: Sequence[int], index: Any) -> Any:
    """Returns the table's entry for this device's block, by arithmetic where the entries are evenly spaced."""
    steps = {b - a for a, b in itertools.pairwise(table)}
    if len(steps) <= 1:
        step = steps.pop() if steps else 0
        return np.int32(table[0]) + (index * np.int32(step) if step else np.int32(0))
    return jnp.asarray(np.array(table, np.int32))[index]


def _beside(x: Any, needed: Fetch, arrived: list[Any], ahead: int, index: Any) -> Any:
    """Concatenates the block with its halos, where these are equally wide on all devices."""
    dim, stop = needed.dim, ahead + needed.width
    halos: dict[int, Any] = {}
    for r, piece in zip(needed.rounds, arrived, strict=True):
        hops = {source - to: to for source, to in reversed(r.pairs)}
        for hop, to in hops.items():
            # Of two devices each sends to the other in one round.
            halos[hop] = piece if len(hops) == 1 else jnp.where(index == to, piece, jnp.zeros_like(piece))
    parts = [jax.lax.slice_in_dim(x, max(ahead, 0), min(stop, needed.block), axis=dim)]
    if ahead < 0:
        size = halos[-1].shape[dim]
        parts.insert(0, jax.lax.slice_in_dim(halos[-1], size + ahead, size, axis=dim))
    if stop > needed.block:
        parts.append(jax.lax.slice_in_dim(halos[1], 0, stop - needed.block, axis=dim))
    return jnp.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _assembled(x: Any, needed: Fetch, arrived: list[Any], index: Any, count: int) -> Any:
    """Selects the needed positions from the block and the received pieces, which start at other positions on each device."""
    dim, width, start = needed.dim, needed.width, by_block(needed.starts, index)
    result = jnp.zeros([width if d == dim else n for d, n in enumerate(x.shape)], x.dtype)
    sources: list[tuple[Any, Any, list[bool]]] = [(x, index * np.int32(needed.block), [True] * count)]
    for r, piece in zip(needed.rounds, arrived, strict=True):
        first, takes = [0] * count, [False] * count
        for sender, to in r.pairs:
            first[to], takes[to] = sender * needed.block + r.starts[sender], True
        sources.append((piece, by_block(first, index), takes))
    for piece, first_at, takes in sources:
        shift = start - first_at
        moved, valid = window(piece, shift, width, dim), in_range(shift, width, piece.shape[dim], dim, x.ndim)
        if not all(takes):
            valid &= jnp.asarray(np.array(takes))[index]
        result = jnp.where(valid, moved, result)
    return result
