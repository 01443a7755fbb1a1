"""From a loss and descriptions of its arguments to a full training step with Adam.

Parameters, gradients and both moments are float32, as in common mixed-precision practice; the models cast to
bfloat16 where they compute.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from .program import Parts, TrainingConfig
from .specs import Tree, abstract, concrete

Loss = Callable[[Tree, Tree], jax.Array]


def optimizer() -> optax.GradientTransformation:
    """AdamW with the usual constants of language-model training."""
    return optax.adamw(learning_rate=3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def fresh_state(adam: optax.GradientTransformation, params: Tree) -> Tree:
    """Returns the result of `adam.init`, which is zeros; by NumPy, since a compilation for every shape is slow."""
    shapes = jax.eval_shape(adam.init, params)
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)


def train_step(loss_fn: Loss, adam: optax.GradientTransformation) -> Callable[..., Any]:
    """`step(params, opt_state, batch) -> (params, opt_state, loss)`."""

    def step(params: Tree, opt_state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = adam.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def training_parts(
    config: TrainingConfig, loss_fn: Loss, batch: Tree, params: Tree, make_params: Callable[[np.random.Generator], Tree]
) -> Parts:
    """The training step of `loss_fn`, or the loss alone where the configuration says `train=False`.

    Args:
      batch: a tree of `Leaf`s.
      params: a tree of `jax.ShapeDtypeStruct`s, of any pytree type.
      make_params: draws parameters of those shapes.
    """
    adam = optimizer()

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return loss_fn(params, batch)

    def make(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        weights = make_params(rng)
        moments = (fresh_state(adam, weights),) if config.train else ()
        return weights, *moments, concrete(batch, rng)

    if not config.train:
        return Parts(loss, (params, abstract(batch)), ("params", "batch"), (), make)
    args = (params, jax.eval_shape(adam.init, params), abstract(batch))
    return Parts(train_step(loss_fn, adam), args, ("params", "optimizer", "batch"), (0, 1), make)


def training(config: TrainingConfig, loss_fn: Loss, params: Tree, batch: Tree) -> Parts:
    """`training_parts` for a model whose parameters are a tree of `Leaf`s."""
    return training_parts(config, loss_fn, batch, abstract(params), lambda rng: concrete(params, rng))
