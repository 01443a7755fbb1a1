"""One function traced at two batch sizes: the same equations, with other shapes and with other literals that depend on a size.

The pair represents one program: *shapes of the small trace, literals of the large one*. A mean over the batch is a sum over its
parts, divided by a literal that must be the full batch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.errors import VariantError

#: Parameters with shapes, which may differ between the two traces.
_SHAPES: Final = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "lhs_shape", "rhs_shape"})


class Literal:
    """A literal operand; equal to itself only."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


#: A value by its number, or a literal.
Atom = int | Literal


def read_atoms(env: Mapping[int, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [atom.value if isinstance(atom, Literal) else env[atom] for atom in atoms]


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

    def bodies(self) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
        """Yields the jaxprs among the parameters, by parameter, each at both sizes."""
        for key, value in self.part.params.items():
            jaxprs = value if isinstance(value, tuple | list) else (value,)
            if jaxprs and all(isinstance(j, internals.Jaxpr | internals.ClosedJaxpr) for j in jaxprs):
                other = self.full.params[key]
                yield key, list(zip(other if isinstance(other, tuple | list) else (other,), jaxprs, strict=True))


def pairs(full: Any, part: Any) -> list[Pair]:
    """Returns the equations of two open or closed jaxprs; raises where they are not the same program at two sizes."""
    (large, consts), (small, others) = internals.split_jaxpr(full), internals.split_jaxpr(part)
    if len(large.eqns) != len(small.eqns) or len(consts) != len(others):
        raise VariantError(
            f"the function is another program for a smaller batch: {len(large.eqns)} operations became {len(small.eqns)}"
        )
    if any(np.shape(a) != np.shape(b) for a, b in zip(consts, others, strict=True)):
        raise VariantError("the function has a constant whose shape depends on the batch's size")
    equation_pairs = [Pair(*both) for both in zip(large.eqns, small.eqns, strict=True)]
    for pair in equation_pairs:
        _check(pair)
    return equation_pairs


def _check(pair: Pair) -> None:
    full, part = pair
    if full.primitive.name != part.primitive.name:
        raise VariantError(
            f"the function is another program for a smaller batch: {pair.where} became {part.primitive.name}"
        )
    atoms = [[str(v.aval.dtype) if hasattr(v.aval, "dtype") else "" for v in (*e.invars, *e.outvars)] for e in pair]
    if atoms[0] != atoms[1]:
        raise VariantError(f"{pair.where} has other types for a smaller batch")
    for key, value in full.params.items() if internals.inner_jaxpr(full) is None else ():
        if key not in _SHAPES and not _alike(value, part.params.get(key)):
            reason = "runs over the batch, or as often as its size says" if key == "length" else f"differs in {key}"
            raise VariantError(f"{pair.where} {reason} for a smaller batch")


def _alike(one: Any, other: Any) -> bool:
    values = one if isinstance(one, tuple | list) else (one,)
    if any(isinstance(j, internals.Jaxpr | internals.ClosedJaxpr) or callable(j) for j in values):
        return True  # jaxprs are compared where they are walked, and functions have been traced to them
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or bool(one == other) or bool(one != one and other != other)


def run_jaxpr(full: Any, part: Any, args: Sequence[Any]) -> list[Any]:
    """Runs the small jaxpr with the literals of the large one."""
    (large, consts), (small, _) = internals.split_jaxpr(full), internals.split_jaxpr(part)
    env: dict[Any, Any] = dict(zip((*small.constvars, *small.invars), (*consts, *args), strict=True))

    def read(atom: Any, literal: Any) -> Any:
        return literal.val if internals.is_literal(atom) else env[atom]

    for one in map(Pair._make, zip(large.eqns, small.eqns, strict=True)):
        arrays = [read(*atoms) for atoms in zip(one.part.invars, one.full.invars, strict=True)]
        env.update(zip(one.part.outvars, run_pair(one, arrays), strict=True))
    return [read(*atoms) for atoms in zip(small.outvars, large.outvars, strict=True)]


def run_pair(pair: Pair, arrays: Sequence[Any]) -> list[Any]:
    """Runs one equation of the small trace with the literals of the large one."""
    full, part = (internals.inner_jaxpr(equation) for equation in pair)
    if full is not None and pair.name not in (*internals.REMAT, *internals.JIT) and _differ(full, part):
        return run_jaxpr(full, part, arrays)  # a custom derivative, which is no longer needed
    changed = {}
    for key, bodies in pair.bodies():
        if any(_differ(*both) for both in bodies):
            rebuilt = [_rebuilt(*both) for both in bodies]
            changed[key] = tuple(rebuilt) if isinstance(pair.part.params[key], tuple | list) else rebuilt[0]
    return internals.bind(pair.part, arrays, changed)


def _rebuilt(full: Any, part: Any) -> Any:
    jaxpr = internals.retrace(lambda *xs: run_jaxpr(full, part, xs), part)
    return jaxpr if hasattr(part, "consts") else internals.open_jaxpr(jaxpr)


def _differ(full: Any, part: Any) -> bool:
    """Returns whether a literal differs between two jaxprs."""
    large, small = internals.split_jaxpr(full)[0], internals.split_jaxpr(part)[0]
    inner = [Pair(*both) for both in zip(large.eqns, small.eqns, strict=True)]
    atoms = [*zip(large.outvars, small.outvars, strict=True)]
    atoms += [both for pair in inner for both in zip(pair.full.invars, pair.part.invars, strict=True)]
    if any(
        internals.is_literal(a) and np.any((a.val != b.val) & ((a.val == a.val) | (b.val == b.val))) for a, b in atoms
    ):
        return True
    return any(_differ(*both) for pair in inner for _, bodies in pair.bodies() for both in bodies)
