"""The function that docs/analysis.md takes apart. One operation a line, so that a line's variable names its result."""

import jax
import jax.numpy as jnp


def attention(x, wq, wk, wv):
    q = x @ wq
    k = x @ wk
    v = x @ wv
    t = k.T
    s = q @ t
    e = jnp.exp(s)
    z = e.sum(axis=1, keepdims=True)
    p = e / z
    y = p @ v
    return y


SHAPES = {"x": (512, 64), "wq": (64, 32), "wk": (64, 32), "wv": (64, 48)}
ARGUMENTS = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in SHAPES.values())
