"""Flax nnx modules as ordinary functions of pytrees.

A module is split into its graph, which is static, and its state, which is the argument: nothing is hidden in
a closure. Abstract state comes from `nnx.eval_shape`, so that no array is made for a full-size model.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from .program import Config, ZooProgram
from .specs import Leaf, Tree, constant, normal, training

Create = Callable[[nnx.Rngs], nnx.Module]


def split(create: Create, *kinds: type[nnx.Variable[Any]]) -> tuple[nnx.GraphDef[Any], *tuple[Tree, ...]]:
    """Returns the graph of the module, and for each kind of variable its state as a tree of `Leaf`s."""
    graph, *states = nnx.split(nnx.eval_shape(lambda: create(nnx.Rngs(0))), *kinds)
    return graph, *(jax.tree_util.tree_map_with_path(_described, state) for state in states)


def _described(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> Leaf:
    name, shape = jax.tree_util.keystr(path), array.shape
    for value, parts in ((1.0, ("scale", "var")), (0.0, ("bias", "mean"))):
        if any(part in name for part in parts):
            return constant(*shape, value=value, dtype=array.dtype)
    return normal(*shape, scale=(math.prod(shape) / shape[-1]) ** -0.5, dtype=array.dtype)


def module_training(
    config: Config, create: Create, loss_fn: Callable[[Any, Tree], jax.Array], batch: Tree
) -> ZooProgram:
    """Returns the training step of a module whose only state is its parameters; `loss_fn(module, batch)`."""
    graph, params = split(create, nnx.Param)
    return training(config, lambda params, batch: loss_fn(nnx.merge(graph, params), batch), params, batch)
