"""Local forms of gathers, scatters and dynamic slices.

Where the dimension that is looked into is sharded, positions are first made what the whole op would make of them (clamped, or
marked as out of bounds), and then each device looks up or writes what falls into its block.
"""

from __future__ import annotations

import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from shardwise.ir.rule import Kind
from shardwise.ir.traits import SCATTERS
from shardwise.spmd.local import Array, LocalOp, form


def _wide(indices: Array) -> Array:
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 or indices.dtype == jnp.uint32 else indices


def _localized(
    op: LocalOp, indices: Array, dims: tuple[int, ...], widths: tuple[int, ...], mode: Any
) -> tuple[Array, Array, Array]:
    """Index vectors in a device's own block; which of them are inside the whole array; which of them this device has."""
    shape, local = op.shapes[0], op.local_shape(0)
    indices = _wide(indices)
    last = np.array([shape[d] - w for d, w in zip(dims, widths, strict=True)], indices.dtype)
    inside: Any = np.True_
    if mode == GatherScatterMode.FILL_OR_DROP:
        inside = jnp.all((indices >= 0) & (indices <= last), axis=-1)
    indices = jnp.clip(indices, 0, last)
    columns, has = [], inside
    for c, d in enumerate(dims):
        own = indices[..., c]
        if op.axes(0, d) and local[d] != shape[d] and widths[c] != shape[d]:
            own = own - jnp.asarray(op.offset(0, d)).astype(own.dtype)
            has = has & (own >= 0) & (own < local[d])
        columns.append(own)
    return jnp.stack(columns, -1), inside, has


@form("gather")
def gather(op: LocalOp, arrays: list[Array]) -> list[Array]:
    operand, indices = arrays
    numbers, mode = op.params["dimension_numbers"], op.params["mode"]
    shape, local = op.shapes[0], op.local_shape(0)
    sizes = tuple(local[d] if w == shape[d] else w for d, w in enumerate(op.params["slice_sizes"]))
    looked = op.sharded(Kind.INDEXED)
    if not looked:
        return op.bind(arrays, slice_sizes=sizes)
    dims = tuple(numbers.start_index_map)
    own, inside, has = _localized(op, indices, dims, tuple(op.params["slice_sizes"][d] for d in dims), mode)
    own = jnp.clip(own, 0, np.array([local[d] - sizes[d] for d in dims], own.dtype))
    bounds = {"mode": GatherScatterMode.PROMISE_IN_BOUNDS, "indices_are_sorted": False, "unique_indices": False}
    (found,) = op.bind([operand, own], slice_sizes=sizes, fill_value=None, **bounds)

    def over(mask: Array) -> Array:
        """A mask of lookups over the dimensions of the result."""
        batch = iter(np.shape(mask))
        return jnp.reshape(mask, [1 if d in numbers.offset_dims else next(batch) for d in range(found.ndim)])

    zero = jnp.zeros((), found.dtype)
    if mode == GatherScatterMode.FILL_OR_DROP:
        fill = _fill_value(op.params["fill_value"], found.dtype)
        zero = jnp.where(over(inside) | ~op.is_first(looked), zero, fill)
    return [jnp.where(over(has), found, zero)]


def _fill_value(given: Any, dtype: Any) -> Any:
    """What stands for positions out of bounds."""
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(np.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    ends = jnp.iinfo(dtype)
    return jnp.asarray(ends.min if jnp.issubdtype(dtype, jnp.signedinteger) else ends.max, dtype)


#: What an update that is dropped has in its place; elsewhere what stands there already.
_NEUTRAL: Final = {kind: {"sum": 0, "prod": 1}[how] for kind, how in SCATTERS.items() if how in ("sum", "prod")}


@form(*SCATTERS)
def scatter(op: LocalOp, arrays: list[Array]) -> list[Array]:
    operand, indices, updates = arrays
    kind, numbers, changed = op.op.kind, op.params["dimension_numbers"], dict[str, Any]()
    single = math.prod(indices.shape[:-1]) == 1 and op.params["mode"] == GatherScatterMode.FILL_OR_DROP
    if single or op.sharded(Kind.INDEXED):
        dims = tuple(numbers.scatter_dims_to_operand_dims)
        outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        window = [d for d in range(operand.ndim) if d not in outside]
        widths = dict(zip(window, (op.shapes[2][u] for u in numbers.update_window_dims), strict=True))
        own, _, has = _localized(op, indices, dims, tuple(widths.get(d, 1) for d in dims), op.params["mode"])
        changed = {"indices_are_sorted": False, "unique_indices": False}
        if math.prod(indices.shape[:-1]) == 1:
            updates, indices = _kept(op, operand, own, updates, has)
            changed["mode"] = GatherScatterMode.PROMISE_IN_BOUNDS
        else:
            indices = jnp.where(has[..., None], own, -1)
            changed["mode"] = GatherScatterMode.FILL_OR_DROP
    summed = op.sharded(Kind.REDUCTION)
    if summed and kind in _NEUTRAL:
        # What is scattered into counts once.
        operand = jnp.where(op.is_first(summed), operand, jnp.asarray(_NEUTRAL[kind], operand.dtype))
    return op.bind([operand, indices, updates], **changed)


def _kept(op: LocalOp, operand: Array, indices: Array, updates: Array, has: Array) -> tuple[Array, Array]:
    """A single update that changes nothing where it is to be dropped, and its index vector, which is in bounds.

    XLA makes one update a dynamic slice, and merges that with one around it as if it were in bounds.
    """
    numbers = op.params["dimension_numbers"]
    outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sizes = iter(updates.shape[u] for u in numbers.update_window_dims)
    slices = tuple(1 if d in outside else next(sizes) for d in range(operand.ndim))
    dims = numbers.scatter_dims_to_operand_dims
    indices = jnp.clip(indices, 0, np.array([operand.shape[d] - slices[d] for d in dims], indices.dtype))
    if op.op.kind in _NEUTRAL:
        old = jnp.asarray(_NEUTRAL[op.op.kind], updates.dtype)
    else:
        looked = jax.lax.GatherDimensionNumbers(
            offset_dims=numbers.update_window_dims,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        )
        old = jax.lax.gather(operand, indices, looked, slices, mode=GatherScatterMode.PROMISE_IN_BOUNDS)
    return jnp.where(jnp.all(has), updates, old.astype(updates.dtype)), indices


@form("dynamic_slice")
def dynamic_slice(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Only dimensions that are taken whole are sharded. Starts are clamped here: XLA merges a slice of a slice into one, which
    clamps their sum instead of the first start."""
    x, *starts = arrays
    for d, start in enumerate(starts):
        last = x.shape[d] - op.local_shape(op.out)[d]
        starts[d] = (
            jnp.zeros_like(start) if op.axes(0, d) else jnp.clip(start, 0, min(last, jnp.iinfo(start.dtype).max))
        )
    return op.bind([x, *starts], slice_sizes=op.local_shape(op.out))


@form("dynamic_update_slice")
def dynamic_update_slice(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Starts are clamped in the whole array; then each device writes the part of the update that falls into its block.

    Only as much as the update is read and written, so that the rest stays in place.
    """
    x, update, *starts = arrays
    whole = op.shapes[0]
    begins: list[Any] = []
    window: list[int] = []
    valid: Any = None
    for d, start in enumerate(starts):
        size, wanted = x.shape[d], op.shapes[1][d]
        if wanted == whole[d]:  # taken whole
            begins.append(np.int32(0))
            window.append(size)
            continue
        start = jnp.clip(start.astype(jnp.int32), 0, whole[d] - wanted)
        if not op.axes(0, d):
            begins.append(start)
            window.append(wanted)
            continue
        first = start - op.offset(0, d)  # of the update, in this block
        width = min(wanted, size)
        begin = jnp.clip(first, 0, size - width)
        shift = begin - first  # of the written window, in the update
        widths = [(width, width, 0) if k == d else (0, 0, 0) for k in range(x.ndim)]
        padded = jax.lax.pad(update, np.zeros((), update.dtype), widths)
        update = jax.lax.dynamic_slice_in_dim(padded, jnp.clip(shift, -width, wanted) + width, width, d)
        at = jnp.arange(width, dtype=jnp.int32) + shift
        inside = ((at >= 0) & (at < wanted)).reshape([-1 if k == d else 1 for k in range(x.ndim)])
        valid = inside if valid is None else valid & inside
        begins.append(begin)
        window.append(width)
    begins = [jnp.asarray(b, jnp.int32) for b in begins]
    if valid is not None:
        update = jnp.where(valid, update, jax.lax.dynamic_slice(x, begins, window))
    return [jax.lax.dynamic_update_slice(x, update, begins)]
