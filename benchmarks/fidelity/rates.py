"""``python -m benchmarks.fidelity.rates``: the rates of kernels in libtpu's cycle estimates, for TPUs.

Each kernel runs over an array of 4096 x 4096 on one chip. Printed are cycles for 1,024 elements, which fill a register, and
what follows for a hardware profile: the efficiency of memory, the elements of a reduction beside its bytes, and the vector
operations of a sine over those of other transcendental functions (10); and the elements of a single op, of which profiles have
no figure. Profiles are fitted to more kernels than these. Needs libtpu, and no TPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from shardwise.hardware.load import load_profile
from shardwise.verification.compiled import tpu_environment

#: Without v4, whose profile is of a chip with two cores: libtpu's device is one of them.
TOPOLOGIES: Final = ("v2:4x4", "v3:4x4", "v5e:4x4", "v5p:2x2x4", "v6e:4x4")
SHAPE: Final = (4096, 4096)
REGISTER: Final = 1024
KERNELS: Final[dict[str, tuple[Callable[..., Any], tuple[str, ...]]]] = {
    "fusion": (lambda x: x * 2 + 1, ("float32",)),
    "bfloat16": (lambda x: x * 2 + 1, ("bfloat16",)),
    "reduction": (lambda x: jnp.exp(x * 2).sum(1), ("float32",)),
    "three arrays": (lambda x, y, z: (x * y * z).sum(1), ("float32",) * 3),
    "single": (jnp.tanh, ("float32",)),
    "single reduction": (lambda x: x.sum(1), ("float32",)),
    "sine": (lambda x: jnp.sin(x) * 2, ("float32",)),
    "three sines": (lambda x: jnp.sin(jnp.sin(jnp.sin(x) * 2) * 2), ("float32",)),
}


def cycles(topology: str) -> dict[str, float]:
    """Cycles for 1,024 elements, by kernel."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    alone = jax.sharding.SingleDeviceSharding(device)
    found = {}
    for name, (fn, dtypes) in KERNELS.items():
        args = [jax.ShapeDtypeStruct(SHAPE, dtype, sharding=alone) for dtype in dtypes]
        text = jax.jit(fn).lower(*args).compile().as_text()
        total = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))
        found[name] = total * REGISTER / (SHAPE[0] * SHAPE[1])
    return found


def rates(topology: str, found: dict[str, float]) -> dict[str, float]:
    """Figures of the hardware profile."""
    profile = load_profile(topology.partition(":")[0])
    per_byte = found["fusion"] / (2 * 4 * REGISTER)
    operations = profile.vector_flops_per_s / profile.clock_hz
    second = REGISTER * profile.clock_hz
    return {
        "memory.efficiency": profile.clock_hz / per_byte / profile.memory_bytes_per_s,
        "vector.elements_per_s": second / (found["reduction"] - 4 * REGISTER * per_byte),
        "elements of a single op per second": second / found["single"],
        "vector.angle_factor": found["three sines"] / 3 * operations / REGISTER / 10,
    }


if __name__ == "__main__":
    os.environ |= tpu_environment()
    for topology in TOPOLOGIES:
        found = cycles(topology)
        print(topology, ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
        print("   ", ", ".join(f"{name} = {value:.3g}" for name, value in rates(topology, found).items()), flush=True)
