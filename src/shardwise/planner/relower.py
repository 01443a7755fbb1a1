"""A plan lowered again, from its decisions and the function that it is one of."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardwise.dims.analysis import analyze_program
from shardwise.hardware.layout import Placement, place, placements
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Program
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered
from shardwise.planner.deciding import placement_of
from shardwise.planner.inquiry import Inquiry
from shardwise.plans.plan import Plan

#: Placements of a mesh among which that of a loaded plan is looked for.
_PLACEMENTS: Final = 50


def relowered(plan: Plan, program: Program) -> Lowered:
    """The lowered state of a plan."""
    inquiry = plan.asked if plan.asked is not None else inquiry_of(plan, program)
    lowered: Lowered = inquiry.settle(plan.choices).lowered
    return lowered


def inquiry_of(plan: Plan, program: Program) -> Inquiry:
    """What it takes to carry out the decisions of a plan that was loaded."""
    donated = {a.path: a.donated for a in plan.arguments}
    arguments = tuple(replace(a, donated=donated[a.path]) for a in program.arguments)
    analysis = analyze_program(replace(program, arguments=arguments))
    return Inquiry(analysis, HardwareCost(_placement(plan)), dict(plan.roles))


def _placement(plan: Plan) -> Placement:
    """Where a plan was made for, from what is saved of it."""
    if not plan.placement:
        return placement_of(plan.mesh, None)
    where = topology_of(plan.predicted.hardware)
    found = placements(plan.mesh, where, limit=_PLACEMENTS)
    return next((p for p in found if p.lines() == plan.placement), place(plan.mesh, where))
