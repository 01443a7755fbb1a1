"""Rematerialization of scans: less is stacked, the numbers are the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise import zoo
from shardwise.capture import jax_internals as internals
from shardwise.capture.trace import JitOptions, Traced
from shardwise.errors import VariantError
from shardwise.tactics.strategies import FSDP
from shardwise.transforms.variants import Variant, batch_of, trace_variant
from tests.planner.test_plan_search import small_memory
from tests.transforms.test_microbatch import arrays, loops, run

ROLES = {"batch": "batch", "params": "params"}
LAYERS, BATCH, WIDTH = 6, 16, 8


def step(params: Any, batch: jax.Array) -> Any:
    """Layers in a scan, with a parameter that all share and a running penalty."""

    def loss(p: Any) -> jax.Array:
        def layer(carry: Any, w: jax.Array) -> Any:
            x, penalty = carry
            hidden = jnp.tanh(x @ w) * p["scale"]
            return (x + jnp.sin(hidden) @ w.T, penalty + jnp.sum(hidden**2)), None

        (x, penalty), _ = jax.lax.scan(layer, (batch, jnp.zeros(())), p["layers"])
        return jnp.mean(x**2) + 1e-2 * penalty

    value, grads = jax.value_and_grad(jax.jit(loss))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def step_args() -> tuple[Any, ...]:
    layers, scale, batch = arrays((LAYERS, WIDTH, WIDTH), (WIDTH,), (BATCH, WIDTH))
    return {"layers": layers / 3, "scale": scale}, batch


def traced(fn: Any, args: tuple[Any, ...], count: int = 1, remat: bool = True) -> Traced:
    plain = trace_variant(fn, args, {}, JitOptions(), Variant())
    batch = batch_of(plain, {"batch": ("batch",)})[0] if count > 1 else ()
    return trace_variant(fn, args, {}, JitOptions(), Variant(count, batch, remat))


def stacked_bytes(jaxpr: Any) -> int:
    """What the scans stack at the top of a program."""
    return sum(
        v.aval.size * v.aval.dtype.itemsize
        for loop in loops(jaxpr)
        for v in loop.outvars[internals.scan_counts(loop.params)[1] :]
    )


@pytest.mark.parametrize("count", [1, 4])
def test_the_same_numbers(count: int) -> None:
    args = step_args()
    made = traced(step, args, count)
    for have, want in zip(run(made.jaxpr, *args), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6)


def test_only_the_carry_is_stacked() -> None:
    forward, backward = loops(traced(step, step_args()).jaxpr)
    stacks = [v.aval.shape for v in forward.outvars[internals.scan_counts(forward.params)[1] :]]
    assert stacks == [(LAYERS, BATCH, WIDTH)], "the activations at the start of each layer; not the penalty"
    again = [e.primitive.name for e in internals.split_jaxpr(backward.params["jaxpr"])[0].eqns]
    assert "tanh" in again and again.count("dot_general") == 1 + 4, "the second product of a layer is not run again"


def test_a_stack_that_something_else_reads_is_kept() -> None:
    def fn(params: jax.Array, batch: jax.Array) -> Any:
        def loss(p: jax.Array) -> Any:
            def layer(x: jax.Array, w: jax.Array) -> Any:
                y = jnp.tanh(x @ w)
                return jnp.sin(y) * jnp.cos(x), y

            x, ys = jax.lax.scan(layer, batch, p, reverse=True)
            return jnp.mean(x) + jnp.mean(ys[2:] ** 2), ys

        (value, ys), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, ys, grads

    args = tuple(arrays((LAYERS, WIDTH, WIDTH), (BATCH, WIDTH)))
    made = traced(fn, args)
    assert stacked_bytes(made.jaxpr) < stacked_bytes(traced(fn, args, remat=False).jaxpr)
    for have, want in zip(run(made.jaxpr, *args), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_one_scan_feeds_another() -> None:
    """The second scan runs over what the first one stacks, and both are run again in the backward scans."""

    def fn(params: jax.Array, batch: jax.Array) -> Any:
        def loss(p: jax.Array) -> jax.Array:
            def cell(w: jax.Array) -> Any:
                def turn(h: jax.Array, x: jax.Array) -> Any:
                    y = jnp.tanh(x @ w) * jnp.sin(h) + jnp.cos(x) * jnp.exp(-(h**2))
                    return jnp.sin(y) + h, jnp.cos(y)

                return turn

            start = jnp.zeros((BATCH, WIDTH))
            _, ys = jax.lax.scan(cell(p[0]), start, batch)
            last, _ = jax.lax.scan(cell(p[1]), start, ys)
            return jnp.mean(last**2)

        return jax.value_and_grad(loss)(params)

    args = tuple(arrays((2, WIDTH, WIDTH), (5, BATCH, WIDTH)))
    for have, want in zip(run(traced(fn, args).jaxpr, *args), jax.jit(fn)(*args), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def no_loop(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def forward_only(w: jax.Array, x: jax.Array) -> Any:
    return jax.lax.scan(lambda c, p: (jnp.tanh(c @ p), c), x, w[None])


@pytest.mark.parametrize("fn", [no_loop, forward_only])
def test_where_there_is_nothing_to_compute_again(fn: Any) -> None:
    with pytest.raises(VariantError, match="has no loop and no repeated block whose backward pass reads more"):
        shardwise.plan(fn, *arrays((4, 4), (8, 4)), mesh={"x": 2}, tactics=[], remat=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [("itx", {}), ("mlp", {"remat": True}), ("t2b", {"remat": True}), ("gpt", {"remat": True, "scan": False})],
)
def test_programs_of_the_zoo_that_have_nothing(name: str, options: dict[str, Any]) -> None:
    program = zoo.load(name, "tiny", **options)
    with pytest.raises(VariantError, match="has no loop"):
        traced(program.fn, program.args)


@pytest.mark.parametrize("name", ["t2b", "gpt", "llama3", "mixtral", "t5", "vit", "gns", "ssm"])
def test_programs_of_the_zoo_stack_less(name: str) -> None:
    program = zoo.load(name, "tiny")
    plain, made = (traced(program.fn, program.args, remat=remat).jaxpr for remat in (False, True))
    assert stacked_bytes(made) < 0.7 * stacked_bytes(plain)


def test_as_much_memory_as_with_checkpoint() -> None:
    """The model sees the same peak as for the program whose author wrote ``jax.checkpoint``."""
    asked: dict[str, Any] = {"mesh": {"data": 8}, "tactics": [FSDP("data")], "roles": ROLES}
    by_hand, plain = zoo.load("gpt", "tiny", remat=True), zoo.load("gpt", "tiny")
    want = shardwise.plan(by_hand.fn, *by_hand.args, **asked).predicted
    have = shardwise.plan(plain.fn, *plain.args, remat=True, **asked).predicted
    assert have.peak_bytes <= 1.02 * want.peak_bytes


@pytest.mark.parametrize("count", [None, 4])
def test_sharded_it_computes_the_same(count: int | None) -> None:
    asked: dict[str, Any] = {"mesh": {"data": 4, "model": 2}, "tactics": [FSDP("data")], "roles": ROLES}
    plan = shardwise.plan(step, *step_args(), microbatches=count, remat=True, **asked)
    assert plan.variant.remat and "keep their carry and compute the rest again" in " ".join(str(plan).split())
    assert shardwise.verify(plan, step, *step_args()).agrees


@pytest.mark.parametrize(("name", "count"), [("mixtral", None), ("t5", 2), ("ssm", 2)])
def test_programs_of_the_zoo_sharded_compute_the_same(name: str, count: int | None) -> None:
    program = zoo.load(name, "tiny")
    asked: dict[str, Any] = {"mesh": {"data": 4}, "tactics": [FSDP("data")], "roles": ROLES, "remat": True}
    plan = shardwise.plan(program.fn, *program.args, microbatches=count, **asked)
    assert shardwise.verify(plan, program.fn, *program.make_args()).agrees


def test_the_search_chooses_it_where_it_is_what_fits() -> None:
    shape = jax.ShapeDtypeStruct
    params = {"layers": shape((24, 256, 256), "float32"), "scale": shape((256,), "float32")}
    where: dict[str, Any] = {"topology": small_memory("v5e:2x2", 220 * 2**20), "mesh": {"x": 4}, "budget_evals": 400}
    plan = shardwise.plan(step, params, shape((16384, 256), "float32"), remat="auto", **where)
    assert plan.predicted.fits and plan.variant == Variant(remat=True) and plan.search is not None
    assert [(t.variant, t.fits) for t in plan.search.variants] == [("as it is", False), ("rematerialized", True)]


def two_stacks(params: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(jnp.cos(x @ w) * jnp.tanh(x)), None

    def loss(params: dict[str, Any]) -> jax.Array:
        first, _ = jax.lax.scan(layer, x, params["first"])
        second, _ = jax.lax.scan(layer, first * 2, params["second"])
        return jnp.mean(second**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_two_stacks_compute_the_same() -> None:
    first, second, x = arrays((3, 16, 16), (5, 16, 16), (8, 16))
    params = {"first": first, "second": second}
    traced = trace_variant(two_stacks, (params, x), {}, JitOptions(), Variant(remat=True))
    for a, b in zip(run(traced.jaxpr, params, x), jax.tree.leaves(jax.jit(two_stacks)(params, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
