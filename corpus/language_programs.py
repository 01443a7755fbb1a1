"""Language models of Tunix (nnx), quantized by Qwix, and private training by JAX Privacy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


def _next_token(logits: jax.Array, text: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()


def _causal(batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    return positions, jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))


@program(
    "google-tunix",
    "train",
    "test",
    small=dict(layers=2, width=64, hidden=128, heads=4, groups=2, vocabulary=512, batch=8, length=32),
    full=dict(layers=16, width=2048, hidden=8192, heads=32, groups=8, vocabulary=128256, batch=32, length=1024),
)
def tunix_llama3(
    layers: int, width: int, hidden: int, heads: int, groups: int, vocabulary: int, batch: int, length: int
) -> Case:
    """Llama 3 of Tunix, an nnx model split into graph and state; fine-tuning with AdamW."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    config = llama3.ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=width,
        hidden_dim=hidden,
        num_heads=heads,
        head_dim=width // heads,
        num_kv_heads=groups,
        rope_theta=500_000,
        norm_eps=1e-5,
        weight_tying=True,
    )

    def create() -> Any:
        return llama3.Llama3(config, rngs=nnx.Rngs(0))

    graph, _ = nnx.split(nnx.eval_shape(create))

    def loss(params: Any, text: jax.Array) -> jax.Array:
        positions, mask = _causal(batch, length)
        return _next_token(nnx.merge(graph, params)(text, positions, None, mask)[0], text)

    def params() -> Any:
        return nnx.to_pure_dict(nnx.split(create())[1])

    text = tokens(batch, length, below=vocabulary)
    return training(loss, optax.adamw(1e-4), params, text)


@program(
    "google-tunix",
    "infer",
    "test",
    small=dict(layers=2, width=64, hidden=128, heads=4, groups=2, vocabulary=512, batch=8, length=32),
    full=dict(layers=28, width=2048, hidden=6144, heads=16, groups=8, vocabulary=151936, batch=64, length=2048),
)
def tunix_qwen3_decode(
    layers: int, width: int, hidden: int, heads: int, groups: int, vocabulary: int, batch: int, length: int
) -> Case:
    """Qwen 3 of Tunix: one step of decoding with a key-value cache."""
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=layers,
        vocab_size=vocabulary,
        embed_dim=width,
        hidden_dim=hidden,
        num_heads=heads,
        head_dim=width // heads,
        num_kv_heads=groups,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )

    def create() -> Any:
        return qwen3.Qwen3(config, rngs=nnx.Rngs(0))

    graph, _ = nnx.split(nnx.eval_shape(create))

    def step(params: Any, cache: Any, token: jax.Array, position: jax.Array) -> Any:
        mask = (jnp.arange(length) <= position)[:, None]
        logits, cache = nnx.merge(graph, params)(token, position, cache, mask)
        return jnp.argmax(logits[:, -1:], -1), cache

    def make() -> tuple[Any, ...]:
        heads_shape = batch, length, groups, width // heads
        cache = {
            f"layer_{n}": {
                "k": jnp.zeros(heads_shape),
                "v": jnp.zeros(heads_shape),
                "end_index": jnp.full((batch,), length // 2, jnp.int32),
            }
            for n in range(layers)
        }
        position = jnp.full((batch, 1), length // 2, jnp.int32)
        return nnx.to_pure_dict(nnx.split(create())[1]), cache, tokens(batch, 1, below=vocabulary)(), position

    return Case(step, make, donate=(1,))


@program(
    "qwix",
    "infer",
    "test",
    small=dict(width=64, hidden=256, batch=16),
    full=dict(width=4096, hidden=16384, batch=4096),
)
def qwix_int8(width: int, hidden: int, batch: int) -> Case:
    """An MLP of Flax linen quantized after training by Qwix: int8 weights and activations."""
    import qwix
    from flax import linen as nn

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                x = x + nn.Dense(width, use_bias=False)(nn.gelu(nn.Dense(hidden, use_bias=False)(x)))
            return x

    rules = [qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)]
    plain = Mlp()
    model = qwix.quantize_model(plain, qwix.PtqProvider(rules))
    x = normal(batch, width)

    def make() -> tuple[Any, ...]:
        params = plain.init(jax.random.key(0), x())["params"]
        shapes = jax.eval_shape(model.init, jax.random.key(0), x())["params"]
        return qwix.quantize_params(params, shapes), x()

    return Case(lambda params, x: model.apply({"params": params}, x), make)


@program(
    "qwix",
    "train",
    "fit",
    small=dict(width=64, hidden=256, batch=16),
    full=dict(width=4096, hidden=16384, batch=4096),
)
def qwix_lora(width: int, hidden: int, batch: int) -> Case:
    """LoRA by Qwix on an MLP of Flax linen: only the adapters are trained; AdamW."""
    import qwix
    from flax import linen as nn

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(2):
                x = x + nn.Dense(width, use_bias=False)(nn.gelu(nn.Dense(hidden, use_bias=False)(x)))
            return x

    provider = qwix.LoraProvider([qwix.LoraRule(module_path=".*", rank=8, alpha=16.0)])
    model = qwix.apply_lora_to_model(Mlp(), provider)
    optimizer = optax.adamw(1e-3)

    def is_adapter(path: Any) -> bool:
        return "lora" in jax.tree_util.keystr(path)

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        frozen = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if not is_adapter(path)]
        trained = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_adapter(path)]
        tree = jax.tree_util.tree_structure(params)
        paths = [is_adapter(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

        def merged(trained: Any) -> Any:
            first, second = iter(trained), iter(frozen)
            return jax.tree_util.tree_unflatten(tree, [next(first) if p else next(second) for p in paths])

        def loss(trained: Any) -> jax.Array:
            return jnp.mean((model.apply({"params": merged(trained)}, x) - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(gradients, state, trained)
        return merged(optax.apply_updates(trained, updates)), state, value

    def make() -> tuple[Any, ...]:
        x = normal(batch, width)()
        params = model.init(jax.random.key(0), x)["params"]
        trained = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params) if is_adapter(path)]
        return params, optimizer.init(trained), x, normal(batch, width, seed=5)()

    return Case(step, make, donate=(0, 1))


@program(
    "jax-privacy",
    "train",
    "fit",
    small=dict(width=64, hidden=128, batch=16),
    full=dict(width=1024, hidden=4096, batch=1024),
)
def privacy_dp_sgd(width: int, hidden: int, batch: int) -> Case:
    """DP-SGD of JAX Privacy: gradients clipped for each example, Gaussian noise; SGD."""
    import jax_privacy

    optimizer = optax.sgd(0.1)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out = jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    gradient = jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2), normalize_by=batch)
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(stddev=1.0 / batch, prng_key=jax.random.key(7))

    def step(params: Any, noise: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        noisy, noise = privatizer.update(gradient(params, x, y), noise)
        updates, state = optimizer.update(noisy, state, params)
        return optax.apply_updates(params, updates), noise, state

    def make() -> tuple[Any, ...]:
        params = {
            "up": 0.1 * normal(width, hidden)(),
            "bias": jnp.zeros(hidden),
            "down": 0.1 * normal(hidden, 16, seed=4)(),
        }
        x, y = normal(batch, width)(), tokens(batch, below=16)()
        return params, privatizer.init(params), optimizer.init(params), x, y

    return Case(step, make, donate=(0, 1, 2))
