"""What windowed ops fetch from other devices: the rounds alone, and against the compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.ir.rule import Factor, Kind, Rule, Window
from shardwise.lowering.halo import Fetch, fetches
from shardwise.tactics.strategies import Shard


def fetched(window: Window, pieces: int, operand: int, result: int) -> Fetch | None:
    """What is fetched along one dimension, from one operand for one result."""
    rule = Rule((Factor(operand, Kind.HALO),), (((0,),),), (((0,),),), (window,))
    found = fetches("slice", rule, [(operand,), (result,)], [pieces])
    return None if found is None else found[0] if found else None


@pytest.mark.parametrize(
    ("window", "sizes", "rounds"),
    [
        (Window(0, 0, 1, low=-2, high=2), (64, 64), [(-1, 2), (1, 2)]),
        (Window(0, 0, 1, low=0, high=0), (64, 64), []),
        # A stride of two with three taps: the last position of a block looks one to the right.
        (Window(0, 0, 1, stride=2, low=0, high=2), (64, 32), [(1, 1)]),
        # A causal convolution looks to the left only.
        (Window(0, 0, 1, low=-3, high=0), (64, 64), [(-1, 3)]),
        # Wider than a block: from the second neighbor as well.
        (Window(0, 0, 1, low=-9, high=0), (64, 64), [(-1, 8), (-2, 1)]),
    ],
)
def test_neighbors_exchange_what_windows_reach(
    window: Window, sizes: tuple[int, int], rounds: list[tuple[int, int]]
) -> None:
    found = fetched(window, 8, *sizes)
    assert found is not None
    assert [(r.pairs[0][0] - r.pairs[0][1], r.length) for r in found.rounds] == rounds
    assert all(len({a - b for a, b in r.pairs}) == 1 for r in found.rounds)


def test_a_reversed_dimension_takes_one_round() -> None:
    found = fetched(Window(0, 0, 1, stride=-1, low=63, high=63), 8, 64, 64)
    assert found is not None and [r.length for r in found.rounds] == [8]
    assert {a + b for a, b in found.rounds[0].pairs} == {7}


def test_blocks_that_start_at_other_places_of_a_dilated_window_are_not_computed_apart() -> None:
    assert fetched(Window(0, 0, 1, dilation=2), 4, 6, 12) is None
    assert fetched(Window(0, 0, 1, dilation=2), 2, 8, 16) is not None


def test_nothing_is_exchanged_by_one_piece() -> None:
    assert fetched(Window(0, 0, 1, low=-9, high=9), 1, 64, 64) is None


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
    assert plan.array("x").spec[1] == ("rows",)
    found = shardwise.verify(plan, fn, *args)
    assert any(r.kind == "collective-permute" and r.compiled_bytes for r in found.rows)
    assert found.agrees and found.matched == 1.0, str(found)
