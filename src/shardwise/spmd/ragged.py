"""The local form of ragged products.

Where rows are sharded, a device finds how many rows of each group it has by the sizes of all groups.

Where the rows of each group are contracted, as in gradients of experts' weights, XLA multiplies every row with every group and
masks what does not belong together: as many times the arithmetic as there are groups. Here blocks of rows are visited one
after another, each for one group. The number of visits is that of the worst load, which is at most one more for each group
than the rows need, so that the time does not depend on the load.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from shardwise.lowering.padding import ragged_block
from shardwise.spmd.local import Array, LocalOp, form


@form("ragged_dot_general")
def ragged_product(op: LocalOp, arrays: list[Array]) -> list[Array]:
    left, right, sizes = arrays
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    if op.axes(0, ragged):
        before = jnp.cumsum(sizes.astype(jnp.int32), -1) - op.offset(0, ragged)
        before = jnp.clip(before, 0, left.shape[ragged])
        sizes = jnp.diff(before, prepend=jnp.zeros_like(before[..., :1])).astype(sizes.dtype)
    if ragged not in contracted[0] or batch[0] or sizes.ndim > 1 or not left.shape[ragged]:
        return op.bind([left, right, sizes])
    return [_by_blocks(op, left, right, sizes)]


def _by_blocks(op: LocalOp, left: Array, right: Array, sizes: Array) -> Array:
    """Returns for each group the product of its rows of both operands, which are contracted."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (contracted, batch), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    along = ragged, contracted[1][contracted[0].index(ragged)]
    rows, groups = left.shape[ragged], len(sizes)
    block, sizes = ragged_block(rows, groups), sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    counts = -(-sizes // block)
    visits = jnp.cumsum(counts)
    dtype = op.equation.outvars[0].aval.dtype
    wide: Any = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype

    def own(x: Array, dim: int, start: Array, first: Array, end: Array) -> Array:
        """Returns a block of rows with zeros in those of other groups."""
        x = lax.dynamic_slice_in_dim(x, start, block, dim)
        position = start + lax.broadcasted_iota(jnp.int32, x.shape, dim)
        return jnp.where((position >= first) & (position < end), x, 0)

    def visit(carry: tuple[Array, Array], turn: Array) -> tuple[tuple[Array, Array], None]:
        total, result = carry
        group = jnp.minimum(jnp.searchsorted(visits, turn, side="right"), groups - 1)
        number = turn - visits[group] + counts[group]  # of the block, in its group
        first = ends[group] - sizes[group] + number * block
        start = jnp.clip(first, 0, rows - block)
        x, y = (own(a, d, start, first, ends[group]) for a, d in zip((left, right), along, strict=True))
        part = lax.dot_general(x, y, (contracted, batch), op.params["precision"], wide)
        total = jnp.where(number == 0, 0, total) + part
        return (total, lax.dynamic_update_index_in_dim(result, total.astype(dtype), group, 0)), None

    result = jnp.zeros((groups, *_free(left, contracted[0]), *_free(right, contracted[1])), dtype)
    turns = jnp.arange(rows // block + groups, dtype=jnp.int32)
    (_, result), _ = lax.scan(visit, (jnp.zeros(result.shape[1:], wide), result), turns)
    return result


def _free(x: Array, contracted: tuple[int, ...]) -> list[int]:
    """Returns the sizes of the dimensions that are not contracted."""
    return [n for d, n in enumerate(x.shape) if d not in contracted]
