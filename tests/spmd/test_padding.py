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

_STARTS = np.array([0, 4, 8, 9, 40, -3, -40], np.int32)


def _summed(fn: Any) -> Any:
    """The gradient of a function's sum."""
    return jax.grad(lambda *args: sum(y.sum() for y in jax.tree.leaves(fn(*args))))


def _loops(x: Any, w: Any) -> Any:
    """Carries, inputs and outputs of loops are ``1 / x``, which is infinite in the padding."""
    x = 1 / x

    def row(carry: Any, r: Any) -> Any:
        return carry / 2 + r, jnp.flip(carry * r)

    carry, rows = lax.scan(row, x[0] * 2, x, reverse=True)
    repeated = lax.fori_loop(0, 3, lambda k, z: z.at[k].mul(0.5) + jnp.roll(z, 1, 0), x)
    _, halved = lax.while_loop(lambda s: s[0].max() > 1, lambda s: (s[0] / 2, s[1] @ w), (jnp.abs(x), x))
    return carry, rows, repeated, halved, lax.cond(x[0, 0] > 0, lambda z: jnp.flip(z, 0), lambda z: z @ w, x)


#: Ops that read positions other than their own; the padding of ``1 / x`` is infinite.
MOVING: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "dynamic slices": (
        lambda x, s: [(lax.dynamic_slice(1 / x, (k, 0), (5, 7)), lax.dynamic_slice(1 / x, (2, k), (13, 3))) for k in s],
        (draw(13, 7), _STARTS),
    ),
    "dynamic updates": (
        lambda x, u, s: [lax.dynamic_update_slice(1 / x, 1 / u, at) for k in s for at in ((k, 0), (2, k))],
        (draw(13, 7), draw(5, 3), _STARTS),
    ),
    "slices": (
        lambda x: [(1 / x)[s] for s in np.s_[:3, 2:11, 1:, -1:, ::2, 1::3, 3:12:5, :, 4:5]],
        (draw(13, 5),),
    ),
    "split": (
        lambda x: (jnp.split(1 / x, [3, 4, 12]), jnp.split(1 / x, [2], 1), jnp.split(1 / x, 3, 1)),
        (draw(13, 9),),
    ),
    "reversed both": (lambda x: (jnp.flip(1 / x), jnp.flip(1 / x, 0), jnp.flip(1 / x, 1)[::-2]), (draw(13, 5),)),
    "rolled": (lambda x: (jnp.roll(1 / x, 4, 0), jnp.roll(1 / x, -2, 1)), (draw(13, 5),)),
    "joined": (
        lambda x, y: (jnp.concatenate([1 / x, 1 / y, 2 / x]), jnp.concatenate([1 / x, x], 1) * 2),
        (draw(5, 7), draw(3, 7)),
    ),
    "pad": (
        lambda x: [
            lax.pad(1 / x, np.float32(3), (w, (0, 0, 0))) for w in ((1, 2, 0), (2, -1, 1), (-2, 3, 0), (0, -3, 2))
        ],
        (draw(7, 5),),
    ),
    "cumulative ops": (
        lambda x: [
            fn(1 / x, axis=axis, reverse=reverse)
            for fn in (lax.cumsum, lax.cummax, lax.cummin, lax.cumprod, lax.cumlogsumexp)
            for axis in (0, 1)
            for reverse in (False, True)
        ],
        (draw(7, 5) + 3,),
    ),
    "sorted": (
        lambda x, i: (
            [jnp.sort(1 / x, d, descending=down) for d in (0, 1) for down in (False, True)],
            lax.sort((i * 1, 1 / x), dimension=0, num_keys=2),
            jnp.argsort(i * 1, 1),
            lax.top_k(1 / x, 3),
            lax.top_k((1 / x).T, 2),
        ),
        (draw(13, 7), integers(5, 13, 7)),
    ),
    "reductions": (
        lambda x, i: (
            [fn(1 / x, d) for fn in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin) for d in (0, 1)],
            [fn(i * i, d) for fn in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin) for d in (0, 1)],
            [
                lax.reduce(~i, np.int32(s), fn, (0,))
                for fn, s in ((lax.bitwise_and, -1), (lax.bitwise_or, 0), (lax.bitwise_xor, 0))
            ],
            jnp.argmin(jnp.abs(i) - 5, 0),
            jnp.argmax(jnp.where(i > 1, jnp.nan, 1 / x), 0),
        ),
        (draw(13, 7) + 3, integers(3, 13, 7)),
    ),
    "lookups": (
        lambda x, i: (
            [jnp.take(1 / x, i * 1, d, mode=mode) for mode in ("fill", "clip", "wrap") for d in (0, 1)],
            jnp.take_along_axis(1 / x, i[:13, None], 1, mode="clip"),
            (1 / x)[i[0]],
            lax.gather(
                1 / x,
                i[:, None],
                lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)),
                (3, 7),
                mode="clip",
            ),
        ),
        (draw(13, 7), integers(24, 15)),
    ),
    "scatters": (
        lambda x, i, u: [
            getattr((1 / x).at[at], how)(rows, mode=mode)
            for how in ("set", "add", "multiply", "min", "max")
            for mode in ("drop", "clip")
            for at, rows in ((i * 1, 1 / u), (i[0], u[0] * 2))
        ],
        (draw(13, 7), np.array([3, -1, 12, 30, -40, 13], np.int32), draw(6, 7)),
    ),
    "arange": (lambda x: (1 / x + jnp.arange(7), x * jnp.arange(13)[:, None] + jnp.eye(13, 7, 2)), (draw(13, 7),)),
    "loops": (_loops, (draw(13, 7), draw(7, 7) / 3)),
    "remat": (
        _summed(jax.checkpoint(lambda x, w, v: jnp.tanh(jnp.cumsum(jnp.tanh(x @ w)[1:], 1)[:, ::-1]) @ v)),
        (draw(13, 8), draw(8, 25), draw(25, 8)),
    ),
    "gradients": (
        _summed(
            lambda x, w: (jnp.sort(x @ w, 0) ** 2, jnp.split(jnp.exp(x @ w), [3]), lax.cumprod(x @ w, 1, reverse=True))
        ),
        (draw(13, 8), draw(8, 7)),
    ),
}


@pytest.mark.parametrize("name", [*PROGRAMS, *MOVING])
def test_padded_ops_compute_the_same(name: str) -> None:
    assert check(*(PROGRAMS | MOVING)[name], padded=True)
