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
