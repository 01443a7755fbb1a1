"""Small programs whose decision space is known by thought."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BATCH, SEQUENCE, MODEL, HEADS, HEAD = 2, 12, 16, 4, 8


def shape(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention(p: dict[str, Any], x: jax.Array, memory: jax.Array | None = None, causal: bool = True) -> jax.Array:
    """Multi-head attention with a residual; self-attention unless a memory is given."""
    source = x if memory is None else memory
    q = jnp.einsum("bsd,dhk->bshk", x, p["q"])
    k = jnp.einsum("btd,dhk->bthk", source, p["k"])
    v = jnp.einsum("btd,dhk->bthk", source, p["v"])
    scores = jnp.einsum("bshk,bthk->bhst", q, k)
    if memory is None and causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)
    return x + jnp.einsum("bshk,hkd->bsd", mixed, p["o"])


def attention_params(layers: int | None = None, model: int = MODEL) -> dict[str, jax.ShapeDtypeStruct]:
    lead = () if layers is None else (layers,)
    into = {n: shape(*lead, model, HEADS, HEAD) for n in "qkv"}
    return {**into, "o": shape(*lead, HEADS, HEAD, model)}


def stream() -> jax.ShapeDtypeStruct:
    return shape(BATCH, SEQUENCE, MODEL)


def unrolled(p: list[Any], x: jax.Array) -> jax.Array:
    for layer in p:
        x = attention(layer, x)
    return x


def scanned(p: Any, x: jax.Array, wrap: Callable[..., Any] = lambda f: f) -> jax.Array:
    return jax.lax.scan(wrap(lambda c, layer: (attention(layer, c), None)), x, p)[0]


def gradient(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Gradients by parameters and input of the sum of squares."""

    @functools.wraps(fn)
    def loss(*args: Any) -> jax.Array:
        return jnp.sum(fn(*args) ** 2)

    return jax.grad(loss, argnums=(0, 1))
