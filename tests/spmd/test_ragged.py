"""Ragged products on local blocks: any load, rows sharded or not, contracted or not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.spmd.test_ops import check

CONTRACTED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([0], [0]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
#: All rows in one group, rows in no group, groups that end just before and after a block.
LOADS = ([0, 1024, 0, 0], [3, 0, 5, 7], [256, 257, 255, 128])


def normal(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("sizes", LOADS)
def test_rows_find_their_groups(sizes: list[int]) -> None:
    def fn(x: jax.Array, y: jax.Array, w: jax.Array, sizes: jax.Array) -> Any:
        return lax.ragged_dot(x, w, sizes), lax.ragged_dot_general(x, y, sizes, CONTRACTED)

    args = normal(1024, 16), normal(1024, 8), normal(4, 16, 8), jnp.asarray(sizes, jnp.int32)
    assert check(fn, args)


def test_gradients_of_experts_without_a_capacity() -> None:
    """Sorted rows are another dimension than the batch, and partial updates pass through the scatter-add of a gradient."""

    def loss(gate: jax.Array, down: jax.Array, x: jax.Array, router: jax.Array) -> jax.Array:
        weights, experts = lax.top_k(jax.nn.softmax(x @ router), 2)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=4).astype(jnp.int32)
        hidden = jax.nn.silu(lax.ragged_dot(x[order // 2], gate, sizes))
        rows = lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)].reshape(*experts.shape, -1)
        return jnp.sum(jnp.einsum("nc,ncd->nd", weights, rows) ** 2)

    args = normal(4, 16, 24), normal(4, 24, 16), normal(32, 16), normal(16, 4)
    assert check(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)), [0.3 * x for x in args], {"a": 4})
