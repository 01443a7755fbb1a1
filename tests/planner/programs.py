"""Small float32 programs of many kinds, with concrete arguments, for runs on eight host devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dims.programs import attention, attention_params, gradient, scanned, unrolled

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def drawn(shapes: Any, seed: int = 0) -> Any:
    """Random float arrays of these shapes."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda s: (generator.normal(size=s.shape) * 0.3).astype(s.dtype), shapes)


def array(*sizes: int, seed: int = 0) -> jax.Array:
    return drawn(jax.ShapeDtypeStruct(sizes, jnp.float32), seed)


def mlp() -> Case:
    def step(w, x, y):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((jax.nn.relu(x @ w[0]) @ w[1] - y) ** 2))(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), loss

    return step, ((array(8, 32), array(32, 16, seed=1)), array(16, 8, seed=2), array(16, 16, seed=3))


def attention_gradient() -> Case:
    return gradient(attention), (drawn(attention_params()), array(8, 16, 16, seed=1))


def scanned_gradient() -> Case:
    return gradient(scanned), (drawn(attention_params(3)), array(8, 16, 16, seed=1))


def rematerialized() -> Case:
    def fn(p, x):
        return scanned(p, x, jax.checkpoint)

    return gradient(fn), (drawn(attention_params(3)), array(8, 16, 16, seed=1))


def unrolled_gradient() -> Case:
    return gradient(unrolled), ([drawn(attention_params(), k) for k in range(2)], array(8, 16, 16, seed=1))


def convolutions() -> Case:
    def loss(w, x):
        def conv(x, w, stride):
            return jax.lax.conv_general_dilated(
                x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        y = jax.nn.relu(conv(x, w["a"], 1))
        y = jax.nn.relu(conv(y, w["b"], 2))
        return jnp.sum(jnp.mean(y, (1, 2)) ** 2)

    w = {"a": array(3, 3, 4, 8), "b": array(3, 3, 8, 16, seed=1)}
    return jax.grad(loss), (w, array(8, 16, 16, 4, seed=2))


def graph() -> Case:
    def loss(w, nodes, senders, receivers):
        for _ in range(2):
            edges = jax.nn.relu(jnp.concatenate([nodes[senders], nodes[receivers]], -1) @ w)
            nodes = nodes + jax.ops.segment_sum(edges, receivers, num_segments=nodes.shape[0])
        return jnp.sum(nodes**2)

    generator = np.random.default_rng(0)
    senders, receivers = (generator.integers(0, 16, 64).astype(np.int32) for _ in range(2))
    return jax.grad(loss), (array(16, 8), array(16, 8, seed=1), senders, receivers)


def control() -> Case:
    def fn(x, w, n):
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x * 2, x)
        x = jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
        x = jax.lax.fori_loop(0, 3, lambda i, c: c.at[i].add(1.0), x)
        return jnp.cumsum(x, 0), jnp.sort(x, 1), jnp.argmax(x, 1), jax.lax.top_k(x, 4)

    return fn, (array(16, 8), array(8, 8, seed=1), 3)


def movements() -> Case:
    def fn(x, y):
        z = jnp.concatenate([x[:, :8], y[:, 8:], jnp.flip(x[:, 4:12], 1)], 1)
        z = jnp.pad(z, ((2, 0), (0, 0)))[2:].reshape(4, 4, 24).transpose(2, 0, 1).reshape(24, 16)
        return jnp.roll(z, 3, 0), z[::2], jnp.einsum("ij,kj->ik", z, x), jax.lax.associative_scan(jnp.add, z)

    return fn, (array(16, 16), array(16, 16, seed=1))


CASES = {
    f.__name__: f
    for f in (
        mlp,
        attention_gradient,
        scanned_gradient,
        rematerialized,
        unrolled_gradient,
        convolutions,
        graph,
        control,
        movements,
    )
}
