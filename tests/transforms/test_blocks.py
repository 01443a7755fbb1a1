"""Rematerialization of repeated blocks: layers that are unrolled in the program keep less, the numbers are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from shardwise import zoo
from shardwise.capture import jax_internals as internals
from shardwise.capture.equations import is_transposed
from shardwise.capture.trace import JitOptions, Traced
from shardwise.errors import VariantError
from shardwise.tactics.strategies import FSDP
from shardwise.transforms.blocks import blocks_by_step, find_blocks, find_families
from shardwise.transforms.flat import Flat, spliced
from shardwise.transforms.remat import rematerialized
from shardwise.transforms.variants import Variant, batch_of, trace_variant
from tests.planner.test_plan_search import small_memory
from tests.transforms.test_microbatch import arrays, run

ROLES = {"batch": "batch", "params": "params"}
LAYERS, BATCH, SEQ, WIDTH = 4, 8, 6, 16

Layer = Callable[..., Any]


def trained(layer: Layer) -> Callable[..., Any]:
    """A step of gradient descent on layers in a Python loop."""

    def step(params: list[Any], batch: jax.Array) -> Any:
        def loss(params: list[Any]) -> jax.Array:
            x = batch
            for k, p in enumerate(params):
                x = layer(p, x, k)
            return jnp.mean(x**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def mlp(p: Any, x: jax.Array, k: int) -> jax.Array:
    return x + jnp.sin(jnp.tanh(x @ p["up"]) * jnp.cos(x @ p["up"])) @ p["down"]


def transformer(p: Any, x: jax.Array, k: int, rate: float = 0.25) -> jax.Array:
    """Attention and a residual connection with dropout, from a key of the layer's own."""
    scores = jnp.einsum("bsd,btd->bst", x @ p["up"][:, :WIDTH], x) / 4
    y = jax.nn.softmax(scores) @ x
    if rate:
        kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), k), 1 - rate, y.shape)
        y = jnp.where(kept, y / (1 - rate), 0)
    x = x + y
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


@jax.jit
def jitted(p: Any, x: jax.Array, k: int) -> jax.Array:
    return mlp(p, x, k)


@jax.custom_vjp
def squared(x: jax.Array) -> jax.Array:
    return jnp.sin(x) ** 2


squared.defvjp(lambda x: (squared(x), (jnp.sin(x), jnp.cos(x))), lambda r, g: (2 * g * r[0] * r[1],))


def custom(p: Any, x: jax.Array, k: int) -> jax.Array:
    return x + jax.jit(squared)(jnp.tanh(x @ p["up"])) @ p["down"]


def printing(p: Any, x: jax.Array, k: int) -> jax.Array:
    y = mlp(p, x, k)
    jax.debug.callback(lambda total: PRINTED.append(float(total)), y.sum())
    return y


PRINTED: list[float] = []


def asking(p: Any, x: jax.Array, k: int) -> jax.Array:
    """What a callback gives depends on how often it was called."""
    drawn = jax.experimental.io_callback(
        lambda: np.float32(ASKED.append(k) or len(ASKED)), jax.ShapeDtypeStruct((), "float32")
    )
    return jnp.sin(mlp(p, x, k) * drawn)


ASKED: list[int] = []


def layers(count: int = LAYERS) -> list[Any]:
    shapes = [(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)] * count
    drawn = iter(arrays(*shapes))
    return [{"up": next(drawn) / 5, "down": next(drawn) / 5} for _ in range(count)]


def batch() -> jax.Array:
    return arrays((BATCH, SEQ, WIDTH))[0]


def traced(fn: Any, args: tuple[Any, ...], count: int = 1, remat: bool = True) -> Traced:
    plain = trace_variant(fn, args, {}, JitOptions(), Variant())
    paths = batch_of(plain, {"batch": ("batch",)})[0] if count > 1 else ()
    return trace_variant(fn, args, {}, JitOptions(), Variant(count, paths, remat))


def check(fn: Any, args: tuple[Any, ...], count: int = 1) -> None:
    for have, want in zip(run(traced(fn, args, count).jaxpr, *args), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6)


def found(fn: Any, *args: Any) -> list[int]:
    """The number of blocks of every family."""
    flat = Flat(trace_variant(fn, args, {}, JitOptions(), Variant()).jaxpr)
    return [len(find_blocks(flat, cuts)) for cuts in find_families(flat)]


def temporaries(jaxpr: Any) -> int:
    """What XLA takes on the host, in an order that saves memory."""
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.jaxpr.invars]
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    try:
        compiled = jax.jit(jex.jaxpr_as_fun(jaxpr)).lower(*shapes).compile(options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        pytest.skip(str(error))
    return int(compiled.memory_analysis().temp_size_in_bytes)


@pytest.mark.parametrize("layer", [mlp, transformer, jitted, custom])
def test_the_same_numbers(layer: Layer) -> None:
    args = layers(), batch()
    assert found(trained(layer), *args) == [LAYERS]
    check(trained(layer), args)


@pytest.mark.parametrize("layer", [transformer, custom])
@settings(max_examples=4, deadline=None, derandomize=True)
@given(data=st.data())
def test_wherever_the_cuts_are(layer: Layer, data: st.DataObject) -> None:
    """Cuts are found by a rule of thumb; they may be anywhere in the forward pass."""
    args = layers(2), batch()
    plain = traced(trained(layer), args, remat=False).jaxpr
    flat = Flat(plain)
    forward = next(k for k, step in enumerate(flat.steps) if step.is_backward)
    cuts = data.draw(st.lists(st.integers(0, forward), min_size=2, max_size=6, unique=True).map(sorted))
    made = spliced(internals.retrace(rematerialized(flat, (), blocks_by_step(flat, [tuple(cuts)])), plain))
    for have, want in zip(run(made, *args), run(plain, *args), strict=True):
        np.testing.assert_allclose(have, want, rtol=2e-5, atol=1e-6)


def test_the_backward_pass_reads_parameters_behind_the_barrier() -> None:
    """As with jax.checkpoint: what is gathered for a forward pass need not be kept for the backward pass."""
    jaxpr = internals.split_jaxpr(traced(trained(mlp), (layers(), batch())).jaxpr)[0]
    weights = set(jaxpr.invars[:-1])
    backward = [e for e in jaxpr.eqns if is_transposed(e) and e.primitive.name != "optimization_barrier"]
    read = {v for e in backward for v in e.invars if not internals.is_literal(v)}
    assert len(backward) > 10 * LAYERS and weights.isdisjoint(read)


def test_in_micro_batches() -> None:
    check(trained(mlp), (layers(), batch()), 4)
    check(trained(partial(transformer, rate=0)), (layers(), batch()), 2)


def test_a_loss_under_jit() -> None:
    """Differentiation makes a call of the forward pass, and another one of the backward pass."""

    def step(params: list[Any], batch: jax.Array) -> Any:
        @jax.jit
        def loss(params: list[Any]) -> jax.Array:
            x = batch
            for p in params:
                x = mlp(p, x, 0)
            return jnp.mean(x**2)

        return jax.value_and_grad(loss)(params)

    args = layers(), batch()
    assert found(step, *args) == [LAYERS]
    check(step, args)


def test_what_is_carried_may_be_several_arrays() -> None:
    def layer(p: Any, carry: Any, k: int) -> Any:
        x, total = carry
        hidden = jnp.tanh(x @ p["up"])
        return x + jnp.sin(hidden) @ p["down"], total + jnp.sum(hidden**2)

    def step(params: list[Any], batch: jax.Array) -> Any:
        def loss(params: list[Any]) -> jax.Array:
            carry = batch, jnp.zeros(())
            for k, p in enumerate(params):
                carry = layer(p, carry, k)
            return jnp.mean(carry[0] ** 2) + 1e-2 * carry[1]

        return jax.value_and_grad(loss)(params)

    assert found(step, layers(), batch()) == [LAYERS]
    check(step, (layers(), batch()))


def test_layers_that_share_their_parameters() -> None:
    def shared(params: Any, batch: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            x = batch
            for k in range(LAYERS):
                x = mlp(p, x, k)
            return jnp.mean(x**2)

        return jax.value_and_grad(loss)(params)

    args = layers(1)[0], batch()
    assert found(shared, *args) == [LAYERS]
    check(shared, args)


def test_values_that_something_else_reads_are_kept() -> None:
    """All layers feed the loss, and one is an output."""

    def step(params: list[Any], batch: jax.Array) -> Any:
        def loss(params: list[Any]) -> Any:
            x, seen = batch, []
            for k, p in enumerate(params):
                seen.append(jnp.tanh(x @ p["up"]))
                x = mlp(p, x, k) + jnp.cos(seen[-1]) @ p["down"]
            return jnp.mean(x**2) + sum(jnp.mean(s) for s in seen), seen[1]

        return jax.value_and_grad(loss, has_aux=True)(params)

    assert found(step, layers(), batch()) == [LAYERS]
    check(step, (layers(), batch()))


def test_two_gradients_one_after_the_other() -> None:
    def step(params: list[Any], batch: jax.Array) -> Any:
        first, value = trained(mlp)(params, batch)
        return trained(mlp)(first, batch * value)

    assert found(step, layers(), batch()) == [LAYERS, LAYERS]
    check(step, (layers(), batch()))


def test_effects_are_not_run_twice() -> None:
    args = layers(), batch()
    PRINTED.clear()
    check(trained(printing), args)
    jax.effects_barrier()
    assert len(PRINTED) == 2 * LAYERS, "as often as without, in either run"
    with pytest.raises(VariantError, match="no loop and no repeated block"):
        traced(trained(asking), args)


def test_keys_that_are_arguments() -> None:
    def step(params: list[Any], batch: jax.Array, keys: jax.Array) -> Any:
        def layer(p: Any, x: jax.Array, k: int) -> jax.Array:
            y = jax.nn.gelu(x @ p["up"])
            return x + jnp.where(jax.random.bernoulli(keys[k], 0.8, y.shape), y, 0) @ p["down"]

        return trained(layer)(params, batch)

    args = layers(), batch(), jax.random.split(jax.random.key(3), LAYERS)
    assert found(step, *args) == [LAYERS]
    check(step, args)


def test_scans_inside_read_what_a_scan_before_them_leaves_out() -> None:
    def step(params: list[Any], batch: jax.Array) -> Any:
        def loss(params: list[Any]) -> jax.Array:
            def turn(h: jax.Array, x: jax.Array) -> Any:
                y = jnp.tanh(x @ params[0]["up"])
                return jnp.sin(h) + y.sum(-1, keepdims=True), jnp.cos(y)

            _, ys = jax.lax.scan(turn, jnp.zeros((SEQ, 1)), batch)
            x = jnp.zeros((SEQ, WIDTH))
            for p in params:

                def inner(h: jax.Array, y: jax.Array, p: Any = p) -> Any:
                    z = jnp.tanh((y * jnp.sin(y)) @ p["down"])
                    return jnp.sin(h + z), jnp.cos(z) * h

                x, zs = jax.lax.scan(inner, x, ys)
                x = x + jnp.mean(jnp.sin(zs), 0)
            return jnp.mean(x**2)

        return jax.value_and_grad(loss)(params)

    args = layers(), batch()
    check(step, args)


def once(params: list[Any], batch: jax.Array) -> Any:
    return trained(transformer)(params[:1], batch)


def forward(params: list[Any], batch: jax.Array) -> Any:
    for p in params:
        batch = mlp(p, batch, 0)
    return batch


def checkpointed(params: list[Any], batch: jax.Array) -> Any:
    return trained(jax.checkpoint(mlp, static_argnums=2))(params, batch)


def different(params: list[Any], batch: jax.Array) -> Any:
    def loss(p: Any) -> jax.Array:
        x = jnp.sin(batch @ p["up"]) @ p["down"]
        return jnp.mean(jnp.exp(jnp.cumsum(x, 0) - jax.nn.logsumexp(x, 1, keepdims=True)))

    return jax.grad(loss)(params[0])


@pytest.mark.parametrize("fn", [once, forward, checkpointed, different])
def test_where_there_is_nothing_to_compute_again(fn: Any) -> None:
    with pytest.raises(VariantError, match="has no loop and no repeated block whose backward pass reads more"):
        traced(fn, (layers(), batch()))


def test_as_much_memory_as_with_checkpoint() -> None:
    """By XLA, and by the cost model: as for the program whose author wrote ``jax.checkpoint``."""
    options: dict[str, Any] = {"scan": False, "layers": 3}
    plain, by_hand = zoo.load("mixtral", "tiny", **options), zoo.load("mixtral", "tiny", remat=True, **options)
    made = traced(plain.fn, plain.args).jaxpr
    before, want = (temporaries(traced(p.fn, p.args, remat=False).jaxpr) for p in (plain, by_hand))
    assert temporaries(made) <= 1.02 * want and want < 0.8 * before
    asked: dict[str, Any] = {"mesh": {"data": 8}, "tactics": [FSDP("data")], "roles": ROLES}
    predicted = shardwise.plan(plain.fn, *plain.args, remat=True, **asked).predicted
    other = shardwise.plan(by_hand.fn, *by_hand.args, **asked).predicted
    assert predicted.peak_bytes <= 1.02 * other.peak_bytes and predicted.time_s <= 1.02 * other.time_s


@pytest.mark.parametrize("count", [None, 2])
def test_sharded_it_computes_the_same(count: int | None) -> None:
    args = layers(), batch()
    asked: dict[str, Any] = {"mesh": {"data": 4, "model": 2}, "tactics": [FSDP("data")], "roles": ROLES}
    plan = shardwise.plan(trained(mlp), *args, microbatches=count, remat=True, **asked)
    assert plan.variant.remat and shardwise.verify(plan, trained(mlp), *args).agrees


def test_the_search_chooses_it_where_it_is_what_fits() -> None:
    program = zoo.load("gpt", "tiny", scan=False, layers=6, batch=256)
    where: dict[str, Any] = {"mesh": {"x": 4}, "budget_evals": 200, "donate_argnums": program.donate_argnums}
    plan = shardwise.plan(program.fn, *program.args, topology=small_memory("v5e:2x2", 24 << 20), remat="auto", **where)
    assert plan.predicted.fits and plan.variant == Variant(remat=True) and plan.search is not None
    tried = {t.variant: t.fits for t in plan.search.variants}
    assert tried == {"as it is": False, "parameters gathered again": False, "rematerialized": True}


@pytest.mark.parametrize(("name", "count"), [("vit", 2), ("t5", None), ("mixtral", None), ("ssm", 2), ("gns", None)])
def test_programs_of_the_zoo_sharded_compute_the_same(name: str, count: int | None) -> None:
    program = zoo.load(name, "tiny", scan=False)
    asked: dict[str, Any] = {"mesh": {"data": 4}, "tactics": [FSDP("data")], "roles": ROLES, "remat": True}
    plan = shardwise.plan(program.fn, *program.args, microbatches=count, **asked)
    assert shardwise.verify(plan, program.fn, *program.make_args()).agrees


@pytest.mark.parametrize(
    ("name", "options", "families"),
    [("gpt", {"layers": 24}, [24]), ("t5", {}, [2, 2]), ("gpt", {"layers": 1}, []), ("mlp", {"layers": 6}, [6])],
)
def test_families_in_the_zoo(name: str, options: dict[str, Any], families: list[int]) -> None:
    program = zoo.load(name, "tiny", scan=False, **options)
    assert found(program.fn, *program.args) == families
