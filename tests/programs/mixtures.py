"""Training steps of transformers with a mixture of experts, in the styles in which people write them, and with attention whose
heads look like experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

_B, _S, _D, _H, _K, _F, _E, _V = 32, 512, 1024, 16, 64, 4096, 8, 32000
_TOKENS: Final = _B * _S
_LAYERS: Final = 2
Tree = Any
Sublayer = Callable[[Tree, jax.Array], jax.Array]


def _shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _ffn(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ up) @ down


# Attention. Heads of the first two are leading dimensions that products share.

HEADS: Final = {"q": _shape(_H, _D, _K), "k": _shape(_H, _D, _K), "v": _shape(_H, _D, _K), "o": _shape(_H, _K, _D)}
BLOCKS: Final = {
    "in": _shape(_D, _H * _K),
    **dict.fromkeys("qkv", _shape(_H, _K, _K)),
    "o": _shape(_H * _K, _D),
}
FEW: Final = {"q": _shape(_D, _H, _K), "k": _shape(_D, 2, _K), "v": _shape(_D, 2, _K), "o": _shape(_H, _K, _D)}
FEW_FLAT: Final = {
    "q": _shape(_D, _H * _K),
    "k": _shape(_D, 2 * _K),
    "v": _shape(_D, 2 * _K),
    "o": _shape(_H * _K, _D),
}


def vmapped_heads(p: Tree, x: jax.Array) -> jax.Array:
    def head(q: jax.Array, k: jax.Array, v: jax.Array, o: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.einsum("bqk,bsk->bqs", x @ q, x @ k) / _K**0.5)
        return scores @ (x @ v) @ o

    return jax.vmap(head)(p["q"], p["k"], p["v"], p["o"]).sum(0)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / _K**0.5)
    return jnp.einsum("bhqs,bshk->bqhk", scores, v)


def block_diagonal_heads(p: Tree, x: jax.Array) -> jax.Array:
    """Each head has its own matrices for queries, keys and values, as in mLSTM."""
    x = (x @ p["in"]).reshape(_B, _S, _H, _K)
    q, k, v = (jnp.einsum("bshk,hkj->bshj", x, p[name]) for name in "qkv")
    return _attend(q, k, v).reshape(_B, _S, -1) @ p["o"]


def few_key_value_heads(p: Tree, x: jax.Array) -> jax.Array:
    """Two heads of keys and values, fewer than the axis has devices, repeated for the heads of queries."""
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in "qkv")
    k, v = (jnp.repeat(t, _H // 2, 2) for t in (k, v))
    return jnp.einsum("bshk,hkd->bsd", _attend(q, k, v), p["o"])


def few_flat_heads(p: Tree, x: jax.Array) -> jax.Array:
    """The same with matrices that have heads and their width in one dimension."""
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], -1, _K) for name in "qkv")
    k, v = (jnp.repeat(t, _H // 2, 2) for t in (k, v))
    return _attend(q, k, v).reshape(*x.shape[:2], -1) @ p["o"]


def grouped_queries(p: Tree, x: jax.Array) -> jax.Array:
    """Two groups of queries, for one head of keys and values each."""
    q, k, v = ((x @ p[name]).reshape(*x.shape[:2], 2, -1, _K) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bsgmk,btgnk->bgmst", q, k) / _K**0.5)
    return jnp.einsum("bgmst,btgnk->bsgmk", scores, v).reshape(*x.shape[:2], -1) @ p["o"]


# Feed-forward layers, of tokens [tokens, model].

DENSE: Final = {"up": _shape(_D, _F), "down": _shape(_F, _D)}
EXPERTS: Final = {"router": _shape(_D, _E), "up": _shape(_E, _D, _F), "down": _shape(_E, _F, _D)}


def dense(p: Tree, x: jax.Array) -> jax.Array:
    return _ffn(p["up"], p["down"], x)


def _two(p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    return weights, chosen


def by_masks(p: Tree, x: jax.Array) -> jax.Array:
    """As in GShard: tokens are sent to the slots of experts by products with masks."""
    weights, chosen = _two(p, x := x.reshape(_B, _S, _D))
    mask = jax.nn.one_hot(chosen, _E)
    place = ((jnp.cumsum(mask.reshape(_B, 2 * _S, _E), 1) - 1).reshape(mask.shape) * mask).sum(-1)
    slot = jax.nn.one_hot(place.astype("int32"), 2 * _S // _E)
    sent = jnp.einsum("bske,bskc,bsd->ebcd", mask, slot, x)
    hidden = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", sent, p["up"]))
    made = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"])
    return jnp.einsum("bske,bsk,bskc,ebcd->bsd", mask, weights, slot, made)


def by_slots(p: Tree, x: jax.Array) -> jax.Array:
    """Tokens are scattered to the slots of experts, which are computed under vmap."""
    weights, chosen = _two(p, x)
    mask, to = jax.nn.one_hot(chosen.reshape(-1), _E, dtype="int32"), chosen.reshape(-1)
    place = (jnp.cumsum(mask, 0) * mask).sum(-1) - 1
    sent = jnp.zeros((_E, 2 * _TOKENS // _E, _D)).at[to, place].add(jnp.repeat(x, 2, 0), mode="drop")
    made = jax.vmap(_ffn)(p["up"], p["down"], sent).at[to, place].get(mode="fill", fill_value=0)
    return (made.reshape(_TOKENS, 2, _D) * weights[..., None]).sum(1)


def all_experts(p: Tree, x: jax.Array) -> jax.Array:
    """Every expert computes every token, under vmap."""
    weights, chosen = _two(p, x)
    shares = (jax.nn.one_hot(chosen, _E) * weights[..., None]).sum(1)
    return jnp.einsum("te,etd->td", shares, jax.vmap(_ffn, (0, 0, None))(p["up"], p["down"], x))


def all_in_one(p: Tree, x: jax.Array) -> jax.Array:
    """Every expert computes every token, and one product adds them up."""
    hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, p["up"])) * jax.nn.softmax(x @ p["router"])[..., None]
    return jnp.einsum("tef,efd->td", hidden, p["down"])


def sorted_by_expert(p: Tree, x: jax.Array) -> jax.Array:
    weights, chosen = _two(p, x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=_E)
    hidden = jax.nn.silu(jax.lax.ragged_dot(x[order // 2], p["up"], sizes))
    made = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]
    return (made.reshape(_TOKENS, 2, _D) * weights[..., None]).sum(1)


def own_matrices(p: Tree, x: jax.Array) -> jax.Array:
    """Each token looks up the matrices of its expert."""
    best = jnp.argmax(x @ p["router"], -1)
    hidden = jax.nn.silu(jnp.einsum("td,tdf->tf", x, p["up"][best]))
    return jnp.einsum("tf,tfd->td", hidden, p["down"][best])


def one_by_one(p: Tree, x: jax.Array) -> jax.Array:
    """A loop visits the experts: they have no dimension to shard."""
    shares = jax.nn.softmax(x @ p["router"]).T

    def visit(total: jax.Array, each: Tree) -> tuple[jax.Array, None]:
        up, down, share = each
        return total + share[:, None] * _ffn(up, down, x), None

    return jax.lax.scan(visit, jnp.zeros_like(x), (p["up"], p["down"], shares))[0]


def training(attention: Sublayer, mlp: Sublayer, layer: Tree, scanned: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A step with momentum, and its arguments."""

    def block(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        x = x + attention(p["attention"], _norm(x))
        return x + mlp(p["mlp"], _norm(x).reshape(_TOKENS, _D)).reshape(x.shape), None

    def loss(params: Tree, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        if scanned:
            x, _ = jax.lax.scan(block, x, params["layers"])
        else:
            for p in params["layers"]:
                x, _ = block(x, p)
        scores = jax.nn.log_softmax(_norm(x) @ params["head"])
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

    def step(params: Tree, moments: Tree, batch: jax.Array) -> Tree:
        value, grads = jax.value_and_grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value

    stacked = jax.tree.map(lambda s: _shape(_LAYERS, *s.shape), layer)
    params = {"embed": _shape(_V, _D), "layers": stacked if scanned else [layer] * _LAYERS, "head": _shape(_D, _V)}
    return step, (params, params, jax.ShapeDtypeStruct((_B, _S + 1), "int32"))
