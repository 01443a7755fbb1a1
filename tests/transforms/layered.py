"""Small float32 programs with scanned layers: a decoder, an encoder with a decoder, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

BATCH, SEQ, WIDTH, HEADS, HIDDEN, VOCAB = 16, 6, 16, 4, 32, 24
Step = Callable[..., Any]


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(0.5 * rng.normal(size=shape) / np.sqrt(shape[-2]), np.float32)


def tokens(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1, VOCAB, (BATCH, SEQ)).astype(np.int32)


def attention(p: Any, x: jax.Array, y: jax.Array, allowed: jax.Array | None = None) -> jax.Array:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", z, p[name]) for z, name in ((x, "q"), (y, "k"), (y, "v")))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / 2
    if allowed is not None:
        scores = jnp.where(allowed, scores, -1e9)
    return jnp.einsum("bhst,bthk,hkd->bsd", jax.nn.softmax(scores), v, p["o"])


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


def block(rng: np.random.Generator, layers: int) -> dict[str, np.ndarray]:
    head = WIDTH // HEADS
    projections = {name: weights(rng, layers, WIDTH, HEADS, head) for name in "qkv"}
    mlp = {"up": weights(rng, layers, WIDTH, HIDDEN), "down": weights(rng, layers, HIDDEN, WIDTH)}
    return projections | {"o": weights(rng, layers, HEADS, head, WIDTH)} | mlp


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over those targets that are not 1: a number that depends on the whole batch."""
    chosen = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(targets, VOCAB), axis=-1)
    counted = targets != 1
    return -jnp.sum(jnp.where(counted, chosen, 0)) / jnp.sum(counted)


def trained(loss: Callable[..., jax.Array]) -> Step:
    """A step with momentum."""

    def step(params: Any, moments: Any, batch: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch, *rest)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value

    return step


def decoder(layers: int, remat: bool = False, drop: bool = True) -> tuple[Step, tuple[Any, ...]]:
    """Tied embeddings, positions, a mask from the tokens, and dropout by folded keys."""

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        causal = jnp.arange(SEQ)[:, None] >= jnp.arange(SEQ)
        allowed = causal & (batch["inputs"] > 2)[:, None, None, :]

        def layer(x: jax.Array, numbered: Any) -> tuple[jax.Array, None]:
            p, number = numbered
            y = attention(p, norm(x), norm(x), allowed)
            x = x + (dropout(jax.random.fold_in(key, number), y) if drop else y)
            return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None

        layer = jax.checkpoint(layer) if remat else layer
        x = params["embed"][batch["inputs"]] + params["positions"]
        x, _ = jax.lax.scan(layer, x, (params["layers"], jnp.arange(layers)))
        return cross_entropy(norm(x) @ params["embed"].T, batch["targets"])

    rng = np.random.default_rng(0)
    params = {"embed": weights(rng, VOCAB, WIDTH), "positions": weights(rng, SEQ, WIDTH), "layers": block(rng, layers)}
    batch = {"inputs": tokens(rng), "targets": tokens(rng)}
    return trained(loss), (params, jax.tree.map(np.ones_like, params), batch, jax.random.key(0))


def translator(layers: int, remat: bool = False) -> tuple[Step, tuple[Any, ...]]:
    """An encoder, and a decoder whose layers all read its result; the scale of all layers is one parameter."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def encode(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            x = x + params["scale"] * attention(p, norm(x), norm(x))
            return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None

        def decode(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            x = x + params["scale"] * attention(p["own"], norm(x), norm(x))
            x = x + attention(p["cross"], norm(x), encoded)
            return x + jax.nn.gelu(norm(x) @ p["own"]["up"]) @ p["own"]["down"], None

        encode, decode = (jax.checkpoint(f, prevent_cse=False) if remat else f for f in (encode, decode))
        encoded, _ = jax.lax.scan(encode, params["embed"][batch["inputs"]], params["encoder"])
        x, _ = jax.lax.scan(decode, params["embed"][batch["outputs"]], params["decoder"])
        return cross_entropy(norm(x) @ params["head"], batch["targets"])

    rng = np.random.default_rng(0)
    params = {
        "embed": weights(rng, VOCAB, WIDTH),
        "head": weights(rng, WIDTH, VOCAB),
        "scale": np.ones(WIDTH, np.float32),
        "encoder": block(rng, layers),
        "decoder": {"own": block(rng, layers), "cross": block(rng, layers)},
    }
    batch = {"inputs": tokens(rng), "outputs": tokens(rng), "targets": tokens(rng)}
    return trained(loss), (params, jax.tree.map(np.ones_like, params), batch)


def experts(layers: int, remat: bool = False) -> tuple[Step, tuple[Any, ...]]:
    """Experts with a capacity, and a loss that balances them for each example, which the loop carries."""
    count, places = 4, 3

    def loss(params: Any, batch: Any) -> jax.Array:
        def layer(carry: tuple[jax.Array, jax.Array], p: Any) -> tuple[Any, None]:
            x, balance = carry
            x = x + attention(p, norm(x), norm(x))
            shares = jax.nn.softmax(norm(x) @ p["router"])
            chosen = jax.nn.one_hot(jnp.argmax(shares, axis=-1), count)
            place = jnp.sum((jnp.cumsum(chosen, axis=1) - 1) * chosen, axis=-1).astype(jnp.int32)
            sent = chosen[..., None] * jax.nn.one_hot(place, places)[..., None, :]
            inputs = jnp.einsum("bsep,bsd->bepd", sent, norm(x))
            outputs = jax.nn.relu(jnp.einsum("bepd,edf->bepf", inputs, p["in"]))
            y = jnp.einsum("bsep,bepf,efd,bse->bsd", sent, outputs, p["out"], shares)
            return (x + y, balance + jnp.sum(jnp.mean(shares, axis=1) * jnp.mean(chosen, axis=1))), None

        layer = jax.checkpoint(layer) if remat else layer
        x, balance = jax.lax.scan(
            layer, (params["embed"][batch["inputs"]], jnp.sum(params["embed"])), params["layers"]
        )[0]
        return cross_entropy(norm(x) @ params["embed"].T, batch["targets"]) + 0.01 * balance

    rng = np.random.default_rng(0)
    own = {
        "router": weights(rng, layers, WIDTH, count),
        "in": weights(rng, layers, count, WIDTH, HIDDEN),
        "out": weights(rng, layers, count, HIDDEN, WIDTH),
    }
    params = {"embed": weights(rng, VOCAB, WIDTH), "layers": block(rng, layers) | own}
    batch = {"inputs": tokens(rng), "targets": tokens(rng)}
    return trained(loss), (params, jax.tree.map(np.ones_like, params), batch)


BUILD: dict[str, Callable[..., tuple[Step, tuple[Any, ...]]]] = {
    "decoder": decoder,
    "translator": translator,
    "experts": experts,
}
ALL = {name: cache(build) for name, build in BUILD.items()}


@cache
def plain(name: str, layers: int) -> list[jax.Array]:
    """The results of a step in plain JAX."""
    fn, args = ALL[name](layers)
    return jax.tree.leaves(jax.jit(fn)(*args))


def _called(f: Any, init: Any, xs: Any, **_: Any) -> tuple[Any, None]:
    """A scan that calls the layers one by one."""
    layers, numbers = xs if isinstance(xs, tuple) else (xs, None)
    for k, p in enumerate(layers):
        init, _ = f(init, p if numbers is None else (p, k))
    return init, None


def _apart(tree: Any) -> Any:
    """Stacked arrays as lists of layers."""
    if not isinstance(tree, dict):
        return tree
    stacks = {"layers", "encoder", "decoder"} & tree.keys()
    return {
        k: [jax.tree.map(lambda x, n=n: x[n], sub) for n in range(len(jax.tree.leaves(sub)[0]))] if k in stacks else sub
        for k, sub in tree.items()
    }


def one_by_one(name: str, layers: int) -> tuple[Step, tuple[Any, ...]]:
    """The step that calls its layers one by one, with separate arrays for the parameters of each."""
    step, (params, moments, *rest) = BUILD[name](layers)

    def unrolled(params: Any, moments: Any, batch: Any, *rest: Any) -> Any:
        with mock.patch.object(jax.lax, "scan", _called):
            return step(params, moments, batch, *rest)

    return unrolled, (_apart(params), _apart(moments), *rest)
