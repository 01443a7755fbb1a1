"""A plain deep multilayer perceptron: `layers` hidden layers of equal width between two projections.

Unrolled unless asked otherwise: under a scan the carry makes a layer's input and output dimensions one and
the same.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, cast, cross_entropy, run_layers
from .program import LayeredConfig, Parts
from .specs import Tree, integers, layered, normal, weight, zeros
from .training import training


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig(LayeredConfig):
    """Sizes of an MLP classifier."""

    scan: bool = False
    features: int
    width: int
    classes: int


PROGRAMS = {
    "mlp": {
        "full": MLPConfig(batch=8192, layers=8, features=4096, width=16384, classes=1024),
        "tiny": MLPConfig(batch=16, layers=2, features=48, width=64, classes=40),
    }
}


def build(config: MLPConfig) -> Parts:
    """The training step."""
    params = {
        "first": dense_spec(config.features, config.width),
        "hidden": layered(dense_spec(config.width, config.width), config.layers, config.scan),
        "last": dense_spec(config.width, config.classes),
    }
    batch = {"inputs": normal(config.batch, config.features), "labels": integers(config.batch, below=config.classes)}
    return training(config, partial(loss, config), params, batch)


def dense_spec(inputs: int, outputs: int) -> Tree:
    """Kernel and bias of a dense layer."""
    return {"kernel": weight(inputs, outputs, fan_in=inputs), "bias": zeros(outputs)}


def dense(p: Tree, x: jax.Array) -> jax.Array:
    """`x @ kernel + bias`, in the compute type."""
    p = cast(p)
    y: jax.Array = x @ p["kernel"] + p["bias"]
    return y


def layer(p: Tree, x: jax.Array) -> jax.Array:
    """One hidden layer."""
    return jax.nn.relu(dense(p, x))


def loss(config: MLPConfig, params: Tree, batch: Tree) -> jax.Array:
    """Cross entropy over the classes."""
    x = layer(params["first"], jnp.asarray(batch["inputs"], COMPUTE))
    x = run_layers(layer, params["hidden"], x, remat=config.remat)
    return cross_entropy(dense(params["last"], x), batch["labels"])
