"""Eight host devices for every test that runs a sharded program; set before JAX is imported.

XLA compiles quickly rather than well, since tests compare numbers and not times: LLVM optimizes little and reads one module for
each program, and fusions are not emitted by way of MLIR, which takes most of the time of a compilation. There is no fused
multiply-add: one fusion would use it and another not, so that an element is unequal to itself (the gradient of a maximum asks
that). LAPACK has one thread: with eight devices that each start one for every core they would wait for each other for minutes.

JAX makes an MLIR context for every program that it lowers, which takes longer than to lower a small program. Here many programs
share a context. A program that is lowered while another one is being lowered gets a new context, since it would become a part
of the other.
"""

import contextlib
import os
from importlib.metadata import version
from typing import Any

_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_max_isa=AVX --xla_cpu_parallel_codegen_split_count=1"
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later compilers have no other emitters
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

#: Programs that are lowered in one MLIR context.
_PROGRAMS = 100


def pytest_collection_finish() -> None:
    from jax._src.interpreters import mlir

    make, context, left = mlir.make_ir_context, None, 0

    def shared() -> Any:
        nonlocal context, left
        with contextlib.suppress(ValueError):  # raised where nothing is being written
            if mlir.ir.InsertionPoint.current is not None:
                return make()
        if left == 0:
            context, left = make(), _PROGRAMS
        left -= 1
        return context

    mlir.make_ir_context = shared
