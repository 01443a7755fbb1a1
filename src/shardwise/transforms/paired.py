"""One function traced at two sizes: the same equations, other shapes, and other numbers where the program holds a size.

The pair stands for one program: *shapes of the small trace, numbers of the large one*. A mean over the batch is a sum of which
a part adds up to a part of it, divided by a literal that must be the whole batch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.errors import VariantError

#: Parameters that say shapes: these may differ between the two traces.
_SHAPES: Final = frozenset({"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "lhs_shape", "rhs_shape"})


class Number:
    """A number written into a program, where a value may stand; equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


#: A value by number, or a number that is written there.
Atom = int | Number


def read_atoms(env: Mapping[int, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [atom.value if isinstance(atom, Number) else env[atom] for atom in atoms]


class Pair(NamedTuple):
    """One equation at both sizes."""

    full: Any
    part: Any

    @property
    def name(self) -> str:
        return str(self.full.primitive.name)

    @property
    def line(self) -> str:
        """``model.py:12``, or a question mark where none is known."""
        return equations.user_line(self.full.source_info)

    @property
    def where(self) -> str:
        """``reduce_sum at model.py:12``."""
        return f"{self.name} at {self.line}"

    def bodies(self) -> Iterator[tuple[str, list[tuple[Any, Any]]]]:
        """The jaxprs among the parameters, by parameter, each at both sizes."""
        for key, value in self.part.params.items():
            held = value if isinstance(value, tuple | list) else (value,)
            if held and all(isinstance(j, internals.Jaxpr | internals.ClosedJaxpr) for j in held):
                other = self.full.params[key]
                yield key, list(zip(other if isinstance(other, tuple | list) else (other,), held, strict=True))


def pairs(full: Any, part: Any) -> list[Pair]:
    """The equations of two open or closed jaxprs. Refuses where they are not the same program at two sizes."""
    (large, consts), (small, others) = internals.split_jaxpr(full), internals.split_jaxpr(part)
    if len(large.eqns) != len(small.eqns) or len(consts) != len(others):
        raise VariantError(
            f"the function is another program for a smaller batch: {len(large.eqns)} operations became {len(small.eqns)}"
        )
    if any(np.shape(a) != np.shape(b) for a, b in zip(consts, others, strict=True)):
        raise VariantError("the function holds an array whose shape depends on the batch's size")
    found = [Pair(*both) for both in zip(large.eqns, small.eqns, strict=True)]
    for pair in found:
        _check(pair)
    return found


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
    held = one if isinstance(one, tuple | list) else (one,)
    if any(isinstance(j, internals.Jaxpr | internals.ClosedJaxpr) or callable(j) for j in held):
        return True  # jaxprs are compared where they are walked, and functions are what they were made from
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one is other or bool(one == other) or bool(one != one and other != other)


def run_jaxpr(full: Any, part: Any, args: Sequence[Any]) -> list[Any]:
    """Runs the small jaxpr with the numbers of the large one."""
    (large, consts), (small, _) = internals.split_jaxpr(full), internals.split_jaxpr(part)
    env: dict[Any, Any] = dict(zip((*small.constvars, *small.invars), (*consts, *args), strict=True))

    def read(atom: Any, literal: Any) -> Any:
        return literal.val if internals.is_literal(atom) else env[atom]

    for one in map(Pair._make, zip(large.eqns, small.eqns, strict=True)):
        arrays = [read(*atoms) for atoms in zip(one.part.invars, one.full.invars, strict=True)]
        env.update(zip(one.part.outvars, run_pair(one, arrays), strict=True))
    return [read(*atoms) for atoms in zip(small.outvars, large.outvars, strict=True)]


def run_pair(pair: Pair, arrays: Sequence[Any]) -> list[Any]:
    """Runs one equation of the small trace with the numbers of the large one."""
    full, part = (internals.inner_jaxpr(equation) for equation in pair)
    if full is not None and pair.name not in (*internals.REMAT, *internals.JIT) and _differ(full, part):
        return run_jaxpr(full, part, arrays)  # a custom derivative, which nobody asks for any more
    changed = {}
    for key, bodies in pair.bodies():
        if any(_differ(*both) for both in bodies):
            made = [_rebuilt(*both) for both in bodies]
            changed[key] = tuple(made) if isinstance(pair.part.params[key], tuple | list) else made[0]
    return internals.bind(pair.part, arrays, changed)


def _rebuilt(full: Any, part: Any) -> Any:
    made = internals.retrace(lambda *xs: run_jaxpr(full, part, xs), part)
    return made if hasattr(part, "consts") else internals.open_jaxpr(made)


def _differ(full: Any, part: Any) -> bool:
    """Is there a number in one jaxpr that is another in the other?"""
    large, small = internals.split_jaxpr(full)[0], internals.split_jaxpr(part)[0]
    inner = [Pair(*both) for both in zip(large.eqns, small.eqns, strict=True)]
    atoms = [*zip(large.outvars, small.outvars, strict=True)]
    atoms += [both for pair in inner for both in zip(pair.full.invars, pair.part.invars, strict=True)]
    if any(
        internals.is_literal(a) and np.any((a.val != b.val) & ((a.val == a.val) | (b.val == b.val))) for a, b in atoms
    ):
        return True
    return any(_differ(*both) for pair in inner for _, bodies in pair.bodies() for both in bodies)
