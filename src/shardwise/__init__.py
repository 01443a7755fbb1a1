"""Shardwise decides how a JAX program is split over many accelerators.

import shardwise
analysis = shardwise.analyze(train_step, params, opt_state, batch)
print(analysis)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Analysis",
    "OpCall",
    "Plan",
    "ShardwiseError",
    "analyze",
    "compare",
    "jit",
    "kernel",
    "load_plan",
    "plan",
    "register_rule",
    "unregister_rule",
    "verify",
]

if TYPE_CHECKING:
    from shardwise.capture.user_kernel import kernel
    from shardwise.dims.analysis import Analysis, analyze
    from shardwise.errors import ShardwiseError
    from shardwise.planner.dropin import jit
    from shardwise.planner.planning import plan
    from shardwise.plans.load import load_plan
    from shardwise.plans.plan import Plan
    from shardwise.report.compare import compare
    from shardwise.rules.call import OpCall
    from shardwise.rules.registry import register_rule, unregister_rule
    from shardwise.verification.verify import verify

_HOMES = {
    "Analysis": "shardwise.dims.analysis",
    "OpCall": "shardwise.rules.call",
    "Plan": "shardwise.plans.plan",
    "ShardwiseError": "shardwise.errors",
    "analyze": "shardwise.dims.analysis",
    "compare": "shardwise.report.compare",
    "jit": "shardwise.planner.dropin",
    "kernel": "shardwise.capture.user_kernel",
    "load_plan": "shardwise.plans.load",
    "plan": "shardwise.planner.planning",
    "register_rule": "shardwise.rules.registry",
    "unregister_rule": "shardwise.rules.registry",
    "verify": "shardwise.verification.verify",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: ``shardwise --help`` must not wait for JAX."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
