"""Compiles a step for host devices or, without a TPU, for a TPU topology, and reads the compiled program.

``backend`` is ``"host"`` for CPU devices of this process, or a TPU topology such as ``"v5e:4x4"``, or ``"2*v5e:4x4"`` for two
slices, compiled ahead of time by libtpu. A program that exceeds the memory of the topology is a result, not an exception.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from shardwise.errors import CompileError
from shardwise.hardware.mesh import MeshAxes
from shardwise.planner import devices as planned_devices
from shardwise.verification import hlo
from shardwise.verification.collectives import Collective, read_collectives
from shardwise.verification.slices import Slices

HOST: Final = "host"
#: Without these libtpu looks for a TPU machine and its metadata service.
_TPU_ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device. ``peak_bytes`` is the compiler's number on TPUs; on the host, where that excludes temporaries, it
    is the sum of arguments, outputs that reuse no argument, and temporaries."""

    peak_bytes: int
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program compiled for one device.

    ``estimated_cycles`` is the TPU compiler's estimate of everything but the collectives, over all runs of loop bodies (0 on
    the host). ``out_of_memory`` is the compiler's message for a program that does not fit; everything else is empty then.
    """

    backend: str
    collectives: tuple[Collective, ...] = ()
    memory: Memory | None = None
    estimated_cycles: int = 0
    out_of_memory: str = ""

    @property
    def fits(self) -> bool:
        return not self.out_of_memory


def tpu_environment() -> dict[str, str]:
    """Returns environment variables with which libtpu compiles on a machine without TPUs, for a subprocess. ``make_mesh`` sets
    the missing ones, which is early enough unless JAX has already looked for devices on a machine with TPUs."""
    return dict(_TPU_ENVIRONMENT)


def make_mesh(axes: Any, backend: str = HOST, order: Sequence[int] = ()) -> Any:
    """Returns a mesh of automatic axes over the devices of a backend; ``axes`` in any form that ``MeshAxes.of`` takes,
    ``order`` as in ``Plan.device_order``."""
    mesh_axes = MeshAxes.of(axes)
    if backend != HOST:
        return _tpu_mesh(mesh_axes, backend, order)
    devices = jax.devices("cpu")
    if len(devices) < mesh_axes.devices:
        raise CompileError(
            f"the mesh {mesh_axes} needs {mesh_axes.devices} host devices and this process has {len(devices)}: "
            f"{planned_devices.host_devices(mesh_axes.devices)}"
        )
    return planned_devices.make_mesh(mesh_axes, devices)


def _tpu_mesh(mesh_axes: MeshAxes, backend: str, order: Sequence[int]) -> Any:
    if not (match := re.fullmatch(r"(?:(\d+)\*)?(v\w+:\d+(?:x\d+)*)", backend)):
        raise CompileError(
            f"unknown backend {backend!r}: use 'host' or a TPU topology such as 'v5e:4x4', 'v5p:2x2x2' or '2*v5e:4x4'"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise CompileError(
            f'compiling for {backend} needs libtpu, which is not installed: pip install "shardwise[tpu]"'
        )
    for name, value in _TPU_ENVIRONMENT.items():
        if name != "JAX_PLATFORMS":  # JAX has read it already
            os.environ.setdefault(name, value)
    slices = {"num_slices": int(match[1])} if match[1] else {}
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=match[2], **slices)
    except Exception as error:
        raise CompileError(f"libtpu does not know the topology {backend!r}: {error}") from error
    if len(topology.devices) != mesh_axes.devices:
        raise CompileError(
            f"{backend} has {len(topology.devices)} devices, the mesh {mesh_axes} has {mesh_axes.devices}"
        )
    if slices:  # JAX lays out no mesh over several slices: ids count the devices of one after the other
        order = order or range(mesh_axes.devices)
    try:
        return planned_devices.make_mesh(mesh_axes, topology.devices, order)
    except (NotImplementedError, ValueError) as error:
        raise CompileError(f"the mesh {mesh_axes} cannot be laid out on {backend}: {error}") from error


def compile_lowered(lowered: Any, mesh: Mesh, backend: str = HOST) -> tuple[Compiled, Any]:
    """Compiles what ``jax.jit(...).lower(...)`` returns, and reads it. The second result is the executable, ``None`` where
    the program does not fit."""
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(backend, out_of_memory=str(error).splitlines()[0]), None
    return read_compiled(executable, mesh, backend), executable


def read_compiled(executable: Any, mesh: Mesh, backend: str = HOST) -> Compiled:
    """Reads what ``jax.jit(...).lower(...).compile()`` returns. JAX assigns devices in the order of the mesh."""
    return read_text(executable.as_text(), executable.memory_analysis(), mesh, backend)[1]


def read_text(text: str, stats: Any, mesh: Mesh, backend: str) -> tuple[hlo.Module, Compiled]:
    """Reads the text of a compiled program, and what ``memory_analysis()`` returns for it."""
    module, devices = hlo.read(text), mesh.devices.ravel().tolist()
    collectives = read_collectives(module, MeshAxes.of(mesh), Slices.of(devices))
    memory = read_memory(stats, on_host=devices[0].platform == "cpu")
    return module, Compiled(backend, collectives, memory, module.estimated_cycles)


def read_memory(stats: Any, on_host: bool) -> Memory | None:
    """Reads what ``memory_analysis()`` returns. Its peak counts arrays in the memory of the host, donated ones once."""
    if stats is None:
        return None
    temp, argument = int(stats.temp_size_in_bytes), int(stats.argument_size_in_bytes)
    output, alias = int(stats.output_size_in_bytes), int(stats.alias_size_in_bytes)
    total = argument + output - alias + temp
    in_host = {name: int(getattr(stats, f"host_{name}_size_in_bytes", 0)) for name in ("argument", "output", "alias")}
    peak = int(getattr(stats, "peak_memory_in_bytes", 0))
    peak -= in_host["argument"] + in_host["output"] - in_host["alias"] if peak else 0
    return Memory(total if on_host or not peak else peak, temp, argument, output, alias)
