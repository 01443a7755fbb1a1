"""An inference transformer (PartIR's IT32): prefill of a prompt, greedy decode loop on a key-value cache.

Multi-query attention: one key and value head, so the cache has no head dimension. Weights are bfloat16, as
served. Letters: b batch, s new positions, t cached positions, d model, h heads, k head dimension, f hidden.
"""

from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, rms_norm, rope
from .program import Config, ZooError, ZooProgram
from .specs import Tree, constant, integers, layered, normal, ones, program, weight

MODES = ("decode", "prefill", "step")


def build(config: Config) -> ZooProgram:
    """Returns the program of the configuration's mode. The cache has room for the prompt and for the generated tokens."""
    if config.mode not in MODES:
        raise ZooError(f"itx has no mode {config.mode!r}. There are: {', '.join(MODES)}")

    def prefill(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache_spec(config))
        return forward(params, cache, batch["tokens"], jnp.zeros((), jnp.int32))

    def decode(params: Tree, cache: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        """Returns the likeliest next tokens, `[b, generate]`."""

        def step(carry: tuple[Tree, Tree], _: None) -> tuple[tuple[Tree, Tree], jax.Array]:
            cache, last = carry
            tokens, cache = decode_step(params, cache, last)
            return (cache, {"tokens": tokens, "position": last["position"] + 1}), tokens

        (cache, _), tokens = jax.lax.scan(step, (cache, batch), None, length=config.generate)
        return tokens.T, cache

    params = {
        "embed": normal(config.vocab, config.d, scale=0.02, dtype=COMPUTE),
        "layers": layered(layer_spec(config), config.layers, config.scan),
        "final_norm": ones(config.d),
        "head": weight(config.d, config.vocab, fan_in=config.d, dtype=COMPUTE),
    }
    if config.mode == "prefill":
        prompt = {"tokens": integers(config.batch, config.seq, below=config.vocab)}
        return program(prefill, params=params, batch=prompt)
    tokens, position = integers(config.batch, below=config.vocab), constant(value=config.seq, dtype=jnp.int32)
    last = {"tokens": tokens, "position": position}
    run = decode_step if config.mode == "step" else decode
    return program(run, (1,), params=params, cache=cache_spec(config), batch=last)


def layer_spec(config: Config) -> Tree:
    d, h, k, f = config.d, config.heads, config.head, config.ffn
    matrix = partial(weight, dtype=COMPUTE)
    return {
        "attention_norm": ones(d),
        "q": matrix(d, h, k, fan_in=d),
        "k": matrix(d, k, fan_in=d),
        "v": matrix(d, k, fan_in=d),
        "o": matrix(h, k, d, fan_in=h * k),
        "mlp_norm": ones(d),
        "up": matrix(d, f, fan_in=d),
        "down": matrix(f, d, fan_in=f),
    }


def cache_spec(config: Config) -> Tree:
    """Returns the cache: stacked or a tuple, as the layers are. Its values stand for a prompt's keys and values."""
    one = normal(config.batch, config.seq + config.generate, config.head, dtype=COMPUTE)
    return layered({"k": one, "v": one}, config.layers, config.scan)


def layer(p: Tree, cache: Tree, x: jax.Array, position: jax.Array) -> tuple[jax.Array, Tree]:
    """New positions `x[b, s, d]` from `position` on go into the cache and look at all up to them."""
    y = rms_norm(x, p["attention_norm"])
    positions = position + jnp.arange(x.shape[1])
    q = rope(jnp.einsum("bsd,dhk->bshk", y, p["q"]), positions)
    k = rope(jnp.einsum("bsd,dk->bsk", y, p["k"])[:, :, None, :], positions)[:, :, 0, :]
    v = jnp.einsum("bsd,dk->bsk", y, p["v"])
    keys = jax.lax.dynamic_update_slice_in_dim(cache["k"], k, position, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(cache["v"], v, position, axis=1)

    scores = jnp.einsum("bshk,btk->bhst", q, keys).astype(jnp.float32) * q.shape[-1] ** -0.5
    seen = jnp.arange(keys.shape[1])[None, :] <= positions[:, None]
    probabilities = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(x.dtype)
    y = jnp.einsum("bhst,btk->bshk", probabilities, values)
    x = x + jnp.einsum("bshk,hkd->bsd", y, p["o"])

    hidden = jax.nn.gelu(jnp.einsum("bsd,df->bsf", rms_norm(x, p["mlp_norm"]), p["up"]))
    return x + jnp.einsum("bsf,fd->bsd", hidden, p["down"]), {"k": keys, "v": values}


def forward(params: Tree, cache: Tree, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Tree]:
    """Logits `[b, v]` after the last of `tokens[b, s]`, and the cache with these tokens in it."""
    x = jnp.take(params["embed"], tokens, axis=0)
    if isinstance(cache, tuple):
        filled = []
        for p, one in zip(params["layers"], cache, strict=True):
            x, one = layer(p, one, x, position)
            filled.append(one)
        cache = tuple(filled)
    else:
        x, cache = jax.lax.scan(lambda x, pc: layer(*pc, x, position), x, (params["layers"], cache))
    last = rms_norm(x[:, -1], params["final_norm"])
    return (last @ params["head"]).astype(jnp.float32), cache


def decode_step(params: Tree, cache: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
    """Returns the most likely next token of each sequence."""
    logits, cache = forward(params, cache, batch["tokens"][:, None], batch["position"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache
