"""Plans of decisions that no tactic takes."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.capture.trace import Traced
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision
from shardwise.lowering.local_cost import HardwareCost
from shardwise.planner.inquiry import Inquiry
from shardwise.planner.planning import assemble
from shardwise.plans.plan import Plan


def plan_decisions(
    traced: Traced,
    analysis: Analysis,
    mesh: MeshAxes,
    decisions: Sequence[Decision],
    cost: HardwareCost | None = None,
) -> Plan:
    return decided(traced, inquire(analysis, mesh, cost), decisions)


def inquire(analysis: Analysis, mesh: MeshAxes, cost: HardwareCost | None = None) -> Inquiry:
    """What several plans of one program on one mesh share."""
    return Inquiry(CostModel.of(analysis, cost or HardwareCost.of(mesh)))


def decided(traced: Traced, inquiry: Inquiry, decisions: Sequence[Decision]) -> Plan:
    return assemble(traced, inquiry, inquiry.settle(decisions), decisions)
