"""The variants of a function, each traced, analyzed and modeled once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.capture.lower import lower
from shardwise.capture.trace import Call, JitOptions, Traced
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.errors import PlanError
from shardwise.hardware.layout import Placement
from shardwise.lowering.local_cost import HardwareCost
from shardwise.planner.inquiry import Inquiry
from shardwise.tactics.roles import Roles
from shardwise.transforms.variant import Variant
from shardwise.transforms.variants import trace_variant


class Captured:
    """A variant of a function, traced and analyzed, with one inquiry for each placed mesh."""

    def __init__(self, variant: Variant, traced: Traced, analysis: Analysis):
        self.variant, self.traced, self.analysis = variant, traced, analysis
        self._inquiries: dict[Placement, Inquiry] = {}
        self._structure: dict[object, Any] = {}  # what tactics find out about the program, on any mesh

    def inquiry(self, placement: Placement, roles: Roles) -> Inquiry:
        if placement not in self._inquiries:
            cost, other = HardwareCost(placement), next(iter(self._inquiries.values()), None)
            model = CostModel.of(self.analysis, cost) if other is None else other.model.on(cost)
            self._inquiries[placement] = Inquiry(model, roles, self._structure)
        return self._inquiries[placement]


class Variants:
    """The variants of a function for some arguments."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: JitOptions):
        self._call = fn, args, kwargs, options
        self._traces: dict[bool, Traced] = {}
        self._captured: dict[Variant, Captured] = {}

    @property
    def call(self) -> Call:
        """The function and the shapes of its arguments."""
        return Call.of(*self._call[:3])

    def __getitem__(self, variant: Variant) -> Captured:
        if variant not in self._captured:
            traced = trace_variant(*self._call, variant, self._traces)
            analysis = analyze_program(lower(traced))
            if not analysis.program.arguments:
                raise PlanError(f"{traced.name} has no array arguments: there is nothing to shard")
            self._captured[variant] = Captured(variant, traced, analysis)
        return self._captured[variant]
