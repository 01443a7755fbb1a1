"""One function traced at two batch sizes: one program with the *shapes of the small trace and literals of the large one*. A
mean over the batch is a sum over its parts, divided by a literal that must be the full batch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.errors import VariantError

#: Parameters with shapes, which may differ between the two traces.
_SHAPES: Final = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "lhs_shape", "rhs_shape"})


class Pair(NamedTuple):
    """One equation at both sizes."""

    full: Any
    part: Any

    @property
    def name(self) -> str:
        return str(self.full.primitive.name)

    @property
    def line(self) -> str:
        """The user's line, such as ``model.py:12``, else ``?``."""
        return equations.user_line(self.full.source_info)

    @property
    def where(self) -> str:
        """The primitive and its line, such as ``reduce_sum at model.py:12``."""
        return f"{self.name} at {self.line}"


def pairs(full: Any, part: Any) -> list[Pair]:
    """Returns the equations of two jaxprs of the same structure."""
    large, small = (internals.split_jaxpr(jaxpr)[0].eqns for jaxpr in (full, part))
    return [Pair(*both) for both in zip(large, small, strict=True)]


def with_literals(full: Any, part: Any) -> Any:
    """Returns the small jaxpr with the literals and constants of the large one; raises where they are different programs."""
    (large, consts), (small, others) = internals.split_jaxpr(full), internals.split_jaxpr(part)
    if len(large.eqns) != len(small.eqns) or len(consts) != len(others):
        raise VariantError(
            f"the function is another program for a smaller batch: {len(large.eqns)} operations became {len(small.eqns)}"
        )
    if any(np.shape(a) != np.shape(b) for a, b in zip(consts, others, strict=True)):
        raise VariantError("the function has a constant whose shape depends on the batch's size")

    def atoms(of_full: Sequence[Any], of_part: Sequence[Any]) -> list[Any]:
        return [a if internals.is_literal(a) else b for a, b in zip(of_full, of_part, strict=True)]

    merged = []
    for pair in pairs(full, part):
        _check(pair)
        params = {key: _merged(pair.full.params.get(key), value) for key, value in pair.part.params.items()}
        merged.append(pair.part.replace(invars=atoms(pair.full.invars, pair.part.invars), params=params))
    jaxpr = small.replace(eqns=merged, outvars=atoms(large.outvars, small.outvars))
    return internals.ClosedJaxpr(jaxpr, consts) if hasattr(part, "consts") else jaxpr


def _merged(full: Any, part: Any) -> Any:
    """Returns a parameter of the small trace; jaxprs with the literals of the large one."""
    if isinstance(part, internals.Jaxpr | internals.ClosedJaxpr):
        return with_literals(full, part)
    if type(part) is tuple and part and all(isinstance(j, internals.ClosedJaxpr) for j in part):
        return tuple(map(with_literals, full, part))
    return part


def _check(pair: Pair) -> None:
    full, part = pair
    if full.primitive.name != part.primitive.name:
        raise VariantError(
            f"the function is another program for a smaller batch: {pair.where} became {part.primitive.name}"
        )
    full_dtypes, part_dtypes = ([getattr(v.aval, "dtype", None) for v in (*e.invars, *e.outvars)] for e in pair)
    if full_dtypes != part_dtypes:
        raise VariantError(f"{pair.where} has other types for a smaller batch")
    for key, value in full.params.items() if internals.inner_jaxpr(full) is None else ():
        if key not in _SHAPES and not _alike(value, part.params.get(key)):
            reason = "runs over the batch, or as often as its size says" if key == "length" else f"differs in {key}"
            raise VariantError(f"{pair.where} {reason} for a smaller batch")


def _alike(one: Any, other: Any) -> bool:
    values = one if isinstance(one, tuple | list) else (one,)
    if any(isinstance(j, internals.Jaxpr | internals.ClosedJaxpr) or callable(j) for j in values):
        return True  # jaxprs are compared by `with_literals`, and functions have been traced to them
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or bool(one == other) or bool(one != one and other != other)
