"""The pieces that the sequence models share.

Letters: b batch, s and t positions, d model, h heads, g key-value heads, r query heads for each of those, k
head dimension, f hidden, v vocabulary. Weights come in as float32 and a layer casts its matrices with `cast`;
norms and softmax compute in float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .specs import Leaf, Tree, weight

COMPUTE = jnp.bfloat16


def cast(tree: Tree) -> Tree:
    """Returns every array of the tree in the compute type."""
    return jax.tree.map(lambda x: x.astype(COMPUTE), tree)


def run_layers(layer: Callable[[Tree, Tree], Tree], params: Tree, x: Tree, *, remat: bool = False) -> Tree:
    """`x` through every layer: a loop over a tuple of parameters, a scan over stacked ones."""
    scan = not isinstance(params, tuple)
    if remat:
        # Inside a scan nothing can be merged across the loop's boundary: barriers are not needed there.
        layer = jax.checkpoint(layer, prevent_cse=not scan)
    if scan:
        return jax.lax.scan(lambda carry, p: (layer(p, carry), None), x, params)[0]
    for p in params:
        x = layer(p, x)
    return x


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root-mean-square normalization over the last dimension."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def layer_norm(x: jax.Array, p: Tree) -> jax.Array:
    """Layer normalization over the last dimension, with `p["scale"]` and `p["bias"]`."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    scaled: jax.Array = y * p["scale"] + p["bias"]
    return scaled.astype(x.dtype)


def affine(pattern: str, x: jax.Array, p: Tree) -> jax.Array:
    """Returns the einsum of `x` with `p["kernel"]`, plus `p["bias"]`."""
    return jnp.add(jnp.einsum(pattern, x, p["kernel"]), p["bias"])


def rope(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Rotary position embedding of `x[b, s, h, k]` at `positions[s]`."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def causal_mask(length: int) -> jax.Array:
    """`mask[s, t]`: position s may look at t."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None = None, bias: jax.Array | None = None
) -> jax.Array:
    """Attention of `q[b, s, h, k]` on `k, v[b, t, g, k]`: each key-value head serves `h/g` query heads. `mask[s, t]` is true
    where s may attend to t, and `bias[h, s, t]` is added to the scores."""
    b, s, h, head = q.shape
    g = k.shape[2]
    grouped = q.reshape(b, s, g, h // g, head)
    scores = jnp.einsum("bsgrk,btgk->bgrst", grouped, k).astype(jnp.float32) * head**-0.5
    if bias is not None:
        scores = scores + bias.reshape(g, h // g, *bias.shape[1:])
    if mask is not None:
        scores = jnp.where(mask, scores, -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", probabilities, v).reshape(b, s, h, -1)


def attention_spec(d: int, heads: int, kv_heads: int, head: int) -> dict[str, Leaf]:
    """Projections without biases."""
    return {
        "q": weight(d, heads, head, fan_in=d),
        "k": weight(d, kv_heads, head, fan_in=d),
        "v": weight(d, kv_heads, head, fan_in=d),
        "o": weight(heads, head, d, fan_in=heads * head),
    }


def rope_attention(p: Tree, x: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Causal self-attention with rotary positions; `p` as in `attention_spec`."""
    positions = jnp.arange(x.shape[1])
    q = rope(jnp.einsum("bsd,dhk->bshk", x, p["q"]), positions, base)
    k = rope(jnp.einsum("bsd,dgk->bsgk", x, p["k"]), positions, base)
    v = jnp.einsum("bsd,dgk->bsgk", x, p["v"])
    return jnp.einsum("bshk,hkd->bsd", attention(q, k, v, mask=causal_mask(x.shape[1])), p["o"])


def gated_mlp(p: Tree, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`down(activation(gate(x)) * up(x))`."""
    hidden = activation(jnp.einsum("bsd,df->bsf", x, p["gate"])) * jnp.einsum("bsd,df->bsf", x, p["up"])
    return jnp.einsum("bsf,fd->bsd", hidden, p["down"])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of `labels[...]` under `logits[..., v]`, in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)
