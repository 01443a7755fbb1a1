"""The rows of a value that belong to the parts of a batch, and how the parts' values are put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.transforms.batch_roles import BatchAnalysis, BatchState


def cut_rows(analysis: BatchAnalysis, array: Any, state: BatchState) -> Any:
    """Returns the rows of all parts, with the part as the first dimension."""
    shape, d, parts = array.shape, state.dim, analysis.parts
    split = (state.outer, analysis.size // parts, parts, -1)
    rows = jnp.moveaxis(array.reshape(*shape[:d], *split, *shape[d + 1 :]), d + 2, 0)
    return rows.reshape(parts, *shape[:d], shape[d] // parts, *shape[d + 1 :])


def rows_of(analysis: BatchAnalysis, array: Any, state: BatchState, part: Any) -> Any:
    """Returns the rows of one part."""
    return jax.lax.dynamic_index_in_dim(cut_rows(analysis, array, state), part, keepdims=False)


def joined_rows(analysis: BatchAnalysis, rows: Any, state: BatchState) -> Any:
    """Returns the rows of the parts in the batch's order."""
    parts, *shape = rows.shape
    d, full = state.dim, shape[state.dim] * parts
    rows = rows.reshape(parts, *shape[:d], state.outer, analysis.size // parts, -1, *shape[d + 1 :])
    return jnp.moveaxis(rows, 0, d + 2).reshape(*shape[:d], full, *shape[d + 1 :])


def _limits(dtype: Any) -> tuple[Any, Any]:
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf, jnp.inf
    limits = np.iinfo(dtype)
    return limits.min, limits.max


#: How parts are accumulated, and the initial value. Of a value that is the same for every part the last is taken.
REDUCERS: Final[dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]]] = {
    "": (lambda old, new: new, lambda dtype: 0),
    "sum": (jax.lax.add, lambda dtype: 0),
    "max": (jax.lax.max, lambda dtype: _limits(dtype)[0]),
    "min": (jax.lax.min, lambda dtype: _limits(dtype)[1]),
    "or": (jax.lax.bitwise_or, lambda dtype: 0),
    "and": (jax.lax.bitwise_and, lambda dtype: ~np.zeros((), dtype)),
}

#: The primitives by which a reduced value is added to.
ADDING: Final = {"sum": ("add", "add_any"), "max": ("max",), "min": ("min",), "or": ("or",), "and": ("and",)}


def neutral(shape: tuple[int, ...], dtype: Any, reducer: str) -> Any:
    """Returns an array that adds nothing."""
    return jnp.full(shape, REDUCERS[reducer][1](dtype), dtype)


def reduced(array: Any, reducer: str, dim: int = 0) -> Any:
    """Returns a reduction over a dimension, in the type of the array."""
    reduce, first = REDUCERS["or" if reducer == "sum" and array.dtype == bool else reducer]
    return jax.lax.reduce(array, np.asarray(first(array.dtype), array.dtype), reduce, [dim])
