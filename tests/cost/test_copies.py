"""Row-major copies of gathers and scatters: which are known, and which are in the upper end of the peak only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwise.cost.copies import looks_up, lookup_copies, output_copies, reordered_outputs
from shardwise.cost.memory import BLOCK
from shardwise.hardware.load import load_profile
from tests.cost.test_memory import made
from tests.dims import programs as p

N = 4096


def copies(fn: Callable[..., Any], *args: Any, hardware: str = "v5e") -> list[tuple[int, bool]]:
    """The bytes of the row-major copies of the only gather or scatter, and whether they are known."""
    lowered, life = made(fn, args)
    (op,) = filter(looks_up, life.program.ops)
    return [(a.blocks * BLOCK, known) for a, known in lookup_copies(lowered, life, op, load_profile(hardware))]


def indices(*sizes: int) -> jax.ShapeDtypeStruct:
    return p.shape(*sizes, dtype=jnp.int32)


def rows(table: jax.Array, at: jax.Array) -> jax.Array:
    return jnp.tanh(table.at[at].get(mode="promise_in_bounds"))


def rows_of_each(tables: jax.Array, at: jax.Array) -> jax.Array:
    return jax.vmap(rows)(tables, at)


def update_of_each(tables: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    return jax.vmap(lambda t, k, v: t.at[k].set(v, mode="promise_in_bounds"))(tables, at, new)


def test_rows_that_fill_half_of_a_tile_are_copied() -> None:
    assert copies(rows, p.shape(N, 64), indices(2 * N)) == [(N * 512, True), (2 * N * 512, True)]
    assert copies(rows, p.shape(N, 128), indices(2 * N)) == []


def test_narrower_rows_may_be_copied() -> None:
    assert copies(rows, p.shape(N, 16), indices(2 * N)) == [(N * 512, False), (2 * N * 512, False)]


def test_tables_of_each_example_are_copied() -> None:
    assert copies(rows_of_each, p.shape(N, 33, 18), indices(N)) == [(N * 40 * 512, True), (N * 512, True)]
    found = copies(update_of_each, p.shape(N, 33, 18), indices(N), p.shape(N, 18))
    assert found == [(N * 40 * 512, True), (N * 512, True)]


@pytest.mark.parametrize(("sizes", "expected"), [((N, 8), [(N * 512, True)]), ((N,), [])])
def test_indices_of_several_dimensions_are_copied(sizes: tuple[int, ...], expected: list[Any]) -> None:
    found = copies(lambda x, at: rows(x, at).sum(-1), p.shape(1 << 16), indices(*sizes))
    assert found[: len(expected)] == expected
    assert all(not known for _, known in found[len(expected) :])


def test_without_tiles_nothing_is_copied() -> None:
    assert copies(rows_of_each, p.shape(N, 33, 18), indices(N), hardware="h100") == []


@pytest.mark.parametrize(("sizes", "copied"), [((256, 16), True), ((16, 256), False)])
def test_an_output_whose_rows_a_product_reorders_is_copied(sizes: tuple[int, int], copied: bool) -> None:
    lowered, life = made(lambda x, w: x @ w + 1.0, [p.shape(*sizes, 1024), p.shape(1024, 4096)])
    (output,) = (op for op in life.program.ops if op.kind == "output")
    found = list(output_copies(lowered, life, output, reordered_outputs(life)[output.id], load_profile("v5e")))
    assert len(found) == copied


def test_an_output_in_the_place_of_an_argument_is_not_copied() -> None:
    _, life = made(lambda x, w: x @ w, [p.shape(256, 16, 1024), p.shape(1024, 1024)], donate=0)
    assert reordered_outputs(life) == {}


def test_what_a_loop_looks_up_is_copied_before_the_loop() -> None:
    def walk(tables: jax.Array, at: jax.Array) -> jax.Array:
        def step(at: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.argmax(rows_of_each(tables, at), -1).astype(jnp.int32), None

        return jax.lax.scan(step, at, None, length=5)[0]

    lowered, life = made(walk, [p.shape(N, 33, 18), indices(N)])
    (op,) = filter(looks_up, life.program.ops)
    table, result = (a for a, known in lookup_copies(lowered, life, op, load_profile("v5e")) if known)
    assert (table.first, table.last) == life.span[op.region] and op.region > 0
    assert result.first == result.last == life.point[op.id]
