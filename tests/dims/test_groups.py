"""Grouping: what repeated structure shares a decision, what does not, and that depth does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.dims.analysis import Analysis
from tests.dims import programs as p

Layer = Callable[[Any, jax.Array], jax.Array]


def norm(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def mlp(q: Any, x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ q["up"]) @ q["down"]


def mlp_params(hidden: int = 64) -> Any:
    return {"up": p.shape(p.MODEL, hidden), "down": p.shape(hidden, p.MODEL)}


def block(q: Any, x: jax.Array) -> jax.Array:
    return mlp(q["mlp"], norm(p.attention(q["attention"], norm(x))))


def block_params() -> Any:
    return {"attention": p.attention_params(), "mlp": mlp_params()}


def local_attention(q: Any, x: jax.Array) -> jax.Array:
    """As :func:`programs.attention`, with a band for a mask."""
    queries, keys, values = (jnp.einsum("bsd,dhk->bshk", x, q[n]) for n in "qkv")
    scores = jnp.einsum("bshk,bthk->bhst", queries, keys)
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    mixed = jax.nn.softmax(jnp.where((distance >= 0) & (distance < 4), scores, -1e9))
    return x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", mixed, values), q["o"])


def keys_first(q: Any, x: jax.Array) -> jax.Array:
    """Attention whose scores are keys times queries."""
    queries, keys, values = (jnp.einsum("bsd,dhk->bshk", x, q[n]) for n in "qkv")
    mixed = jax.nn.softmax(jnp.einsum("bthk,bshk->bhst", keys, queries))
    return x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", mixed, values), q["o"])


def experts(q: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jnp.einsum("bsd,edf->besf", x, q["up"]))
    return x + jnp.einsum("besf,efd,bse->bsd", hidden, q["down"], jax.nn.softmax(x @ q["router"]))


def expert_params() -> Any:
    return {"router": p.shape(p.MODEL, 5), "up": p.shape(5, p.MODEL, 24), "down": p.shape(5, 24, p.MODEL)}


def stack(*kinds: Layer) -> Callable[..., jax.Array]:
    """Unrolled layers of these kinds in turn."""

    def fn(params: Any, x: jax.Array) -> jax.Array:
        for k, layer in enumerate(params):
            x = kinds[k % len(kinds)](layer, norm(x))
        return x

    return fn


def trained(fn: Callable[..., jax.Array], *args: Any) -> Analysis:
    analysis = shardwise.analyze(jax.grad(lambda *a: jnp.sum(fn(*a) ** 2)), *args)
    check_members_never_meet(analysis)
    return analysis


def check_members_never_meet(analysis: Analysis) -> None:
    """No op and no value holds two colors of one group: one axis could not shard both."""
    group = {c.id: c.group for c in analysis.colors}
    names = analysis.names
    for op in (op for op in analysis.program.ops if op.rule is not None):
        for f, g in op.rule.rivals:
            a, b = (int(names.color[names.first_node[op.id] + x]) for x in (f, g))
            assert a == b or group[a] != group[b], (op, f, g)


def facts(analysis: Analysis) -> tuple[int, int]:
    return sum(g.matters for g in analysis.groups), analysis.bits


def towers(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """Two encoders of equal shapes whose outputs meet in a contrastive loss."""
    for layer in params["left"]:
        x = block(layer, x)
    for layer in params["right"]:
        y = block(layer, y)
    return jax.nn.log_softmax(x.mean(1) @ y.mean(1).T)


def encoder_decoder(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params["encoder"]:
        x = block(layer, x)
    for layer in params["decoder"]:
        y = p.attention(layer["attention"], norm(y))
        y = mlp(layer["mlp"], norm(p.attention(layer["cross"], norm(y), norm(x))))
    return y


def sliced(params: Any, x: jax.Array) -> jax.Array:
    """Stacked parameters, taken apart by number."""
    for k in range(params["mlp"]["up"].shape[0]):
        x = block(jax.tree.map(lambda a, k=k: a[k], params), x)
    return x


def shared(layers: int) -> Callable[..., jax.Array]:
    def fn(params: Any, x: jax.Array) -> jax.Array:
        for _ in range(layers):
            x = block(params, x)
        return x

    return fn


def many(layers: int, *makers: Callable[[], Any]) -> list[Any]:
    return [makers[k % len(makers)]() for k in range(layers)]


def stacked(layers: int) -> Any:
    return jax.tree.map(lambda s: p.shape(layers, *s.shape), block_params())


MODELS: dict[str, Callable[[int], Analysis]] = {
    "one kind": lambda n: trained(stack(block), many(n, block_params), p.stream()),
    "local and global attention": lambda n: trained(
        stack(p.attention, local_attention), many(n, p.attention_params), p.stream()
    ),
    "attention and experts": lambda n: trained(
        stack(p.attention, experts), many(n, p.attention_params, expert_params), p.stream()
    ),
    "shared weights": lambda n: trained(shared(n), block_params(), p.stream()),
    "stacked and sliced": lambda n: trained(sliced, stacked(n), p.stream()),
    "two towers": lambda n: trained(
        towers, {"left": many(n, block_params), "right": many(n, block_params)}, p.stream(), p.stream()
    ),
    "encoder and decoder": lambda n: trained(
        encoder_decoder,
        {
            "encoder": many(n, block_params),
            "decoder": many(n, lambda: {**block_params(), "cross": p.attention_params()}),
        },
        p.stream(),
        p.shape(p.BATCH, 20, p.MODEL),
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_depth_does_not_matter(model: str) -> None:
    assert len({facts(MODELS[model](layers)) for layers in (2, 4, 8)}) == 1


def test_layers_of_two_kinds_are_decided_apart() -> None:
    analysis = MODELS["attention and experts"](6)
    heads = {analysis.color_of(f"a/0/{k}/q", 1).group for k in (0, 2, 4)}
    hidden = {analysis.color_of(f"a/0/{k}/up", 2).group for k in (1, 3, 5)}
    expert = {analysis.color_of(f"a/0/{k}/up", 0).group for k in (1, 3, 5)}
    assert len(heads) == len(hidden) == len(expert) == 1
    assert len(heads | hidden | expert) == 3


def test_layers_of_different_widths_are_decided_apart() -> None:
    widths = [32, 64, 96, 64]
    analysis = trained(stack(mlp), [mlp_params(w) for w in widths], p.stream())
    groups = [analysis.color_of(f"a/0/{k}/up", 1).group for k in range(4)]
    assert groups[1] == groups[3] and len(set(groups)) == 3


def test_towers_share_groups_but_for_the_batches_that_meet() -> None:
    analysis = MODELS["two towers"](2)
    left, right = (analysis.color_of(f"a/0/{side}/0/mlp/up", 1) for side in ("left", "right"))
    assert left != right and left.group == right.group
    assert analysis.color_of("a/1", 0).group != analysis.color_of("a/2", 0).group


def test_shared_weights_are_one_color_and_one_bit() -> None:
    analysis = MODELS["shared weights"](4)
    assert len(analysis.colors) == len(analysis.groups) == 7
    assert len(analysis.compatibility_sets) == 4 and analysis.bits == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_a_bit_means_the_same_side_in_every_layer(gradients: bool) -> None:
    """Queries are on one side in each layer, whether the product has them left or right."""
    fn = stack(lambda q, x: p.attention(q, x, causal=False), keys_first)
    args = many(6, p.attention_params), p.stream()
    analysis = trained(fn, *args) if gradients else shardwise.analyze(fn, *args)
    program = analysis.program
    params = {a.value: a.path for a in program.arguments}
    queries = {
        op.results[0]
        for op in program.ops
        if op.kind == "dot_general" and any(params.get(v, "").endswith("/q") for v in op.operands)
    }
    sides: dict[int, set[bool]] = {}
    for s in analysis.compatibility_sets:
        first, second = (s.second, s.first) if s.flipped else (s.first, s.second)
        here, there = ({place.value for place in side} & queries for side in (first, second))
        assert bool(here) != bool(there)
        sides.setdefault(s.bit, set()).add(bool(here))
    assert all(len(side) == 1 for side in sides.values())
