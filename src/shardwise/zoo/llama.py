"""Llama-3 decoders: grouped-query attention, rotary positions, SwiGLU, an output head of its own."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .layers import (
    COMPUTE,
    attention_spec,
    cast,
    cross_entropy,
    gated_mlp,
    gated_mlp_spec,
    rms_norm,
    rope_attention,
    run_layers,
    token_batch,
)
from .program import LayeredConfig, Parts
from .specs import Tree, layered, normal, ones, weight
from .training import training

ROPE_BASE = 500_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(LayeredConfig):
    """Sizes of a Llama."""

    seq: int = 8192
    d: int
    heads: int
    kv_heads: int = 8
    head: int = 128
    ffn: int
    vocab: int = 128256

    def __post_init__(self) -> None:
        self.require_divisible(heads_by_kv_heads=(self.heads, self.kv_heads), head_by_two=(self.head, 2))


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
    params = {
        "embed": normal(config.vocab, config.d, scale=0.02),
        "layers": layered(layer_spec(config), config.layers, config.scan),
        "final_norm": ones(config.d),
        "head": weight(config.d, config.vocab, fan_in=config.d),
    }
    batch = token_batch(config.batch, config.seq, config.vocab)
    return training(config, partial(loss, config), params, batch)


def layer_spec(config: LlamaConfig) -> Tree:
    """One layer's parameters."""
    return {
        "attention_norm": ones(config.d),
        "attention": attention_spec(config.d, config.heads, config.kv_heads, config.head),
        "mlp_norm": ones(config.d),
        "mlp": gated_mlp_spec(config.d, config.ffn),
    }


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
