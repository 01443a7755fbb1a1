"""GPT-3 shaped decoders in Alpa's sizes: LayerNorm, biases, learned positions, fused q, k, v projection."""

from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, affine, attention, cast, causal_mask, cross_entropy, layer_norm, run_layers
from .program import Config, ZooProgram
from .specs import Tree, dense_spec, layered, norm_spec, normal, token_batch, training, weight, zeros


def build(config: Config) -> ZooProgram:
    d, h, k = config.d, config.heads, config.head
    layer = {
        "attention_norm": norm_spec(d),
        "qkv": {"kernel": weight(d, 3, h, k, fan_in=d), "bias": zeros(3, h, k)},
        "out": {"kernel": weight(h, k, d, fan_in=h * k), "bias": zeros(d)},
        "mlp_norm": norm_spec(d),
        "up": dense_spec(d, config.ffn),
        "down": dense_spec(config.ffn, d),
    }
    params = {
        "embed": normal(config.vocab, d, scale=0.02),
        "positions": normal(config.seq, d, scale=0.02),
        "layers": layered(layer, config.layers, config.scan),
        "final_norm": norm_spec(d),
    }
    return training(config, partial(loss, config), params, token_batch(config.batch, config.seq, config.vocab))


def layer(p: Tree, x: jax.Array) -> jax.Array:
    w = cast(p)
    y = layer_norm(x, p["attention_norm"])
    qkv = affine("bsd,dchk->bschk", y, w["qkv"])
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    y = attention(q, k, v, mask=causal_mask(x.shape[1]))
    x = x + affine("bshk,hkd->bsd", y, w["out"])
    y = jax.nn.gelu(affine("bsd,df->bsf", layer_norm(x, p["mlp_norm"]), w["up"]))
    return x + affine("bsf,fd->bsd", y, w["down"])


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy."""
    embed = params["embed"].astype(COMPUTE)
    x = jnp.take(embed, batch["inputs"], axis=0) + params["positions"].astype(COMPUTE)
    x = run_layers(layer, params["layers"], x, remat=config.remat)
    x = layer_norm(x, params["final_norm"])
    return cross_entropy(jnp.einsum("bsd,vd->bsv", x, embed), batch["targets"])
