"""Local forms of reductions: positions of a maximum are global, and go with the values there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from shardwise.ir.rule import Kind
from shardwise.spmd.local import Array, LocalOp, form


@form("argmax", "argmin")
def arg_reduce(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """The local position, counted in the whole dimension; where devices are to be compared, with the value there."""
    (x,) = arrays
    (dim,) = op.params["axes"]
    (at,) = op.bind([x])
    if not op.sharded(Kind.REDUCTION):
        return [at]
    largest = op.op.kind == "argmax"
    values = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(at, dim), dim), dim)
    return [at + jnp.asarray(op.offset(0, dim)).astype(at.dtype), _ordered(values, largest)]


def _ordered(values: Array, largest: bool) -> Array:
    """Numbers in the order in which a maximum (or minimum) sees values: integers of the same width. A NaN wins over all."""
    if not jnp.issubdtype(values.dtype, jnp.floating):
        return values.astype(jnp.uint8) if values.dtype == jnp.bool_ else values
    integer: Any = jnp.dtype(f"int{values.dtype.itemsize * 8}")
    bits = jax.lax.bitcast_convert_type(values + jnp.zeros((), values.dtype), integer)  # no negative zero
    ends = jnp.iinfo(integer)
    bits = jnp.where(bits >= 0, bits, bits ^ ends.max)
    return jnp.where(jnp.isnan(values), ends.max if largest else ends.min, bits)
