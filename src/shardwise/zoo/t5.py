"""T5 encoder-decoders (arXiv 1910.10683): cross attention, a relative position bias shared by all layers.

The loss is T5X's: one-hot targets and a small penalty on the logarithm of the softmax normalizer.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, attention, attention_spec, cast, causal_mask, rms_norm, run_layers
from .program import Config, ZooProgram
from .specs import Tree, integers, layered, normal, ones, training, weight

BUCKETS = 32
MAX_DISTANCE = 128
Z_LOSS = 1e-4


def build(config: Config) -> ZooProgram:
    d = config.d
    projections = attention_spec(d, config.heads, config.heads, config.head)
    mlp_spec = {"up": weight(d, config.ffn, fan_in=d), "down": weight(config.ffn, d, fan_in=config.ffn)}
    encoder = {"self_norm": ones(d), "self": projections, "mlp_norm": ones(d), "mlp": mlp_spec}
    decoder = {**encoder, "cross_norm": ones(d), "cross": projections}
    params = {
        "embed": normal(config.vocab, d, scale=1.0),
        "encoder_bias": normal(BUCKETS, config.heads, scale=0.1),
        "encoder": layered(encoder, config.layers, config.scan),
        "encoder_norm": ones(d),
        "decoder_bias": normal(BUCKETS, config.heads, scale=0.1),
        "decoder": layered(decoder, config.layers, config.scan),
        "decoder_norm": ones(d),
    }
    batch = {
        "encoder_inputs": integers(config.batch, config.seq, below=config.vocab),
        "decoder_inputs": integers(config.batch, config.target_seq, below=config.vocab),
        "targets": integers(config.batch, config.target_seq, below=config.vocab),
    }
    return training(config, partial(loss, config), params, batch)


def relative_bias(table: jax.Array, length: int, bidirectional: bool) -> jax.Array:
    """`bias[h, s, t]` by the distance from s to t: exact buckets nearby, logarithmic ones further off."""
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
    buckets = BUCKETS
    offset = jnp.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = jnp.where(distance > 0, buckets, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, 1) / exact) / math.log(MAX_DISTANCE / exact)
    far = jnp.minimum(exact + (ratio * (buckets - exact)).astype(jnp.int32), buckets - 1)
    bucket = offset + jnp.where(distance < exact, distance, far)
    return jnp.take(table, bucket, axis=0).transpose(2, 0, 1)


def attend(
    p: Tree, x: jax.Array, source: jax.Array, bias: jax.Array | None = None, mask: jax.Array | None = None
) -> jax.Array:
    p = cast(p)
    q = jnp.einsum("bsd,dhk->bshk", x, p["q"])
    k = jnp.einsum("btd,dhk->bthk", source, p["k"])
    v = jnp.einsum("btd,dhk->bthk", source, p["v"])
    return jnp.einsum("bshk,hkd->bsd", attention(q, k, v, mask=mask, bias=bias), p["o"])


def mlp(p: Tree, x: jax.Array) -> jax.Array:
    p = cast(p)
    return jnp.einsum("bsf,fd->bsd", jax.nn.relu(jnp.einsum("bsd,df->bsf", x, p["up"])), p["down"])


def encoder_layer(bias: jax.Array, p: Tree, x: jax.Array) -> jax.Array:
    y = rms_norm(x, p["self_norm"])
    x = x + attend(p["self"], y, y, bias)
    return x + mlp(p["mlp"], rms_norm(x, p["mlp_norm"]))


def decoder_layer(bias: jax.Array, encoded: jax.Array, p: Tree, x: jax.Array) -> jax.Array:
    """Causal self-attention, attention on the encoder's output, MLP."""
    y = rms_norm(x, p["self_norm"])
    x = x + attend(p["self"], y, y, bias, causal_mask(x.shape[1]))
    x = x + attend(p["cross"], rms_norm(x, p["cross_norm"]), encoded)
    return x + mlp(p["mlp"], rms_norm(x, p["mlp_norm"]))


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Cross entropy of the decoder's next tokens, plus the penalty on the normalizer."""
    embed = params["embed"].astype(COMPUTE)
    x = jnp.take(embed, batch["encoder_inputs"], axis=0)
    bias = relative_bias(params["encoder_bias"], config.seq, bidirectional=True)
    x = run_layers(partial(encoder_layer, bias), params["encoder"], x, remat=config.remat)
    encoded = rms_norm(x, params["encoder_norm"])

    y = jnp.take(embed, batch["decoder_inputs"], axis=0)
    bias = relative_bias(params["decoder_bias"], config.target_seq, bidirectional=False)
    y = run_layers(partial(decoder_layer, bias, encoded), params["decoder"], y, remat=config.remat)
    y = rms_norm(y, params["decoder_norm"]) * jnp.asarray(config.d**-0.5, COMPUTE)

    logits = jnp.einsum("bsd,vd->bsv", y, embed).astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    targets = jax.nn.one_hot(batch["targets"], config.vocab, dtype=jnp.float32)
    likelihood = jnp.sum(targets * logits, axis=-1) - normalizer
    return jnp.mean(Z_LOSS * jnp.square(normalizer) - likelihood)
