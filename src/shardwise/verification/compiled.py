"""Compiling a step for host devices or for a TPU topology nobody has at hand, and reading what came out.

``backend`` is ``"host"`` for CPU devices of this process, or a TPU topology such as ``"v5e:4x4"``, compiled ahead of time by
libtpu without a TPU. A program that does not fit the memory of the topology is a result that says so, not an exception: it
is the compiler's verdict on a plan.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.errors import CompileError
from shardwise.hardware.mesh import MeshAxes
from shardwise.planner import devices as planned_devices
from shardwise.verification import hlo
from shardwise.verification.collectives import Collective, collectives

HOST: Final = "host"
#: Without these libtpu looks for the TPU's own machine and its metadata service.
_TPU_ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}
_FIGURE: Final = r"([\d.]+)\s*([KMGT]?)i?B?"
_EXCEEDED: Final = (
    re.compile(rf"\({_FIGURE}\) exceeds available HBM \({_FIGURE}\)"),
    re.compile(rf"Used {_FIGURE} of {_FIGURE} hbm"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device. ``peak_bytes`` is the compiler's figure on TPUs; on the host, where it leaves the temporaries
    out, it is arguments, outputs that reuse no argument, and temporaries together."""

    peak_bytes: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The compiler's refusal; figures are 0 where its message has none."""

    message: str
    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a program, for one device.

    ``flops`` is XLA's count, with loop bodies counted once; ``estimated_cycles`` is the TPU compiler's own estimate of
    everything but the collectives, with loop bodies as often as they run (0 on the host). Where ``out_of_memory`` is set
    there is no program, and everything else is empty.
    """

    backend: str
    mesh: MeshAxes
    collectives: tuple[Collective, ...]
    memory: Memory | None
    flops: float
    estimated_cycles: int
    loops_of_unknown_trips: int
    compile_s: float
    out_of_memory: OutOfMemory | None = None
    text: str = field(default="", repr=False)

    @property
    def fits(self) -> bool:
        return self.out_of_memory is None

    def to_json(self) -> dict[str, Any]:
        """Everything but the text, as plain data in a stable order."""
        from shardwise.verification.summary import compiled_json

        return compiled_json(self)

    def __str__(self) -> str:
        from shardwise.verification.summary import compiled_text

        return compiled_text(self)


def tpu_environment() -> dict[str, str]:
    """Environment variables with which libtpu compiles on a machine without TPUs.

    Set them before JAX is imported, for instance for a subprocess: ``subprocess.run(..., env=os.environ |
    tpu_environment())``. ``compile_step`` sets the missing ones itself, which is early enough unless JAX has already looked
    for devices on a machine that has TPUs.
    """
    return dict(_TPU_ENVIRONMENT)


def make_mesh(axes: Any, backend: str = HOST) -> Any:
    """A mesh of automatic axes over host devices or over the devices of a TPU topology.

    Args:
      axes: axis names and sizes, in whatever form ``MeshAxes.of`` takes.
      backend: ``"host"`` or a TPU topology such as ``"v5e:4x4"``.
    """
    wanted = MeshAxes.of(axes)
    if backend != HOST:
        return _tpu_mesh(wanted, backend)
    devices = jax.devices("cpu")
    if len(devices) < wanted.devices:
        raise CompileError(
            f"the mesh {wanted} needs {wanted.devices} host devices and this process has {len(devices)}: start Python with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted.devices}, or call "
            f"jax.config.update('jax_num_cpu_devices', {wanted.devices}) before anything uses JAX"
        )
    return planned_devices.make_mesh(wanted, devices)


def _tpu_mesh(wanted: MeshAxes, backend: str) -> Any:
    if not re.fullmatch(r"v\w+:\d+(x\d+)*", backend):
        raise CompileError(
            f"unknown backend {backend!r}: use 'host' or a TPU topology such as 'v5e:4x4' or 'v5p:2x2x2'"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise CompileError(
            f'compiling for {backend} needs libtpu, which is not installed: pip install "shardwise[tpu]"'
        )
    for name, value in _TPU_ENVIRONMENT.items():
        if name != "JAX_PLATFORMS" or "jax" not in sys.modules:
            os.environ.setdefault(name, value)
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=backend)
    except Exception as error:
        raise CompileError(f"libtpu does not know the topology {backend!r}: {error}") from error
    if len(topology.devices) != wanted.devices:
        raise CompileError(f"{backend} has {len(topology.devices)} devices, the mesh {wanted} has {wanted.devices}")
    try:
        return planned_devices.make_mesh(wanted, topology.devices)
    except (NotImplementedError, ValueError) as error:
        raise CompileError(f"the mesh {wanted} cannot be laid out on {backend}: {error}") from error


def compile_step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] = (),
    backend: str = HOST,
    mesh: Any = None,
    static_argnums: int | Sequence[int] = (),
) -> Compiled:
    """Compile a function and read its collectives, memory and estimates.

    Args:
      fn: the function; constraints in it may be bare ``PartitionSpec``s.
      args: arrays or ``jax.ShapeDtypeStruct``s.
      in_shardings: ``PartitionSpec``s or shardings in the structure of ``args``; ``None`` leaves them to the compiler.
      out_shardings: the same for the results.
      donate_argnums: arguments whose memory the results may take.
      backend: ``"host"`` or a TPU topology such as ``"v5e:4x4"``.
      mesh: axis names and sizes, or a ``jax.sharding.Mesh`` over the backend's devices.
      static_argnums: as in ``jax.jit``.
    """
    grid = mesh if isinstance(mesh, Mesh) else make_mesh(mesh, backend)

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: NamedSharding(grid, leaf) if isinstance(leaf, PartitionSpec) else leaf,
            tree,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    options: dict[str, Any] = {"donate_argnums": donate_argnums, "static_argnums": static_argnums}
    if in_shardings is not None:
        options["in_shardings"] = place(in_shardings)
    if out_shardings is not None:
        options["out_shardings"] = place(out_shardings)
    with jax.set_mesh(grid):
        return read_or_refuse(jax.jit(fn, **options).lower(*args), grid, backend)[0]


def read_or_refuse(lowered: Any, mesh: Mesh, backend: str = HOST) -> tuple[Compiled, Any]:
    """Compile what ``jax.jit(...).lower(...)`` gave and read it. The second result is the program, to be run; None where the
    compiler said that it does not fit."""
    started = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds = time.perf_counter() - started
        refused = _out_of_memory(str(error))
        return Compiled(backend, MeshAxes.of(mesh), (), None, 0.0, 0, 0, seconds, out_of_memory=refused), None
    return read_compiled(program, mesh, backend, time.perf_counter() - started), program


def read_compiled(compiled: Any, mesh: Mesh, backend: str = HOST, compile_s: float = 0.0) -> Compiled:
    """Read what ``jax.jit(...).lower(...).compile()`` gave.

    The program numbers its devices in the order of the mesh, which is how JAX assigns them.
    """
    text = compiled.as_text()
    module = hlo.read(text)
    axes = MeshAxes.of(mesh)
    return Compiled(
        backend=backend,
        mesh=axes,
        collectives=collectives(module, axes),
        memory=_memory(compiled.memory_analysis(), on_host=mesh.devices.flat[0].platform == "cpu"),
        flops=_flops(compiled.cost_analysis()),
        estimated_cycles=module.estimated_cycles,
        loops_of_unknown_trips=sum(loop.trips is None for loop in module.loops),
        compile_s=compile_s,
        text=text,
    )


def _memory(stats: Any, on_host: bool) -> Memory | None:
    if stats is None:
        return None
    temp, argument = int(stats.temp_size_in_bytes), int(stats.argument_size_in_bytes)
    output, alias = int(stats.output_size_in_bytes), int(stats.alias_size_in_bytes)
    together = argument + output - alias + temp
    peak = int(getattr(stats, "peak_memory_in_bytes", 0))
    return Memory(together if on_host or not peak else peak, temp, argument, output, alias)


def _flops(costs: Any) -> float:
    if isinstance(costs, list):
        costs = costs[0] if costs else None
    return float((costs or {}).get("flops", 0.0))


def _out_of_memory(message: str) -> OutOfMemory:
    """
    >>> _out_of_memory("... temporaries (1.5K) exceeds available HBM (1K).").needed_bytes
    1536
    """
    for pattern in _EXCEEDED:
        if found := pattern.search(message):
            needed, needed_unit, available, unit = found.groups()
            return OutOfMemory(message, _bytes(needed, needed_unit), _bytes(available, unit))
    return OutOfMemory(message, 0, 0)


def _bytes(figure: str, unit: str) -> int:
    return int(float(figure.rstrip(".")) * 1024 ** " KMGT".index(unit or " "))
