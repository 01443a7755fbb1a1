"""Flax nnx modules as ordinary functions of pytrees.

A module is split into its graph, which is static, and its state, which is the argument: nothing is hidden in
a closure. Abstract state comes from `nnx.eval_shape`, so that no array is made for a full-size model.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from .program import Parts, TrainingConfig
from .specs import Tree
from .training import training_parts

Create = Callable[[nnx.Rngs], nnx.Module]


def split_abstract(create: Create, *kinds: type[nnx.Variable[Any]]) -> tuple[nnx.GraphDef[Any], tuple[Tree, ...]]:
    """The graph of the module and its state as shapes, one tree for each kind of variable."""
    graph, *states = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))), *kinds)
    return graph, tuple(states)


def draw(state: Tree, rng: np.random.Generator) -> Tree:
    """State of the given shapes, by NumPy: to compile the modules' initialisers takes longer than a step."""

    def fill(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Any:
        where = jax.tree_util.keystr(path)
        if any(name in where for name in ("scale", "var")):
            return jax.device_put(np.ones(leaf.shape, leaf.dtype))
        if any(name in where for name in ("bias", "mean")):
            return jax.device_put(np.zeros(leaf.shape, leaf.dtype))
        fan_in = math.prod(leaf.shape) / leaf.shape[-1]
        return jax.device_put(rng.normal(0.0, fan_in**-0.5, leaf.shape).astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(fill, state)


def module_training(
    config: TrainingConfig, create: Create, loss_fn: Callable[[Any, Tree], jax.Array], batch: Tree
) -> Parts:
    """The training step of a module whose only state is its parameters; `loss_fn(module, batch)`."""
    graph, (params,) = split_abstract(create, nnx.Param)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return loss_fn(nnx.merge(graph, params), batch)

    return training_parts(config, loss, batch, params, partial(draw, params))
