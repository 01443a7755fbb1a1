"""Flax linen and nnx layers as documented: ``nn.scan`` over remat blocks, ``nn.RNN``, decoding, ``nnx.Optimizer``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from .program import (
    Program,
    Step,
    apart,
    conflicts,
    deciding_groups,
    exactly,
    loop,
    no_conflict,
    one_color,
    random_key,
    shape,
    tokens,
    training,
)

BATCH, SEQ, MODEL, HEADS, HIDDEN, VOCAB = 16, 128, 512, 8, 2048, 32_000


def _next_token_loss(logits: jax.Array, text: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()


def linen_language_model() -> tuple[Step, tuple[Any, ...]]:
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
            x = x + nn.MultiHeadDotProductAttention(HEADS, qkv_features=MODEL)(nn.LayerNorm()(x), mask=mask)
            return x + nn.Dense(MODEL)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, text: jax.Array) -> jax.Array:
            embed = nn.Embed(VOCAB, MODEL)
            stack = nn.scan(
                nn.remat(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=6,
                in_axes=nn.broadcast,
            )
            x, _ = stack()(embed(text), nn.make_causal_mask(text))
            return embed.attend(nn.LayerNorm()(x))

    model, text = Model(), tokens(BATCH, SEQ)
    params = jax.eval_shape(model.init, jax.random.key(0), text)["params"]
    return training(lambda p, t: _next_token_loss(model.apply({"params": p}, t), t), optax.adamw(1e-3), params, text)


def linen_recurrent() -> tuple[Step, tuple[Any, ...]]:
    from flax import linen as nn

    model = nn.Bidirectional(nn.RNN(nn.LSTMCell(256)), nn.RNN(nn.GRUCell(256)))
    series = shape(64, 100, 80)
    params = jax.eval_shape(model.init, jax.random.key(0), series)["params"]
    return training(lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2), optax.adafactor(1e-3), params, series)


def linen_decode() -> tuple[Step, tuple[Any, ...]]:
    from flax import linen as nn

    model = nn.MultiHeadDotProductAttention(HEADS, qkv_features=MODEL, decode=True)
    variables = jax.eval_shape(model.init, jax.random.key(0), shape(BATCH, 256, MODEL))

    def step(params: Any, cache: Any, x: jax.Array) -> Any:
        return model.apply({"params": params, "cache": cache}, x, mutable=["cache"])

    return step, (variables["params"], variables["cache"], shape(BATCH, 1, MODEL))


def linen_autoencoder() -> tuple[Step, tuple[Any, ...]]:
    from flax import linen as nn

    class Autoencoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for features in (64, 128):
                x = nn.relu(nn.GroupNorm(8)(nn.Conv(features, (3, 3), strides=2)(x)))
            for features in (64, 32):
                x = nn.relu(nn.LayerNorm()(nn.ConvTranspose(features, (3, 3), strides=(2, 2))(x)))
            return nn.Conv(3, (3, 3), feature_group_count=1)(x)

    model, images = Autoencoder(), shape(32, 64, 64, 3)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    return training(
        lambda p, x: jnp.mean((model.apply({"params": p}, x) - x) ** 2), optax.sgd(0.1, 0.9), params, images
    )


def nnx_language_model() -> tuple[Step, tuple[Any, ...]]:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.before, self.between = nnx.RMSNorm(MODEL, rngs=rngs), nnx.RMSNorm(MODEL, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS, MODEL, decode=False, dropout_rate=0.1, deterministic=False, rngs=rngs
            )
            self.up = nnx.LoRALinear(MODEL, HIDDEN, lora_rank=16, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, MODEL, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.before(x))
            return x + self.down(jax.nn.silu(self.up(self.between(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(VOCAB, MODEL, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])
            self.out = nnx.Linear(MODEL, VOCAB, rngs=rngs)

        def __call__(self, text: jax.Array) -> jax.Array:
            x = self.embed(text)
            for block in self.blocks:
                x = block(x)
            return self.out(x)

    def make() -> tuple[Any, Any]:
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(make)
    model_graph, params = nnx.split(model)
    optimizer_graph, state = nnx.split(optimizer)

    def step(params: Any, state: Any, text: jax.Array) -> Any:
        model, optimizer = nnx.merge(model_graph, params), nnx.merge(optimizer_graph, state)
        loss, gradients = nnx.value_and_grad(lambda m: _next_token_loss(m(text), text))(model)
        optimizer.update(model, gradients)
        return nnx.state(model), nnx.state(optimizer), loss

    return step, (params, state, tokens(BATCH, SEQ))


def nnx_convolutional() -> tuple[Step, tuple[Any, ...]]:
    from flax import nnx

    class CNN(nnx.Module):
        """The model of Flax's MNIST tutorial."""

        def __init__(self, rngs: nnx.Rngs):
            self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
            self.batch_norm1 = nnx.BatchNorm(32, rngs=rngs)
            self.dropout1 = nnx.Dropout(rate=0.025)
            self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
            self.batch_norm2 = nnx.BatchNorm(64, rngs=rngs)
            self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
            self.dropout2 = nnx.Dropout(rate=0.025)
            self.linear2 = nnx.Linear(256, 10, rngs=rngs)

        def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> jax.Array:
            x = nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs)))
            x = nnx.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
            x = nnx.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))), window_shape=(2, 2), strides=(2, 2))
            x = nnx.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1)), rngs=rngs))
            return self.linear2(x)

    graph, params, statistics = nnx.split(nnx.eval_shape(lambda: CNN(nnx.Rngs(0))), nnx.Param, ...)

    def gradients(params: Any, statistics: Any, batch: Any, key: jax.Array) -> Any:
        def loss(model: CNN) -> jax.Array:
            logits = model(batch["image"], nnx.Rngs(dropout=key))
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        model = nnx.merge(graph, params, statistics)
        value, found = nnx.value_and_grad(loss)(model)
        return value, found, nnx.state(model, nnx.BatchStat)

    batch = {"image": shape(256, 28, 28, 1), "label": tokens(256)}
    return gradients, (params, statistics, batch, random_key())


_BLOCK = "params/ScanCheckpointBlock_0"
_ATTENTION = f"{_BLOCK}/MultiHeadDotProductAttention_0"

PROGRAMS = (
    Program(
        "linen-language-model",
        "flax",
        "a linen decoder, nn.scan over nn.remat blocks, tied embedding, AdamW",
        linen_language_model,
        (
            exactly("batch[0]"),
            exactly("batch[1]"),
            loop(f"{_ATTENTION}/*/kernel[0]"),
            one_color("params/Embed_0/embedding[1]", f"{_ATTENTION}/query/kernel[1]", f"{_ATTENTION}/out/kernel[3]"),
            one_color(f"{_ATTENTION}/query/kernel[2]", f"{_ATTENTION}/value/kernel[2]", f"{_ATTENTION}/out/kernel[1]"),
            apart(f"{_ATTENTION}/query/kernel[3]", f"{_ATTENTION}/value/kernel[3]", f"{_BLOCK}/Dense_1/kernel[2]"),
            one_color("params/Embed_0/embedding[0]", "state/0/*/Embed_0/embedding[0]"),
            conflicts(1, 1, "batch[1]"),
            deciding_groups(8),
        ),
    ),
    Program(
        "linen-recurrent",
        "flax",
        "linen Bidirectional of RNN(LSTMCell) and RNN(GRUCell), Adafactor",
        linen_recurrent,
        (
            exactly("batch[0]"),
            loop("batch[1]"),
            one_color("batch[2]", "params/forward_rnn/cell/ii/kernel[0]", "params/backward_rnn/cell/in/kernel[0]"),
            apart("batch[0]", "batch[2]", "params/forward_rnn/cell/hi/kernel[0]"),
            conflicts(7, 1, "params/*/cell/h*/kernel[0]"),
            deciding_groups(3),
        ),
    ),
    Program(
        "linen-decode",
        "flax",
        "one step of linen attention with its key-value cache",
        linen_decode,
        (
            exactly("cache/cached_key[0]", "cache/cached_value[0]", "x[0]"),
            exactly("cache/cached_key[1]", "cache/cached_value[1]"),
            one_color("cache/cached_key[2]", "params/query/kernel[1]", "params/out/kernel[0]"),
            apart("cache/cached_key[3]", "cache/cached_value[3]"),
            no_conflict(),
            deciding_groups(7),
        ),
    ),
    Program(
        "linen-autoencoder",
        "flax",
        "strided Conv, GroupNorm, ConvTranspose, LayerNorm; SGD with momentum",
        linen_autoencoder,
        (
            exactly("batch[0]"),
            exactly("batch[1]"),
            exactly("batch[2]"),
            one_color("params/Conv_1/kernel[3]", "params/ConvTranspose_0/kernel[2]"),
            apart("batch[0]", "batch[1]", "batch[2]", "batch[3]", "params/Conv_0/kernel[3]", "params/Conv_1/kernel[3]"),
            no_conflict(),
        ),
    ),
    Program(
        "nnx-language-model",
        "flax",
        "an nnx decoder, unrolled, attention dropout, LoRALinear, nnx.Optimizer",
        nnx_language_model,
        (
            exactly("text[0]"),
            exactly("text[1]"),
            one_color("params/blocks/*/up/kernel/value[0]", "params/blocks/*/up/lora/lora_a/value[0]"),
            one_color("params/blocks/0/up/lora/lora_a/value[1]", "params/blocks/0/up/lora/lora_b/value[0]"),
            apart("params/embed/embedding/value[0]", "params/out/kernel/value[1]"),
            conflicts(4, 1, "text[1]"),
            deciding_groups(10),
        ),
    ),
    Program(
        "nnx-convolutional",
        "flax",
        "the nnx MNIST tutorial's CNN: BatchNorm, dropout, pooling; gradients",
        nnx_convolutional,
        (
            exactly("batch/image[0]", "batch/label[0]"),
            one_color("params/conv2/kernel/value[3]", "params/batch_norm2/scale/value[0]"),
            one_color("params/conv2/kernel/value[2]", "params/conv1/bias/value[0]"),
            no_conflict(),
        ),
    ),
)
