"""Steps emitted as they are, without being traced again.

Problem. A transformation copies nearly all equations of a program, and to trace them again takes as long as the function did.
Idea. A stretch of steps is traced as one placeholder, and the equations are put in its place afterwards (``spliced``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from shardwise.capture import jax_internals as internals
from shardwise.transforms.flat import Step


class Emitted(NamedTuple):
    """A step to emit, with changed parameters and with the types of its results."""

    step: Step
    types: Sequence[Any]
    changed: Mapping[str, Any]


def emit(steps: Sequence[Emitted], env: Mapping[int, Any], wanted: Collection[int]) -> dict[int, Any]:
    """Returns the wanted values that some steps compute. Only a function that is then ``spliced`` may call it."""
    made: dict[int, Any] = {}
    later = {v for one in steps for v in one.step.reads} if any(map(_has_effects, steps)) else set[int]()
    for traced, some in groupby(steps, _has_effects):
        if traced:  # they are effects of what is around it, too
            for one in some:
                made |= zip(one.step.results, one.step.run({**env, **made}, one.changed), strict=True)
        else:
            made |= _placeholder(list(some), {**env, **made} if made else env, later.union(wanted))
    return made


def _has_effects(one: Emitted) -> bool:
    return bool(one.step.equation.effects)


def _placeholder(steps: Sequence[Emitted], env: Mapping[int, Any], wanted: Collection[int]) -> dict[int, Any]:
    types = {v: aval for one in steps for v, aval in zip(one.step.results, one.types, strict=True)}
    read = dict.fromkeys(v for one in steps for v in one.step.reads if v not in types and env[v] is not None)
    results = [v for v in types if v in wanted]
    if not results:
        return {}
    avals = [types[v] for v in results]
    arrays = internals.placeholder([env[v] for v in read], avals, _Stretch(steps, tuple(read), tuple(results)))
    return dict(zip(results, arrays, strict=True))


class _Stretch:
    """The steps that a placeholder stands for, with the values that it reads and returns."""

    def __init__(self, steps: Sequence[Emitted], read: tuple[int, ...], results: tuple[int, ...]):
        self._steps, self._read, self._results = steps, read, results

    def equations(self, placeholder: Any) -> list[Any]:
        """Returns the equations with the variables of the placeholder."""
        env = dict(zip(self._read, placeholder.invars, strict=True))
        kept = dict(zip(self._results, placeholder.outvars, strict=True))
        used = {v for one in self._steps for v in one.step.reads}
        equations, names = [], placeholder.source_info.name_stack
        for step, types, changed in self._steps:
            variables = [
                kept[v] if v in kept and not (v in used and internals.is_dropped(kept[v])) else internals.variable(t)
                for v, t in zip(step.results, types, strict=True)
            ]
            atoms = [env[atom] if isinstance(atom, int) else atom for atom in step.operands]
            env.update(zip(step.results, variables, strict=True))
            equations.append(internals.placed(step.equation, atoms, variables, changed, (names, *step.names)))
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
