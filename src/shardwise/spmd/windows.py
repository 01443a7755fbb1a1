"""Local forms of windowed ops: convolutions, pooling, and their gradients. Halos come from the neighbors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.lowering.halo import Fetch
from shardwise.spmd.local import Array, LocalOp, form


def _least(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _padding(f: Fetch, outputs: int, stride: int, span: int, dilation: int) -> tuple[int, int]:
    """The padding with which a fetched block gives exactly the block of the result; ``span`` is the width of a window."""
    covered = f.offset + (f.width - 1) * dilation + 1
    return f.offset, (outputs - 1) * stride + span - covered


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
    for s, (i, k, o) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        if (0, i) in fetched:
            span = (arrays[1].shape[k] - 1) * p["rhs_dilation"][s] + 1
            outputs, stride = op.local_shape(op.out)[o], p["window_strides"][s]
            padding[s] = _padding(fetched[0, i], outputs, stride, span, p["lhs_dilation"][s])
    return op.bind(arrays, padding=tuple(padding), **changed)


@form(
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add",
)  # fmt: skip
def reduce_window(op: LocalOp, arrays: list[Array]) -> list[Array]:
    p, kind = op.params, op.op.kind
    fills: list[Any]
    if kind == "reduce_window":
        count = len(op.op.results)
        fills = [*arrays[count:], *[None] * count]
    elif kind == "select_and_gather_add":
        largest = p["select_prim"].name == "ge"
        fills = [0, _least(arrays[1].dtype) if largest else _most(arrays[1].dtype)]
    else:
        dtype = arrays[0].dtype
        fills = [{"reduce_window_sum": 0, "reduce_window_max": _least(dtype)}.get(kind, _most(dtype))]
    arrays, fetched = op.fetched(arrays, fills)
    padding = list(p["padding"])
    rank = len(padding)
    base, dilation = (p.get(name, (1,) * rank) for name in ("base_dilation", "window_dilation"))
    for (_, d), f in fetched.items():
        span = (p["window_dimensions"][d] - 1) * dilation[d] + 1
        padding[d] = _padding(f, op.local_shape(op.out)[d], p["window_strides"][d], span, base[d])
    return op.bind(arrays, padding=tuple(padding))


@form("select_and_scatter_add")
def select_and_scatter_add(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """The gradient of a pooling. A device computes all windows that touch its block, and keeps the block."""
    p = op.params
    largest = p["select_prim"].name == "ge"
    dtype = arrays[1].dtype
    arrays, fetched = op.fetched(arrays, [0, _least(dtype) if largest else _most(dtype)])
    padding = list(p["padding"])
    dims = [d for k, d in fetched if k == 1]
    for d in dims:
        covered = (fetched[0, d].width - 1) * p["window_strides"][d] + p["window_dimensions"][d]
        padding[d] = (0, covered - fetched[1, d].width)
    operand = arrays[1]
    for d in dims:  # padding by a negative number would be cut off inside: positions beyond the windows get nothing
        if padding[d][1] < 0:
            arrays[1] = jax.lax.slice_in_dim(arrays[1], 0, arrays[1].shape[d] + padding[d][1], axis=d)
            padding[d] = (0, 0)
    (result,) = op.bind(arrays, padding=tuple(padding))
    widths = [(0, operand.shape[d] - n, 0) for d, n in enumerate(result.shape)]
    result = jax.lax.pad(result, np.zeros((), result.dtype), widths)
    for d in dims:
        f = fetched[1, d]
        starts = jnp.asarray(np.array([k * f.block - s for k, s in enumerate(f.starts)], np.int32))
        index = op.offset(op.out, d) // np.int32(f.block)
        result = jax.lax.dynamic_slice_in_dim(result, starts[index], f.block, d)
    return [result]
