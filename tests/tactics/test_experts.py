"""Experts are found by structure, however a mixture is written; heads are none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwise import analyze
from shardwise.tactics.places import find_places
from tests.dims.programs import shape
from tests.programs import mixtures

#: The parameters that have a place of the experts, by style. Lookups do not link the experts of one matrix with another's.
STYLES = {
    mixtures.by_masks: ("down",),
    mixtures.by_slots: ("down",),
    mixtures.all_experts: ("down",),
    mixtures.all_in_one: ("down",),
    mixtures.sorted_by_expert: ("down",),
    mixtures.own_matrices: ("down", "up"),
    mixtures.one_by_one: (),
    mixtures.dense: (),
}


def places(fn: Any, *args: Any) -> Any:
    program = (analysis := analyze(fn, *args)).program
    inputs = [program.values[a.value] for a in program.arguments]
    batch = [v for v in inputs if v.path in ("batch", "cache", "x")]
    return find_places(analysis, batch, [v for v in inputs if v.path.startswith("params")])


@pytest.mark.parametrize("mlp", STYLES, ids=lambda mlp: mlp.__name__)
def test_beside_heads_that_products_share(mlp: Any) -> None:
    layer = {"attention": mixtures.HEADS, "mlp": mixtures.DENSE if mlp is mixtures.dense else mixtures.EXPERTS}
    fn, args = mixtures.training(mixtures.vmapped_heads, mlp, layer)
    found = places(fn, *args)
    assert found.experts == tuple((f"params/layers/0/mlp/{name}", 0) for name in STYLES[mlp])
    assert found.vocabularies == (("params/embed", 0), ("params/head", 1))


def test_heads_that_have_matrices_of_their_own() -> None:
    layer = {"attention": mixtures.BLOCKS, "mlp": mixtures.DENSE}
    fn, args = mixtures.training(mixtures.block_diagonal_heads, mixtures.dense, layer, scanned=True)
    assert places(fn, *args).experts == ()


def test_heads_that_attend_to_latents() -> None:
    """The matrices of keys and values are applied to queries and results: no product of activations has heads in both."""

    def decode(params: Any, cache: jax.Array, x: jax.Array) -> jax.Array:
        q = jnp.einsum("bhk,rhk->bhr", jnp.einsum("bd,dhk->bhk", x, params["q"]), params["k"])
        scores = jax.nn.softmax(jnp.einsum("bhr,btr->bht", q, cache))
        latents = jnp.einsum("bht,btr->bhr", scores, cache)
        return jnp.einsum("bhk,hkd->bd", jnp.einsum("bhr,rhk->bhk", latents, params["v"]), params["o"])

    params = {"q": shape(64, 8, 16), "k": shape(32, 8, 16), "v": shape(32, 8, 16), "o": shape(8, 16, 64)}
    assert places(decode, params, shape(16, 128, 32), shape(16, 64)).experts == ()


def test_those_with_the_most_bytes_come_first() -> None:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        for name in ("small", "large"):
            shares = jax.nn.softmax(x @ params[name]["router"])
            made = jax.vmap(lambda up, down, x=x: jax.nn.relu(x @ up) @ down)(params[name]["up"], params[name]["down"])
            x = x + jnp.einsum("te,etd->td", shares, made)
        return x

    params = {
        name: {"router": shape(64, count), "up": shape(count, 64, 128), "down": shape(count, 128, 64)}
        for name, count in (("small", 4), ("large", 8))
    }
    assert [path for path, _ in places(forward, params, shape(256, 64)).experts] == [
        "params/large/down",
        "params/small/down",
    ]
