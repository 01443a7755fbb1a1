"""Roles of steps that serve a model: caches, frozen weights, decoding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardwise as sw
from tests.tactics.test_roles import PARAMS, X, Y, inferred, loss_of, shape


def test_pages_of_a_cache() -> None:
    """They have no dimension of the batch."""

    def step(w: Any, pages: Any, table: Any, x: Any) -> Any:
        pages = pages.at[table[:, 0]].set(x @ w)
        return pages, jnp.einsum("bd,bpd->bp", x, pages[table]).argmax(-1)

    found = inferred(step, shape(16, 16), shape(512, 16), shape(64, 4, dtype="int32"), shape(64, 16))
    assert found == {"batch": ("table", "x"), "params": ("w",), "cache": ("pages",)}


def test_frozen_weights_with_adapters() -> None:
    def step(base: Any, adapter: Any, x: Any, y: Any) -> Any:
        def loss(adapter: Any) -> Any:
            merged = {**base, "up": base["up"] + adapter["a"] @ adapter["b"]}
            return loss_of(merged, x, y)

        value, grads = jax.value_and_grad(loss)(adapter)
        return jax.tree.map(lambda w, g: w - g, adapter, grads), value

    adapter = {"a": shape(16, 4), "b": shape(4, 64)}
    assert inferred(step, PARAMS, adapter, X, Y) == {"batch": ("x", "y"), "params": ("base", "adapter")}


def test_inference() -> None:
    def forward(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]

    assert inferred(forward, PARAMS, X) == {"batch": ("x",), "params": ("params",)}
    assert inferred(lambda x, params: forward(params, x), X, PARAMS) == {"batch": ("x",), "params": ("params",)}
    residual = {**PARAMS, "down": shape(64, 16)}
    assert inferred(lambda p, x: x + forward(p, x), residual, X) == {"batch": ("x",), "params": ("p",)}
    assert inferred(lambda w, x: x @ w.T, shape(8, 16), X) == {"batch": ("x",), "params": ("w",)}


def test_attention_with_a_mask_and_a_table() -> None:
    def forward(params: Any, text: Any, mask: Any) -> Any:
        h = params["table"][text]
        scores = jnp.einsum("bsd,btd->bst", h @ params["q"], h @ params["k"]) + mask
        return jax.nn.softmax(scores) @ h @ params["table"].T

    params = {"table": shape(512, 64), "q": shape(64, 64), "k": shape(64, 64)}
    text = shape(32, 128, dtype="int32")
    assert inferred(forward, params, text, shape(128, 128)) == {"batch": ("text",), "params": ("params",)}

    def step(params: Any, text: Any, mask: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = jax.nn.log_softmax(forward(params, text, mask))
            return -jnp.take_along_axis(logits, text[..., None], -1).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads), value

    assert inferred(step, params, text, shape(128, 128)) == {"batch": ("text",), "params": ("params",)}


def test_decoding_with_a_cache() -> None:
    def decode(params: Any, cache: Any, x: Any, position: Any) -> Any:
        keys = jax.lax.dynamic_update_index_in_dim(cache, (x @ params["k"])[:, None], position, 1)
        scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", x @ params["q"], keys))
        return keys, jnp.einsum("bt,btd->bd", scores, keys) @ params["o"]

    params = {name: shape(64, 64) for name in "kqo"}
    found = inferred(decode, params, shape(32, 128, 64), shape(32, 64), shape(dtype="int32"))
    assert found == {"batch": ("x",), "params": ("params",), "cache": ("cache",)}


def test_decoding_by_scanned_layers_that_returns_the_next_tokens() -> None:
    def decode(params: Any, cache: Any, tokens: Any, position: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            w, keys = own
            keys = jax.lax.dynamic_update_index_in_dim(keys, (x @ w)[:, None], position, 1)
            scores = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, keys))
            return x + jnp.einsum("bt,btd->bd", scores, keys), keys

        x, cache = jax.lax.scan(layer, params["embed"][tokens], (params["w"], cache))
        return (x @ params["embed"].T).argmax(-1).astype(tokens.dtype), cache

    params = {"embed": shape(512, 64), "w": shape(16, 64, 64)}
    args = (params, shape(16, 32, 128, 64), shape(32, dtype="int32"), shape(dtype="int32"))
    assert inferred(decode, *args) == {"batch": ("tokens",), "params": ("params",), "cache": ("cache",)}
    plan = sw.plan(decode, *args, mesh={"data": 4}, tactics="dp")
    assert plan.spec("cache") == P(None, "data") and plan.spec("params/w") == P()
