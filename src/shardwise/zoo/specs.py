"""Trees of array descriptions, from which both shapes and concrete values are made.

A model states its parameters and its batch once, as a pytree of `Leaf`s. `abstract` turns the tree into
`jax.ShapeDtypeStruct`s (nothing is allocated, whatever the size) and `concrete` into arrays drawn with NumPy,
which is much faster than compiling an initialiser for every shape.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
"""A pytree; its leaves are `Leaf`s, shapes or arrays, as the context says."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array: `fill` says what `value` means.

    - `normal`: `value` is the standard deviation;
    - `constant`: `value` is broadcast to the shape;
    - `integer`: uniform below `value` (broadcast to the shape, so that columns may have ranges of their own).
    """

    shape: tuple[int, ...]
    dtype: Any
    fill: Literal["normal", "constant", "integer"]
    value: float | tuple[float, ...]


def weight(*shape: int, fan_in: int, dtype: Any = jnp.float32) -> Leaf:
    """A weight with variance `1/fan_in`."""
    return Leaf(shape, dtype, "normal", 1.0 / math.sqrt(fan_in))


def normal(*shape: int, scale: float = 1.0, dtype: Any = jnp.float32) -> Leaf:
    """Gaussian values: features, images, embeddings."""
    return Leaf(shape, dtype, "normal", scale)


def constant(*shape: int, value: float | tuple[float, ...], dtype: Any = jnp.float32) -> Leaf:
    """`value`, broadcast to the shape."""
    return Leaf(shape, dtype, "constant", value)


def zeros(*shape: int, dtype: Any = jnp.float32) -> Leaf:
    """A bias, or a scale that is stored as its distance from one."""
    return constant(*shape, value=0.0, dtype=dtype)


def ones(*shape: int, dtype: Any = jnp.float32) -> Leaf:
    """A normalisation scale."""
    return constant(*shape, value=1.0, dtype=dtype)


def integers(*shape: int, below: int | tuple[int, ...]) -> Leaf:
    """Indices in range: token ids, class labels, node numbers."""
    return Leaf(shape, jnp.int32, "integer", below)


def layered(layer: Tree, layers: int, scan: bool) -> Tree:
    """The parameters of equal layers: stacked on a leading dimension if `scan`, else a tuple of trees."""
    if not scan:
        return (layer,) * layers
    return jax.tree.map(lambda leaf: replace(leaf, shape=(layers, *leaf.shape)), layer)


_struct: Any = jax.ShapeDtypeStruct  # JAX has not annotated it.


def abstract(tree: Tree) -> Tree:
    """The tree with every `Leaf` as a `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: _struct(leaf.shape, leaf.dtype), tree)


def concrete(tree: Tree, rng: np.random.Generator) -> Tree:
    """The tree with every `Leaf` as an array."""
    return jax.tree.map(lambda leaf: jax.device_put(_draw(leaf, rng).astype(leaf.dtype)), tree)


def _draw(leaf: Leaf, rng: np.random.Generator) -> np.ndarray:
    match leaf.fill:
        case "normal":
            return np.asarray(rng.normal(0.0, leaf.value, leaf.shape))
        case "constant":
            return np.broadcast_to(np.asarray(leaf.value), leaf.shape)
        case "integer":
            return np.asarray(rng.integers(0, np.asarray(leaf.value, np.int64), leaf.shape))
