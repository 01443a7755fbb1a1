"""Shardwise decides how a JAX program is split over many accelerators.

import shardwise as sw
plan = sw.plan(train_step, params, opt_state, batch, mesh={"data": 4, "model": 2}, tactics=[sw.FSDP("data"), sw.Auto("model")])
print(plan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardwise.capture.user_kernel import kernel as kernel
    from shardwise.dims.analysis import Analysis as Analysis
    from shardwise.dims.analysis import analyze as analyze
    from shardwise.errors import CaptureError as CaptureError
    from shardwise.errors import CompileError as CompileError
    from shardwise.errors import DecisionError as DecisionError
    from shardwise.errors import HardwareError as HardwareError
    from shardwise.errors import HloError as HloError
    from shardwise.errors import InfeasibleError as InfeasibleError
    from shardwise.errors import MeshError as MeshError
    from shardwise.errors import PlanError as PlanError
    from shardwise.errors import QueryError as QueryError
    from shardwise.errors import RuleError as RuleError
    from shardwise.errors import ShardwiseError as ShardwiseError
    from shardwise.errors import SpmdError as SpmdError
    from shardwise.errors import TargetError as TargetError
    from shardwise.errors import VariantError as VariantError
    from shardwise.planner.dropin import jit as jit
    from shardwise.planner.planning import plan as plan
    from shardwise.planner.together import plan_together as plan_together
    from shardwise.plans.load import load_plan as load_plan
    from shardwise.plans.plan import Plan as Plan
    from shardwise.report.compare import compare as compare
    from shardwise.rules.call import OpCall as OpCall
    from shardwise.rules.registry import register_rule as register_rule
    from shardwise.rules.registry import unregister_rule as unregister_rule
    from shardwise.tactics.auto import Auto as Auto
    from shardwise.tactics.strategies import FSDP as FSDP
    from shardwise.tactics.strategies import ContextParallel as ContextParallel
    from shardwise.tactics.strategies import DataParallel as DataParallel
    from shardwise.tactics.strategies import EdgeSharding as EdgeSharding
    from shardwise.tactics.strategies import ExpertParallel as ExpertParallel
    from shardwise.tactics.strategies import Keep as Keep
    from shardwise.tactics.strategies import Megatron as Megatron
    from shardwise.tactics.strategies import Pipeline as Pipeline
    from shardwise.tactics.strategies import Replicate as Replicate
    from shardwise.tactics.strategies import SequenceParallel as SequenceParallel
    from shardwise.tactics.strategies import Shard as Shard
    from shardwise.tactics.strategies import ZeRO1 as ZeRO1
    from shardwise.tactics.strategies import ZeRO2 as ZeRO2
    from shardwise.tuning.tune import tune as tune
    from shardwise.verification.verify import verify as verify

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
    "tactics.strategies": """ContextParallel DataParallel EdgeSharding ExpertParallel FSDP Keep Megatron Pipeline
    Replicate SequenceParallel Shard ZeRO1 ZeRO2""",
    "tuning.tune": "tune",
    "verification.verify": "verify",
}
_HOME: Final = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: ``shardwise --help`` must not wait for JAX."""
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"shardwise.{_HOME[name]}"), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
