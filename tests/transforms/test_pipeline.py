"""Pipelines: loops over layers in stages have the same numbers, or there is a reason why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import JitOptions, trace
from shardwise.errors import VariantError
from shardwise.transforms.pipeline import pipelined
from shardwise.transforms.remat import rematerialize
from tests.transforms.layered import ALL, plain


def jaxpr_of(
    fn: Callable[..., Any],
    args: Any,
    parts: int,
    stages: int,
    remat: bool = False,
    batch: str = "batch",
    circular: int = 1,
) -> Any:
    """The jaxpr of a function in a pipeline. Everything under the argument ``batch`` is the batch."""
    traced = trace(fn, args, {}, JitOptions())
    paths = [leaf.path for leaf in traced.arguments if leaf.path.split("/")[0] == batch]
    return pipelined(rematerialize(traced) if remat else traced, paths, parts, stages, circular).jaxpr


def run(jaxpr: Any, args: Any) -> list[Any]:
    evaluate: Any = jax.core.eval_jaxpr
    found: list[Any] = jax.jit(lambda *xs: evaluate(*internals.split_jaxpr(jaxpr), *xs))(*jax.tree.leaves(args))
    return found


def check(
    fn: Callable[..., Any],
    args: Any,
    parts: int,
    stages: int,
    remat: bool = False,
    want: list[jax.Array] | None = None,
    circular: int = 1,
) -> None:
    want = want or jax.tree.leaves(jax.jit(fn)(*args))
    jaxpr = jaxpr_of(fn, args, parts, stages, remat, circular=circular)
    for have, expected in zip(run(jaxpr, args), want, strict=True):
        assert have.shape == expected.shape and have.dtype == expected.dtype
        largest = float(np.max(np.abs(expected))) if expected.size else 0.0
        np.testing.assert_allclose(have, expected, rtol=1e-5, atol=1e-5 * largest)


def loops(jaxpr: Any) -> list[tuple[int, list[int]]]:
    """The lengths of scans, and of the scans in their bodies."""
    scans = [e for e in internals.split_jaxpr(jaxpr)[0].eqns if e.primitive.name == "scan"]
    return [(e.params["length"], [length for length, _ in loops(e.params["jaxpr"])]) for e in scans]


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


# The same numbers.


@pytest.mark.parametrize("how", ["plain", "checkpoint", "rematerialized"])
@pytest.mark.parametrize("layers, stages, parts", [(4, 4, 8), (6, 4, 2)])
@pytest.mark.parametrize("name", ALL)
def test_a_training_step_has_the_same_numbers(name: str, layers: int, stages: int, parts: int, how: str) -> None:
    fn, args = ALL[name](layers, remat=how == "checkpoint")
    check(fn, args, parts, stages, remat=how == "rematerialized", want=plain(name, layers))


def test_every_loop_over_layers_runs_over_ticks_forward_and_backward() -> None:
    fn, args = ALL["translator"](6)
    ticks = 8 + 3 - 1
    assert loops(jaxpr_of(fn, args, 8, 3)) == [(ticks, [2])] * 4


@pytest.mark.parametrize(
    "name, layers, stages, parts, circular, how",
    [
        ("decoder", 8, 2, 4, 3, "rematerialized"),
        ("experts", 6, 2, 2, 2, "plain"),
    ],
)
def test_circular_stages_have_the_same_numbers(
    name: str, layers: int, stages: int, parts: int, circular: int, how: str
) -> None:
    fn, args = ALL[name](layers)
    check(fn, args, parts, stages, how == "rematerialized", circular=circular)


def test_a_tick_of_circular_stages_is_a_fraction_of_a_round() -> None:
    fn, args = ALL["decoder"](8)
    assert loops(jaxpr_of(fn, args, 4, 2, circular=2)) == [(2 * 4 + 2 - 1, [2])] * 2


def test_residuals_are_read_by_tick() -> None:
    """The backward loop reads stacked values as the forward loop made them: nothing is gathered in between."""
    fn, args = ALL["decoder"](4, drop=False)
    equations = internals.split_jaxpr(jaxpr_of(fn, args, 4, 2))[0].eqns
    forward, backward = [e for e in equations if e.primitive.name == "scan"]
    stacked = {v for v in forward.outvars if len(internals.shape_of(v.aval)) >= 5}
    assert len(stacked) > 5 and stacked <= {*backward.invars, *forward.outvars}
    assert not any(v in stacked for e in equations if e.primitive.name == "gather" for v in e.invars)


def test_stacked_results_with_other_readers() -> None:
    def fn(w: jax.Array, b: jax.Array, batch: jax.Array) -> Any:
        def layer(x: jax.Array, wb: Any) -> Any:
            y = jnp.tanh(x @ wb[0] + wb[1])
            return y, (y.T, jnp.sum(y, axis=0), jnp.max(y), jnp.any(y > 0.9), wb[1] * 2)

        return jax.lax.scan(layer, batch, (w, b))

    for layers, stages, parts, circular in ((6, 3, 4, 1), (5, 3, 4, 1), (7, 2, 4, 3)):
        check(fn, arrays((layers, 4, 4), (layers, 4), (12, 4)), parts, stages, circular=circular)


def test_carries_of_all_kinds() -> None:
    """A counter, a key, a running sum that layers read, one that they only add to, and one that starts from a value."""

    def fn(w: jax.Array, scale: jax.Array, batch: jax.Array) -> Any:
        def layer(carry: Any, wk: jax.Array) -> Any:
            x, count, key, seen, total, largest, running = carry
            key, own = jax.random.split(key)
            y = jnp.tanh(x @ wk) * (1 + count) * jax.random.uniform(own)
            running = running + jnp.sum(y, axis=0)
            return (y, count + 1, key, seen, total + jnp.sum(y * y), jnp.maximum(largest, jnp.max(y)), running), running

        start = (batch, 0, jax.random.key(3), scale, jnp.sum(scale), scale[1], jnp.zeros(4))
        rest, totals = jax.lax.scan(layer, start, w)
        return *rest[:2], jax.random.key_data(rest[2]), *rest[3:], totals

    for layers, circular in ((4, 1), (3, 1), (5, 2)):
        check(fn, arrays((layers, 4, 4), (2,), (8, 4)), 2, 2, circular=circular)


def test_a_loop_in_reverse_and_constants_of_the_batch() -> None:
    def fn(w: jax.Array, batch: Any) -> Any:
        def layer(x: jax.Array, row: Any) -> Any:
            w, extra = row
            y = jnp.tanh(x @ w) * batch["gate"][:, None] + extra
            return y, y * 2

        return jax.lax.scan(layer, batch["x"], (w, jnp.stack([batch["x"]] * 4)), reverse=True)

    x, w, gate = arrays((8, 4), (4, 4, 4), (8,))
    for circular in (1, 2):
        check(fn, (w, {"x": x, "gate": gate}), 4, 2, circular=circular)


def test_the_batch_as_a_part_of_a_dimension() -> None:
    def fn(w: jax.Array, batch: jax.Array) -> jax.Array:
        x = jnp.moveaxis(batch, 0, 1).reshape(-1, 4)  # 3 x batch
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    check(fn, arrays((4, 4, 4), (8, 3, 4)), 4, 2)


def test_bubbles_make_no_numbers_of_their_own() -> None:
    """A layer that is undefined at zero: no stage computes on anything but the batch."""

    def fn(w: jax.Array, batch: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.log(jnp.abs(x @ w)) / x + 2, None), batch, w)[0])

        return jax.grad(loss)(w)

    with jax.debug_nans(True):
        check(fn, arrays((4, 4, 4), (8, 4)), 4, 4)


# What is refused.


def test_circular_stages_with_too_few_micro_batches_or_layers() -> None:
    fn, args = ALL["decoder"](8)
    with pytest.raises(VariantError, match="need a multiple of 4 micro-batches, one for each stage, not 2"):
        jaxpr_of(fn, args, 2, 4, circular=2)
    with pytest.raises(VariantError, match="3 times 4 stages need as many layers, and there are 8"):
        jaxpr_of(fn, args, 4, 4, circular=3)


def test_layers_in_which_examples_meet() -> None:
    def fn(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: ((x - jnp.mean(x, axis=0)) @ w, None), batch, w)[0]

    with pytest.raises(VariantError, match=r"test_pipeline\.py:\d+ needs a value that is reduced over the whole batch"):
        jaxpr_of(fn, arrays((4, 4, 4), (8, 4)), 4, 2)


def test_a_program_without_a_loop_over_layers() -> None:
    def unrolled(w: jax.Array, batch: jax.Array) -> jax.Array:
        for k in range(4):
            batch = jnp.tanh(batch @ w[k])
        return batch

    w, x = arrays((4, 4, 4), (8, 4))
    with pytest.raises(
        VariantError,
        match=r"no loop over at least 2 layers.*; dot_general at test_pipeline\.py:\d+ is in layers that are unrolled: ",
    ):
        jaxpr_of(unrolled, (w, x), 4, 2)

    def scanned(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, w)[0]

    with pytest.raises(
        VariantError, match=r"no loop over at least 8 layers.*; scan at test_pipeline\.py:\d+ is a loop over 4: "
    ):
        jaxpr_of(scanned, (w, x), 4, 8)

    def in_parts(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda _, x: (None, scanned(w, x)), None, batch.reshape(2, 4, 4))[1]

    with pytest.raises(
        VariantError, match=r"; scan at \S+ is inside of another loop, at scan at \S+: layers have to be"
    ):
        jaxpr_of(in_parts, (w, x), 4, 2)

    def until_done(w: jax.Array, batch: jax.Array) -> jax.Array:
        body = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w[c[0]]))  # noqa: E731
        return jax.lax.while_loop(lambda c: c[1][0, 0] < 1, body, (0, batch))[1]

    with pytest.raises(VariantError, match=r"; while at \S+ is a loop whose number of trips is not known"):
        jaxpr_of(until_done, (w, x), 4, 2)
    with pytest.raises(VariantError, match=r"batch \[8, 4\] cannot be cut into 3 micro-batches"):
        jaxpr_of(scanned, (w, x), 3, 2)


def test_a_loop_over_time_is_no_loop_over_layers() -> None:
    def fn(w: jax.Array, batch: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), batch[:, 0], jnp.moveaxis(batch, 1, 0))[0]

    with pytest.raises(VariantError, match="no loop over at least 2 layers"):
        jaxpr_of(fn, arrays((4, 4), (8, 6, 4)), 4, 2)


def test_a_layer_with_an_effect() -> None:
    def fn(w: jax.Array, batch: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> Any:
            jax.debug.print("{}", w[0, 0])
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, batch, w)[0]

    with pytest.raises(VariantError, match="has an effect, which would happen for every micro-batch"):
        jaxpr_of(fn, arrays((4, 4, 4), (8, 4)), 4, 2)
