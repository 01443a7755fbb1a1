"""A program as one list of equations, with calls inlined: a forward pass and its backward pass may be in different ones.

Problem. A transformation copies nearly all equations of a program, and to trace them again takes as long as the function did.
Idea. A stretch of steps is traced as one placeholder (``emit``), and the equations are put in its place afterwards
(``spliced``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import jax

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import dtype_of

#: A value by its number, or a literal of JAX.
Atom = Any


def read_atoms(env: Mapping[int, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [env[atom] if isinstance(atom, int) else atom.val for atom in atoms]


def values_of(atoms: Sequence[Atom]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


class Scan:
    """The operands and results of a scan: constants, carries at the start, what it scans over; carries at the end, stacked."""

    def __init__(self, step: Step):
        self.step, params = step, step.equation.params
        self.length, self.reverse = int(params["length"]), bool(params["reverse"])
        self.consts, self.carries = internals.scan_counts(params)
        self.first_xs = self.consts + self.carries
        self.constants = step.operands[: self.consts]
        self.initial = step.operands[self.consts : self.first_xs]
        self.scanned = step.operands[self.first_xs :]
        self.carried = step.results[: self.carries]
        self.stacked = step.results[self.carries :]


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

    def run(self, env: Mapping[int, Any]) -> list[Any]:
        """Returns the results of the equation, in the name scopes of its calls."""
        with self.inside_calls():
            return internals.bind(self.equation, read_atoms(env, self.operands))

    def inside_calls(self) -> ExitStack:
        stack = ExitStack()
        for call in self.calls:
            stack.enter_context(internals.standing_at(call))
        return stack


@dataclass
class Flat:
    """The equations of a program with its calls inlined; values are numbers, and ``constants`` have their arrays. With
    ``inline_remat`` calls of ``jax.checkpoint`` are inlined too, behind their barrier."""

    jaxpr: Any
    inline_remat: bool = False
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
            is_remat = equation.primitive.name in internals.REMAT
            called = internals.inner_jaxpr(equation) if self.inline_remat or not is_remat else None
            if called is not None:
                if is_remat and equations.has_barrier(equation):
                    operands = self._behind_barrier(operands, (*calls, equation), transposed)
                return self._walk(called, operands, (*calls, equation), transposed)
            results = self._values(equation.outvars)
            self.steps.append(Step(_located(equation, calls), calls, tuple(operands), tuple(results), transposed))
            return results

        return internals.interpret(inner, (*constants, *args), add, literal=lambda atom: atom)

    def _behind_barrier(self, operands: list[Atom], calls: tuple[Any, ...], backward: bool) -> list[Atom]:
        """Returns new numbers of operands, behind an optimization barrier."""
        values = values_of(operands)
        if not values:
            return operands
        traced = jax.make_jaxpr(jax.lax.optimization_barrier)([internals.plain_shape(self.types[v]) for v in values])
        (equation,) = internals.split_jaxpr(traced)[0].eqns
        behind = [self.new(v) for v in values]
        self.steps.append(Step(equation, calls, tuple(values), tuple(behind), backward))
        again = dict(zip(values, behind, strict=True))
        return [again.get(atom, atom) if isinstance(atom, int) else atom for atom in operands]


def _located(equation: Any, calls: Sequence[Any]) -> Any:
    """Returns the equation at the user's line of the innermost call where it has none itself, as in a library's function."""
    if not calls or equations.user_line(equation.source_info) != "?":
        return equation
    call = next((c for c in reversed(calls) if equations.user_line(c.source_info) != "?"), equation)
    return equation.replace(source_info=equation.source_info.replace(traceback=call.source_info.traceback))


def emit(steps: Sequence[Step], env: Mapping[int, Any], wanted: Collection[int]) -> dict[int, Any]:
    """Returns the wanted values that some steps compute. Only a function that is then ``spliced`` may call it."""
    made: dict[int, Any] = {}
    later = {v for step in steps for v in step.reads} if any(map(_has_effects, steps)) else set[int]()
    for traced, some in groupby(steps, _has_effects):
        if traced:  # they are effects of what is around it, too
            for step in some:
                made |= zip(step.results, step.run({**env, **made}), strict=True)
        else:
            made |= _placeholder(list(some), {**env, **made} if made else env, later.union(wanted))
    return made


def _has_effects(step: Step) -> bool:
    return bool(step.equation.effects)


def _placeholder(steps: Sequence[Step], env: Mapping[int, Any], wanted: Collection[int]) -> dict[int, Any]:
    types = {v: out.aval for step in steps for v, out in zip(step.results, step.equation.outvars, strict=True)}
    read = tuple(dict.fromkeys(v for step in steps for v in step.reads if v not in types and env[v] is not None))
    results = tuple(v for v in types if v in wanted)
    if not results:
        return {}
    stretch = _Stretch(steps, read, results)
    arrays = internals.placeholder([env[v] for v in read], [types[v] for v in results], stretch)
    return dict(zip(results, arrays, strict=True))


class _Stretch:
    """The steps that a placeholder stands for, with the values that it reads and returns."""

    def __init__(self, steps: Sequence[Step], read: tuple[int, ...], results: tuple[int, ...]):
        self._steps, self._read, self._results = steps, read, results

    def equations(self, placeholder: Any) -> list[Any]:
        """Returns the equations with the variables of the placeholder."""
        env = dict(zip(self._read, placeholder.invars, strict=True))
        kept = dict(zip(self._results, placeholder.outvars, strict=True))
        used = {v for step in self._steps for v in step.reads}
        kept = {v: out for v, out in kept.items() if v not in used or str(out) != "_"}  # JAX drops what nothing uses
        equations = []
        for step in self._steps:
            atoms = [env[atom] if isinstance(atom, int) else atom for atom in step.operands]
            outputs = zip(step.results, step.equation.outvars, strict=True)
            variables = [kept[v] if v in kept else internals.variable(out.aval) for v, out in outputs]
            env.update(zip(step.results, variables, strict=True))
            names = [around.source_info.name_stack for around in (placeholder, *step.calls)]
            equations.append(internals.placed(step.equation, atoms, variables, names))
        return equations


def spliced(jaxpr: Any) -> Any:
    """Returns a closed jaxpr with the steps of placeholders in their place, also in bodies of loops."""
    inner, consts = internals.split_jaxpr(jaxpr)
    equations: list[Any] = []
    for equation in inner.eqns:
        stretch = internals.content(equation)
        if stretch is not None:
            equations += stretch.equations(equation)
        elif equation.primitive.name == "scan":
            body = equation.params["jaxpr"]
            has = any(internals.content(e) is not None for e in internals.split_jaxpr(body)[0].eqns)
            equations.append(equation.replace(params=equation.params | {"jaxpr": spliced(body)}) if has else equation)
        else:
            equations.append(equation)
    return internals.ClosedJaxpr(inner.replace(eqns=equations), consts)
