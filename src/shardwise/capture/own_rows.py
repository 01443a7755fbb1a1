"""Lookups where each row looks into itself: ``x[jnp.arange(n), i]``, and ``x.at[jnp.arange(n), i].set(v)``.

JAX traces these as gathers and scatters that may address any row. Where the row's number is a counter (an ``iota``), the row is
a batching dimension of the op, as ``jnp.take_along_axis`` and ``vmap`` state it: it can be sharded without communication.

Weak: a counter from outside of the jaxpr, as one that a loop's body closes over, is not recognized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from shardwise.capture import jax_internals as internals
from shardwise.ir.traits import SCATTERS

LOOKUPS: Final = ("gather", *SCATTERS)
#: By jaxpr, the equations that make its values: a program may have many lookups.
_MAKERS: Final[WeakKeyDictionary[Any, Mapping[Any, Any]]] = WeakKeyDictionary()


def with_own_rows(jaxpr: Any, equation: Any) -> Any | None:
    """Returns a jaxpr of a lookup with batching dimensions for the operand's dimensions that counters address; None if there
    are none."""
    columns = _counters(jaxpr, equation)
    if not columns:
        return None
    params = {**equation.params, "dimension_numbers": _batched(equation, columns), "indices_are_sorted": False}

    def run(operand: Any, indices: Any, *updates: Any) -> list[Any]:
        kept = [c for c in range(indices.shape[-1]) if c not in columns]
        parts = [jax.lax.slice_in_dim(indices, c, c + 1, axis=-1) for c in kept]
        fewer = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
        return [equation.primitive.bind(operand, fewer, *updates, **params)]

    return internals.trace_in_place(equation, run)


def _batched(equation: Any, columns: Mapping[int, int]) -> Any:
    """Returns the dimension numbers without some columns of the indices: their operand's dimensions are batching ones."""
    numbers = equation.params["dimension_numbers"]
    gathers = equation.primitive.name == "gather"
    window, addressed, batching = (
        ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims")
        if gathers
        else ("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims")
    )
    dims = getattr(numbers, addressed)
    pairs = list(zip(numbers.operand_batching_dims, getattr(numbers, batching), strict=True))
    pairs = sorted([*pairs, *((dims[c], p) for c, p in columns.items())])
    own = {dims[c] for c in columns}
    changed = {
        window: tuple(d for d in getattr(numbers, window) if d not in own),
        addressed: tuple(d for c, d in enumerate(dims) if c not in columns),
        "operand_batching_dims": tuple(d for d, _ in pairs),
        batching: tuple(p for _, p in pairs),
    }
    return numbers._replace(**changed)


def _counters(jaxpr: Any, equation: Any) -> dict[int, int]:
    """Returns the columns of a lookup's indices that count the rows of one of their dimensions, and that dimension."""
    numbers, (operand, indices) = equation.params["dimension_numbers"], equation.invars[:2]
    gathers = equation.primitive.name == "gather"
    dims = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
    dropped = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
    batching = numbers.start_indices_batching_dims if gathers else numbers.scatter_indices_batching_dims
    if len(dims) < 2:
        return {}
    if jaxpr not in _MAKERS:
        _MAKERS[jaxpr] = {v: e for e in jaxpr.eqns for v in e.outvars}
    makers = _MAKERS[jaxpr]
    joined = None if internals.is_literal(indices) else makers.get(indices)
    if joined is None or joined.primitive.name != "concatenate" or len(joined.invars) != len(dims):
        return {}
    columns: dict[int, int] = {}
    for column, part in enumerate(joined.invars):
        counted, d = _counted(part, makers), dims[column]
        if counted is None or d not in dropped or counted in (*batching, *columns.values()):
            continue
        if len(columns) < len(dims) - 1 and operand.aval.shape[d] == indices.aval.shape[counted]:
            columns[column] = counted
    return columns


def _counted(atom: Any, makers: Mapping[Any, Any]) -> int | None:
    """Returns the dimension along which an array of integers counts from zero; None if there is none."""
    maker = None if internals.is_literal(atom) else makers.get(atom)
    if maker is None or not _counts_to(atom.aval, max(atom.aval.shape, default=0)):
        return None
    name, params = maker.primitive.name, maker.params
    if name == "iota":
        return int(params["dimension"])
    if name == "select_n" and len(maker.invars) == 3:  # x + n where x is negative, which a counter never is
        predicate, counter = maker.invars[:2]
        test = None if internals.is_literal(predicate) else makers.get(predicate)
        if test is None or test.primitive.name != "lt" or test.invars[0] is not counter:
            return None
        return _counted(counter, makers) if internals.is_literal(test.invars[1]) and test.invars[1].val == 0 else None
    if name not in ("broadcast_in_dim", "reshape", "convert_element_type"):
        return None
    shape, result = maker.invars[0].aval.shape, atom.aval.shape
    counted = _counted(maker.invars[0], makers)
    if counted is None or name == "convert_element_type":
        return counted
    if name == "broadcast_in_dim":
        moved = int(params["broadcast_dimensions"][counted])
        return moved if shape[counted] == result[moved] else None
    sized = [d for d, size in enumerate(result) if size != 1]  # a reshape that adds or removes dimensions of size one
    same = [size for size in shape if size != 1] == [result[d] for d in sized]
    return sized[sum(size != 1 for size in shape[:counted])] if same and shape[counted] != 1 else None


def _counts_to(aval: Any, size: int) -> bool:
    """Returns whether integers of an array's type can count to a size."""
    return bool(jnp.issubdtype(aval.dtype, jnp.integer)) and size <= jnp.iinfo(aval.dtype).max
