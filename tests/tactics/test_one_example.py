"""A batch of one example: its sequence is what strategies shard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardwise as sw
from tests.programs import mixtures

MODEL, TOKENS = 64, 256


def block(w: Any, x: jax.Array) -> jax.Array:
    q, k, v = (x @ w[name] for name in "qkv")
    x = x + jax.nn.softmax(jnp.einsum("bsk,btk->bst", q, k)) @ v @ w["o"]
    return x + jax.nn.relu(x @ w["up"]) @ w["down"]


def f32(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, "float32")


LAYER = {**dict.fromkeys("qkvo", f32(MODEL, MODEL)), "up": f32(MODEL, 4 * MODEL), "down": f32(4 * MODEL, MODEL)}


def tokens_step(w: Any, tokens: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        scores = jax.nn.log_softmax(block(w["layer"], w["embed"][tokens]) @ w["head"])
        return -jnp.take_along_axis(scores, jnp.roll(tokens, -1, 1)[..., None], -1).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient), value


def activations_step(w: Any, x: jax.Array, y: jax.Array) -> Any:
    """With a table of positions that is trained, and has the sequence in its first dimension."""
    gradient = jax.grad(lambda w: ((block(w["layer"], x + w["positions"]) - y) ** 2).mean())(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradient)


def step(examples: int = 1) -> tuple[Any, ...]:
    w = {"layer": LAYER, "embed": f32(512, MODEL), "head": f32(MODEL, 512)}
    return tokens_step, w, jax.ShapeDtypeStruct((examples, TOKENS), "int32")


@pytest.mark.parametrize("tactic", ["fsdp", "zero1", "zero2", "context", "megatron+sequence"])
def test_strategies_shard_the_sequence(tactic: str) -> None:
    plan = sw.plan(*step(), mesh={"x": 4}, tactics=tactic)
    assert plan.roles == {"batch": ("tokens",), "params": ("w",)}
    assert plan.spec("tokens") == P(None, "x")
    assert (plan.spec("w/layer/up") != P()) == (tactic in ("fsdp", "megatron+sequence"))


def test_data_parallelism_says_that_there_is_one_example() -> None:
    with pytest.raises(
        sw.DecisionError, match="DataParallel: the batch has one example; 'context' shards its sequence"
    ):
        sw.plan(*step(), mesh={"x": 4}, tactics="dp")
    assert sw.plan(*step(4), mesh={"x": 4}, tactics="dp").spec("tokens") == P("x")


def test_all_strategies_of_a_sequence_are_compared() -> None:
    compared = sw.compare(*step(), mesh={"x": 4}, topology="v5e:2x2")
    names = {row.name for row in compared.rows}
    assert {"fsdp:x", "zero1:x", "zero2:x", "context:x", "megatron:x,sequence:x"} <= names
    assert set(dict(compared.refused)) == {"expert:x", "edges:x", "dp:x", "dp:x,vocabulary:x"}


def test_activations_of_one_example_beside_trained_positions() -> None:
    for positions in (f32(TOKENS, MODEL), f32(1, TOKENS, MODEL)):
        x = f32(1, TOKENS, MODEL)
        w = {"layer": LAYER, "positions": positions}
        plan = sw.plan(activations_step, w, x, x, mesh={"x": 4}, tactics="context")
        assert plan.roles == {"batch": ("x", "y"), "params": ("w",)}
        assert plan.spec("x") == plan.spec("y") == P(None, "x")


def test_experts_are_not_the_batch_where_there_is_one_example(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_B", 1), ("_TOKENS", mixtures._S)):
        monkeypatch.setattr(mixtures, name, size)
    layer = {"attention": mixtures.HEADS, "mlp": mixtures.EXPERTS}
    fn, args = mixtures.training(mixtures.vmapped_heads, mixtures.all_experts, layer)
    plan = sw.plan(fn, *args, mesh={"x": 4}, tactics=[])
    assert plan.roles == {"batch": ("batch",), "params": ("params",), "optimizer": ("moments",)}


def test_a_bias_in_one_row_is_no_batch() -> None:
    def net(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ w + bias) @ w.T

    plan = sw.plan(net, f32(8, 16), f32(1, 16), f32(32, 8), mesh={"x": 4}, tactics=[])
    assert plan.roles == {"batch": ("x",), "params": ("w", "bias")}


def test_a_sequence_that_is_not_found_says_what_to_name() -> None:
    with pytest.raises(sw.DecisionError, match=r"context: the program has no sequence .* roles=\{'batch': 'path'\}"):
        sw.plan(lambda w, x: x @ w, f32(8, 8), f32(1, 8), mesh={"x": 4}, tactics="context")
