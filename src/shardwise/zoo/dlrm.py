"""DLRM (arXiv 1906.00091): 26 embedding tables, an MLP for dense features, pairwise interactions, an MLP.

Moments are kept for entire tables, as with plain Optax: the optimizer is not sparse.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .layers import COMPUTE
from .mlp import dense
from .program import Config, ZooProgram
from .specs import Tree, integers, mlp_spec, normal, training


def build(config: Config) -> ZooProgram:
    tables, pairs = len(config.rows), (len(config.rows) + 1) * len(config.rows) // 2
    params = {
        "tables": [normal(rows, config.dim, scale=config.dim**-0.5) for rows in config.rows],
        "bottom": mlp_spec(config.dense_features, *config.bottom, config.dim),
        "top": mlp_spec(config.dim + pairs, *config.top, 1),
    }
    batch = {
        "dense": normal(config.batch, config.dense_features),
        "ids": integers(config.batch, tables, below=config.rows),
        "clicked": integers(config.batch, below=2),
    }
    return training(config, partial(loss, config), params, batch)


def mlp(params: list[Tree], x: jax.Array) -> jax.Array:
    for i, p in enumerate(params):
        x = dense(p, jax.nn.relu(x) if i else x)
    return x


def loss(config: Config, params: Tree, batch: Tree) -> jax.Array:
    """Binary cross entropy of the click."""
    x = (jax.checkpoint(logits) if config.remat else logits)(params, batch).astype(jnp.float32)
    y = batch["clicked"].astype(jnp.float32)
    return jnp.mean(jax.nn.softplus(x) - x * y)


def logits(params: Tree, batch: Tree) -> jax.Array:
    """Returns the score of every example, `[b]`."""
    features = jax.nn.relu(mlp(params["bottom"], batch["dense"].astype(COMPUTE)))
    looked_up = [jnp.take(table, batch["ids"][:, i], axis=0) for i, table in enumerate(params["tables"])]
    vectors = jnp.stack([features, *(x.astype(COMPUTE) for x in looked_up)], axis=1)
    products = jnp.einsum("bnd,bmd->bnm", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], k=-1)
    x = jnp.concatenate([features, products[:, rows, columns]], axis=-1)
    return mlp(params["top"], x)[:, 0]
