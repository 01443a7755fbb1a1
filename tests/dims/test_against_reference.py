"""``dims`` against the definition, on random programs and on the zoo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise
from shardwise import zoo
from shardwise.dims.analysis import Analysis
from tests.dims import programs as p
from tests.dims.reference import analyze_by_definition
from tests.ir.verify import check_program

ELEMENTS = 4096

Step = tuple[str, int, int, int, int]


def check_against_reference(analysis: Analysis) -> None:
    check_program(analysis.program)
    expected = analyze_by_definition(analysis.program)
    names, table = analysis.names, analysis.conflict_table
    nodes = list(zip(names.node_op.tolist(), names.node_factor.tolist(), strict=True))
    assert set(nodes) == set(expected.colors)
    pairs = {(expected.colors[node], color) for node, color in zip(nodes, names.color.tolist(), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(analysis.colors)
    sides = zip(table.first.tolist(), table.second.tolist(), strict=True)
    found = [(nodes[min(pair)], nodes[max(pair)]) for pair in sides]
    assert len(found) == len(set(found)) and set(found) == expected.conflicts
    families = {
        frozenset(((c.op, c.first), (c.op, c.second)) for c in s.conflicts): s.consistent
        for s in analysis.compatibility_sets
    }
    assert len(families) == len(expected.families)
    for members, consistent in expected.families:
        if consistent:
            mirror = frozenset((b, a) for a, b in members)
            assert families.get(members, families.get(mirror)) is True
        else:
            matching = [f for f in families if f <= members]
            assert len(matching) == 1 and len(matching[0]) * 2 == len(members) and not families[matching[0]]


def apply(step: Step, values: list[jax.Array]) -> jax.Array | None:
    """One step on earlier values, or None where the shapes do not allow it."""
    kind, a, b, i, j = step
    x, y = values[a % len(values)], values[b % len(values)]
    axis = i % max(x.ndim, 1)
    if kind == "dot":
        pairs = [(d, e) for d in range(x.ndim) for e in range(y.ndim) if x.shape[d] == y.shape[e]]
        if not pairs:
            return None
        d, e = pairs[i % len(pairs)]
        rest = [(f, g) for f, g in pairs if f != d and g != e]
        batch = [rest[j % len(rest)]] if rest and j % 3 == 0 else []
        return jax.lax.dot_general(x, y, (([d], [e]), ([f for f, _ in batch], [g for _, g in batch])))
    if kind == "add":
        return x + y if x.shape == y.shape else jnp.tanh(x)
    if kind == "transpose":
        return x.transpose([*range(x.ndim)][::-1] if j % 2 else [*range(axis, x.ndim), *range(axis)])
    if x.ndim == 0:
        return None
    if kind == "merge":
        return x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :]) if axis else None
    if kind == "split":
        return x.reshape(*x.shape[:axis], 2, -1, *x.shape[axis + 1 :]) if x.shape[axis] % 2 == 0 else None
    if kind == "reduce":
        return x.sum(axis, keepdims=j % 2 == 0)
    if kind == "broadcast":
        return jnp.broadcast_to(jnp.expand_dims(x, axis), (*x.shape[:axis], 4, *x.shape[axis:]))
    if kind == "concatenate":
        return jnp.concatenate([x, x if x.shape != y.shape else y], axis)
    if kind == "slice":
        return jax.lax.slice_in_dim(x, 0, max(x.shape[axis] // 2, 1), axis=axis)
    if kind == "gather":
        return jnp.take(x, jnp.argmax(y, axis=-1) % x.shape[axis] if y.ndim else 0, axis=axis)
    if kind == "cumsum":
        return jnp.cumsum(x, axis)
    if kind == "scan":
        return scan(x, y, j)
    if kind == "cond":
        return jax.lax.cond(x.sum() > 0, lambda z: z * 2, lambda z: z[::-1] + 1, x)
    assert kind == "while"
    return jax.lax.while_loop(
        lambda z: z.sum() < 100, lambda z: z.T if z.ndim == 2 and len(set(z.shape)) == 1 else z * 2, x
    )


def scan(x: jax.Array, y: jax.Array, form: int) -> jax.Array:
    """Loops over the leading dimension, with a carry that grows, is transposed, or is only handed on."""

    def body(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> Any:
        a, b = carry
        a = a + row if form % 2 else row
        if form % 3 == 0 and b.ndim >= 2 and b.shape[-1] == b.shape[-2]:
            b = jnp.swapaxes(b, -1, -2)
        return ((b, a) if a.shape == b.shape and form % 5 == 0 else (a, b)), (row if form % 7 == 0 else a)

    (first, second), stacked = jax.lax.scan(body, (x[0], y), x)
    return [first, second, stacked][form % 3]


def program(steps: list[Step]) -> Callable[..., Any]:
    def fn(*arguments: jax.Array) -> list[jax.Array]:
        values = list(arguments)
        for step in steps:
            new = apply(step, values)
            if new is not None and new.ndim <= 5 and new.size <= ELEMENTS:
                values.append(new)
        return values[len(arguments) :]

    return fn


KINDS = """dot dot dot add add transpose merge split reduce broadcast concatenate slice gather cumsum
scan scan cond while""".split()
small = st.integers(0, 11)
steps = st.lists(st.tuples(st.sampled_from(KINDS), small, small, small, small), min_size=4, max_size=16)
shapes = st.lists(st.lists(st.sampled_from([4, 4, 4, 6, 1]), min_size=1, max_size=3), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(shapes, steps)
def test_random_programs(sizes: list[list[int]], drawn: list[Step]) -> None:
    check_against_reference(shardwise.analyze(program(drawn), *[p.shape(*s) for s in sizes]))


@pytest.mark.parametrize(
    "target", ["t2b:tiny", "mixtral:tiny", "gns:tiny", "unet:tiny", "ssm:tiny", "t5:tiny", "itx:tiny"]
)
def test_the_zoo(target: str) -> None:
    loaded = zoo.parse(target)
    check_against_reference(shardwise.analyze(loaded.fn, *loaded.args))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_attention_with_gradients(wrap: Callable[..., Any]) -> None:
    fn = p.gradient(functools.partial(p.scanned, wrap=wrap))
    check_against_reference(shardwise.analyze(fn, p.attention_params(3), p.stream()))
