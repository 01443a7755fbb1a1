"""The small cost interface that the compute rule asks, and its first implementation.

Until a hardware profile is behind it: bytes over one link rate, FLOPs over one peak rate, bytes over one memory rate, and a
latency for each collective. Figures are those of one TPU v5e chip (docs/decisions.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from shardwise.cost.sharding import Collective, Kind
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Unit


class LocalCost(Protocol):
    """Seconds on one device."""

    def communication_s(self, steps: Iterable[Collective], mesh: MeshAxes, early: bool) -> float:
        """Of collectives one after another. ``early``: their operand is ready long before, so that they can be hidden."""
        ...

    def compute_s(self, flops: float, nbytes: float, unit: Unit) -> float: ...


@dataclass(frozen=True, slots=True)
class SimpleCost:
    link_bytes_per_s: float = 4.5e10
    matrix_flops_per_s: float = 1.97e14
    vector_flops_per_s: float = 4e12
    memory_bytes_per_s: float = 8.1e11
    latency_s: float = 1e-6
    hidden_share: float = 0.75

    def communication_s(self, steps: Iterable[Collective], mesh: MeshAxes, early: bool) -> float:
        total = 0.0
        for step in steps:
            if step.kind is Kind.SLICE:
                continue
            devices = 1
            for axis in step.axes:
                devices *= mesh.sizes[axis]
            ring = (devices - 1) / devices
            # On a ring an all-reduce is a reduce-scatter and an all-gather, and an all-to-all crosses n/4 links on average.
            volume = step.nbytes * {Kind.ALL_REDUCE: 2 * ring, Kind.ALL_TO_ALL: devices / 4}.get(step.kind, ring)
            hidden = self.hidden_share if early and step.kind is Kind.ALL_GATHER else 0.0
            total += self.latency_s + volume / self.link_bytes_per_s * (1 - hidden)
        return total

    def compute_s(self, flops: float, nbytes: float, unit: Unit) -> float:
        rate = self.matrix_flops_per_s if unit is Unit.MATRIX else self.vector_flops_per_s
        return max(flops / rate, nbytes / self.memory_bytes_per_s)
