"""Whether a plan is one of a program."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

from shardwise.errors import PlanError
from shardwise.ir.program import Program, format_program
from shardwise.plans.plan import Plan


def fingerprint(program: Program) -> str:
    """A digest of the program's text: ops, shapes, rules and structure, not source lines."""
    return hashlib.sha256(format_program(program).encode(errors="surrogatepass")).hexdigest()[:16]


def check_version(
    plan: Plan, program: Program, name: str = "the plan", variant: Callable[[], Program] | None = None
) -> None:
    """Raises what differs if a plan is not one of this program, or of the ``variant`` that the plan is for."""
    values = {a.path: program.values[a.value] for a in program.arguments}
    for array in plan.arguments:
        value = values.get(array.path)
        if value is None:
            raise PlanError(f"{name} is for another program: {array.path} is no argument of {program.name}; plan again")
        if value.shape != array.shape or value.dtype != array.dtype:
            theirs, ours = f"{array.dtype}{list(array.shape)}", f"{value.dtype}{list(value.shape)}"
            raise PlanError(f"{name} is for other shapes: {array.path} is {theirs} there and {ours} here; plan again")
    if fingerprint(variant() if variant is not None else program) != plan.fingerprint:
        raise PlanError(
            f"{name} was made for another version of {plan.function} (other code or JAX version): plan again"
        )


def check_parts(plan: Plan, program: Program) -> None:
    """Raises what in a loaded plan does not fit its program, although the fingerprint does."""
    arrays = (*plan.arguments, *plan.outputs)
    values = [program.values[v] for v in (*(a.value for a in program.arguments), *program.outputs)]
    problems = list(itertools.islice(plan.sharded.problems(program), 3))
    if [(a.path, a.shape, a.dtype) for a in arrays] != [(v.path, v.shape, v.dtype) for v in values]:
        problems.append("its arguments and outputs are others, or in another order")
    elif not problems:
        specs = [plan.sharded.shardings[v.id].spec(plan.mesh) for v in values]
        problems += [f"{a.path} is sharded otherwise inside" for a, s in zip(arrays, specs, strict=True) if a.spec != s]
    if problems:
        raise PlanError("the plan does not fit its program: " + "; ".join(problems) + "; plan again")
