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
