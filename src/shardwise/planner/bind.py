"""Plans and their programs: whether a plan is one of a program, and a loaded plan with its program."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from shardwise.capture import jax_internals as internals
from shardwise.capture.lower import lower
from shardwise.capture.trace import Call, JitOptions
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.errors import PlanError
from shardwise.hardware.layout import Placement, ideal, place, placements
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Program, format_program
from shardwise.lowering.decisions import Keep, Pin, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered
from shardwise.planner.inquiry import Inquiry
from shardwise.plans.plan import Plan
from shardwise.transforms.variants import trace_variant

#: Placements of a mesh among which that of a loaded plan is looked for.
_PLACEMENTS: Final = 50


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
        what = "other code, static arguments or JAX version"
        raise PlanError(f"{name} was made for another version of {plan.function} ({what}): plan again")


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


def static_options(plan: Plan, fn: Callable[..., Any]) -> JitOptions:
    """The static arguments that a plan remembers, for a function that does not know them itself."""
    return JitOptions() if internals.is_jitted(fn) else JitOptions.of_static(plan.static)


def bound(plan: Plan, fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    """A loaded plan with what is not saved, from its function."""
    traced = trace_variant(fn, args, kwargs, static_options(plan, fn), plan.variant)
    program = lower(traced)
    check_version(plan, program)
    check_parts(plan, program)
    inquiry = inquiry_of(plan, program)
    again, saved = inquiry.settle(plan.choices).predicted, plan.predicted
    same = (again.time_s, again.peak_bytes) == (saved.time_s, saved.peak_bytes)
    return replace(
        plan,
        trees=(traced.inputs, traced.outputs),
        jaxpr=traced.jaxpr,
        asked=inquiry,
        call=Call.of(fn, args, kwargs),
        predicted=again if same else saved,
    )


def relowered(plan: Plan, program: Program) -> Lowered:
    """Lowers the decisions of a plan again."""
    inquiry = plan.asked if plan.asked is not None else inquiry_of(plan, program)
    lowered: Lowered = inquiry.settle(plan.choices).lowered
    return lowered


def inquiry_of(plan: Plan, program: Program) -> Inquiry:
    """The inquiry of a loaded plan, from its program."""
    donated = {a.path: a.donated for a in plan.arguments}
    arguments = tuple(replace(a, donated=donated[a.path]) for a in program.arguments)
    analysis = analyze_program(replace(program, arguments=arguments))
    colors, values = range(len(analysis.colors)), range(len(program.values))
    for d in plan.decisions:
        named = d.colors if isinstance(d, Shard) else [c for c in d.colors if c != -1] if isinstance(d, Pin) else ()
        stored = d.values if isinstance(d, Keep) else (d.value,) if isinstance(d, Pin) else ()
        if any(c not in colors for c in named) or any(v not in values for v in stored) or not (named or stored):
            raise PlanError(f"the plan does not fit its program: there is nothing that is {d}; plan again")
    placement = _placement(plan).limited(plan.predicted.usable_bytes)
    return Inquiry(CostModel.of(analysis, HardwareCost(placement)), dict(plan.roles))


def _placement(plan: Plan) -> Placement:
    if not plan.placement:
        return ideal(plan.mesh, plan.predicted.hardware.rpartition(" ")[2])
    topology = topology_of(plan.predicted.hardware)
    candidates = placements(plan.mesh, topology, limit=_PLACEMENTS)
    return next((p for p in candidates if p.lines() == plan.placement), place(plan.mesh, topology))
