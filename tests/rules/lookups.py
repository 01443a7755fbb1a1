"""Indexed factors: a gather looks into its own part and masks the rest; a scatter writes what falls into its part.

This is what XLA's partitioner does: indices are shifted by the part's start, those outside are masked (gather) or dropped
(scatter). Where indices out of bounds are clamped, they are clamped to the whole before.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from tests.rules.cases import Array, Case

_DROP = GatherScatterMode.FILL_OR_DROP
_CLIP = GatherScatterMode.CLIP


def check_indexed(case: Case, factor: int) -> None:
    from tests.rules.harness import assert_same

    if case.name == "gather":
        got = [_gather(case, factor)]
    elif case.name == "dynamic_update_slice":
        got = [_update(case, factor)]
    else:
        got = _scatter(case, factor)
    for part, wanted in zip(got, case.whole, strict=True):
        assert_same(part, wanted)


def _dim(case: Case, factor: int) -> int:
    return next(d for d, dim in enumerate(case.rule.operands[0]) if factor in dim)


def _halves(n: int) -> list[tuple[int, int]]:
    return [(0, n // 2), (n // 2, n)]


def _slots(x: Array, d: int, low: int, high: int) -> Array:
    return x[(slice(None),) * d + (slice(low, high),)]


def _clamped(indices: Array, index_map: tuple[int, ...], shape: tuple[int, ...], windows: list[int]) -> Array:
    """Every window moved to lie inside of the operand, as the clamping mode does."""
    limits = [shape[d] - windows[d] for d in index_map]
    return np.clip(indices, 0, np.asarray(limits, indices.dtype)) if limits else indices


def _gather(case: Case, factor: int) -> Array:
    numbers, sizes = case.params["dimension_numbers"], list(case.params["slice_sizes"])
    operand, indices = case.operands
    index_map = tuple(numbers.start_index_map)
    d = _dim(case, factor)
    inside = _clamped(indices, index_map, operand.shape, sizes)
    valid = (inside == indices).all(-1) | (case.params["mode"] == _CLIP)
    total: Any = 0
    for low, high in _halves(operand.shape[d]):
        local = inside.copy()
        at = np.zeros(indices.shape[:-1], indices.dtype)
        if d in index_map:
            at = inside[..., index_map.index(d)]
            local[..., index_map.index(d)] = np.clip(at - low, 0, high - low - 1)
        params = {**case.params, "mode": _CLIP, "fill_value": None}
        (found,) = case.run([_slots(operand, d, low, high), local], params)
        mine = _spread((low <= at) & (at < high), numbers.offset_dims, found.ndim)
        total = total + np.where(mine, found, np.zeros((), found.dtype))
    fill = case.params["fill_value"]
    fill = _default_fill(operand.dtype) if fill is None else fill
    return np.where(_spread(valid, numbers.offset_dims, total.ndim), total, np.asarray(fill, operand.dtype)).astype(
        operand.dtype
    )


def _spread(mask: Array, offset_dims: tuple[int, ...], rank: int) -> Array:
    """A value per lookup, as an array that broadcasts against the gather's result."""
    return np.expand_dims(mask, tuple(offset_dims)) if rank > mask.ndim else mask


def _default_fill(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype.kind == "b":
        return True
    return jnp.iinfo(dtype).max if dtype.kind == "u" else jnp.iinfo(dtype).min


def _scatter(case: Case, factor: int) -> list[Array]:
    n = len(case.call.results)
    numbers = case.params["dimension_numbers"]
    indices, shape = case.operands[n], case.operands[0].shape
    index_map = tuple(numbers.scatter_dims_to_operand_dims)
    d = _dim(case, factor)
    if case.params["mode"] == _CLIP:
        indices = _clamped(indices, index_map, shape, _update_windows(case))
    parts = []
    for low, high in _halves(shape[d]):
        stored = [_slots(x, d, low, high) for x in case.operands[:n]]
        local = indices.copy()
        if d in index_map:
            local[..., index_map.index(d)] -= low
        elif low > 0:  # without an index every update goes to position 0
            parts.append(stored)
            continue
        parts.append(case.run([*stored, local, *case.operands[n + 1 :]], {**case.params, "mode": _DROP}))
    return [np.concatenate(pair, d) for pair in zip(*parts, strict=True)]


def _update_windows(case: Case) -> list[int]:
    """How much of every operand dimension one update covers."""
    numbers = case.params["dimension_numbers"]
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = iter(case.operands[-1].shape[u] for u in numbers.update_window_dims)
    return [1 if d in dropped else next(sizes) for d in range(case.operands[0].ndim)]


def _update(case: Case, factor: int) -> Array:
    """Each part takes what falls into it: the update is written into the part with room on both sides."""
    operand, update, *start = case.operands
    d = _dim(case, factor)
    width = update.shape[d]
    start = [np.clip(s, 0, n - u).astype(s.dtype) for s, n, u in zip(start, operand.shape, update.shape, strict=True)]
    parts = []
    for low, high in _halves(operand.shape[d]):
        room = [(width, width) if k == d else (0, 0) for k in range(operand.ndim)]
        padded = np.pad(_slots(operand, d, low, high), room)
        at = np.clip(start[d].astype(int) - low + width, 0, high - low + width)
        local = [at.astype(s.dtype) if k == d else s for k, s in enumerate(start)]
        (found,) = case.run([padded, update, *local])
        parts.append(_slots(found, d, width, width + high - low))
    return np.concatenate(parts, d)
