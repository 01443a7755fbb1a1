"""Llama-3 decoders: grouped-query attention, rotary positions, SwiGLU, an output head of its own."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .decoder import DecoderConfig, decoder, dense_layer
from .layers import COMPUTE, cast, cross_entropy, gated_mlp, rms_norm, rope_attention, run_layers, token_batch
from .program import Parts
from .specs import Tree
from .training import training

ROPE_BASE = 500_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama."""

    seq: int = 8192
    kv_heads: int = 8
    head: int = 128
    vocab: int = 128256


PROGRAMS = {
    "llama3": {
        "8b": LlamaConfig(batch=128, layers=32, d=4096, heads=32, ffn=14336),
        "70b": LlamaConfig(batch=256, layers=80, d=8192, heads=64, ffn=28672),
        "405b": LlamaConfig(batch=512, layers=126, d=16384, heads=128, ffn=53248),
        "tiny": LlamaConfig(batch=32, seq=24, layers=2, d=64, heads=16, kv_heads=8, head=12, ffn=160, vocab=320),
    }
}


def build(config: LlamaConfig) -> Parts:
    """The training step."""
    params = decoder(config, dense_layer(config))
    batch = token_batch(config.batch, config.seq, config.vocab)
    return training(config, partial(loss, config), params, batch)


def layer(p: Tree, x: jax.Array) -> jax.Array:
    """One decoder layer."""
    x = x + rope_attention(cast(p["attention"]), rms_norm(x, p["attention_norm"]), ROPE_BASE)
    return x + gated_mlp(cast(p["mlp"]), rms_norm(x, p["mlp_norm"]), jax.nn.silu)


def loss(config: LlamaConfig, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy."""
    x = jnp.take(params["embed"], batch["inputs"], axis=0).astype(COMPUTE)
    x = run_layers(layer, params["layers"], x, remat=config.remat)
    x = rms_norm(x, params["final_norm"])
    return cross_entropy(jnp.einsum("bsd,dv->bsv", x, params["head"].astype(COMPUTE)), batch["targets"])
