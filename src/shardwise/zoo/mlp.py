"""A plain deep multilayer perceptron: `layers` hidden layers of equal width between two projections."""

from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, cast, cross_entropy, run_layers
from .program import Config, ZooProgram
from .specs import Tree, dense_spec, integers, layered, normal, training


def build(config: Config) -> ZooProgram:
    params = {
        "first": dense_spec(config.features, config.width),
        "hidden": layered(dense_spec(config.width, config.width), config.layers, config.scan),
        "last": dense_spec(config.width, config.classes),
    }
    batch = {"inputs": normal(config.batch, config.features), "labels": integers(config.batch, below=config.classes)}
    return training(config, partial(loss, config), params, batch)


def dense(p: Tree, x: jax.Array) -> jax.Array:
    """`x @ kernel + bias`, in the compute type."""
    p = cast(p)
    return jnp.add(x @ p["kernel"], p["bias"])


def layer(p: Tree, x: jax.Array) -> jax.Array:
    return jax.nn.relu(dense(p, x))


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Cross entropy over the classes."""
    x = layer(params["first"], jnp.asarray(batch["inputs"], COMPUTE))
    x = run_layers(layer, params["hidden"], x, remat=config.remat)
    return cross_entropy(dense(params["last"], x), batch["labels"])
