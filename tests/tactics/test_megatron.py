"""Megatron finds hidden dimensions and heads by structure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.tactics.strategies import Megatron
from tests.dims.programs import shape


@pytest.mark.parametrize(
    ("target", "sharded", "whole"),
    [
        (
            "t2b:tiny",
            ["mlp/up:2", "mlp/gate:2", "mlp/down:1", "attention/q:2", "attention/o:1"],
            ["attention/k", "attention_norm"],
        ),
        ("llama3:tiny", ["mlp/up:2", "mlp/down:1", "attention/q:2", "attention/k:2", "attention/o:1"], ["mlp_norm"]),
        ("t2b:tiny,unrolled", ["mlp/up:1", "mlp/down:0", "attention/q:1", "attention/o:0"], ["attention/k"]),
    ],
)
def test_transformers(target: str, sharded: list[str], whole: list[str]) -> None:
    program = zoo.parse(target)
    layers = "params/layers/0" if "unrolled" in target else "params/layers"
    plan = shardwise.plan(
        program.fn, *program.args, mesh={"model": 4}, tactics=[Megatron("model")], roles={"params": "params"}
    )
    for place in sharded:
        path, dim = place.split(":")
        spec = plan.array(f"{layers}/{path}").spec
        assert [axes for axes in spec if axes] == [("model",)] and spec[int(dim)] == ("model",), (place, spec)
    for path in whole:
        assert not any(plan.array(f"{layers}/{path}").spec), path


def test_a_skip_inside_the_hidden_dimension_is_no_residual_stream() -> None:
    def loss(w, x):
        hidden = x @ w["a"]
        return jnp.sum(((hidden + jnp.tanh(hidden)) @ w["b"]) ** 2)

    w = {"a": shape(16, 64), "b": shape(64, 8)}
    plan = shardwise.plan(
        jax.grad(loss), w, shape(32, 16), mesh={"model": 4}, tactics=[Megatron("model")], roles={"params": "w"}
    )
    assert plan.array("w/a").spec == ((), ("model",)) and plan.array("w/b").spec == (("model",), ())


def test_a_bias_that_is_no_parameter_makes_no_residual_stream() -> None:
    def loss(w, bias, x):
        return jnp.sum((jax.nn.relu(x @ w["a"] + bias) @ w["b"]) ** 2)

    w = {"a": shape(16, 64), "b": shape(64, 8)}
    plan = shardwise.plan(
        jax.grad(loss),
        w,
        shape(64),
        shape(32, 16),
        mesh={"model": 4},
        tactics=[Megatron("model")],
        roles={"params": "w"},
    )
    assert plan.array("w/a").spec == ((), ("model",)) and plan.array("bias").spec == (("model",),)


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def test_a_product_that_is_normalized_before_it_is_added_makes_a_residual_stream() -> None:
    def loss(layers, x):
        for w in layers:
            x = x + norm(jax.nn.relu(norm(x) @ w["up"]) @ w["down"])
        return jnp.sum(x**2)

    layers = [{"up": shape(64, 256), "down": shape(256, 64)} for _ in range(2)]
    where = {"mesh": {"model": 4}, "tactics": [Megatron("model")], "roles": {"params": "layers"}}
    plan = shardwise.plan(jax.grad(loss), layers, shape(32, 64), **where)
    for k in range(2):
        assert plan.array(f"layers/{k}/up").spec == ((), ("model",))
        assert plan.array(f"layers/{k}/down").spec == (("model",), ())
    assert plan.array("x").spec == ((), ())


def attend(w, x, heads: int):
    """Attention with one matrix for queries, keys and values."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthk->bsthk", x, w["qkv"]), 2, 0)
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / k.shape[-1] ** 0.5)
    return jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", scores, v), w["o"])


@pytest.mark.parametrize(("heads", "want"), [(8, True), (6, False)])
def test_heads_that_the_axis_divides_and_never_their_width(heads: int, want: bool) -> None:
    def loss(w, x):
        y = attend(w, x, heads)
        return jnp.sum((x + y + jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)

    w = {"qkv": shape(64, 3, heads, 16), "o": shape(heads, 16, 64), "up": shape(64, 256), "down": shape(256, 64)}
    where = {"mesh": {"model": 4}, "tactics": [Megatron("model")], "roles": {"params": "w"}}
    plan = shardwise.plan(jax.grad(loss), w, shape(8, 16, 64), **where)
    on = ("model",) if want else ()
    assert plan.array("w/qkv").spec == ((), (), on, ()) and plan.array("w/o").spec == (on, (), ())
    assert plan.array("w/up").spec == ((), ("model",))


@pytest.mark.parametrize("target", ["t5:tiny", "gpt:tiny", "llama3:tiny"])
def test_the_order_of_tactics_does_not_matter(target: str) -> None:
    program = zoo.parse(target)
    specs = []
    for tactics in ("dp:data,megatron:model", "megatron:model,dp:data"):
        plan = shardwise.plan(program.fn, *program.args, mesh={"data": 2, "model": 4}, tactics=tactics)
        specs.append({a.path: a.spec for a in plan.arguments})
    assert specs[0] == specs[1] and any(("model",) in spec for spec in specs[0].values())


def test_a_part_of_a_parameter_is_nothing_to_shard() -> None:
    """The second half of a dimension is made by one product and contracted by another, and no parameter has it alone."""

    def loss(w, x):
        first = w["a"].reshape(16, 8, 4)
        h = jnp.einsum("bi,ijk->bjk", x, first)
        return jnp.sum(jnp.einsum("bjk,jkl->bl", jax.nn.relu(h), w["b"].reshape(8, 4, 16)) ** 2)

    w = {"a": shape(16, 32), "b": shape(32, 16)}
    where = {"mesh": {"model": 4}, "tactics": [Megatron("model")], "roles": {"params": "w"}}
    plan = shardwise.plan(jax.grad(loss), w, shape(8, 16), **where)
    assert plan.array("w/a").spec == ((), ("model",)) and plan.array("w/b").spec == (("model",), ())


def test_of_a_chain_of_products_every_second_dimension_is_sharded() -> None:
    """The dimension in the middle excludes both of its neighbors, and would shard two of the four matrices."""

    def loss(w, x):
        for name in "abcd":
            x = jax.nn.relu(x @ w[name])
        return jnp.sum(x**2)

    sizes = {"a": (256, 512), "b": (512, 1024), "c": (1024, 512), "d": (512, 256)}
    w = {name: shape(*size) for name, size in sizes.items()}
    plan = shardwise.plan(
        jax.grad(loss), w, shape(4096, 256), mesh={"data": 2, "model": 4}, tactics="dp:data,megatron:model"
    )
    assert [plan.array(f"w/{name}").spec for name in "abcd"] == [((), ("model",)), (("model",), ())] * 2
