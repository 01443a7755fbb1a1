"""Primitives that are only a name for a function: looked into instead of being opaque.

Libraries define primitives to give a function other transformation rules (Equinox does so throughout); what they compute is
ordinary JAX code, and their implementation can be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from shardwise.capture import jax_internals as internals


def implementation(equation: Any) -> Any | None:
    """What a primitive does, as a jaxpr, where its own implementation is plain JAX code; else None."""
    primitive, params = equation.primitive, equation.params
    try:
        shapes = [internals.abstract(v.aval) for v in equation.invars]
        made = jax.make_jaxpr(lambda *xs: primitive.impl(*xs, **params))(*shapes)
    except Exception:  # whatever an implementation may raise: it is then no plain JAX code
        return None
    if _types(internals.split_jaxpr(made)[0].outvars) != _types(equation.outvars) or _mentions(made, primitive):
        return None
    return made


def _types(variables: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(internals.shape_of(v.aval), internals.dtype_of(v.aval)[0]) for v in variables]


def _mentions(jaxpr: Any, primitive: Any) -> bool:
    equations = internals.split_jaxpr(jaxpr)[0].eqns
    parameters = [p for e in equations for p in e.params.values()]
    inner = [j for p in parameters for j in (p if isinstance(p, tuple | list) else (p,))]
    return any(e.primitive is primitive for e in equations) or any(
        _mentions(j, primitive) for j in inner if isinstance(j, internals.Jaxpr | internals.ClosedJaxpr)
    )
