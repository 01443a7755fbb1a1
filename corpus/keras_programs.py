"""Keras 3 on JAX: a stateless training step with BatchNorm, and models of KerasHub."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

from corpus.registry import Case, normal, program, tokens, training


def _keras() -> Any:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    return keras


def _values(variables: Any, full: bool) -> Any:
    """Returns the values of variables, or, for shapes alone, zeros."""
    return [jnp.zeros(v.shape, v.dtype) if full else jnp.array(v.value) for v in variables]


@program("keras", "train", "test", small=dict(width=16, image=32, batch=16), full=dict(width=128, image=128, batch=512))
def keras_convnet(width: int, image: int, batch: int) -> Case:
    """A Keras network (separable convolutions, BatchNorm) by stateless_call, with its own optimizer."""
    keras = _keras()
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((image, image, 3)),
            layers.Conv2D(width, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.SeparableConv2D(2 * width, 3, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.SeparableConv2D(4 * width, 3, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.AdamW(1e-3)
    optimizer.build(model.trainable_variables)

    def step(trainable: Any, fixed: Any, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(trainable: Any) -> Any:
            logits, moved = model.stateless_call(trainable, fixed, images, training=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), moved

        (value, moved), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
        trainable, state = optimizer.stateless_apply(state, gradients, trainable)
        return trainable, moved, state, value

    def make() -> tuple[Any, ...]:
        variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        data = normal(batch, image, image, 3)(), tokens(batch, below=10)()
        return *(_values(v, False) for v in variables), *data

    return Case(step, make, donate=(0, 1, 2))


@program(
    "keras-hub",
    "train",
    "fit",
    small=dict(layers=2, width=64, heads=4, groups=2, vocabulary=512, batch=8, length=32),
    full=dict(layers=18, width=2048, heads=8, groups=1, vocabulary=32000, batch=32, length=1024),
)
def keras_hub_gemma(layers: int, width: int, heads: int, groups: int, vocabulary: int, batch: int, length: int) -> Case:
    """The Gemma backbone of KerasHub by stateless_call, tied output; Adafactor."""
    keras = _keras()
    import keras_hub

    full = width > 64
    with keras.device("cpu"):
        model = keras_hub.models.GemmaBackbone(
            vocabulary_size=vocabulary,
            num_layers=layers,
            num_query_heads=heads,
            num_key_value_heads=groups,
            hidden_dim=width,
            intermediate_dim=4 * width,
            head_dim=width // heads,
        )

    def loss(trainable: Any, fixed: Any, text: jax.Array) -> jax.Array:
        inputs = {"token_ids": text, "padding_mask": jnp.ones_like(text)}
        hidden, _ = model.stateless_call(trainable, fixed, inputs)
        logits = hidden @ trainable[0].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean()

    params, fixed = (lambda v=v: _values(v, full) for v in (model.trainable_variables, model.non_trainable_variables))
    return training(loss, optax.adafactor(1e-3), params, fixed, tokens(batch, length, below=vocabulary))


@program(
    "keras-hub",
    "infer",
    "fit",
    small=dict(layers=2, width=64, heads=4, patch=8, image=32, batch=8),
    full=dict(layers=12, width=768, heads=12, patch=16, image=224, batch=256),
)
def keras_hub_vit(layers: int, width: int, heads: int, patch: int, image: int, batch: int) -> Case:
    """The vision transformer backbone of KerasHub by stateless_call."""
    _keras()
    import keras_hub

    model = keras_hub.models.ViTBackbone(
        image_shape=(image, image, 3),
        patch_size=patch,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=width,
        mlp_dim=4 * width,
    )

    def encode(trainable: Any, fixed: Any, images: jax.Array) -> jax.Array:
        return model.stateless_call(trainable, fixed, images)[0]

    def make() -> tuple[Any, ...]:
        weights = (_values(v, False) for v in (model.trainable_variables, model.non_trainable_variables))
        return *weights, normal(batch, image, image, 3)()

    return Case(encode, make)
