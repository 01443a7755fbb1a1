"""DeepSeek-V3 shaped decoder (arXiv 2412.19437): many small experts, one that every token takes, and latent attention.

Attention compresses queries and keys with values to small latents. Rotary positions are on a few extra dimensions of each
query head, and on one key head that all query heads share. The first layers have dense MLPs; the others have the experts of
`mixtral`, by capacity or dropless. Routing is Mixtral's softmax with its load-balancing loss, and there is no prediction of
further tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp

from .decoder import untied_logits
from .layers import COMPUTE, attention, cast, causal_mask, cross_entropy, gated_mlp, rms_norm, rope, run_layers
from .mixtral import dispatched_experts, dropless_experts
from .program import Config, ZooError, ZooProgram, require_divisible
from .specs import Leaf, Tree, layered, normal, ones, token_batch, training, weight


def build(config: Config) -> ZooProgram:
    require_divisible("tokens by group", config.batch * config.seq, config.group)
    require_divisible("rope by two", config.rope, 2)
    if config.chosen > config.experts or config.dense >= config.layers:
        raise ZooError(f"{config.chosen} of {config.experts} experts, {config.dense} of {config.layers} layers dense")
    d, e, f = config.d, config.experts, config.ffn
    common = {"attention_norm": ones(d), "attention": attention_spec(config), "mlp_norm": ones(d)}
    experts = {"gate": weight(e, d, f, fan_in=d), "up": weight(e, d, f, fan_in=d), "down": weight(e, f, d, fan_in=f)}
    moe = {"router": weight(d, e, fan_in=d), "experts": experts, "shared": mlp_spec(d, f)}
    params = {
        "embed": normal(config.vocab, d, scale=0.02),
        "dense": layered(common | {"mlp": mlp_spec(d, config.dense_ffn)}, config.dense, config.scan),
        "layers": layered(common | moe, config.layers - config.dense, config.scan),
        "final_norm": ones(d),
        "head": weight(d, config.vocab, fan_in=d),
    }
    return training(config, partial(loss, config), params, token_batch(config.batch, config.seq, config.vocab))


def mlp_spec(d: int, f: int) -> dict[str, Leaf]:
    return {"gate": weight(d, f, fan_in=d), "up": weight(d, f, fan_in=d), "down": weight(f, d, fan_in=f)}


def attention_spec(config: Config) -> dict[str, Leaf]:
    """`down` leads to a latent, `up` from it to heads. Norms are float32 and cast with the rest."""
    d, h, q, kv = config.d, config.heads, config.q_rank, config.kv_rank
    return {
        "q_down": weight(d, q, fan_in=d),
        "q_norm": ones(q),
        "q_up": weight(q, h, config.head + config.rope, fan_in=q),
        "kv_down": weight(d, kv, fan_in=d),
        "kv_norm": ones(kv),
        "k_rope": weight(d, config.rope, fan_in=d),
        "k_up": weight(kv, h, config.head, fan_in=kv),
        "v_up": weight(kv, h, config.head, fan_in=kv),
        "o": weight(h, config.head, d, fan_in=h * config.head),
    }


def latent_attention(config: Config, p: Tree, x: jax.Array) -> jax.Array:
    """Causal self-attention; `p` as in `attention_spec`."""
    positions = jnp.arange(x.shape[1])
    latent = rms_norm(jnp.einsum("bsd,dr->bsr", x, p["q_down"]), p["q_norm"])
    q, q_rope = jnp.split(jnp.einsum("bsr,rhk->bshk", latent, p["q_up"]), [config.head], axis=-1)
    latent = rms_norm(jnp.einsum("bsd,dr->bsr", x, p["kv_down"]), p["kv_norm"])
    k, v = (jnp.einsum("bsr,rhk->bshk", latent, p[name]) for name in ("k_up", "v_up"))
    k_rope = rope(jnp.einsum("bsd,dk->bsk", x, p["k_rope"])[:, :, None], positions, config.rope_base)
    q = jnp.concatenate([q, rope(q_rope, positions, config.rope_base)], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(k_rope, (*k.shape[:3], config.rope))], axis=-1)
    return jnp.einsum("bshk,hkd->bsd", attention(q, k, v, mask=causal_mask(x.shape[1])), p["o"])


def dense_layer(config: Config, p: Tree, x: jax.Array) -> jax.Array:
    x = x + latent_attention(config, cast(p["attention"]), rms_norm(x, p["attention_norm"]))
    return x + gated_mlp(cast(p["mlp"]), rms_norm(x, p["mlp_norm"]), jax.nn.silu)


def layer(config: Config, p: Tree, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Applies a layer of experts; the carry is the activations and the load-balancing loss so far."""
    x, balance = carry
    x = x + latent_attention(config, cast(p["attention"]), rms_norm(x, p["attention_norm"]))
    y = rms_norm(x, p["mlp_norm"])
    experts = dropless_experts if config.dropless else dispatched_experts
    routed, extra = experts(config, p["router"], cast(p["experts"]), y)
    return x + routed + gated_mlp(cast(p["shared"]), y, jax.nn.silu), balance + extra


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Next-token cross entropy plus the load-balancing loss of the routers."""
    x = jnp.take(params["embed"], batch["inputs"], axis=0).astype(COMPUTE)
    x = run_layers(partial(dense_layer, config), params["dense"], x, remat=config.remat)
    carry = (x, jnp.zeros((), jnp.float32))
    x, balance = run_layers(partial(layer, config), params["layers"], carry, remat=config.remat)
    penalty: jax.Array = config.aux_weight * balance / (config.layers - config.dense)
    return cross_entropy(untied_logits(params, x), batch["targets"]) + penalty
