"""A plain deep multilayer perceptron: `layers` hidden layers of equal width between two projections.

Unrolled by default: under a scan the carry makes a layer's input and output dimensions one.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .layers import COMPUTE, cast, cross_entropy, run_layers
from .program import LayeredConfig, ZooProgram
from .specs import Tree, dense_spec, integers, layered, normal, training


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig(LayeredConfig):
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


def build(config: MLPConfig) -> ZooProgram:
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


def loss(config: MLPConfig, params: Tree, batch: Tree) -> jax.Array:
    """Cross entropy over the classes."""
    x = layer(params["first"], jnp.asarray(batch["inputs"], COMPUTE))
    x = run_layers(layer, params["hidden"], x, remat=config.remat)
    return cross_entropy(dense(params["last"], x), batch["labels"])
