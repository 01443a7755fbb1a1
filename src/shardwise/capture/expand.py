"""Expands equations to jaxprs: calls, primitives that only name a function, loops over a batch.

Libraries define primitives to give a function other transformation rules (Equinox does so throughout); what they compute is
ordinary JAX code, and their implementation can be traced. A ``while`` with one condition per example, from ``vmap``, is
expanded as in JAX's lowering, a linear solve to its solve, a ``scan`` of length one to its body, a ``device_put`` of many
arrays to one of each, and a lookup by row and column to one by column (``own_rows.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import abstract, dtype_of
from shardwise.capture.own_rows import LOOKUPS, with_own_rows
from shardwise.rules.kernels import primitive_names
from shardwise.rules.registry import is_known

#: The results of ``called`` by jaxpr and equation number: unrolled layers call one jaxpr many times.
_CACHE: Final[WeakKeyDictionary[Any, dict[int, Any]]] = WeakKeyDictionary()


def called(jaxpr: Any, number: int) -> Any | None:
    """Returns the jaxpr that an equation of an open jaxpr is expanded to; None where it is not expanded."""
    cached = _CACHE.setdefault(jaxpr, {})
    if number not in cached:
        cached[number] = _called(jaxpr, jaxpr.eqns[number])
    return cached[number]


def _called(jaxpr: Any, equation: Any) -> Any | None:
    name = equation.primitive.name
    if name in LOOKUPS:
        return with_own_rows(jaxpr, equation)
    if name in EXPANDED:
        return EXPANDED[name](equation)
    inner = internals.inner_jaxpr(equation)
    return implementation(equation) if inner is None and not is_known(name) else inner


def _one_condition(equation: Any) -> Any | None:
    """Expands a loop with one condition per example to a loop with one condition; None where it has one already."""
    p = equation.params
    test_jaxpr, body_jaxpr = p["cond_jaxpr"], p["body_jaxpr"]
    tests, bodies = p["cond_nconsts"], p["body_nconsts"]
    shape = internals.shape_of(internals.split_jaxpr(test_jaxpr)[0].outvars[0].aval)
    if not shape:
        return None

    def run(*operands: Any) -> list[Any]:
        def goes_on(carried: list[Any]) -> Any:
            return internals.evaluate(test_jaxpr, [*operands[:tests], *carried])[0]

        def body(carried: list[Any]) -> list[Any]:
            each = goes_on(carried)
            updated = internals.evaluate(body_jaxpr, [*operands[tests : tests + bodies], *carried])
            masks = (jnp.broadcast_to(each.reshape(*shape, *[1] * (x.ndim - len(shape))), x.shape) for x in carried)
            return [jax.lax.select(m, new, old) for m, new, old in zip(masks, updated, carried, strict=True)]

        results: list[Any] = jax.lax.while_loop(lambda c: jnp.any(goes_on(c)), body, [*operands[tests + bodies :]])
        return results

    return internals.trace_in_place(equation, run)


def _solve(equation: Any) -> Any:
    """Expands a ``custom_linear_solve`` to its solve; its other functions are for derivatives."""
    lengths = equation.params["const_lengths"]
    start, end = lengths.matvec + lengths.vecmat, sum(lengths)

    def run(*operands: Any) -> list[Any]:
        chosen = [*operands[start : start + lengths.solve], *operands[end:]]
        return internals.evaluate(equation.params["jaxprs"].solve, chosen)

    return internals.trace_in_place(equation, run)


def _one_trip(equation: Any) -> Any | None:
    """Expands a ``scan`` of length one, which is no loop to XLA, to its body; None for other scans."""
    p = equation.params
    if p["length"] != 1:
        return None
    consts, carries = internals.scan_counts(p)
    body = internals.split_jaxpr(p["jaxpr"])[0]
    before = consts + carries
    # The body is not traced again: its equations may name the axes of a shard_map around it.
    slices = internals.reshapes(equation.invars[before:], body.invars[before:])
    stacks = internals.reshapes(body.outvars[carries:], equation.outvars[carries:])
    expanded = body.replace(
        invars=[*body.invars[:before], *slices.invars],
        outvars=[*body.outvars[:carries], *stacks.outvars],
        eqns=[
            *(e.replace(outvars=[v]) for e, v in zip(slices.eqns, body.invars[before:], strict=True)),
            *body.eqns,
            *(e.replace(invars=[v]) for e, v in zip(stacks.eqns, body.outvars[carries:], strict=True)),
        ],
    )
    return internals.ClosedJaxpr(expanded, internals.split_jaxpr(p["jaxpr"])[1])


def _one_by_one(equation: Any) -> Any | None:
    """Expands a ``device_put`` of several arrays, whose shardings have nothing to do with each other, to one of each; None for
    a single one."""
    if len(equation.invars) == 1:
        return None

    def run(*operands: Any) -> list[Any]:
        each = [{name: (value[k],) for name, value in equation.params.items()} for k in range(len(operands))]
        return [equation.primitive.bind(x, **params)[0] for x, params in zip(operands, each, strict=True)]

    return internals.trace_in_place(equation, run)


#: Primitives that are expanded, and how.
EXPANDED: Final = {
    "while": _one_condition,
    "custom_linear_solve": _solve,
    "scan": _one_trip,
    "device_put": _one_by_one,
}


def implementation(equation: Any) -> Any | None:
    """Returns the implementation of a primitive as a jaxpr where it is plain JAX code, else None."""
    primitive, params = equation.primitive, equation.params
    try:
        shapes = [abstract(v.aval) for v in equation.invars]
        jaxpr = jax.make_jaxpr(lambda *xs: primitive.impl(*xs, **params))(*shapes)
    except Exception:  # an implementation that is no plain JAX code may raise anything
        return None
    inner = internals.split_jaxpr(jaxpr)[0]
    same = _types(inner.outvars) == _types(equation.outvars) and primitive.name not in primitive_names(inner)
    return jaxpr if same else None


def _types(variables: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [(internals.shape_of(v.aval), dtype_of(v.aval)[0]) for v in variables]


def forwarded(closed: Any) -> list[int | None]:
    """Returns for each output of a jaxpr the number of the argument that it is, unchanged by calls, or None."""
    jaxpr = internals.split_jaxpr(closed)[0]
    known: dict[Any, int | None] = {v: k for k, v in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        inner = internals.inner_jaxpr(equation)
        if inner is None or not any(not internals.is_literal(v) and v in known for v in equation.invars):
            continue
        for var, k in zip(equation.outvars, forwarded(inner), strict=True):
            outer = equation.invars[k] if k is not None and k < len(equation.invars) else None
            if outer is not None and not internals.is_literal(outer) and outer in known:
                known[var] = known[outer]
    return [None if internals.is_literal(v) else known.get(v) for v in jaxpr.outvars]


def with_outputs(closed: Any, kept: Sequence[int]) -> Any:
    """Returns a jaxpr with some of its outputs."""
    inner = internals.split_jaxpr(closed)[0]
    fewer = inner.replace(outvars=[inner.outvars[k] for k in kept])
    return closed.replace(jaxpr=fewer) if isinstance(closed, internals.ClosedJaxpr) and closed is not inner else fewer
