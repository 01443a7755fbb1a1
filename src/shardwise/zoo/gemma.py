"""Gemma-1 shaped decoders: RMSNorm, rotary positions, gated GELU, tied embeddings; 2B: one key-value head."""

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
from .specs import Tree, layered, normal, zeros
from .training import training


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(LayeredConfig):
    """Sizes of a Gemma."""

    seq: int
    d: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int

    def __post_init__(self) -> None:
        self.require_divisible(heads_by_kv_heads=(self.heads, self.kv_heads), head_by_two=(self.head, 2))


def _tiny(kv_heads: int) -> GemmaConfig:
    return GemmaConfig(batch=16, seq=24, layers=2, d=64, heads=8, kv_heads=kv_heads, head=16, ffn=160, vocab=320)


PROGRAMS = {
    "t2b": {
        "2b": GemmaConfig(
            batch=64, seq=2048, layers=18, d=2048, heads=8, kv_heads=1, head=256, ffn=16384, vocab=256128
        ),
        "tiny": _tiny(kv_heads=1),
    },
    "t7b": {
        "7b": GemmaConfig(
            batch=64, seq=2048, layers=28, d=3072, heads=16, kv_heads=16, head=256, ffn=24576, vocab=256128
        ),
        "tiny": _tiny(kv_heads=8),
    },
}


def build(config: GemmaConfig) -> Parts:
    """The training step."""
    params = {
        "embed": normal(config.vocab, config.d, scale=0.02),
        "layers": layered(layer_spec(config), config.layers, config.scan),
        "final_norm": zeros(config.d),
    }
    batch = token_batch(config.batch, config.seq, config.vocab)
    return training(config, partial(loss, config), params, batch)


def layer_spec(config: GemmaConfig) -> Tree:
    """One layer's parameters. Norm scales are stored as their distance from one."""
    return {
        "attention_norm": zeros(config.d),
        "attention": attention_spec(config.d, config.heads, config.kv_heads, config.head),
        "mlp_norm": zeros(config.d),
        "mlp": gated_mlp_spec(config.d, config.ffn),
    }


def layer(p: Tree, x: jax.Array) -> jax.Array:
    """One decoder layer."""
    x = x + rope_attention(cast(p["attention"]), rms_norm(x, 1 + p["attention_norm"]))
    return x + gated_mlp(cast(p["mlp"]), rms_norm(x, 1 + p["mlp_norm"]), jax.nn.gelu)


def loss(config: GemmaConfig, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy."""
    embed = params["embed"].astype(COMPUTE)
    x = jnp.take(embed, batch["inputs"], axis=0) * jnp.asarray(config.d**0.5, COMPUTE)
    x = run_layers(layer, params["layers"], x, remat=config.remat)
    x = rms_norm(x, 1 + params["final_norm"])
    return cross_entropy(jnp.einsum("bsd,vd->bsv", x, embed), batch["targets"])
