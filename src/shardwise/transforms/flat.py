"""A program as one list of equations with its calls inlined: differentiation may have put a forward pass and its backward pass
into different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.transforms.trace_pair import Atom, Literal

#: Calls that only group equations once everything is differentiated.
_PLAIN_CALLS: Final = frozenset({*internals.JIT, "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})


@dataclass(frozen=True, slots=True)
class Step:
    """An equation, with the calls around it. ``is_backward``: it comes from a transposition."""

    equation: Any
    calls: tuple[Any, ...]
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    is_backward: bool

    @property
    def is_scan(self) -> bool:
        return str(self.equation.primitive.name) == "scan"

    @property
    def reads(self) -> list[int]:
        return [v for v in self.operands if isinstance(v, int)]


@dataclass
class Flat:
    """The equations of a program with its calls inlined; values are numbers, and ``constants`` have their arrays."""

    jaxpr: Any
    steps: list[Step] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = self._values(internals.split_jaxpr(self.jaxpr)[0].invars)
        self.outputs = self._walk(self.jaxpr, self.inputs, (), False)

    def nbytes(self, value: int) -> float:
        aval = self.types[value]
        return float(aval.size * internals.dtype_of(aval)[1]) if hasattr(aval, "size") else 0.0

    @cached_property
    def producer(self) -> dict[int, int]:
        """The step that computes a value; inputs and constants have none."""
        return {v: k for k, step in enumerate(self.steps) for v in step.results}

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """The steps that read a value, in their order."""
        users: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            for v in dict.fromkeys(step.reads):
                users.setdefault(v, []).append(k)
        return users

    def _values(self, variables: Sequence[Any]) -> list[int]:
        first = len(self.types)
        self.types += [v.aval for v in variables]
        return list(range(first, len(self.types)))

    def _walk(self, jaxpr: Any, args: Sequence[Atom], calls: tuple[Any, ...], backward: bool) -> list[Atom]:
        inner, arrays = internals.split_jaxpr(jaxpr)
        constants = self._values(inner.constvars)
        self.constants |= zip(constants, arrays, strict=True)
        env: dict[Any, Atom] = dict(zip((*inner.constvars, *inner.invars), (*constants, *args), strict=True))

        def read(atom: Any) -> Atom:
            return Literal(atom.val) if internals.is_literal(atom) else env[atom]

        for equation in inner.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            transposed = backward or equations.is_transposed(equation)
            called = internals.inner_jaxpr(equation)
            results: Sequence[Atom]
            if called is not None and _is_inlined(equation, called):
                results = self._walk(called, operands, (*calls, equation), transposed)
            else:
                results = values = self._values(equation.outvars)
                self.steps.append(Step(equation, calls, operands, tuple(values), transposed))
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]


def _is_inlined(equation: Any, called: Any) -> bool:
    name = equation.primitive.name
    return name not in internals.REMAT and (name in _PLAIN_CALLS or _has_scan(called))


def _has_scan(jaxpr: Any) -> bool:
    for equation in internals.split_jaxpr(jaxpr)[0].eqns:
        called = internals.inner_jaxpr(equation)
        if equation.primitive.name == "scan" or (called is not None and _has_scan(called)):
            return True
    return False
