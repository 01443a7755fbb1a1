"""Dimensions that no mesh axis divides, padded: numbers equal the plain run, and collectives are those that were predicted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.test_ops import check, draw, integers

#: By name: a function and its arguments. No size is a multiple of 2, 4 or 8 but those of dimensions that stay whole.
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "elementwise": (lambda x: jnp.where(jnp.exp(x) > 1, x, -x) / x, (draw(7, 5),)),
    "product": (lambda x, w: jnp.tanh(x @ w), (draw(7, 25), draw(25, 9))),
    "chain": (lambda x, w, v: jnp.log(x @ w) @ v, (draw(6, 8) ** 2, draw(8, 25) ** 2, draw(25, 8))),
    "batched": (lambda q, k: jnp.einsum("bshk,bthk->bhst", q, k), (draw(3, 7, 5, 4), draw(3, 9, 5, 4))),
    "sum": (lambda x: (jnp.sum(1 / x, 0), jnp.sum(1 / x, 1), jnp.sum(1 / x)), (draw(13, 5),)),
    "maximum": (lambda x: (jnp.max(1 / x, 1), jnp.min(-1 / x, 0), jnp.max(1 / x)), (draw(13, 7) ** 2,)),
    "integers": (lambda x: (jnp.max(-x * x, 0), jnp.prod(x * x, 1), jnp.min(x * x)), (1 + integers(2, 13, 7) % 3,)),
    "short floats": (lambda x: jnp.max((1 / x).astype(jnp.float8_e4m3fn), 0), (draw(13, 7) ** 2 + 1,)),
    "booleans": (lambda x: (jnp.all(x * x > 0, 0), jnp.any(x * x == 0, 1), jnp.any(x * x == 0)), (draw(11, 6),)),
    "argmax": (
        lambda x: (jnp.argmax(1 / x, 0), jnp.argmin(-1 / x, 1), jnp.argmax(0 * x - jnp.inf, 0)),
        (draw(45, 901) ** 2,),
    ),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (draw(6, 57) * 9,)),
    "mean": (lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True), (draw(7, 25),)),
    "lookup": (lambda w, i: jnp.take(w * 2, i, axis=0), (draw(57, 6), integers(57, 7, 3))),
    "clipped": (lambda w, i: jnp.take(w * 2, i, axis=0, mode="clip"), (draw(57, 6), integers(57, 7, 3))),
    "along": (lambda x, i: jnp.take_along_axis(jnp.exp(x), i[:, None], 1), (draw(7, 57), integers(50, 7) % 57)),
    "scatter": (lambda x, i, u: (x * 2).at[i * 1].add(1 / u), (draw(57, 6), integers(57, 7), draw(7, 6))),
    "set": (lambda x, i, u: (x * 2).at[i].set(u), (draw(57, 6), np.arange(7) * 3, draw(7, 6))),
    "one hot": (lambda i: jax.nn.one_hot(i, 57) * 2, (integers(57, 7),)),
    "positions": (
        lambda x: x * lax.broadcasted_iota(jnp.float32, (13, 7), 0) + jnp.tril(jnp.ones((13, 7))),
        (draw(13, 7),),
    ),
    "views": (lambda x: (x * 2).transpose(1, 0, 2).reshape(7, 5, 1, 4)[:, :, :, 1:3] + 1, (draw(5, 7, 4),)),
    "merged": (lambda x: jnp.exp(jnp.exp(x).reshape(7, 20)).reshape(7, 5, 4) + 1, (draw(7, 5, 4),)),
    "shifted": (lambda x: (x * 2)[1:] - jnp.exp(x)[:-1], (draw(13, 5),)),
    "reversed": (lambda x: jnp.flip(jnp.exp(x), 0) + 1, (draw(8, 7),)),
    "concatenated": (lambda x, y: jnp.exp(jnp.concatenate([x * 2, y * 2], 1)), (draw(7, 5), draw(7, 3))),
    "cumulative": (lambda x: jnp.cumsum(jnp.exp(x), 1) + jnp.sort(x, 0), (draw(7, 5),)),
    "update": (lambda x, u: lax.dynamic_update_slice(x * 2, u, (9, 0)), (draw(13, 5), draw(3, 5))),
    "uniform": (lambda x: jnp.zeros((7, 5)) + x[:, None], (draw(7),)),
    "partial sums": (lambda x, w, v: (x @ w + x @ v) @ w.T, (draw(7, 25), draw(25, 9), draw(25, 9))),
}


@pytest.mark.parametrize("mesh", [{"a": 4}, {"a": 2, "b": 4}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_padded_ops_compute_the_same(name: str, mesh: dict[str, int]) -> None:
    fn, args = PROGRAMS[name]
    assert check(fn, args, mesh, padded=True)
