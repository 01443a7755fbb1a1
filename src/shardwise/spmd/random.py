"""Local forms of random numbers: a block holds what the whole array would hold there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.spmd.local import Array, LocalOp, form, local_part, spread_out
from shardwise.spmd.shapes import counters


@form("random_bits")
def random_bits(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Threefry's bits depend on the key and on the position in the flat array, so that every block is made by itself."""
    (keys,) = arrays
    settings: Any = jax.config
    if "fry" not in str(keys.dtype) or not settings.jax_threefry_partitionable:
        return whole(op, arrays)
    words = jax.random.key_data(keys)
    shape, width = op.params["shape"], op.params["bit_width"]
    local = op.local_shape(op.out)[keys.ndim :]
    offsets = [op.offset(op.out, keys.ndim + d) for d in range(len(shape))]
    high, low = counters(shape, local, offsets)
    each = [words[..., k].reshape(*keys.shape, *(1,) * len(local)) for k in (0, 1)]
    made = [jnp.broadcast_to(a, (*keys.shape, *local)) for a in (*each, high, low)]
    first, second = internals.threefry(*made)
    if width == 64:
        return [(first.astype(jnp.uint64) << np.uint64(32)) | second.astype(jnp.uint64)]
    return [(first ^ second).astype(jnp.dtype(f"uint{width}"))]


@form("random_split", "rng_uniform", "rng_bit_generator")
def whole(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Every device makes all of it and keeps its block."""
    return [local_part(op, op.out + r, x) for r, x in enumerate(op.bind(arrays))]


@form("random_gamma")
def random_gamma(op: LocalOp, arrays: list[Array]) -> list[Array]:
    """Each position derives a key from its number in the whole array."""
    keys, alpha = arrays
    if keys.ndim and any(op.axes(0, d) for d in range(keys.ndim)):
        return op.bind(arrays)
    one = jnp.ones((), alpha.dtype)
    (made,) = op.bind([keys, spread_out(op, 1, alpha - one) + one])
    return [local_part(op, op.out, made)]
