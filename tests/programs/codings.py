"""Training steps of transformers in which projections are fused, as people write them in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

_B, _S, _D, _H, _G, _K, _F, _V = 32, 512, 1024, 16, 4, 64, 4096, 32000
_LAYERS: Final = 2
Tree = Any
Block = Callable[[Tree, jax.Array], jax.Array]


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, [batch, sequence, heads, width] each; heads and width of the result are one dimension."""
    mask = jnp.tril(jnp.ones((_S, _S), bool))
    scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(_B, _S, -1)


def _training(layer: Tree, block: Block) -> tuple[Any, tuple[Any, ...]]:
    """A step with momentum, and its arguments."""

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        for p in params["layers"]:
            x = block(p, x)
        scores = jax.nn.log_softmax(_norm(x, params["norm"]) @ params["head"])
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

    def step(params: Tree, moments: Tree, batch: jax.Array) -> Tree:
        value, grads = jax.value_and_grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value

    params = {"embed": _shape(_V, _D), "layers": [layer] * _LAYERS, "norm": _shape(_D), "head": _shape(_D, _V)}
    return step, (params, params, jax.ShapeDtypeStruct((_B, _S + 1), "int32"))


def latent_attention() -> tuple[Any, tuple[Any, ...]]:
    """Queries, keys and values by way of narrow latents; heads and their width are one dimension of the parameters."""
    q_rank, kv_rank, rope = 384, 256, 32

    def block(p: Tree, x: jax.Array) -> jax.Array:
        y = _norm(x, p["norm"])
        q = (_norm(y @ p["q_down"], p["q_norm"]) @ p["q_up"]).reshape(_B, _S, _H, _K + rope)
        latent, turned = jnp.split(y @ p["kv_down"], [kv_rank], -1)
        k, v = jnp.split((_norm(latent, p["kv_norm"]) @ p["kv_up"]).reshape(_B, _S, _H, 2 * _K), 2, -1)
        k = jnp.concatenate([k, jnp.broadcast_to(turned[:, :, None], (_B, _S, _H, rope))], -1)
        x = x + _attend(q, k, v) @ p["o"]
        y = _norm(x, p["mlp_norm"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    layer = {"norm": _shape(_D), "q_down": _shape(_D, q_rank), "q_norm": _shape(q_rank)}
    layer |= {"q_up": _shape(q_rank, _H * (_K + rope)), "kv_down": _shape(_D, kv_rank + rope)}
    layer |= {"kv_norm": _shape(kv_rank), "kv_up": _shape(kv_rank, _H * 2 * _K), "o": _shape(_H * _K, _D)}
    layer |= {"mlp_norm": _shape(_D), "gate": _shape(_D, _F), "up": _shape(_D, _F), "down": _shape(_F, _D)}
    return _training(layer, block)


def fused_projections() -> tuple[Any, tuple[Any, ...]]:
    """Grouped queries with queries, keys and values in one matrix, repeated keys and values, and both halves of a gated MLP in
    one matrix."""

    def block(p: Tree, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(_norm(x, p["norm"]) @ p["qkv"], [_H * _K, (_H + _G) * _K], -1)
        k, v = (jnp.repeat(t.reshape(_B, _S, _G, _K), _H // _G, 2) for t in (k, v))
        x = x + _attend(q.reshape(_B, _S, _H, _K), k, v) @ p["o"]
        gate, up = jnp.split(_norm(x, p["mlp_norm"]) @ p["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    layer = {"norm": _shape(_D), "qkv": _shape(_D, (_H + 2 * _G) * _K), "o": _shape(_H * _K, _D)}
    return _training(
        layer | {"mlp_norm": _shape(_D), "gate_up": _shape(_D, 2 * _F), "down": _shape(_F, _D)},
        block,
    )


def experts_by_scatter() -> tuple[Any, tuple[Any, ...]]:
    """Attention with one matrix ``[3, model, heads * width]`` beside two of eight experts for each token, to which tokens are
    scattered."""
    experts, chosen, tokens = 8, 2, _B * _S
    capacity = tokens * chosen * 5 // (experts * 4)

    def mixture(p: Tree, x: jax.Array) -> jax.Array:
        weights, to = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), chosen)
        to = to.reshape(-1)
        one_hot = jax.nn.one_hot(to, experts, dtype="int32")
        place = (jnp.cumsum(one_hot, 0) * one_hot).sum(-1) - 1
        sent = jnp.zeros((experts, capacity, _D)).at[to, place].add(jnp.repeat(x, chosen, 0), mode="drop")
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", sent, p["gate"])) * jnp.einsum("ecd,edf->ecf", sent, p["up"])
        made = jnp.einsum("ecf,efd->ecd", hidden, p["down"]).at[to, place].get(mode="fill", fill_value=0)
        return (made.reshape(tokens, chosen, _D) * weights[..., None]).sum(1)

    def block(p: Tree, x: jax.Array) -> jax.Array:
        y = _norm(x, p["norm"])
        q, k, v = (t.reshape(_B, _S, _H, _K) for t in jnp.einsum("bsd,tde->tbse", y, p["qkv"]))
        return x + _attend(q, k, v) @ p["o"] + mixture(p, y.reshape(tokens, _D)).reshape(x.shape)

    layer = {"norm": _shape(_D), "qkv": _shape(3, _D, _H * _K), "o": _shape(_H * _K, _D), "router": _shape(_D, experts)}
    expert = {"gate": _shape(experts, _D, _F), "up": _shape(experts, _D, _F), "down": _shape(experts, _F, _D)}
    return _training(layer | expert, block)
