"""Decoders with rotary positions and gated MLPs: Llama-3 (grouped-query attention, SwiGLU, an untied output head) and Gemma-1
shaped ones (gated GELU, tied embeddings, norm scales stored as their distance from one; 2B has one key-value head)."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp

from .layers import COMPUTE, attention_spec, cast, cross_entropy, gated_mlp, rms_norm, rope_attention, run_layers
from .program import LayeredConfig, ZooProgram
from .specs import Tree, layered, normal, ones, token_batch, training, weight, zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(LayeredConfig):
    """Sizes of a decoder."""

    seq: int
    d: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    rope_base: ClassVar[float] = 10_000.0
    tied: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.require_divisible(heads_by_kv_heads=(self.heads, self.kv_heads), head_by_two=(self.head, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    seq: int = 2048
    head: int = 256
    vocab: int = 256128
    tied: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    seq: int = 8192
    kv_heads: int = 8
    head: int = 128
    vocab: int = 128256
    rope_base: ClassVar[float] = 500_000.0


_TINY = GemmaConfig(batch=16, seq=24, layers=2, d=64, heads=8, kv_heads=1, head=16, ffn=160, vocab=320)
PROGRAMS = {
    "t2b": {"2b": GemmaConfig(batch=64, layers=18, d=2048, heads=8, kv_heads=1, ffn=16384), "tiny": _TINY},
    "t7b": {
        "7b": GemmaConfig(batch=64, layers=28, d=3072, heads=16, kv_heads=16, ffn=24576),
        "tiny": replace(_TINY, kv_heads=8),
    },
    "llama3": {
        "8b": LlamaConfig(batch=128, layers=32, d=4096, heads=32, ffn=14336),
        "70b": LlamaConfig(batch=256, layers=80, d=8192, heads=64, ffn=28672),
        "405b": LlamaConfig(batch=512, layers=126, d=16384, heads=128, ffn=53248),
        "tiny": LlamaConfig(batch=32, seq=24, layers=2, d=64, heads=16, head=12, ffn=160, vocab=320),
    },
}


def build(config: DecoderConfig) -> ZooProgram:
    d, f = config.d, config.ffn
    mlp = {"gate": weight(d, f, fan_in=d), "up": weight(d, f, fan_in=d), "down": weight(f, d, fan_in=f)}
    norm = zeros(d) if config.tied else ones(d)
    params = decoder_spec(config, {"mlp_norm": norm, "mlp": mlp})
    return training(config, partial(loss, config), params, token_batch(config.batch, config.seq, config.vocab))


def decoder_spec(config: DecoderConfig, mlp: dict[str, Tree]) -> dict[str, Tree]:
    """The parameters of the model, `mlp` being those of a layer after its attention."""
    d, norm = config.d, zeros(config.d) if config.tied else ones(config.d)
    projections = attention_spec(d, config.heads, config.kv_heads, config.head)
    params = {
        "embed": normal(config.vocab, d, scale=0.02),
        "layers": layered({"attention_norm": norm, "attention": projections} | mlp, config.layers, config.scan),
        "final_norm": norm,
    }
    return params if config.tied else params | {"head": weight(d, config.vocab, fan_in=d)}


def layer(config: DecoderConfig, p: Tree, x: jax.Array) -> jax.Array:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, 1 + scale if config.tied else scale)

    x = x + rope_attention(cast(p["attention"]), norm(x, p["attention_norm"]), config.rope_base)
    activation = jax.nn.gelu if config.tied else jax.nn.silu
    return x + gated_mlp(cast(p["mlp"]), norm(x, p["mlp_norm"]), activation)


def loss(config: DecoderConfig, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy."""
    run = partial(run_layers, partial(layer, config), params["layers"], remat=config.remat)
    if config.tied:
        embed = params["embed"].astype(COMPUTE)
        x = run(jnp.take(embed, batch["inputs"], axis=0) * jnp.asarray(config.d**0.5, COMPUTE))
        logits = jnp.einsum("bsd,vd->bsv", rms_norm(x, 1 + params["final_norm"]), embed)
    else:
        x = run(jnp.take(params["embed"], batch["inputs"], axis=0).astype(COMPUTE))
        logits = untied_logits(params, x)
    return cross_entropy(logits, batch["targets"])


def untied_logits(params: Tree, x: jax.Array) -> jax.Array:
    x = rms_norm(x, params["final_norm"])
    return jnp.einsum("bsd,dv->bsv", x, params["head"].astype(COMPUTE))
