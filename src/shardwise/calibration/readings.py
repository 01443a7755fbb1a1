"""Measurements of a machine: times of small programs whose work is known, and what the machine reports about itself.
``measure.py`` makes them, and ``calibrate.py`` fits a profile to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Collectives that are measured.
KINDS: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True, slots=True)
class Reading:
    """The time that one device takes for some work.

    ``what`` is ``"matrix.bf16"`` and so on (FLOPs), ``"thin"`` (FLOPs of a product of few rows, and the ``elements`` of its
    operands), ``"memory"`` (bytes that a kernel over ``elements`` reads and writes), ``"vector"`` (operations), ``"launch"``
    (kernels), ``"straight"`` and ``"transposed"`` (bytes of a kernel over ``elements``, without and with a transposed read),
    or one of ``KINDS`` (bytes). ``between``: it was measured between products, whose time is the reading ``"between"``
    (FLOPs).
    """

    what: str
    size: str
    work: float
    time_s: float
    elements: float = 0.0
    between: bool = False

    @property
    def rate(self) -> float:
        return self.work / self.time_s


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine reports. ``memory_bytes`` is a device's share of a host's memory, or JAX's limit (0 if there is none);
    ``scatters`` says whether the compiler has
    reduce-scatters; ``minor_copies`` whether it transposes arrays to gather them. ``None`` means not set, or not tried."""

    device_kind: str
    platform: str
    devices: int
    jax: str
    memory_bytes: int = 0
    scatters: bool | None = None
    minor_copies: bool | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine, its readings, and notes on what could not be measured."""

    machine: Machine
    readings: tuple[Reading, ...]
    notes: tuple[str, ...]
    time_s: float
