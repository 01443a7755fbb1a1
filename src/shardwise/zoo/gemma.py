"""Gemma-1 shaped decoders: RMSNorm, rotary positions, gated GELU, tied embeddings; 2B: one key-value head."""

from functools import partial

import jax
import jax.numpy as jnp

from .decoder import DecoderConfig, decoder, dense_layer
from .layers import COMPUTE, cast, cross_entropy, gated_mlp, rms_norm, rope_attention, run_layers, token_batch
from .program import Parts
from .specs import Tree, zeros
from .training import training


def _tiny(kv_heads: int) -> DecoderConfig:
    return DecoderConfig(batch=16, seq=24, layers=2, d=64, heads=8, kv_heads=kv_heads, head=16, ffn=160, vocab=320)


PROGRAMS = {
    "t2b": {
        "2b": DecoderConfig(
            batch=64, seq=2048, layers=18, d=2048, heads=8, kv_heads=1, head=256, ffn=16384, vocab=256128
        ),
        "tiny": _tiny(kv_heads=1),
    },
    "t7b": {
        "7b": DecoderConfig(
            batch=64, seq=2048, layers=28, d=3072, heads=16, kv_heads=16, head=256, ffn=24576, vocab=256128
        ),
        "tiny": _tiny(kv_heads=8),
    },
}


def build(config: DecoderConfig) -> Parts:
    """The training step."""
    # Norm scales are stored as their distance from one.
    params = decoder(config, dense_layer(config, zeros), zeros, head=False)
    batch = token_batch(config.batch, config.seq, config.vocab)
    return training(config, partial(loss, config), params, batch)


def layer(p: Tree, x: jax.Array) -> jax.Array:
    """One decoder layer."""
    x = x + rope_attention(cast(p["attention"]), rms_norm(x, 1 + p["attention_norm"]))
    return x + gated_mlp(cast(p["mlp"]), rms_norm(x, 1 + p["mlp_norm"]), jax.nn.gelu)


def loss(config: DecoderConfig, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy."""
    embed = params["embed"].astype(COMPUTE)
    x = jnp.take(embed, batch["inputs"], axis=0) * jnp.asarray(config.d**0.5, COMPUTE)
    x = run_layers(layer, params["layers"], x, remat=config.remat)
    x = rms_norm(x, 1 + params["final_norm"])
    return cross_entropy(jnp.einsum("bsd,vd->bsv", x, embed), batch["targets"])
