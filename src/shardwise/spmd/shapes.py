"""Local forms of ops that have shapes among their parameters, or depend on positions: ops that move elements, random numbers,
and windowed ops (convolutions, pooling), whose halos come from neighbors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from shardwise.capture import jax_internals as internals
from shardwise.spmd.collectives import block_index, by_block, in_range, window
from shardwise.spmd.local import Array, LocalOp, form, last_chosen


@form("broadcast_in_dim", "broadcast_to", "empty", "full", "reshape", "rng_uniform_like")
def shaped(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Changes the result's shape, which is a parameter."""
    parameter = "new_sizes" if op.op.kind == "reshape" else "shape"
    return op.bind(arrays, **{parameter: op.local_shape(op.out)})


@form("device_put")
def transferred(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Moves blocks between the memories of host and device. The shardings that the op states are part of the plan."""
    spaces = [v.aval.memory_space for v in op.equation.outvars]
    pairs = zip(arrays, spaces, strict=True)
    return [x if jax.typeof(x).memory_space is space else jax.device_put(x, space) for x, space in pairs]


@form("fft")
def fft(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """States a layout: XLA's CPU compiler chooses one that it cannot compute where the operand was gathered."""
    (result,) = op.bind(arrays)
    return [with_layout_constraint(result, Layout(tuple(range(result.ndim))))]


@form("iota")
def iota(op: LocalOp, arrays: list[Array]) -> list[Array]:
    dim = op.params["dimension"]
    (x,) = op.bind(arrays, shape=op.local_shape(op.out))
    return [x + jnp.asarray(op.offset(op.out, dim)).astype(x.dtype) if op.axes(op.out, dim) else x]


@form("tile")
def tile(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Repeats less often: the repetitions are the major factor of a tiled dimension."""
    reps = tuple(n // op.mesh.pieces(op.axes(op.out, d)) for d, n in enumerate(op.params["reps"]))
    missing = len(reps) - len(op.shapes[0])
    # Where a dimension is not repeated, it is the operand that is split.
    reps = tuple(max(n, 1) if d >= missing else n for d, n in enumerate(reps))
    return op.bind(arrays, reps=reps)


@form("slice")
def slice_(op: LocalOp, arrays: list[Array]) -> list[Array]:
    starts, limits = list(op.params["start_indices"]), list(op.params["limit_indices"])
    (x,), _ = op.fetched(arrays, [None])
    for d in range(x.ndim):
        if op.axes(0, d):
            starts[d], limits[d] = 0, x.shape[d]
    return op.bind([x], start_indices=tuple(starts), limit_indices=tuple(limits))


@form("pad")
def pad(op: LocalOp, arrays: list[Array]) -> list[Array]:
    arrays, fetched = op.fetched(arrays, [arrays[1], None])
    config = list(op.params["padding_config"])
    for (_, d), f in fetched.items():
        config[d] = (*op.padding(f), config[d][2])
    return op.bind(arrays, padding_config=tuple(config))


@form("rev")
def rev(op: LocalOp, arrays: list[Array]) -> list[Array]:
    return op.bind(op.fetched(arrays, [None])[0])


@form("concatenate")
def concatenate(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Takes from every operand what falls into this device's block of the result."""
    dim = op.params["dimension"]
    axes, size = op.axes(op.out, dim), op.local_shape(op.out)[dim]
    if not axes:
        return op.bind(arrays)
    index = block_index(axes, op.mesh)
    start, result = 0, None
    for k, x in enumerate(arrays):
        length = op.shapes[k][dim]
        first = index * np.int32(size) - np.int32(start)  # the operand's position that is the first of the block
        # A small operand is not sharded.
        x = op.fetch(k, op.fetches[k], x, None) if k in op.fetches else window(x, first, size, dim)
        result = x if result is None else jnp.where(in_range(first, size, length, dim, x.ndim), x, result)
        start += length
    return [result]


@form("split")
def split(op: LocalOp, arrays: list[Array]) -> list[Array]:
    (x,) = arrays
    shapes = [op.local_shape(op.out + r) for r in range(len(op.op.results))]
    needed = op.fetches.get(0, ())
    if not needed:
        return op.bind([x], sizes=tuple(shape[op.params["axis"]] for shape in shapes))
    results = iter(op.fetch(0, (f,), x, None) for f in needed)
    return [next(results) if math.prod(shape) else jnp.zeros(shape, x.dtype) for shape in shapes]


@form("iota_2x32_shape")
def iota_2x32_shape(op: LocalOp, arrays: list[Array]) -> list[Array]:
    shape, local = op.shapes[op.out], op.local_shape(op.out)
    return list(counters(shape, local, [op.offset(op.out, d) for d in range(len(shape))]))


def counters(shape: tuple[int, ...], local: tuple[int, ...], offsets: list[Any]) -> tuple[Array, Array]:
    """Returns high and low words of the positions that the elements of a block have in the flat array."""
    low = jnp.zeros(local, jnp.uint32)
    high = jnp.zeros(local, jnp.uint32)
    wide = math.prod(shape) > 2**32
    for d, size in enumerate(shape):
        at = jax.lax.broadcasted_iota(jnp.uint32, local, d) + jnp.asarray(offsets[d]).astype(jnp.uint32)
        if wide:
            more, scaled = _times(low, size)
            high = high * np.uint32(size) + more
            low = scaled + at
            high = high + (low < at).astype(jnp.uint32)
        else:
            low = low * np.uint32(size) + at
    return high, low


def _times(x: Array, factor: int) -> tuple[Array, Array]:
    """Returns high and low words of a product of 32-bit numbers."""
    mask, half = np.uint32(0xFFFF), np.uint32(16)
    a, b = x >> half, x & mask
    c, d = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    middle = a * d + ((b * d) >> half)
    carry = b * c + (middle & mask)
    return a * c + (middle >> half) + (carry >> half), x * np.uint32(factor)


@form("random_bits")
def random_bits(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Computes Threefry's bits of this device's block, which depend on the key and on positions in the flat array only."""
    (keys,) = arrays
    if not _is_positional(keys):
        return sliced(op, arrays)
    width = op.params["bit_width"]
    first, second = _hashes(op, keys)
    if width == 64:
        return [(first.astype(jnp.uint64) << np.uint64(32)) | second.astype(jnp.uint64)]
    return [(first ^ second).astype(jnp.dtype(f"uint{width}"))]


@form("random_split")
def random_split(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Computes the keys of this device's block: both words of the hash of the key and their positions."""
    (keys,) = arrays
    if not _is_positional(keys):
        return sliced(op, arrays)
    return [jax.random.wrap_key_data(jnp.stack(_hashes(op, keys), axis=-1), impl=jax.random.key_impl(keys))]


def _is_positional(keys: Array) -> bool:
    """Are random numbers hashes of their positions?"""
    settings: Any = jax.config
    return "fry" in str(keys.dtype) and settings.jax_threefry_partitionable


def _hashes(op: LocalOp, keys: Array) -> Sequence[Array]:
    """Returns both words of Threefry's hashes of the keys and the positions of this device's block."""
    words, shape = jax.random.key_data(keys), op.params["shape"]
    local = op.local_shape(op.out)[keys.ndim :]
    high, low = counters(shape, local, [op.offset(op.out, keys.ndim + d) for d in range(len(shape))])
    halves = [words[..., k].reshape(*keys.shape, *(1,) * len(local)) for k in (0, 1)]
    return internals.threefry(*(jnp.broadcast_to(a, (*keys.shape, *local)) for a in (*halves, high, low)))


@form("rng_uniform", "rng_bit_generator")
def sliced(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Computes the global result and slices out this device's block."""
    results = op.bind(arrays)
    for r, x in enumerate(results):
        for d, size in enumerate(op.local_shape(op.out + r)):
            if size != x.shape[d]:
                x = jax.lax.dynamic_slice_in_dim(x, op.offset(op.out + r, d), size, d)
        results[r] = x
    return results


@form("random_gamma")
def random_gamma(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Computes the global result: each position derives a key from its number in the global array."""
    keys, alpha = arrays
    if keys.ndim and any(op.axes(0, d) for d in range(keys.ndim)):
        return op.bind(arrays)
    starts = [jnp.asarray(op.offset(1, d), jnp.int32) for d in range(alpha.ndim)]
    alpha = jax.lax.dynamic_update_slice(jnp.ones(op.shapes[1], alpha.dtype), alpha, starts)
    return sliced(op, [keys, alpha])


# Windows.


@form("conv_general_dilated")
def convolution(op: LocalOp, arrays: list[Array]) -> list[Array]:
    p = op.params
    numbers = p["dimension_numbers"]
    arrays, fetched = op.fetched(arrays, [0, None])
    changed: dict[str, Any] = {}
    # The groups are the major factor of the dimensions that they are in.
    for name, dim in (("feature_group_count", numbers.lhs_spec[1]), ("batch_group_count", numbers.lhs_spec[0])):
        if p[name] > 1:
            changed[name] = p[name] // op.mesh.pieces(op.axes(0, dim))
    padding = list(p["padding"])
    for (_, d), f in fetched.items():
        padding[numbers.lhs_spec.index(d) - 2] = op.padding(f)
    return op.bind(arrays, padding=tuple(padding), **changed)


@form(
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add",
)  # fmt: skip
def reduce_window(op: LocalOp, arrays: list[Array]) -> list[Array]:
    p, kind = op.params, op.op.kind
    fills: list[Any] = [0]
    if kind == "reduce_window":
        count = len(op.op.results)
        fills = [*arrays[count:], *[None] * count]
    elif kind == "select_and_gather_add":
        fills = [0, last_chosen(arrays[1].dtype, p["select_prim"].name == "ge")]
    elif kind != "reduce_window_sum":
        fills = [last_chosen(arrays[0].dtype, kind == "reduce_window_max")]
    arrays, fetched = op.fetched(arrays, fills)
    padding = list(p["padding"])
    for (_, d), f in fetched.items():
        padding[d] = op.padding(f)
    return op.bind(arrays, padding=tuple(padding))


@form("select_and_scatter_add")
def select_and_scatter_add(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Computes the gradient of a pooling, for all windows that touch this device's block, and slices out the block."""
    p = op.params
    arrays, fetched = op.fetched(arrays, [0, last_chosen(arrays[1].dtype, p["select_prim"].name == "ge")])
    padding = list(p["padding"])
    dims = [d for k, d in fetched if k == 1]
    shape = arrays[1].shape
    for d in dims:
        covered = (fetched[0, d].width - 1) * p["window_strides"][d] + p["window_dimensions"][d]
        padding[d] = (0, max(covered - shape[d], 0))
        if covered < shape[d]:  # a negative padding would be cut off inside: positions beyond the windows get nothing
            arrays[1] = jax.lax.slice_in_dim(arrays[1], 0, covered, axis=d)
    (result,) = op.bind(arrays, padding=tuple(padding))
    widths = [(0, shape[d] - n, 0) for d, n in enumerate(result.shape)]
    result = jax.lax.pad(result, np.zeros((), result.dtype), widths)
    for d in dims:
        f = fetched[1, d]
        start = by_block([k * f.block - s for k, s in enumerate(f.starts)], block_index(op.axes(op.out, d), op.mesh))
        result = jax.lax.dynamic_slice_in_dim(result, start, f.block, d)
    return [result]
