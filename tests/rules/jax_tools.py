"""What tests of rules need of JAX's internals."""

from __future__ import annotations

from typing import Any


def all_primitives() -> frozenset[str]:
    """Every primitive that this JAX can lower."""
    from jax._src.interpreters import mlir

    found = {p.name for p in mlir._lowerings}
    for table in mlir._platform_specific_lowerings.values():
        found |= {p.name for p in table}
    return frozenset(found)


def run_shardy(lowered: Any, pipeline: str) -> str:
    """Runs Shardy passes over the StableHLO of a ``jax.jit(f).lower(...)`` and returns the module's text."""
    from jaxlib.mlir import passmanager

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        operation = module.operation.clone()
        passmanager.PassManager.parse(pipeline).run(operation)
        return str(operation.get_asm(enable_debug_info=False, large_elements_limit=8))
