"""Constraints are few, and are those under which Shardy arrives at the plan."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from shardwise.capture import jax_internals as internals
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, lower_state
from shardwise.partitioner import constraints as module
from shardwise.partitioner.propagation import Constrained, Constraints, Propagation, abstract_mesh
from tests.planner.programs import CASES
from tests.planner.test_apply import random_decisions

MESH = MeshAxes.of({"x": 2, "y": 4})


def analysed(fn: Any, args: tuple[Any, ...]) -> tuple[Traced, Analysis]:
    traced = trace(fn, args, {}, JitOptions())
    return traced, analyze_program(lower(traced))


def lowered_on(analysis: Analysis, decisions: list[Decision], mesh: MeshAxes = MESH) -> Lowered:
    return lower_state(analysis, State(mesh, tuple(decisions)), HardwareCost.of(mesh))


def propagated_directly(traced: Traced, lowered: Lowered, constraints: Constraints) -> list[Any]:
    """Every op with its shardings, by lowering the program with the constraints in it."""
    mesh, program = lowered.mesh, lowered.program
    constrained = Constrained(program, constraints, abstract_mesh(mesh))
    propagation = Propagation(lowered, traced.jaxpr, ())
    shapes = [internals.plain_shape(v.aval) for v in internals.split_jaxpr(traced.jaxpr)[0].invars]
    shardings = [[propagation._named(s) for s in of] for of in ends(lowered)]
    jitted = jax.jit(
        lambda *arrays: constrained(*arrays),
        in_shardings=shardings[0],
        out_shardings=shardings[1],
        keep_unused=True,
    )
    module = internals.MarkedModule(jitted.trace(*shapes).lower(lowering_platforms=("cpu",)), mesh.names)
    return [(name, per_result) for name, _, per_result in module.propagated({})]


def ends(lowered: Lowered) -> list[list[Any]]:
    program = lowered.program
    return [[lowered.storage[v] for v in of] for of in ([a.value for a in program.arguments], program.outputs)]


@pytest.mark.parametrize("name", CASES)
def test_marks_are_what_lowering_with_constraints_gives(name: str) -> None:
    traced, analysis = analysed(*CASES[name]())
    lowered = lowered_on(analysis, random_decisions(analysis, MESH, seed=3))
    constraints = module.choose_constraints(lowered, traced.jaxpr)
    others = {p for p in constraints if p.place != "stored"}
    propagation = Propagation(lowered, traced.jaxpr, others)
    stated = {propagation._numbers[p]: propagation._named(s) for p, s in constraints.items()}
    found = [(name, per_result) for name, _, per_result in propagation._module.propagated(stated)]
    assert found == propagated_directly(traced, lowered, constraints)
    bare = [(name, per_result) for name, _, per_result in propagation._module.propagated({})]
    assert bare == propagated_directly(traced, lowered, {})
