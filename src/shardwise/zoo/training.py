"""From a loss and descriptions of its arguments to a full training step with Adam.

Parameters, gradients and both moments are float32, as in common mixed-precision practice; the models cast to
bfloat16 where they compute.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from .program import TrainingConfig, ZooProgram
from .specs import Tree, abstract, concrete, zeros


def optimizer() -> optax.GradientTransformation:
    """AdamW with the usual constants of language-model training."""
    return optax.adamw(learning_rate=3e-4, b1=0.9, b2=0.95, weight_decay=0.1)


def moments(params: Tree) -> Tree:
    """Returns the description of `optimizer().init(params)`, which is zeros."""
    state = jax.eval_shape(optimizer().init, abstract(params))
    return jax.tree.map(lambda leaf: zeros(*leaf.shape, dtype=leaf.dtype), state)


def program(fn: Callable[..., Any], donate: tuple[int, ...] = (), **trees: Tree) -> ZooProgram:
    """The program of a function whose arguments have these roles, as trees of `Leaf`s."""

    def make(seed: int) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        return tuple(concrete(tree, rng) for tree in trees.values())

    args = tuple(map(abstract, trees.values()))
    return ZooProgram(fn=fn, args=args, donate_argnums=donate, roles=tuple(trees), _make=make)


def training(
    config: TrainingConfig, loss_fn: Callable[[Tree, Tree], jax.Array], params: Tree, batch: Tree
) -> ZooProgram:
    """The training step of `loss_fn`, or the loss alone where the configuration says `train=False`."""
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
