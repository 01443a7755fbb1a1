"""Interiors of arrays that are computed from pieces and written back, as in ``u.at[1:-1].set(u[2:] + u[:-2])``.

The pieces have N - 2 positions, which hardly any number of devices divides, so that they would be gathered. Where all pieces
are slices of arrays of the size of ``u``, and only ops that work position by position are between them and the write, the same
is computed for all N positions of shifted arrays, and chosen for the interior alone. Neighbors exchange what the shifts need.

Gradients of such programs read interiors by a ``gather`` at a constant place, and write them by a ``pad``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.rules.tables import ELEMENTWISE

#: The share of an array that an interior has at least; the rest is computed for nothing.
_LEAST: Final = 0.75


#: How an update is combined with what is there.
_COMBINED: Final[dict[str, Callable[..., Any]]] = {
    "pad": lambda old, new: new,
    "scatter": lambda old, new: new,
    "scatter-add": jax.lax.add,
    "scatter-mul": jax.lax.mul,
    "scatter-min": jax.lax.min,
    "scatter-max": jax.lax.max,
}

Starts = tuple[int, ...]


#: Which array of more positions an array is a piece of, and where it starts.
Piece = tuple[Any, Starts]


class Interior(NamedTuple):
    """A function of the values of some ``atoms`` that computes what an equation writes, and the ``parts`` for all positions."""

    run: Callable[..., list[Any]]
    atoms: list[Any]
    parts: list[Any]
    starts: Starts


class _Write(NamedTuple):
    """An array that is written at ``starts`` into another one, or into one that is filled."""

    into: Any
    update: Any
    starts: Starts


def interior(equation: Any, makers: Mapping[Any, Any], known: Mapping[Any, Piece]) -> Interior | None:
    """Returns how to compute for all positions what an equation writes, None for other equations. ``known``: arrays that are
    computed for all positions already."""
    write = _write(equation, makers)
    if write is None or internals.is_literal(write.update):
        return None
    shape, size = equation.outvars[0].aval.shape, write.update.aval.shape
    if not _is_inside(write.starts, size, shape) or size == shape or math.prod(size) < _LEAST * math.prod(shape):
        return None
    pieces: dict[Any, Piece] = {}
    made = _made_from_pieces(write.update, shape, makers, known, pieces)
    if made is None:
        return None
    parts = [e.outvars[0] for e in made]
    read = [*(a for e in made for a in e.invars), *(source for source, _ in pieces.values()), write.into]
    variables = dict.fromkeys(a for a in read if not internals.is_literal(a))
    atoms = [a for a in variables if a not in parts and a not in pieces]

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(atoms, arrays, strict=True))
        for piece, (source, starts) in pieces.items():
            env[piece] = _shifted(env[source], [a - b for a, b in zip(write.starts, starts, strict=True)])

        def value(atom: Any) -> Any:
            return atom.val if internals.is_literal(atom) else env[atom]

        for e in made:
            env[e.outvars[0]] = _applied(e, list(map(value, e.invars)), shape)
        old = value(write.into)
        old = jax.lax.broadcast(old, shape) if np.ndim(old) == 0 else old
        combined = _COMBINED[equation.primitive.name](old, env[write.update])
        return [jax.lax.select(_inside(write.starts, size, shape), combined, old), *(env[v] for v in parts)]

    return Interior(run, atoms, parts, write.starts)


def _write(equation: Any, makers: Mapping[Any, Any]) -> _Write | None:
    """Returns what an equation writes at a constant place, None where it does not."""
    name, params, operands = equation.primitive.name, equation.params, equation.invars
    if name not in _COMBINED or not isinstance(equation.outvars[0].aval.dtype, np.dtype):
        return None
    if name == "pad":
        lows = tuple(int(low) for low, _, _ in params["padding_config"])
        inner = any(between for *_, between in params["padding_config"])
        return None if inner else _Write(operands[1], operands[0], lows)
    into, indices, update = operands
    dims = params["dimension_numbers"]
    whole = dims.update_window_dims == tuple(range(len(into.aval.shape)))
    starts = _starts(indices, dims.scatter_dims_to_operand_dims, len(into.aval.shape), makers) if whole else None
    return None if starts is None else _Write(into, update, starts)


def _piece(maker: Any, shape: tuple[int, ...], makers: Mapping[Any, Any]) -> Piece | None:
    """Returns which piece of an array of a shape an equation makes, at a constant place; None if it makes none."""
    params = maker.params
    if not maker.invars or maker.invars[0].aval.shape != shape or internals.is_literal(maker.invars[0]):
        return None
    starts: Starts | None = None
    if maker.primitive.name == "slice" and not any(stride != 1 for stride in params["strides"] or ()):
        starts = params["start_indices"]
    elif maker.primitive.name == "gather":
        dims = params["dimension_numbers"]
        if dims.offset_dims == tuple(range(len(shape))):
            starts = _starts(maker.invars[1], dims.start_index_map, len(shape), makers)
    if starts is None or not _is_inside(starts, maker.outvars[0].aval.shape, shape):
        return None
    return maker.invars[0], starts


def _starts(indices: Any, dims: Sequence[int], rank: int, makers: Mapping[Any, Any]) -> Starts | None:
    """Returns the constant start of a window in each dimension, None if it is computed or if there are several windows."""
    places = _constant(indices, makers)
    if places is None or places.ndim != 1:
        return None
    at = dict(zip(dims, places.tolist(), strict=True))
    return tuple(at.get(d, 0) for d in range(rank))


def _is_inside(starts: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> bool:
    return all(0 <= start <= n - k for start, n, k in zip(starts, shape, size, strict=True))


def _constant(atom: Any, makers: Mapping[Any, Any]) -> Any:
    """Returns the array of some numbers in the program, None where it is computed from others."""
    if internals.is_literal(atom):
        return np.asarray(atom.val)
    maker = makers.get(atom)
    if maker is None or maker.primitive.name not in ("broadcast_in_dim", "concatenate", "convert_element_type"):
        return None
    parts = [_constant(a, makers) for a in maker.invars]
    if any(part is None for part in parts):
        return None
    if maker.primitive.name == "concatenate":
        return np.concatenate(parts)
    return np.broadcast_to(parts[0], atom.aval.shape) if not parts[0].shape else None


def _made_from_pieces(
    update: Any,
    shape: tuple[int, ...],
    makers: Mapping[Any, Any],
    known: Mapping[Any, Piece],
    pieces: dict[Any, Piece],
) -> list[Any] | None:
    """Returns the equations that make an array from pieces of arrays of a shape, in order, and enters the pieces; None if there
    are others."""
    found: set[int] = set()
    pending = [update]
    while pending:
        atom = pending.pop()
        if internals.is_literal(atom) or not atom.aval.shape or atom in pieces:
            continue
        maker = makers.get(atom)
        if maker is None or atom.aval.shape != update.aval.shape:
            return None
        piece = known.get(atom) or _piece(maker, shape, makers)
        if piece is not None and piece[0].aval.shape == shape:
            pieces[atom] = piece
        elif id(maker) in found:
            continue
        elif _is_pointwise(maker):
            found.add(id(maker))
            pending += maker.invars
        else:
            return None
    return [e for e in dict.fromkeys(makers.values()) if id(e) in found]


def _is_pointwise(equation: Any) -> bool:
    """Returns whether each position of the one result depends on the same position of the operands."""
    if len(equation.outvars) != 1:
        return False
    inner = internals.inner_jaxpr(equation)
    if inner is not None:
        return all(map(_is_pointwise, internals.split_jaxpr(inner)[0].eqns)) and not internals.split_jaxpr(inner)[1]
    if equation.primitive.name == "broadcast_in_dim":
        return not equation.invars[0].aval.shape
    return equation.primitive.name in ELEMENTWISE


def _applied(equation: Any, operands: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Computes a pointwise equation for arrays of another shape."""
    inner = internals.inner_jaxpr(equation)
    if inner is not None:
        body = internals.split_jaxpr(inner)[0]
        return internals.interpret(body, operands, lambda number, xs: [_applied(body.eqns[number], xs, shape)])[0]
    if equation.primitive.name == "broadcast_in_dim":
        return jax.lax.broadcast(operands[0], shape) if equation.outvars[0].aval.shape else operands[0]
    return equation.primitive.bind(*operands, **equation.params)


def _shifted(x: Any, by: Sequence[int]) -> Any:
    for d, steps in enumerate(by):
        if steps:
            config = [(steps, -steps, 0) if k == d else (0, 0, 0) for k in range(x.ndim)]
            x = jax.lax.pad(x, np.zeros((), x.dtype), config)
    return x


def _inside(starts: Sequence[int], size: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Returns whether each position is in the interior."""
    inside = None
    for d, (start, k) in enumerate(zip(starts, size, strict=True)):
        position = jax.lax.broadcasted_iota(np.int32, shape, d)
        for bound, compare in ((start, jax.lax.ge), (start + k, jax.lax.lt)):
            if 0 < bound < shape[d]:
                within = compare(position, np.int32(bound))
                inside = within if inside is None else jax.lax.bitwise_and(inside, within)
    return inside
