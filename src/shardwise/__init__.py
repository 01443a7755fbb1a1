"""Shardwise decides how a JAX program is split over many accelerators.

import shardwise as sw
plan = sw.plan(train_step, params, opt_state, batch, mesh={"data": 4, "model": 2}, tactics=[sw.FSDP("data"), sw.Auto("model")])
print(plan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

__all__ = [
    "FSDP",
    "Analysis",
    "Auto",
    "CaptureError",
    "CompileError",
    "ContextParallel",
    "DataParallel",
    "DecisionError",
    "EdgeSharding",
    "ExpertParallel",
    "HardwareError",
    "HloError",
    "InfeasibleError",
    "Keep",
    "Megatron",
    "MeshError",
    "OpCall",
    "Plan",
    "PlanError",
    "QueryError",
    "Replicate",
    "RuleError",
    "SequenceParallel",
    "Shard",
    "ShardwiseError",
    "SpmdError",
    "TargetError",
    "VariantError",
    "ZeRO1",
    "ZeRO2",
    "analyze",
    "compare",
    "jit",
    "kernel",
    "load_plan",
    "plan",
    "plan_together",
    "register_rule",
    "unregister_rule",
    "verify",
]

if TYPE_CHECKING:
    from shardwise.capture.user_kernel import kernel
    from shardwise.dims.analysis import Analysis, analyze
    from shardwise.errors import (
        CaptureError,
        CompileError,
        DecisionError,
        HardwareError,
        HloError,
        InfeasibleError,
        MeshError,
        PlanError,
        QueryError,
        RuleError,
        ShardwiseError,
        SpmdError,
        TargetError,
        VariantError,
    )
    from shardwise.planner.dropin import jit
    from shardwise.planner.planning import plan
    from shardwise.planner.together import plan_together
    from shardwise.plans.load import load_plan
    from shardwise.plans.plan import Plan
    from shardwise.report.compare import compare
    from shardwise.rules.call import OpCall
    from shardwise.rules.registry import register_rule, unregister_rule
    from shardwise.tactics.auto import Auto
    from shardwise.tactics.strategies import (
        FSDP,
        ContextParallel,
        DataParallel,
        EdgeSharding,
        ExpertParallel,
        Keep,
        Megatron,
        Replicate,
        SequenceParallel,
        Shard,
        ZeRO1,
        ZeRO2,
    )
    from shardwise.verification.verify import verify

#: The public names by the module that has them.
_HOMES: Final = {
    "capture.user_kernel": "kernel",
    "dims.analysis": "Analysis analyze",
    "errors": """CaptureError CompileError DecisionError HardwareError HloError InfeasibleError MeshError PlanError QueryError
    RuleError ShardwiseError SpmdError TargetError VariantError""",
    "planner.dropin": "jit",
    "planner.planning": "plan",
    "planner.together": "plan_together",
    "plans.load": "load_plan",
    "plans.plan": "Plan",
    "report.compare": "compare",
    "rules.call": "OpCall",
    "rules.registry": "register_rule unregister_rule",
    "tactics.auto": "Auto",
    "tactics.strategies": """ContextParallel DataParallel EdgeSharding ExpertParallel FSDP Keep Megatron Replicate
    SequenceParallel Shard ZeRO1 ZeRO2""",
    "verification.verify": "verify",
}
_HOME: Final = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: ``shardwise --help`` must not wait for JAX."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"shardwise.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
