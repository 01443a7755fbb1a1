"""A program as one list of equations, calls taken apart: differentiation may have put a forward pass and its backward pass into
different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.transforms.paired import Atom, Number

#: Calls that say nothing but what they call, once everything is differentiated.
_PLAIN_CALLS: Final = frozenset({*internals.JIT, "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})


@dataclass(frozen=True, slots=True)
class Step:
    """An equation, with the calls that it stands in. ``is_backward``: it came of a transposition."""

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
    """The equations of a program with its calls taken apart; values are numbers."""

    jaxpr: Any
    steps: list[Step] = field(default_factory=list)
    values: int = 0
    held: list[tuple[int, Any]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    types: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inner, consts = internals.split_jaxpr(self.jaxpr)
        self.inputs = [self._value(v) for v in inner.invars]
        self.outputs = self._walk(inner, self._hold(inner, consts), self.inputs, (), False)

    def nbytes(self, value: int) -> float:
        aval = self.types[value]
        return float(aval.size * internals.dtype_of(aval)[1]) if hasattr(aval, "size") else 0.0

    @cached_property
    def maker(self) -> dict[int, int]:
        """By value: the step that makes it. Inputs and constants have none."""
        return {v: k for k, step in enumerate(self.steps) for v in step.results}

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """By value: the steps that read it, in their order."""
        found: dict[int, list[int]] = {}
        for k, step in enumerate(self.steps):
            for v in dict.fromkeys(step.reads):
                found.setdefault(v, []).append(k)
        return found

    def _value(self, variable: Any) -> int:
        self.types[self.values] = variable.aval
        self.values += 1
        return self.values - 1

    def _hold(self, inner: Any, consts: Sequence[Any]) -> list[int]:
        made = [self._value(v) for v in inner.constvars]
        self.held += zip(made, consts, strict=True)
        return made

    def _walk(
        self, inner: Any, consts: Sequence[int], args: Sequence[Atom], calls: tuple[Any, ...], backward: bool
    ) -> list[Atom]:
        env: dict[Any, Atom] = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Atom:
            return Number(atom.val) if internals.is_literal(atom) else env[atom]

        for equation in inner.eqns:
            operands = tuple(read(atom) for atom in equation.invars)
            transposed = backward or equations.is_transposed(equation)
            called = internals.inner_jaxpr(equation)
            if called is not None and _is_open(equation, called):
                body, held = internals.split_jaxpr(called)
                results = self._walk(body, self._hold(body, held), operands, (*calls, equation), transposed)
            else:
                made = tuple(self._value(v) for v in equation.outvars)
                self.steps.append(Step(equation, calls, operands, made, transposed))
                results = list(made)
            env.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]


def _is_open(equation: Any, called: Any) -> bool:
    name = equation.primitive.name
    return name not in internals.REMAT and (name in _PLAIN_CALLS or _has_scan(called))


def _has_scan(jaxpr: Any) -> bool:
    for equation in internals.split_jaxpr(jaxpr)[0].eqns:
        called = internals.inner_jaxpr(equation)
        if equation.primitive.name == "scan" or (called is not None and _has_scan(called)):
            return True
    return False
