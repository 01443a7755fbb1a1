"""Trees of array descriptions, from which shapes and concrete values are made, and training steps with Adam.

A model states its parameters and its batch once, as a pytree of `Leaf`s. `abstract` turns the tree into
`jax.ShapeDtypeStruct`s (nothing is allocated, whatever the size) and `concrete` into arrays drawn with NumPy,
which is much faster than compiling an initializer for every shape. Parameters, gradients and both moments are
float32, as in common mixed-precision practice; the models cast to bfloat16 where they compute.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .program import Config, ZooProgram

Tree = Any
"""A pytree; its leaves are `Leaf`s, shapes or arrays, as the context says."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array, and how its values are drawn for a shape."""

    shape: tuple[int, ...]
    dtype: Any
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(*shape: int, scale: float = 1.0, dtype: Any = jnp.float32) -> Leaf:
    """Gaussian values: features, images, embeddings."""
    return Leaf(shape, dtype, lambda rng, shape: np.asarray(rng.normal(0.0, scale, shape)))


def weight(*shape: int, fan_in: int, dtype: Any = jnp.float32) -> Leaf:
    """Returns a weight with variance `1/fan_in`."""
    return normal(*shape, scale=1.0 / math.sqrt(fan_in), dtype=dtype)


def constant(*shape: int, value: float | tuple[float, ...], dtype: Any = jnp.float32) -> Leaf:
    """`value`, broadcast to the shape."""
    return Leaf(shape, dtype, lambda _, shape: np.broadcast_to(np.asarray(value), shape))


def zeros(*shape: int, dtype: Any = jnp.float32) -> Leaf:
    """Returns a bias, or a scale that is stored as its distance from one."""
    return constant(*shape, value=0.0, dtype=dtype)


def ones(*shape: int) -> Leaf:
    """Returns a normalization scale."""
    return constant(*shape, value=1.0)


def integers(*shape: int, below: int | tuple[int, ...]) -> Leaf:
    """Indices in range: token ids, class labels, node numbers. `below` is broadcast to the shape: columns may differ."""
    return Leaf(shape, jnp.int32, lambda rng, shape: np.asarray(rng.integers(0, np.asarray(below, np.int64), shape)))


def dense_spec(inputs: int, outputs: int) -> dict[str, Leaf]:
    """Kernel and bias of a dense layer."""
    return {"kernel": weight(inputs, outputs, fan_in=inputs), "bias": zeros(outputs)}


def mlp_spec(*sizes: int) -> list[Tree]:
    """Returns the parameters of dense layers, one between each two sizes."""
    return [dense_spec(i, o) for i, o in pairwise(sizes)]


def norm_spec(features: int) -> dict[str, Leaf]:
    """Scale and bias of a LayerNorm."""
    return {"scale": ones(features), "bias": zeros(features)}


def token_batch(batch: int, seq: int, vocab: int) -> dict[str, Leaf]:
    """Token ids and the ids that follow them."""
    return {"inputs": integers(batch, seq, below=vocab), "targets": integers(batch, seq, below=vocab)}


def image_batch(batch: int, image: int, classes: int) -> dict[str, Leaf]:
    return {"images": normal(batch, image, image, 3), "labels": integers(batch, below=classes)}


def layered(layer: Tree, layers: int, scan: bool) -> Tree:
    """Returns the parameters of equal layers: stacked on a leading dimension if `scan`, else a tuple of trees."""
    if not scan:
        return (layer,) * layers
    return jax.tree.map(lambda leaf: replace(leaf, shape=(layers, *leaf.shape)), layer)


_struct: Any = jax.ShapeDtypeStruct  # JAX has not annotated it.


def abstract(tree: Tree) -> Tree:
    """Returns the tree with every `Leaf` as a `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: _struct(leaf.shape, leaf.dtype), tree)


def concrete(tree: Tree, rng: np.random.Generator) -> Tree:
    """Returns the tree with every `Leaf` as an array."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf.draw(rng, leaf.shape).astype(leaf.dtype)), tree)


def optimizer() -> optax.GradientTransformation:
    """AdamW with the usual constants of language-model training."""
    return optax.adamw(learning_rate=3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def moments(params: Tree) -> Tree:
    """Returns the description of `optimizer().init(params)`, which is zeros."""
    state = jax.eval_shape(optimizer().init, abstract(params))
    return jax.tree.map(lambda leaf: zeros(*leaf.shape, dtype=leaf.dtype), state)


def program(fn: Callable[..., Any], donate: tuple[int, ...] = (), **trees: Tree) -> ZooProgram:
    """Returns the program of a function whose arguments have these roles, as trees of `Leaf`s."""

    def make(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        return tuple(concrete(tree, rng) for tree in trees.values())

    args = tuple(map(abstract, trees.values()))
    return ZooProgram(fn=fn, args=args, donate_argnums=donate, roles=tuple(trees), _make=make)


def training(config: Config, loss_fn: Callable[[Tree, Tree], jax.Array], params: Tree, batch: Tree) -> ZooProgram:
    """Returns the training step of `loss_fn`, or the loss alone where the configuration says `train=False`."""
    adam = optimizer()

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return loss_fn(params, batch)

    def step(params: Tree, opt_state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = adam.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    if not config.train:
        return program(loss, params=params, batch=batch)
    return program(step, (0, 1), params=params, optimizer=moments(params), batch=batch)
