"""Shifts along a dimension, as ``jnp.roll``, ``jnp.concatenate([x[1:], x[-1:]])`` and their gradients make them.

JAX traces them as pieces of one array that are joined, or padded to its size again. Pieces of N - 1 and 1 positions have sizes
that no number of devices divides. A shift is written here as a ``pad`` of the whole array by a positive and a negative amount,
which keeps its size, and several as a choice between them by position: neighbors exchange what crosses the borders of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.interiors import Piece, interior

#: Pieces of one array that are joined, at most.
_MOST_PIECES: Final = 3
#: Primitives with jaxprs that are left as they are: their arrays are local.
_LOCAL: Final = ("pallas_call", "shard_map", "custom_linear_solve")


class _Piece(NamedTuple):
    """Positions ``start`` to ``stop`` of a dimension of an array."""

    source: Any
    start: int
    stop: int


def with_shifts(jaxpr: Any) -> Any:
    """Returns a jaxpr in which pieces that are joined or padded to the size of their array are shifts of it."""
    inner, _ = internals.split_jaxpr(jaxpr)
    makers = {v: e for e in inner.eqns for v in e.outvars}
    equations: list[Any] = []
    known: dict[Any, Piece] = {}
    changed = False
    for equation in inner.eqns:
        shifts = _shifts(equation, makers)
        if shifts is None and (written := interior(equation, makers, known)) is not None:
            shifts, parts = _inlined(equation, written.run, written.atoms)
            known |= {v: (part, written.starts) for v, part in zip(written.parts, parts, strict=False)}
        if shifts is None:
            shifts = [_with_inner_shifts(equation)]
        changed = changed or shifts != [equation]
        equations += shifts
    if not changed:
        return jaxpr
    inner = inner.replace(eqns=equations)
    return jaxpr.replace(jaxpr=inner) if isinstance(jaxpr, internals.ClosedJaxpr) else inner


def _with_inner_shifts(equation: Any) -> Any:
    """Returns an equation with shifts in the jaxprs of its parameters."""
    if equation.primitive.name in _LOCAL:
        return equation
    changed = {}
    for name, value in equation.params.items():
        several = value if isinstance(value, tuple) else (value,)
        if several and all(hasattr(v, "eqns") for v in several):
            new = tuple(map(with_shifts, several))
            if any(a is not b for a, b in zip(new, several, strict=True)):
                changed[name] = new if isinstance(value, tuple) else new[0]
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def _shifts(equation: Any, makers: Mapping[Any, Any]) -> list[Any] | None:
    """Returns the equations of a shift instead of one that joins or pads pieces; None for other equations."""
    name, params = equation.primitive.name, equation.params
    if name not in ("concatenate", "pad") or not isinstance(equation.outvars[0].aval.dtype, np.dtype):
        return None
    result = equation.outvars[0].aval.shape
    if name == "concatenate":
        dim, parts = params["dimension"], equation.invars
        sizes = [part.aval.shape[dim] for part in parts]
        starts, fill = [0, *accumulate(sizes[:-1])], None
        if not 2 <= len(parts) <= _MOST_PIECES or len(set(sizes)) == 1:
            return None
    else:
        padded = [d for d, config in enumerate(params["padding_config"]) if any(config)]
        if len(padded) != 1 or params["padding_config"][padded[0]][2]:
            return None
        dim, parts, fill = padded[0], equation.invars[:1], equation.invars[1]
        starts = [int(params["padding_config"][dim][0])]
    pieces = [piece for part in parts if (piece := _piece_of_size(part, dim, makers, result[dim])) is not None]
    if len(pieces) < len(parts) or any(piece.source is not pieces[0].source for piece in pieces) or min(starts) < 0:
        return None
    run = _shifting(list(zip(starts, pieces, strict=True)), dim, result[dim])
    return _inlined(equation, run, [pieces[0].source, *([] if fill is None else [fill])])[0]


def _piece_of_size(atom: Any, dim: int, makers: Mapping[Any, Any], size: int) -> _Piece | None:
    """Returns which piece of an array of some size an array is, also as a piece of a piece; None if it is none."""
    piece = _piece(atom, dim, makers)
    while piece is not None and piece.source.aval.shape[dim] != size:
        outer = _piece(piece.source, dim, makers)
        piece = outer and _Piece(outer.source, outer.start + piece.start, outer.start + piece.stop)
    return piece


def _piece(atom: Any, dim: int, makers: Mapping[Any, Any]) -> _Piece | None:
    """Returns which piece of another array an array is, along a dimension; None if it is none."""
    maker = None if internals.is_literal(atom) else makers.get(atom)
    if maker is None or maker.primitive.name not in ("pad", "slice", "split"):
        return None
    params, source = maker.params, maker.invars[0]
    if maker.primitive.name == "split":
        number = maker.outvars.index(atom)
        start = sum(params["sizes"][:number])
        return _Piece(source, start, start + params["sizes"][number]) if params["axis"] == dim else None
    same = all(a == b for d, (a, b) in enumerate(zip(atom.aval.shape, source.aval.shape, strict=True)) if d != dim)
    if maker.primitive.name == "pad":  # the gradient of a pad takes away what was added
        low, high, inner = map(int, params["padding_config"][dim])
        taken = same and low <= 0 and high <= 0 and not inner
        return _Piece(source, -low, source.aval.shape[dim] + high) if taken else None
    if not same or any(stride != 1 for stride in params["strides"] or ()):
        return None
    return _Piece(source, params["start_indices"][dim], params["limit_indices"][dim])


def _shifting(pieces: Sequence[tuple[int, _Piece]], dim: int, size: int) -> Callable[..., Any]:
    """Returns a function of an array, and of what is around its pieces, that puts each piece where it starts."""

    def run(x: Any, *fill: Any) -> Any:
        zero = fill[0] if fill else np.zeros((), x.dtype)
        position = jax.lax.broadcasted_iota(np.int32, x.shape, dim)
        result = None
        for start, piece in reversed(pieces):
            by, stop = start - piece.start, start + piece.stop - piece.start
            config = [(by, -by, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
            shifted = jax.lax.pad(x, zero, config) if by else x
            if result is not None:
                result = jax.lax.select(jax.lax.lt(position, np.int32(stop)), shifted, result)
                continue
            result = shifted
            if fill and start > max(by, 0):  # positions before and after the piece that the shifted array has too
                result = jax.lax.select(jax.lax.ge(position, np.int32(start)), result, jax.lax.broadcast(zero, x.shape))
            if fill and stop < size + min(by, 0):
                result = jax.lax.select(jax.lax.lt(position, np.int32(stop)), result, jax.lax.broadcast(zero, x.shape))
        return result

    return run


def _inlined(equation: Any, fn: Callable[..., Any], atoms: Sequence[Any]) -> tuple[list[Any] | None, list[Any]]:
    """Returns equations that compute the result of another one by a function of some atoms, and the function's other results;
    None and nothing if it has constants."""
    closed = jax.make_jaxpr(fn)(*(internals.plain_shape(a.aval) for a in atoms))
    inner, constants = internals.split_jaxpr(closed)
    if constants or not inner.eqns:
        return None, []
    known = {**dict(zip(inner.invars, atoms, strict=True)), inner.outvars[0]: equation.outvars[0]}

    def outer(atoms: Sequence[Any]) -> list[Any]:
        return [a if internals.is_literal(a) else known.get(a, a) for a in atoms]

    places = {"source_info": equation.source_info, "ctx": equation.ctx}
    equations = [e.replace(invars=outer(e.invars), outvars=outer(e.outvars), **places) for e in inner.eqns]
    return equations, outer(inner.outvars[1:])
