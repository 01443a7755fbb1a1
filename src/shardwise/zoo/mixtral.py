"""Mixtral: a decoder whose MLPs are eight experts, two of them for each token.

The expert layer is GShard's (arXiv 2006.16668): every expert takes at most `capacity` tokens of a group, and
one-hot dispatch and combine tensors move tokens to experts and back. With `dropless` all tokens are sorted by
expert and multiplied by `jax.lax.ragged_dot`: none is dropped, none padded.
"""

from functools import partial

import jax
import jax.numpy as jnp

from .decoder import decoder_spec, untied_logits
from .layers import COMPUTE, cast, cross_entropy, rms_norm, rope_attention, run_layers
from .program import Config, ZooError, ZooProgram, require_divisible
from .specs import Tree, ones, token_batch, training, weight


def build(config: Config) -> ZooProgram:
    require_divisible("tokens by group", config.batch * config.seq, config.group)
    if config.chosen > config.experts:
        raise ZooError(f"{config.chosen} experts chosen out of {config.experts}")
    d, e, f = config.d, config.experts, config.ffn
    experts = {"gate": weight(e, d, f, fan_in=d), "up": weight(e, d, f, fan_in=d), "down": weight(e, f, d, fan_in=f)}
    moe = {"moe_norm": ones(d), "router": weight(d, e, fan_in=d), "experts": experts}
    params = decoder_spec(config, ones(d), moe) | {"head": weight(d, config.vocab, fan_in=d)}
    return training(config, partial(loss, config), params, token_batch(config.batch, config.seq, config.vocab))


def capacity(config: Config) -> int:
    """Tokens of one group that one expert takes, rounded up to a multiple of four."""
    exact = config.group * config.chosen * config.capacity_factor / config.experts
    return -int(-exact // 4) * 4


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy plus the load-balancing loss of the routers."""
    x = jnp.take(params["embed"], batch["inputs"], axis=0).astype(COMPUTE)
    carry = (x, jnp.zeros((), jnp.float32))
    x, balance = run_layers(partial(layer, config), params["layers"], carry, remat=config.remat)
    logits = untied_logits(params, x)
    penalty: jax.Array = config.aux_weight * balance / config.layers
    return cross_entropy(logits, batch["targets"]) + penalty


def layer(config: Config, p: Tree, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Applies one decoder layer; the carry is the activations and the load-balancing loss so far."""
    x, balance = carry
    x = x + rope_attention(cast(p["attention"]), rms_norm(x, p["attention_norm"]), config.rope_base)
    y = rms_norm(x, p["moe_norm"])
    experts = dropless_experts if config.dropless else dispatched_experts
    y, extra = experts(config, p["router"], cast(p["experts"]), y)
    return x + y, balance + extra


def route(config: Config, router: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For `x[..., d]`: the chosen experts' weights and numbers, `[..., chosen]`, and the load-balancing loss, in float32."""
    logits = x.astype(jnp.float32) @ router
    probabilities = jax.nn.softmax(logits, axis=-1)
    top, experts = jax.lax.top_k(logits, config.chosen)
    weights = jax.nn.softmax(top, axis=-1)
    tokens = tuple(range(x.ndim - 1))
    first = jax.nn.one_hot(experts[..., 0], config.experts)
    balance = config.experts * jnp.sum(jnp.mean(probabilities, axis=tokens) * jnp.mean(first, axis=tokens))
    return weights, experts, balance


def dispatched_experts(config: Config, router: jax.Array, p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts with a capacity. Letters: n groups, m tokens of a group, c choices, e experts, q places in an expert."""
    groups = x.reshape(-1, config.group, config.d)
    weights, experts, balance = route(config, router, groups)

    chosen = jax.nn.one_hot(experts, config.experts, dtype=jnp.int32)
    n, m, c, e = chosen.shape
    # First choices of all tokens take their places before any second choice does.
    by_choice = chosen.transpose(0, 2, 1, 3).reshape(n, c * m, e)
    place = (jnp.cumsum(by_choice, axis=1) - 1).reshape(n, c, m, e).transpose(0, 2, 1, 3)
    place = jnp.sum(place * chosen, axis=-1)
    # one_hot gives a row of zeros for a place beyond the capacity: that token is dropped.
    seat = jax.nn.one_hot(place, capacity(config), dtype=COMPUTE)
    chosen = chosen.astype(COMPUTE)
    dispatch = jnp.einsum("nmce,nmcq->nmeq", chosen, seat)
    combine = jnp.einsum("nmc,nmce,nmcq->nmeq", weights.astype(COMPUTE), chosen, seat)

    inputs = jnp.einsum("nmeq,nmd->enqd", dispatch, groups)
    hidden = jax.nn.silu(jnp.einsum("enqd,edf->enqf", inputs, p["gate"]))
    hidden = hidden * jnp.einsum("enqd,edf->enqf", inputs, p["up"])
    outputs = jnp.einsum("enqf,efd->enqd", hidden, p["down"])
    return jnp.einsum("nmeq,enqd->nmd", combine, outputs).reshape(x.shape), balance


def dropless_experts(config: Config, router: jax.Array, p: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Experts without a capacity: tokens sorted by expert, one ragged product for each matrix."""
    tokens = x.reshape(-1, config.d)
    weights, experts, balance = route(config, router, tokens)

    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=config.experts).astype(jnp.int32)
    inputs = jnp.take(tokens, order // config.chosen, axis=0)
    hidden = jax.nn.silu(jax.lax.ragged_dot(inputs, p["gate"], sizes))
    hidden = hidden * jax.lax.ragged_dot(inputs, p["up"], sizes)
    outputs = jax.lax.ragged_dot(hidden, p["down"], sizes)

    outputs = jnp.take(outputs, jnp.argsort(order), axis=0).reshape(*experts.shape, config.d)
    return jnp.einsum("nc,ncd->nd", weights.astype(COMPUTE), outputs).reshape(x.shape), balance
