"""Windows, slices and narrow arrays on TPUs: loops over windows, shifts inside of tiles, taps of convolutions, registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import shardwise
from shardwise.cost.compute import KERNELS, SHIFT, SHORTER
from shardwise.cost.layouts import register_elements
from tests.cost.test_compute import UNIT, predicted, seconds, time_s
from tests.cost.test_copies import copies, indices
from tests.cost.test_memory import TEMPORARY, V5E, blocks, made
from tests.dims import programs as p


def crop(x: jax.Array, at: jax.Array) -> jax.Array:
    return jax.vmap(lambda x, o: lax.dynamic_slice(x, (o[0], o[1]), (24, 48)))(x, at)


def test_a_lookup_of_windows_is_a_loop_that_copies_nothing() -> None:
    args = p.shape(64, 40, 160), indices(64, 2)
    device = replace(UNIT, memory_bytes_per_s=1e30, launch_s=1.0)
    assert max(seconds(predicted(crop, args), device)) == pytest.approx(1.0 + 64 * KERNELS)
    sharded = predicted(crop, args, [("x", 0)])
    assert max(seconds(sharded, device)) == pytest.approx(1.0 + 16 * KERNELS)
    assert copies(crop, *args) == []


def test_windows_of_rows_are_looked_up_at_once_in_row_major_order() -> None:
    def rows(x: jax.Array, at: jax.Array) -> jax.Array:
        return jax.vmap(lambda a: lax.dynamic_slice(x, (a, 0), (64, 32)))(at)

    args = p.shape(8192, 32), indices(256)
    assert max(seconds(predicted(rows, args), replace(UNIT, memory_bytes_per_s=1e30, launch_s=1.0))) == 1.0
    assert (8192 * 128 * 4, True) in copies(rows, *args)
    step = shardwise.plan(rows, p.shape(1 << 20, 32), indices(256), topology="v5e:1x1").predicted
    assert any(row.op == "copy" and row.time_s > 0 for row in step.rows)


@pytest.mark.parametrize(("start", "shifts"), [((0, 0), 0), ((8, 128), 0), ((1, 0), 1), ((0, 1), 1), ((7, 5), 2)])
def test_slices_shift_elements_inside_of_tiles(start: tuple[int, int], shifts: int) -> None:
    device = replace(UNIT, memory_bytes_per_s=1e30, vector_flops_per_s=1.0)
    at = tuple(slice(first, first + 64 * (n + 1)) for n, first in enumerate(start))
    (time_s,) = seconds(predicted(lambda x: x[at], [p.shape(128, 384)]), device)
    assert time_s == shifts * SHIFT * 64 * 128
    assert seconds(predicted(lambda x: x[at], [p.shape(128, 384)]), replace(device, vector_tile=(1, 8))) == [0.0]


def test_a_convolution_of_single_channels_is_a_product_for_each_tap() -> None:
    def blur(x: jax.Array, w: jax.Array) -> jax.Array:
        dims = ("NXC", "XIO", "NXC")
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=dims, feature_group_count=w.shape[2])

    device = replace(UNIT, matrix_tile=(8, 128, 128), memory_bytes_per_s=1e30)
    for channels, tiles in ((3, 1), (128, 1), (384, 3)):
        (time_s,) = seconds(predicted(blur, [p.shape(16, 64, channels), p.shape(7, 1, channels)]), device)
        assert time_s == 2.0 * 7 * 16 * 64 * tiles * 128 * 128


def test_registers_have_eight_rows() -> None:
    tile = (8, 128)
    assert [register_elements(s, tile) for s in ((1024, 3), (3, 1024), (1024, 3, 3), (64, 128))] == [
        8 * 1024,
        8 * 1024,
        3 * 8 * 1024,
        64 * 128,
    ]
    assert register_elements((1024, 3), (1, 32)) == 3 * 1024
    device = replace(UNIT, memory_bytes_per_s=1e30, elements_per_s=1.0)
    assert seconds(predicted(lambda x: jnp.tanh(x), [p.shape(3, 1024)]), device) == [8 * 1024]


def test_what_is_used_late_shares_the_chip_with_what_is_computed_before() -> None:
    def fn(x: jax.Array, *ws: jax.Array) -> jax.Array:
        first = y = x @ ws[0]
        for w in ws[1:]:
            y = y @ w
        return y @ first.T

    args: list[Any] = [p.shape(64, 64)] * 17
    room, n = 64 * 64 * 4, 16 // SHORTER
    device = replace(UNIT, matrix_flops_per_s=(("f32", 1e30),))
    last = [seconds(predicted(fn, args), replace(device, on_chip_bytes=k * room))[-1] for k in (n - 1, n)]
    assert last[0] - last[1] == pytest.approx(room, rel=0.01)


def test_an_argument_that_is_an_output_in_another_order_is_copied() -> None:
    found = made(lambda x: (x.T, jnp.sum(x)), [p.shape(64, 128)])
    alone = made(lambda x: jnp.sum(x), [p.shape(64, 128)])
    assert blocks(found, V5E) - blocks(alone, V5E) == TEMPORARY


def test_a_loop_reads_its_own_slice_of_the_slice_of_an_outer_one() -> None:
    def inner(c: jax.Array, ws: jax.Array) -> Any:
        return lax.scan(lambda c, w: (c * w, None), c, ws)[0], None

    def fn(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.scan(inner, x, ws)[0]

    lowered, work = predicted(fn, [p.shape(64, 64), p.shape(5, 3, 64, 64)])
    times = {lowered.program.runs[w.region]: time_s(lowered, w, UNIT) for w in work}
    assert times[15] == 3 * 64 * 64 * 4.0 and times[5] == 2 * 3 * 64 * 64 * 4.0
