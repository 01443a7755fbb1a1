"""A Mamba-like language model (arXiv 2312.00752): a selective diagonal recurrence, by an associative scan.

The recurrence is `h[s] = decay[s] * h[s-1] + drive[s]` for each of `inner * state` channels; both factors
depend on the input. Letters: b batch, s positions, d model, e inner channels, n states of each, r rank of the
step size.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .layers import COMPUTE, cast, cross_entropy, rms_norm, run_layers
from .program import Config, ZooProgram
from .specs import Tree, constant, layered, normal, ones, token_batch, training, weight, zeros

Pair = tuple[jax.Array, jax.Array]
KERNEL = 4  # positions that the short causal convolution reads


def build(config: Config) -> ZooProgram:
    """Returns the training step. Rates start at 1 .. state for every channel, step sizes near 0.01."""
    d, e, n, r = config.d, config.inner, config.state, config.rank
    layer = {
        "norm": ones(d),
        "in": weight(d, e, fan_in=d),
        "gate": weight(d, e, fan_in=d),
        "conv": {"kernel": weight(KERNEL, 1, e, fan_in=KERNEL), "bias": zeros(e)},
        "b": weight(e, n, fan_in=e),
        "c": weight(e, n, fan_in=e),
        "step_down": weight(e, r, fan_in=e),
        "step_up": weight(r, e, fan_in=r),
        "step_bias": constant(e, value=-4.6),
        "log_rate": constant(e, n, value=tuple(math.log(i + 1) for i in range(n))),
        "skip": ones(e),
        "out": weight(e, d, fan_in=e),
    }
    layers = layered(layer, config.layers, config.scan)
    params = {"embed": normal(config.vocab, d, scale=0.02), "layers": layers, "final_norm": ones(d)}
    return training(config, partial(loss, config), params, token_batch(config.batch, config.seq, config.vocab))


def causal_conv(x: jax.Array, p: Tree) -> jax.Array:
    """Applies a depthwise convolution to `x[b, s, e]` over the last `KERNEL` positions."""
    form: dict[str, Any] = {"dimension_numbers": ("NWC", "WIO", "NWC"), "feature_group_count": x.shape[-1]}
    y = jax.lax.conv_general_dilated(x, p["kernel"], window_strides=(1,), padding=[(KERNEL - 1, 0)], **form)
    return jnp.add(y, p["bias"])


def recurrence(decay: jax.Array, drive: jax.Array) -> jax.Array:
    """`h[:, s] = decay[:, s] * h[:, s-1] + drive[:, s]`, all positions at once."""

    def join(left: Pair, right: Pair) -> Pair:
        return left[0] * right[0], left[1] * right[0] + right[1]

    states: jax.Array = jax.lax.associative_scan(join, (decay, drive), axis=1)[1]
    return states


def layer(p: Tree, x: jax.Array) -> jax.Array:
    """Applies one residual block. The recurrence runs in float32: products of many decays underflow otherwise."""
    w = cast(p)
    y = rms_norm(x, p["norm"])
    u = jax.nn.silu(causal_conv(jnp.einsum("bsd,de->bse", y, w["in"]), w["conv"]))
    step = jnp.einsum("bsr,re->bse", jnp.einsum("bse,er->bsr", u, w["step_down"]), w["step_up"])
    step = jax.nn.softplus(step.astype(jnp.float32) + p["step_bias"])
    b = jnp.einsum("bse,en->bsn", u, w["b"]).astype(jnp.float32)
    c = jnp.einsum("bse,en->bsn", u, w["c"]).astype(jnp.float32)

    decay = jnp.exp(-step[..., None] * jnp.exp(p["log_rate"]))
    drive = (step * u.astype(jnp.float32))[..., None] * b[:, :, None, :]
    h = jnp.einsum("bsen,bsn->bse", recurrence(decay, drive), c).astype(x.dtype)

    h = h + u * w["skip"]
    h = h * jax.nn.silu(jnp.einsum("bsd,de->bse", y, w["gate"]))
    return x + jnp.einsum("bse,ed->bsd", h, w["out"])


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy."""
    embed = params["embed"].astype(COMPUTE)
    x = jnp.take(embed, batch["inputs"], axis=0)
    x = run_layers(layer, params["layers"], x, remat=config.remat)
    x = rms_norm(x, params["final_norm"])
    return cross_entropy(jnp.einsum("bsd,vd->bsv", x, embed), batch["targets"])
