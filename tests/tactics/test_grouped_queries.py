"""Megatron where an axis divides the heads of queries, and not those of keys and values."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw

WIDTH, MODEL, HIDDEN = 8, 32, 64
#: How keys and values get to the queries: repeated, or one head for a group of queries.
STYLES = ("repeated", "flat", "grouped", "flax")


def shapes(heads: int, few: int, style: str) -> dict[str, jax.ShapeDtypeStruct]:
    split = style in ("repeated", "flax")
    sizes = {
        "q": (MODEL, heads, WIDTH) if split else (MODEL, heads * WIDTH),
        "k": (MODEL, few, WIDTH) if split else (MODEL, few * WIDTH),
        "v": (MODEL, few, WIDTH) if split else (MODEL, few * WIDTH),
        "o": (heads, WIDTH, MODEL) if split else (heads * WIDTH, MODEL),
        "up": (MODEL, HIDDEN),
        "down": (HIDDEN, MODEL),
    }
    return {name: jax.ShapeDtypeStruct(size, "float32") for name, size in sizes.items()}


def training(style: str, heads: int, few: int) -> Any:
    def attention(w: Any, x: jax.Array) -> jax.Array:
        if style in ("repeated", "flax"):
            q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
        else:
            q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, WIDTH) for name in "qkv")
        if style == "flax":
            out = jax.nn.dot_product_attention(q, k, v)
        elif style == "grouped":
            q = q.reshape(*x.shape[:2], few, heads // few, WIDTH)
            scores = jax.nn.softmax(jnp.einsum("bsgmk,btgk->bgmst", q, k))
            out = jnp.einsum("bgmst,btgk->bsgmk", scores, v)
        else:
            k, v = (jnp.repeat(t, heads // few, 2) for t in (k, v))
            out = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k)), v)
        out = out.reshape(*x.shape[:2], heads, WIDTH)
        return jnp.einsum("bshk,hkd->bsd", out, w["o"].reshape(heads, WIDTH, MODEL))

    def loss(w: Any, x: jax.Array) -> jax.Array:
        x = x + attention(w, x)
        return ((x + jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2).mean()

    def step(w: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

    return step


def planned(style: str, heads: int, few: int, mesh: dict[str, int], tactics: Any = "megatron") -> Any:
    x = jax.ShapeDtypeStruct((4, 16, MODEL), "float32")
    return sw.plan(training(style, heads, few), shapes(heads, few, style), x, mesh=mesh, tactics=tactics)


def heads_spec(style: str, name: str, axes: Any) -> P:
    """The spec in which the heads of a matrix have some axes."""
    return P(axes) if name == "o" else P(None, axes)


@pytest.mark.parametrize("style", STYLES)
def test_queries_and_outputs_are_sharded_and_keys_and_values_stay_whole(style: str) -> None:
    """With 2 heads of keys for 8 of queries, on 4 devices; results are those of one device."""
    plan = planned(style, 8, 2, {"model": 4})
    for name in "qkvo":
        want = heads_spec(style, name, "model") if name in "qo" else P()
        assert plan.spec(f"w/{name}") == plan.spec(f"out/{name}") == want, name
    assert plan.spec("w/up") == P(None, "model")
    assert any("4" in note and "2" in note and re.search(r"w/\{?k", note) for note in plan.notes), plan.notes
    w = {
        name: np.random.default_rng(k).standard_normal(s.shape, "float32") / 8
        for k, (name, s) in enumerate(shapes(8, 2, style).items())
    }
    x = np.random.default_rng(9).standard_normal((4, 16, MODEL), "float32")
    step = training(style, 8, 2)
    for name, want in step(w, x).items():
        np.testing.assert_allclose(plan.jit(step)(w, x)[name], want, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("style", STYLES)
def test_attention_is_sharded_with_its_queries(style: str) -> None:
    """The products of attention have the queries' heads, or the members of their groups, on the axis."""
    text = planned(style, 8, 2, {"model": 4}).program(160)
    local = [line for line in text.splitlines() if "dot_general" in line and ",16,16]" in line]  # scores of 16 x 16
    assert local and all("·model" in line or "/model" in line for line in local), text


@pytest.mark.parametrize("style", STYLES)
def test_keys_and_values_are_sharded_as_far_as_axes_divide_them(style: str) -> None:
    plan = planned(style, 8, 2, {"a": 2, "b": 4})
    assert plan.spec("w/q") == heads_spec(style, "q", ("a", "b"))
    assert plan.spec("w/o") == heads_spec(style, "o", ("a", "b"))
    assert plan.spec("w/k") == plan.spec("w/v") == heads_spec(style, "k", "a")


@pytest.mark.parametrize("style", STYLES)
def test_heads_that_an_axis_divides_nowhere_are_left_with_a_note(style: str) -> None:
    plan = planned(style, 6, 2, {"model": 4})
    assert {plan.spec(f"w/{name}") for name in "qkvo"} == {P()} and plan.spec("w/up") == P(None, "model")
    assert any("w/{" in note and "q" in note and "6" in note for note in plan.notes), plan.notes


def test_groups_and_members_that_only_two_axes_divide_are_left_to_them() -> None:
    plan = planned("grouped", 8, 4, {"model": 8})
    assert plan.spec("w/q") == P()
    assert any(
        note.endswith("8 devices do not divide 4; two axes, of 4 and 2 devices, would shard it") for note in plan.notes
    )
    assert planned("grouped", 8, 4, {"a": 4, "b": 2}).spec("w/q") == P(None, ("a", "b"))


def test_without_heads_the_sequence_has_the_axis_in_attention() -> None:
    plan = planned("repeated", 8, 2, {"model": 4}, "feedforward+sequence:model")
    assert {plan.spec(f"w/{name}") for name in "qkvo"} == {P()} and plan.spec("w/up") == P(None, "model")
    assert plan.spec("x") == P(None, "model")
    assert planned("repeated", 8, 2, {"model": 4}, sw.Megatron("model", heads=False)).spec("w/up") == P(None, "model")


@pytest.mark.parametrize(("few", "wanted"), [(2, True), (4, False), (8, False)])
def test_strategies_without_heads_are_compared_where_heads_are_divided_in_part(few: int, wanted: bool) -> None:
    args = (shapes(8, few, "repeated"), jax.ShapeDtypeStruct((4, 16, MODEL), "float32"))
    rows = sw.compare(training("repeated", 8, few), *args, mesh={"model": 4}).rows
    names = {row.name for row in rows}
    assert "megatron:model,sequence:model" in names
    assert ("feedforward:model,sequence:model" in names) == wanted
