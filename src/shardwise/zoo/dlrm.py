"""DLRM (arXiv 1906.00091): 26 embedding tables, an MLP for dense features, pairwise interactions, an MLP.

The tables have the row counts of the Criteo terabyte set, capped at 40 million rows as in MLPerf. Moments are
kept for entire tables, as with plain Optax: the optimizer is not sparse.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .layers import COMPUTE
from .mlp import dense
from .program import TrainingConfig, ZooProgram
from .specs import Tree, integers, mlp_spec, normal, training

CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
TINY_ROWS = (
    512, 48, 40, 96, 24, 3, 56, 16, 8, 1024, 128, 80, 10,
    72, 88, 155, 4, 32, 14, 640, 768, 896, 192, 104, 108, 36,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig(TrainingConfig):
    """Sizes of a DLRM. The bottom MLP ends in `dim`, as the embeddings do: their inner products are taken."""

    rows: tuple[int, ...]
    dim: int
    dense_features: int = 13
    bottom: tuple[int, ...]
    top: tuple[int, ...]


PROGRAMS = {
    "dlrm": {
        "full": DLRMConfig(batch=65536, rows=CRITEO_ROWS, dim=128, bottom=(512, 256), top=(1024, 1024, 512, 256)),
        "tiny": DLRMConfig(batch=64, rows=TINY_ROWS, dim=16, bottom=(48, 32), top=(96, 40)),
    }
}


def build(config: DLRMConfig) -> ZooProgram:
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


def loss(config: DLRMConfig, params: Tree, batch: Tree) -> jax.Array:
    """Binary cross entropy of the click."""
    x = (jax.checkpoint(logits) if config.remat else logits)(params, batch).astype(jnp.float32)
    y = batch["clicked"].astype(jnp.float32)
    return jnp.mean(jax.nn.softplus(x) - x * y)


def logits(params: Tree, batch: Tree) -> jax.Array:
    """The score of every example, `[b]`."""
    features = jax.nn.relu(mlp(params["bottom"], batch["dense"].astype(COMPUTE)))
    looked_up = [jnp.take(table, batch["ids"][:, i], axis=0) for i, table in enumerate(params["tables"])]
    vectors = jnp.stack([features, *(x.astype(COMPUTE) for x in looked_up)], axis=1)
    products = jnp.einsum("bnd,bmd->bnm", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], k=-1)
    x = jnp.concatenate([features, products[:, rows, columns]], axis=-1)
    return mlp(params["top"], x)[:, 0]
