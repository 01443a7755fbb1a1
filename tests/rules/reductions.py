"""Cases of reductions, windows, cumulative operations and sorting."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.cases import Case, array, distinct, dtype, shape, size, trace

_NUMBERS = ("float32", "int32", "bfloat16")
_BITS = ("int32", "uint8", "bool")


def _axes(r: Random, rank: int) -> tuple[int, ...]:
    return tuple(sorted(r.sample(range(rank), r.randint(1, rank))))


def _simple(name: str, kinds: tuple[str, ...]) -> Callable[[Random], Case]:
    def case(r: Random) -> Case:
        x = array(r, shape(r, 1, 4), dtype(r, kinds), -2, 3)
        axes = _axes(r, x.ndim)
        return trace(name, lambda x: getattr(lax, name)(x, axes), x)

    return case


def _arg(name: str) -> Callable[[Random], Case]:
    def case(r: Random) -> Case:
        x = array(r, shape(r), dtype(r, ("float32", "int32")))
        axis = r.randrange(x.ndim)
        return trace(name, lambda x: getattr(lax, name)(x, axis, jnp.int32), x)

    return case


def reduce_(r: Random) -> Case:
    """A combiner JAX has no name for: a product modulo 7, or the larger of pairs with what came along."""
    x = array(r, shape(r), "int32", 1, 7)
    axes = _axes(r, x.ndim)
    if r.random() < 0.5:
        return trace("reduce", lambda x: lax.reduce(x, np.int32(1), lambda a, b: (a * b) % 7, axes), x)

    def larger(a: Any, b: Any) -> Any:
        first = a[0] >= b[0]
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    keys = distinct(r, x.shape)
    return trace("reduce", lambda k, x: lax.reduce((k, x), (np.float32(-1), np.int32(0)), larger, axes), keys, x)


def _window(r: Random, rank: int) -> dict[str, Any]:
    plain = r.random() < 0.4
    return {
        "window_dimensions": [r.randint(1, 3) for _ in range(rank)],
        "window_strides": [1 if r.random() < 0.5 else 2 for _ in range(rank)],
        "padding": [(0, 0) if r.random() < 0.5 else (r.randint(0, 2), r.randint(0, 2)) for _ in range(rank)],
        "base_dilation": [1 if plain else r.randint(1, 2) for _ in range(rank)],
        "window_dilation": [1 if plain else r.randint(1, 2) for _ in range(rank)],
    }


def _pooled(r: Random) -> tuple[int, ...]:
    return tuple(r.randint(5, 7) if r.random() < 0.7 else size(r, 3) for _ in range(r.randint(1, 2)))


def _reduce_window(name: str) -> Callable[[Random], Case]:
    def case(r: Random) -> Case:
        x = array(r, _pooled(r))
        w = _window(r, x.ndim)
        inits = {"sum": 0.0, "max": -np.inf, "min": np.inf}
        ops = {"sum": lax.add, "max": lax.max, "min": lax.min}
        if name == "reduce_window":
            fn = lambda x: lax.reduce_window(x, np.float32(1), lambda a, b: a + b - 1, **w)  # noqa: E731
        else:
            which = name.removeprefix("reduce_window_")
            fn = lambda x: lax.reduce_window(x, np.float32(inits[which]), ops[which], **w)  # noqa: E731
        return trace(name, fn, x)

    return case


def _max_pool(x: Any, w: dict[str, Any]) -> Any:
    w = {k: w[k] for k in ("window_dimensions", "window_strides", "padding")}
    return lax.reduce_window(x, -jnp.inf, lax.max, **w)


def _fitting(r: Random, dims: tuple[int, ...]) -> dict[str, Any]:
    """A window that leaves at least one output, none of them wholly in the padding."""
    w = _window(r, len(dims))
    w["padding"] = [(r.randint(0, d - 1), r.randint(0, d - 1)) for d in w["window_dimensions"]]
    return w


def select_and_scatter_add(r: Random) -> Case:
    x = distinct(r, _pooled(r))
    w = _fitting(r, x.shape)
    out = jax.eval_shape(lambda x: _max_pool(x, w), x)
    cotangent = array(r, out.shape, low=1)
    return trace("select_and_scatter_add", lambda x, g: jax.vjp(lambda x: _max_pool(x, w), x)[1](g), x, cotangent)


def select_and_gather_add(r: Random) -> Case:
    x = distinct(r, _pooled(r))
    w = _fitting(r, x.shape)
    return trace(
        "select_and_gather_add", lambda x, t: jax.jvp(lambda x: _max_pool(x, w), (x,), (t,))[1], x, array(r, x.shape)
    )


def _cumulative(name: str) -> Callable[[Random], Case]:
    def case(r: Random) -> Case:
        x = array(r, shape(r), "float32", -2, 3)
        axis, reverse = r.randrange(x.ndim), r.random() < 0.5
        return trace(name, lambda x: getattr(lax, name)(x, axis, reverse), x)

    return case


def sort(r: Random) -> Case:
    dims = shape(r)
    operands = [array(r, dims, dtype(r, ("float32", "int32"))) for _ in range(r.randint(1, 3))]
    axis = r.randrange(len(dims))
    keys = r.randint(1, len(operands))
    return trace("sort", lambda *xs: lax.sort(xs, dimension=axis, is_stable=True, num_keys=keys), *operands)


def top_k(r: Random) -> Case:
    x = distinct(r, shape(r, 1, 3, least=2))
    axis = r.randrange(x.ndim)
    k = r.randint(1, x.shape[axis])
    return trace("top_k", lambda x: lax.top_k(x, k, axis=axis), x)


def approx_top_k(r: Random) -> Case:
    x = distinct(r, shape(r, 1, 3, least=2))
    axis = r.randrange(x.ndim)
    k = r.randint(1, x.shape[axis])
    return trace("approx_top_k", lambda x: lax.approx_max_k(x, k, axis), x)


CASES = {
    **{n: _simple(n, _NUMBERS) for n in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")},
    **{n: _simple(n, _BITS) for n in ("reduce_and", "reduce_or", "reduce_xor")},
    **{n: _arg(n) for n in ("argmax", "argmin")},
    "reduce": reduce_,
    **{n: _reduce_window(n) for n in ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")},
    "select_and_scatter_add": select_and_scatter_add,
    "select_and_gather_add": select_and_gather_add,
    **{n: _cumulative(n) for n in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
    "sort": sort,
    "top_k": top_k,
    "approx_top_k": approx_top_k,
}
