"""A program as one list of equations, with calls inlined: a forward pass and its backward pass may be in different ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import dtype_of

#: A value by its number, or a literal of JAX.
Atom = Any


def read_atoms(env: Mapping[int, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [env[atom] if isinstance(atom, int) else atom.val for atom in atoms]


def values_of(atoms: Sequence[Atom]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


@dataclass(frozen=True, slots=True)
class Step:
    """An equation, with the calls around it. ``is_backward``: it comes from a transposition."""

    equation: Any
    calls: tuple[Any, ...]
    operands: tuple[Atom, ...]
    results: tuple[int, ...]
    is_backward: bool

    @property
    def name(self) -> str:
        return str(self.equation.primitive.name)

    @property
    def reads(self) -> list[int]:
        return values_of(self.operands)

    def run(self, env: Mapping[int, Any], changed: Mapping[str, Any] | None = None) -> list[Any]:
        """Returns the results of the equation, with some parameters changed, in the name scopes of its calls."""
        with self.inside_calls():
            return internals.bind(self.equation, read_atoms(env, self.operands), changed)

    @property
    def names(self) -> list[Any]:
        """The name stacks of the calls around it, the outermost first."""
        return [call.source_info.name_stack for call in self.calls]

    def inside_calls(self) -> ExitStack:
        stack = ExitStack()
        for call in self.calls:
            stack.enter_context(internals.standing_at(call))
        return stack


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
        return float(aval.size * dtype_of(aval)[1]) if hasattr(aval, "size") else 0.0

    def new(self, value: int) -> int:
        """Returns the number of a new value of the type of another one."""
        self.types.append(self.types[value])
        return len(self.types) - 1

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

        def add(number: int, operands: list[Atom]) -> list[Atom]:
            equation = inner.eqns[number]
            transposed = backward or equations.is_transposed(equation)
            called = internals.inner_jaxpr(equation) if equation.primitive.name not in internals.REMAT else None
            if called is not None:
                return self._walk(called, operands, (*calls, equation), transposed)
            results = self._values(equation.outvars)
            self.steps.append(Step(_located(equation, calls), calls, tuple(operands), tuple(results), transposed))
            return results

        return internals.interpret(inner, (*constants, *args), add, literal=lambda atom: atom)


def _located(equation: Any, calls: Sequence[Any]) -> Any:
    """Returns the equation at the user's line of the innermost call where it has none itself, as in a library's function."""
    if not calls or equations.user_line(equation.source_info) != "?":
        return equation
    call = next((c for c in reversed(calls) if equations.user_line(c.source_info) != "?"), equation)
    return equation.replace(source_info=equation.source_info.replace(traceback=call.source_info.traceback))
