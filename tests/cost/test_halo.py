"""What neighbours exchange, by the widths alone and against the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.cost.halo import halo_widths
from shardwise.ir.rule import Window
from shardwise.tactics.strategies import Shard


@pytest.mark.parametrize(
    ("window", "sizes", "widths"),
    [
        (Window(0, 0, 1, low=-2, high=2), (64, 64), (2, 2)),
        (Window(0, 0, 1, low=0, high=0), (64, 64), (0, 0)),
        # A stride of two with three taps: the last position of a shard looks one to the right.
        (Window(0, 0, 1, stride=2, low=0, high=2), (64, 32), (0, 1)),
        # A causal convolution looks to the left only.
        (Window(0, 0, 1, low=-3, high=0), (64, 64), (3, 0)),
    ],
)
def test_widths(window: Window, sizes: tuple[int, int], widths: tuple[int, int]) -> None:
    assert halo_widths(window, 8, *sizes, True) == widths


def test_nothing_is_exchanged_by_one_piece() -> None:
    assert halo_widths(Window(0, 0, 1, low=-9, high=9), 1, 64, 64, True) == (0, 0)


def convolve(x, w, stride: int = 1):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize(
    "fn",
    [
        convolve,
        lambda x, w: convolve(convolve(x, w), w, 2),
        lambda x, w: jax.grad(lambda x, w: jnp.sum(convolve(x, w) ** 2), (0, 1))(x, w),
        lambda x, w: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") + 0 * w.sum(),
        lambda x, w: jnp.pad(x, ((0, 0), (4, 4), (0, 0), (0, 0))) * w.sum(),
    ],
    ids=["convolution", "strided", "gradients", "pooling", "padding"],
)
def test_compiled_as_predicted(fn) -> None:
    draw = np.random.default_rng(0)
    args = [draw.random(shape, np.float32) for shape in ((2, 64, 64, 16), (5, 5, 16, 16))]
    plan = shardwise.plan(fn, *args, mesh={"rows": 8}, tactics=[Shard("x", 1, "rows")])
    assert plan.spec("x")[1] == ("rows",)
    found = shardwise.verify(plan, fn, *args)
    assert any(r.kind == "collective-permute" and r.compiled_bytes for r in found.rows)
    assert found.agrees and found.matched == 1.0, str(found)
