"""The JAX front end: from a function to a :class:`~shardwise.ir.program.Program`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.ir.program import Program

__all__ = ["JitOptions", "capture"]


def capture(fn: Callable[..., Any], /, *args: Any, options: JitOptions | None = None, **kwargs: Any) -> Program:
    """Captures ``fn(*args, **kwargs)`` as a program. Arrays are only asked for their shapes.

    >>> import jax, jax.numpy as jnp
    >>> program = capture(lambda x, w: jnp.tanh(x @ w), jax.ShapeDtypeStruct((8, 4), "float32"), jnp.ones((4, 2)))
    >>> [op.kind for op in program.ops]
    ['argument', 'argument', 'dot_general', 'tanh', 'output']
    """
    return lower(trace(fn, args, kwargs, options or JitOptions()))
