"""Layouts: which dimensions are minor, and what tiles add."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwise
from shardwise.cost.layouts import Layouts, narrow_rows, padded_elements

TILE = (8, 128)


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layouts(fn: Any, *args: Any) -> tuple[Layouts, Any]:
    program = shardwise.analyze(fn, *args).program
    return Layouts(program), program


def of_shape(program: Any, shape: tuple[int, ...]) -> list[int]:
    return [v.id for v in program.values if v.shape == shape]


def test_images_have_batch_and_features_minor() -> None:
    def net(x: jax.Array, w: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y).sum(axis=(1, 2))

    found, program = layouts(net, array(4, 32, 32, 64), array(3, 3, 64, 64))
    images = [op.results[0] for op in program.ops if op.kind in ("conv_general_dilated", "tanh")]
    assert [found.minor[v] for v in images] == [(0, 3), (0, 3)]
    assert not any(v in found.minor for v in of_shape(program, (4, 64)))
    assert not any(a.value in found.minor for a in program.arguments)
    # 64 features take 128 lanes, unless 128 examples do.
    assert found.in_memory(images[0], (4, 32, 32, 64), TILE) == 2
    assert found.in_memory(images[0], (128, 32, 32, 64), TILE) == 1


def test_batched_products_have_other_dimensions_minor() -> None:
    def scores(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum("bshd,bthd->bhst", q, k))

    found, program = layouts(lambda q, k: scores(-q, k), array(1024, 27, 8, 64), array(1024, 27, 8, 64))
    operand, product, result = (op.results[0] for op in program.ops if op.kind in ("neg", "dot_general", "tanh"))
    assert found.minor[product] == found.minor[result] == (2, 3) and found.minor[operand] == (1, 3)
    assert not any(a.value in found.minor for a in program.arguments)
    assert found.in_memory(result, (1024, 8, 27, 27), TILE) == 32 * 128 / 27**2


def test_an_update_in_place_keeps_the_order_of_a_product() -> None:
    """The gradient of a gather of scores: zeros, a scatter into them, and a product that reads them."""

    def fn(q: jax.Array, k: jax.Array, chosen: jax.Array) -> jax.Array:
        scores = jnp.zeros((1024, 27, 27)).at[:, 3, :].add(chosen)
        return jnp.einsum("bst,btd->bsd", scores, k) + q

    found, program = layouts(fn, array(1024, 27, 128), array(1024, 27, 128), array(1024, 27))
    scatter = next(op for op in program.ops if op.kind.startswith("scatter"))
    assert found.minor[scatter.operands[0]] == found.minor[scatter.results[0]] == (1, 2)


def test_other_arrays_are_in_the_order_that_pads_least() -> None:
    found, program = layouts(lambda x, w: jnp.tanh(x @ w), array(64, 256, 64), array(64, 64))
    assert not found.minor
    assert found.in_memory(program.arguments[0].value, (64, 256, 64), TILE) == 1
    assert padded_elements((64, 256, 64), TILE) == 64 * 256 * 64


def test_few_rows_of_an_argument_fill_registers_in_part() -> None:
    def step(cache: jax.Array, new: jax.Array, w: jax.Array) -> Any:
        cache = lax.dynamic_update_slice(cache, new, (0, 7, 0, 0))
        return cache, jnp.tanh(cache), jnp.einsum("bshd,de->bshe", cache, w)

    found, program = layouts(step, array(4, 16, 2, 128), array(4, 1, 2, 128), array(128, 128))
    cache = program.arguments[0].value
    product = next(op for op in program.ops if op.kind == "dot_general").results[0]
    updated = next(op for op in program.ops if op.kind == "dynamic_update_slice").results[0]
    assert {cache, updated} <= found.row_major and product not in found.row_major
    ratios = [found.in_registers(v, (4, 16, 2, 128), 4, TILE) for v in (cache, updated, product)]
    assert ratios == [4, 4, 1]
    assert found.in_registers(cache, (4, 16, 2, 128), 4, (1, 32)) == 1  # a GPU has no tiles


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((16, 8, 128), 2, 1),
        ((16, 4, 256), 2, 2),
        ((16, 1, 128), 4, 8),
        ((16, 1, 128), 2, 1),  # two rows of 16 bits share one of 32: the compiler takes another order
        ((16, 3, 128), 4, 1),  # padded, so that the compiler takes another order
        ((16, 2, 64), 4, 1),
        ((128,), 4, 1),
        ((), 4, 1),
    ],
)
def test_narrow_rows(shape: tuple[int, ...], itemsize: float, expected: float) -> None:
    assert narrow_rows(shape, itemsize, TILE) == expected
