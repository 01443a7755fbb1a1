"""Roles and data parallelism where examples are drawn from arguments: shuffled minibatches, replay buffers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from shardwise.tactics.drawn import summed_rows
from tests.tactics.test_roles import PARAMS, inferred, loss_of, shape

KEY = jax.eval_shape(lambda: jax.random.key(0))


def update(state: Any, part: Any) -> Any:
    params, moments = state
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, jax.grad(loss_of)(params, *part))
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, moments), moments


def shuffled(params: Any, moments: Any, rows: Any, key: Any) -> Any:
    """Epochs over minibatches of all steps of all environments, as in PPO."""
    flat = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), rows)

    def epoch(state: Any, key: Any) -> Any:
        order = jax.random.permutation(key, 32 * 16)
        parts = jax.tree.map(lambda x: x[order].reshape(4, -1, x.shape[-1]), flat)
        return jax.lax.scan(lambda state, part: (update(state, part), None), state, parts)

    return jax.lax.scan(epoch, (params, moments), jax.random.split(key, 3))[0]


def looked_up(params: Any, moments: Any, rows: Any, key: Any) -> Any:
    """Minibatches are looked up in the loop over them."""
    order = jax.random.permutation(key, 512).reshape(4, -1)

    def visit(state: Any, at: Any) -> Any:
        return update(state, jax.tree.map(lambda x: x[at], rows)), None

    return jax.lax.scan(visit, (params, moments), order)[0]


def sliced(params: Any, moments: Any, rows: Any, key: Any) -> Any:
    """Minibatches are slices."""

    def visit(k: Any, state: Any) -> Any:
        return update(state, jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, 64 * k, 64), rows))

    return jax.lax.fori_loop(0, 8, visit, (params, moments))


ROWS = dict.fromkeys((looked_up, sliced), (512,)) | {shuffled: (32, 16)}


@pytest.mark.parametrize("fn", ROWS, ids=lambda fn: fn.__name__)
def test_minibatches(fn: Any) -> None:
    args = PARAMS, PARAMS, (shape(*ROWS[fn], 16), shape(*ROWS[fn], 8)), KEY
    roles = inferred(fn, *args)
    assert {k: v for k, v in roles.items() if k != "cache"} == {
        "batch": ("rows",),
        "params": ("params",),
        "optimizer": ("moments",),
    }
    plan = sw.plan(fn, *args, mesh={"data": 4}, tactics="fsdp")
    assert plan.spec("rows/0") == P("data") and plan.spec("params/up") == plan.spec("moments/up") == P(None, "data")
    assert products_are_sharded(plan)


def products_are_sharded(plan: Any) -> bool:
    products = [op.id for op in plan.inquiry.analysis.program.ops if op.kind == "dot_general"]
    return bool(products) and all(any(plan.sharded.factors[op]) for op in products)


def replay(several: bool) -> Any:
    """A step that writes into a buffer at a cursor, samples from it, and follows its target network."""

    def step(params: Any, target: Any, buffer: Any, cursor: Any, new: Any, key: Any) -> Any:
        if several:
            at = (cursor + jnp.arange(8)) % 512
            buffer = jax.tree.map(lambda old, x: old.at[at].set(x), buffer, new)
        else:
            buffer = jax.tree.map(
                lambda old, x: jax.lax.dynamic_update_index_in_dim(old, x, cursor % 512, 0), buffer, new
            )
        x, reward, following = jax.tree.map(lambda old: old[jax.random.randint(key, (64,), 0, 512)], buffer)

        def loss(params: Any) -> Any:
            hidden = jax.nn.relu(following @ target["up"] + target["bias"])
            return loss_of(params, x, reward[:, None] + (hidden @ target["down"]).max(-1, keepdims=True))

        value, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        target = jax.tree.map(lambda t, w: 0.99 * t + 0.01 * w, target, params)
        return params, target, buffer, cursor + 1, value

    rows = (8,) if several else ()
    buffer, new = ((shape(*n, 16), shape(*n), shape(*n, 16)) for n in ((512,), rows))
    return step, (PARAMS, PARAMS, buffer, shape(dtype="int32"), new, KEY)


@pytest.mark.parametrize("several", [False, True])
def test_a_replay_buffer(several: bool) -> None:
    step, args = replay(several)
    roles = inferred(step, *args)
    assert roles["batch"] == (("buffer", "new") if several else ("buffer",))
    assert roles["params"] == ("params", "target")
    plan = sw.plan(step, *args, mesh={"data": 4}, tactics="dp")
    assert plan.spec("buffer/0") == P("data") and plan.spec("params/up") == P() and products_are_sharded(plan)


def test_samples_of_a_sharded_buffer_are_those_of_plain_jax() -> None:
    step, shapes = replay(True)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes[:-1])
    args = (*args, jax.random.key(1))
    plan = sw.plan(step, *shapes, mesh={"data": 8}, tactics="dp")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), plan.jit(step)(*args), step(*args)
    )


def test_generated_examples_are_sharded_with_the_batch() -> None:
    """The noise of a generator has no dimension of an argument."""

    def step(params: Any, real: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            noise = jax.random.normal(key, (128, 16))
            made = jnp.tanh(noise @ params["up"]) @ params["down"]
            return (made**2).mean() - ((real @ params["down"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    params = {"up": shape(16, 64), "down": shape(64, 8)}
    plan = sw.plan(step, params, shape(256, 64), KEY, mesh={"data": 4}, tactics="dp")
    assert plan.roles == {"batch": ("real",), "params": ("params",)} and products_are_sharded(plan)


def test_a_vocabulary_is_not_drawn_from() -> None:
    """Tokens of shuffled texts look into a table: the table is a parameter, the texts are the batch."""

    def step(params: Any, texts: Any, key: Any) -> Any:
        def visit(params: Any, at: Any) -> Any:
            def loss(params: Any) -> Any:
                return ((params["table"][texts[at]] @ params["w"]) ** 2).mean()

            return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params)), None

        return jax.lax.scan(visit, params, jax.random.permutation(key, 512).reshape(8, 64))[0]

    params = {"table": shape(100, 16), "w": shape(16, 8)}
    found = inferred(step, params, shape(512, 32, dtype="int32"), KEY)
    assert (found["batch"], found["params"]) == (("texts",), ("params",))


def test_widths_of_heads_are_no_examples() -> None:
    """No argument has the width: heads and widths are one dimension. Scores have dimensions of the cache that comes back."""

    def decode(params: Any, cache: Any, x: Any) -> Any:
        cache = cache.at[:, 0].set(x @ params["k"])
        heads = cache.reshape(16, 32, 4, 16)
        scores = jnp.einsum("bhd,bthd->bht", (x @ params["q"]).reshape(16, 4, 16), heads)
        return jnp.einsum("bht,bthd->bhd", scores, heads).reshape(16, 64) @ params["o"], cache

    params = {name: shape(64, 64) for name in "kqo"}
    analysis = sw.analyze(decode, params, shape(16, 32, 64), shape(16, 64))
    assert not summed_rows(analysis, {analysis.color_of("x", 0).id})
