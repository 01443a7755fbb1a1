"""Flax nnx as its documentation writes it: a step under ``nnx.jit`` changes the model, the optimizer and the metrics."""

from __future__ import annotations

from typing import Any

import jax
import optax

from corpus.registry import Case, normal, program, tokens


@program(
    "flax",
    "train",
    "fit",
    small=dict(width=16, batch=32, image=16),
    full=dict(width=256, batch=1024, image=64),
)
def nnx_convnet(width: int, batch: int, image: int) -> Case:
    """An nnx convolutional network: BatchNorm, dropout, MultiMetric; the step changes model, AdamW and metrics."""
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Conv(3, width, (3, 3), rngs=rngs)
            self.second = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
            self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs), nnx.BatchNorm(2 * width, rngs=rngs)])
            self.dropout, self.head = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(2 * width, 100, rngs=rngs)

        def __call__(self, images: jax.Array) -> jax.Array:
            x = nnx.relu(self.norms[0](self.first(images)))
            x = nnx.avg_pool(nnx.relu(self.norms[1](self.second(x))), (2, 2), strides=(2, 2))
            return self.head(self.dropout(x.mean((1, 2))))

    def loss(model: Network, batch: Any) -> tuple[jax.Array, jax.Array]:
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

    def train_step(model: Network, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Any) -> None:
        (value, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(model, batch)
        metrics.update(loss=value, logits=logits, labels=batch["label"])
        optimizer.update(model, gradients)

    def make() -> tuple[Any, ...]:
        model = Network(nnx.Rngs(0, dropout=1))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        examples = {"image": normal(batch, image, image, 3)(), "label": tokens(batch, below=100)()}
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), metrics, examples

    return Case(train_step, make, jit=nnx.jit)


@program(
    "flax",
    "train",
    "fit",
    small=dict(layers=2, width=64, heads=4, vocabulary=512, batch=8, length=32),
    full=dict(layers=16, width=2048, heads=16, vocabulary=32000, batch=64, length=1024),
)
def nnx_lm(layers: int, width: int, heads: int, vocabulary: int, batch: int, length: int) -> Case:
    """An nnx decoder with dropout: layers made by nnx.vmap, run by nnx.scan; the step changes model and Adafactor."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.before, self.between = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
            x = x + self.attention(self.before(x), mask=mask)
            return x + self.dropout(self.down(nnx.gelu(self.up(self.between(x)))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=layers)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.embed, self.blocks = nnx.Embed(vocabulary, width, rngs=rngs), blocks(rngs)
            self.norm = nnx.RMSNorm(width, rngs=rngs)

        def __call__(self, text: jax.Array) -> jax.Array:
            mask = nnx.make_causal_mask(text)

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, block: Block) -> jax.Array:
                return block(x, mask)

            return self.embed.attend(self.norm(run(self.embed(text), self.blocks)))

    def loss(model: Model, text: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(text)[:, :-1], text[:, 1:]).mean()

    def train_step(model: Model, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, text)
        optimizer.update(model, gradients)
        return value

    def make() -> tuple[Any, ...]:
        model = Model(nnx.Rngs(0, dropout=1))
        optimizer = nnx.Optimizer(model, optax.adafactor(1e-3), wrt=nnx.Param)
        return model, optimizer, tokens(batch, length, below=vocabulary)()

    return Case(train_step, make, jit=nnx.jit)
