"""Empty arrays: the dimensions that are not empty are sharded, and shapes and numbers equal the plain run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.test_ops import check, draw, integers

#: By name: a function of ``x``, which has 0 positions in its first dimension, of ``y``, which has 8 there, and of integers.
PROGRAMS: dict[str, Any] = {
    "elementwise": lambda x, y, i: jnp.tanh(x) * 2 + y[:0],
    "product": lambda x, y, i: (
        jnp.einsum("abc,dbc->ad", x, y),
        jnp.einsum("abc,dbc->adb", y, x),
        jnp.tensordot(x, y[0].T, 1),
    ),
    "contracted": lambda x, y, i: (jnp.einsum("abc,ade->bcde", x, x), jnp.einsum("abc,abd->cd", x, x) + y[0, 0, 0]),
    "reductions": lambda x, y, i: (x.sum(), x.sum(0), x.max(1), x.prod((0, 2)), jnp.any(x > 0, 0), x.argmax(1)),
    "softmax": lambda x, y, i: jax.nn.softmax(x, 2),
    "views": lambda x, y, i: (x.transpose(2, 0, 1).reshape(4, 0), x.reshape(0, 32), x.reshape(0, 2, 4, 4) + 1),
    "moved": lambda x, y, i: (jnp.flip(x), jnp.roll(x, 3, 1), x[:, 2:7], jnp.split(x, 2, 1), jnp.sort(x, 1)),
    "joined": lambda x, y, i: (jnp.concatenate([x, y, x]), jnp.concatenate([x, x], 1), jnp.split(y * 2, [0, 3, 3])),
    "pad": lambda x, y, i: (jnp.pad(x, ((1, 2), (0, 0), (0, 1))), jnp.pad(x, ((0, 0), (3, 5), (0, 0)))),
    "cumulative": lambda x, y, i: (jnp.cumsum(x, 0), lax.cumsum(x, 1, reverse=True), lax.top_k(x, 2)),
    "dynamic": lambda x, y, i: (
        lax.dynamic_slice(x, (i[0], i[1], 0), (0, 4, 4)),
        lax.dynamic_update_slice(x, x[:, :2], (0, i[0], 0)),
        lax.dynamic_update_slice(y, x, (i[0], 0, 0)),
        lax.dynamic_slice(y, (i[0], 0, 0), (0, 8, 4)),
    ),
    "lookups": lambda x, y, i: (jnp.take(x, i, 1), jnp.take(y, i[:0], 0), jnp.take(x, i[:0], 2)),
    "scatters": lambda x, y, i: (
        [getattr(x.at[i[:k]], how)(y[:k]) for k in (0, 1, 6) for how in ("set", "add", "max")],
        [y.at[i[:0]].set(x), y.at[i[:0]].add(x), x.at[:, i[0]].set(1.0), x.at[:, i].multiply(2.0)],
        jax.ops.segment_sum(x, i[:0], 5),
    ),
    "random": lambda x, y, i: (
        x + jax.random.uniform(jax.random.key(i[0]), x.shape) + jax.random.normal(jax.random.key(1), x.shape)
    ),
    "loops": lambda x, y, i: (
        lax.scan(lambda c, r: (c + r, c * r), y[0] * 2, x),
        lax.scan(lambda c, r: (c + r.sum(), c * r[0]), x * 2, y),
        lax.fori_loop(0, 2, lambda k, z: jnp.flip(z, 1) * 2, x),
        lax.cond(i[0] > 2, lambda z: z * 2, lambda z: jnp.flip(z, 1), x),
    ),
    "gradient": lambda x, y, i: jax.grad(
        lambda x, y: (jnp.einsum("abc,dbc->adb", x, jnp.tanh(y)) ** 2).sum() + y.sum(), (0, 1)
    )(x, y),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_ops_on_empty_arrays(name: str) -> None:
    args = (np.zeros((0, 8, 4), np.float32), draw(8, 8, 4), integers(8, 6))
    assert check(lambda x, y, i: (PROGRAMS[name](x, y, i), y * 2), args)
