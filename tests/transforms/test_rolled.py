"""Unrolled layers as loops: they have the same numbers, and can be pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.transforms.pipeline import pipelined
from shardwise.transforms.rolled import rolled
from tests.transforms.layered import one_by_one
from tests.transforms.test_pipeline import run


def loops(traced: Traced) -> list[tuple[int, bool]]:
    """Length and direction of the scans."""
    scans = [e for e in internals.split_jaxpr(traced.jaxpr)[0].eqns if e.primitive.name == "scan"]
    return [(e.params["length"], e.params["reverse"]) for e in scans]


def traced(fn: Callable[..., Any], *args: Any) -> Traced:
    return trace(fn, args, {}, JitOptions())


@pytest.mark.parametrize("name", ["decoder", "experts"])
def test_layers_of_a_model_are_loops_and_pipelines(name: str) -> None:
    """Dropout by the number of a layer, tied embeddings, a second value that is carried; 5 layers on 4 stages."""
    step, args = one_by_one(name, 5)
    plain = traced(step, *args)
    assert not loops(plain)
    want = run(plain.jaxpr, args)
    looped = rolled(plain, 4)
    assert loops(looped) == [(5, False), (5, True)]
    batch = [leaf.path for leaf in plain.arguments if leaf.path.split("/")[0] == "batch"]
    for jaxpr in (looped.jaxpr, pipelined(looped, batch, 4, 4).jaxpr):
        for have, expected in zip(run(jaxpr, args), want, strict=True):
            np.testing.assert_allclose(have, expected, rtol=1e-5, atol=1e-5 * np.max(np.abs(expected)))


def test_layers_that_share_something_with_a_gradient_stay_as_they_are() -> None:
    step, args = one_by_one("translator", 5)
    plain = traced(step, *args)
    assert rolled(plain, 4) is plain


def stack(x: Any, weights: Any, act: Callable[[int, Any], Any]) -> Any:
    for k, w in enumerate(weights):
        x = act(k, x @ w)
    return x


def test_blocks_that_differ_stay_as_they_are() -> None:
    w, x = [jnp.ones((8, 8))] * 4, jnp.ones((4, 8))
    same = traced(lambda x, *w: stack(x, w, lambda k, y: jnp.tanh(y) + k), x, *w)
    assert loops(rolled(same, 2)) == [(4, False)]
    assert rolled(same, 5) is same
    other = traced(lambda x, *w: stack(x, w, lambda k, y: jax.lax.reduce_precision(y, 8, 7 + k)), x, *w)
    assert rolled(other, 2) is other
    shortcut = traced(lambda x, *w: stack(x, w, lambda k, y: jnp.tanh(y) + (x if k == 2 else y)), x, *w)
    assert (4, False) not in loops(rolled(shortcut, 4))
    printing = traced(lambda x, *w: stack(x, w, lambda k, y: [y, jax.debug.print("{}", k)][0]), x, *w)
    assert rolled(printing, 2) is printing
