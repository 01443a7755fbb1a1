"""Decoders with rotary positions and gated MLPs: Llama-3 (grouped-query attention, SwiGLU, an untied output head) and Gemma-1
shaped ones (gated GELU, tied embeddings, norm scales stored as their distance from one; 2B has one key-value head)."""

from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, attention_spec, cast, cross_entropy, gated_mlp, rms_norm, rope_attention, run_layers
from .program import Config, ZooProgram, require_divisible
from .specs import Leaf, Tree, layered, normal, ones, token_batch, training, weight, zeros


def build(config: Config) -> ZooProgram:
    d, f = config.d, config.ffn
    mlp = {"gate": weight(d, f, fan_in=d), "up": weight(d, f, fan_in=d), "down": weight(f, d, fan_in=f)}
    norm = zeros(d) if config.tied else ones(d)
    params = decoder_spec(config, norm, {"mlp_norm": norm, "mlp": mlp})
    if not config.tied:
        params["head"] = weight(d, config.vocab, fan_in=d)
    return training(config, partial(loss, config), params, token_batch(config.batch, config.seq, config.vocab))


def decoder_spec(config: Config, norm: Leaf, mlp: dict[str, Tree]) -> dict[str, Tree]:
    """Returns the parameters of the model without its head; `mlp` has those of a layer after its attention."""
    require_divisible("heads by kv heads", config.heads, config.kv_heads)
    require_divisible("head by two", config.head, 2)
    projections = attention_spec(config.d, config.heads, config.kv_heads, config.head)
    return {
        "embed": normal(config.vocab, config.d, scale=0.02),
        "layers": layered({"attention_norm": norm, "attention": projections} | mlp, config.layers, config.scan),
        "final_norm": norm,
    }


def layer(config: Config, p: Tree, x: jax.Array) -> jax.Array:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, 1 + scale if config.tied else scale)

    x = x + rope_attention(cast(p["attention"]), norm(x, p["attention_norm"]), config.rope_base)
    activation = jax.nn.gelu if config.tied else jax.nn.silu
    return x + gated_mlp(cast(p["mlp"]), norm(x, p["mlp_norm"]), activation)


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
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
