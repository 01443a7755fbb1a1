"""Local forms of gathers, scatters, dynamic slices and positions of a maximum.

Where the indexed dimension is sharded, positions are first clamped, or marked as out of bounds, as in the global array;
then each device reads or writes what falls into its block.
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
from shardwise.spmd.collectives import in_range, window
from shardwise.spmd.local import Array, LocalOp, form


def _localized(
    op: LocalOp, indices: Array, dims: tuple[int, ...], widths: tuple[int, ...], mode: Any
) -> tuple[Array, Array, Array]:
    """Returns index vectors in this device's block, a mask of those in the global array, and a mask of those in the block."""
    shape, local = op.shapes[0], op.local_shape(0)
    if indices.dtype.itemsize < 4 or indices.dtype == jnp.uint32:
        indices = indices.astype(jnp.int32)
    last = np.array([shape[d] - w for d, w in zip(dims, widths, strict=True)], indices.dtype)
    inside: Any = np.True_
    if mode == GatherScatterMode.FILL_OR_DROP:
        inside = jnp.all((indices >= 0) & (indices <= last), axis=-1)
    indices = jnp.clip(indices, 0, last)
    columns, has = [], inside
    for c, d in enumerate(dims):
        column = indices[..., c]
        if op.axes(0, d) and local[d] != shape[d] and widths[c] != shape[d]:
            column = column - jnp.asarray(op.offset(0, d)).astype(column.dtype)
            has = has & (column >= 0) & (column < local[d])
        columns.append(column)
    return jnp.stack(columns, -1), inside, has


@form("gather")
def gather(op: LocalOp, arrays: list[Array]) -> list[Array]:
    operand, indices = arrays
    numbers, mode = op.params["dimension_numbers"], op.params["mode"]
    shape, local = op.shapes[0], op.local_shape(0)
    sizes = tuple(local[d] if w == shape[d] else w for d, w in enumerate(op.params["slice_sizes"]))
    indexed = op.sharded(Kind.INDEXED)
    if not indexed:
        return op.bind(arrays, slice_sizes=sizes)
    dims = tuple(numbers.start_index_map)
    indices, inside, has = _localized(op, indices, dims, tuple(op.params["slice_sizes"][d] for d in dims), mode)
    indices = jnp.clip(indices, 0, np.array([local[d] - sizes[d] for d in dims], indices.dtype))
    bounds = {"mode": GatherScatterMode.PROMISE_IN_BOUNDS, "indices_are_sorted": False, "unique_indices": False}
    (result,) = op.bind([operand, indices], slice_sizes=sizes, fill_value=None, **bounds)

    def over(mask: Array) -> Array:
        """Broadcasts a mask of lookups over the dimensions of the result."""
        batch = iter(np.shape(mask))
        return jnp.reshape(mask, [1 if d in numbers.offset_dims else next(batch) for d in range(result.ndim)])

    zero = jnp.zeros((), result.dtype)
    if mode == GatherScatterMode.FILL_OR_DROP:
        fill = jnp.asarray(op.params["fill_value"], result.dtype)
        zero = jnp.where(over(inside) | ~op.is_first(indexed), zero, fill)
    return [jnp.where(over(has), result, zero)]


#: By kind of scatter the update that changes nothing.
_NEUTRAL: Final = {kind: {"sum": 0, "prod": 1}[how] for kind, how in SCATTERS.items() if how in ("sum", "prod")}


@form(*SCATTERS)
def scatter(op: LocalOp, arrays: list[Array]) -> list[Array]:
    operand, indices, updates = arrays
    if not operand.size:
        return [operand]
    kind, numbers, changed = op.op.kind, op.params["dimension_numbers"], dict[str, Any]()
    single = math.prod(indices.shape[:-1]) == 1 and op.params["mode"] == GatherScatterMode.FILL_OR_DROP
    if single or op.sharded(Kind.INDEXED):
        dims = tuple(numbers.scatter_dims_to_operand_dims)
        sizes = _slice_sizes(numbers, operand.ndim, op.shapes[2])
        indices, _, has = _localized(op, indices, dims, tuple(sizes[d] for d in dims), op.params["mode"])
        changed = {"indices_are_sorted": False, "unique_indices": False, "mode": GatherScatterMode.FILL_OR_DROP}
        if math.prod(indices.shape[:-1]) == 1:
            updates, indices = _kept(op, operand, indices, updates, has)
            changed["mode"] = GatherScatterMode.PROMISE_IN_BOUNDS
        else:
            indices = jnp.where(has[..., None], indices, -1)
    summed = op.sharded(Kind.REDUCTION)
    if summed and kind in _NEUTRAL:
        # The operand counts once.
        operand = jnp.where(op.is_first(summed), operand, jnp.asarray(_NEUTRAL[kind], operand.dtype))
    return op.bind([operand, indices, updates], **changed)


def _slice_sizes(numbers: Any, rank: int, updates: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the slice that one update of a scatter writes."""
    outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    sizes = iter(updates[u] for u in numbers.update_window_dims)
    return tuple(1 if d in outside else next(sizes) for d in range(rank))


def _kept(op: LocalOp, operand: Array, indices: Array, updates: Array, has: Array) -> tuple[Array, Array]:
    """Returns a single update that changes nothing where it would be dropped, and its index vector, clamped into bounds. XLA
    converts a single update to a dynamic slice, and merges that with others as if it were in bounds."""
    numbers = op.params["dimension_numbers"]
    slices = _slice_sizes(numbers, operand.ndim, updates.shape)
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
    """Starts are clamped here: XLA merges a slice of a slice into one, which clamps their sum instead of the first start."""
    x, *starts = arrays
    for d, start in enumerate(starts):
        last = x.shape[d] - op.local_shape(op.out)[d]
        starts[d] = (
            jnp.zeros_like(start) if op.axes(0, d) else jnp.clip(start, 0, min(last, jnp.iinfo(start.dtype).max))
        )
    return op.bind([x, *starts], slice_sizes=op.local_shape(op.out))


@form("dynamic_update_slice")
def dynamic_update_slice(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Each device writes the part of the update that falls into its block; the rest stays in place."""
    x, update, *starts = arrays
    begins: list[Any] = []
    valid: Any = None
    for d, start in enumerate(starts):
        size, wanted, total = x.shape[d], op.shapes[1][d], op.shapes[0][d]
        if wanted == total:
            begins.append(np.int32(0))
            continue
        begin = jnp.clip(start.astype(jnp.int32), 0, total - wanted)
        if op.axes(0, d):
            first = begin - op.offset(0, d)  # of the update, in this block
            width = min(wanted, size)
            begin = jnp.clip(first, 0, size - width)
            shift = begin - first  # of the written window, in the update
            update = window(update, shift, width, d)
            inside = in_range(shift, width, wanted, d, x.ndim)
            valid = inside if valid is None else valid & inside
        begins.append(begin)
    begins = [jnp.asarray(b, jnp.int32) for b in begins]
    if valid is not None:
        update = jnp.where(valid, update, jax.lax.dynamic_slice(x, begins, update.shape))
    return [jax.lax.dynamic_update_slice(x, update, begins)]


@form("argmax", "argmin")
def arg_reduce(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Returns the position in the global dimension and, where the dimension is sharded, the value there."""
    (x,) = arrays
    (dim,) = op.params["axes"]
    (at,) = op.bind([x])
    if not op.sharded(Kind.REDUCTION):
        return [at]
    largest = op.op.kind == "argmax"
    values = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(at, dim), dim), dim)
    return [at + jnp.asarray(op.offset(0, dim)).astype(at.dtype), _ordered(values, largest)]


def _ordered(values: Array, largest: bool) -> Array:
    """Returns integers of the same width in the order in which a maximum (or minimum) compares values. NaN comes before all."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(jnp.uint8) if values.dtype == jnp.bool_ else values
    integer: Any = jnp.dtype(f"int{values.dtype.itemsize * 8}")
    bits = jax.lax.bitcast_convert_type(values + jnp.zeros((), values.dtype), integer)  # no negative zero
    ends = jnp.iinfo(integer)
    bits = jnp.where(bits >= 0, bits, bits ^ ends.max)
    return jnp.where(jnp.isnan(values), ends.max if largest else ends.min, bits)
