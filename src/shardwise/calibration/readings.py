"""Measurements of a machine: times of small programs whose work is known, and what the machine reports about itself.

``shardwise.calibration.measure`` makes them, ``shardwise.calibration.calibrate`` fits a profile to them. They can be saved, and
measurements made at different times can be combined.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardwise.errors import HardwareError

#: The layout of saved readings; schema 1 had readings of groups of devices.
SCHEMA: Final = 2
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
    ``memory_fraction`` the fraction of a GPU's memory that JAX is set to preallocate; ``scatters`` whether the compiler has
    reduce-scatters; ``minor_copies`` whether it transposes arrays to gather them. ``None`` means not set, or not tried."""

    device_kind: str
    platform: str
    devices: int
    jax: str
    memory_bytes: int = 0
    memory_fraction: float | None = None
    scatters: bool | None = None
    minor_copies: bool | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine, its readings, and notes on what could not be measured."""

    machine: Machine
    readings: tuple[Reading, ...]
    notes: tuple[str, ...]
    time_s: float

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **dataclasses.asdict(self)}


def read_measured(path: Path) -> Measured:
    """Reads a file that ``--readings`` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"readings of schema {data['schema']!r} are not supported")
        readings = tuple(Reading(**reading) for reading in data["readings"])
        return Measured(Machine(**data["machine"]), readings, tuple(map(str, data["notes"])), float(data["time_s"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise HardwareError(f"{path} has no readings of 'hardware calibrate --readings': {error}") from None


def fastest(*rounds: Measured) -> Measured:
    """Combines measurements: the fastest of each reading counts, since other work on a machine only ever slows it."""
    kinds = {(m.machine.device_kind, m.machine.devices) for m in rounds}
    if len(kinds) != 1:
        raise HardwareError(
            f"readings of different machines cannot be joined: {', '.join(f'{n} {k}' for k, n in kinds)}"
        )
    best: dict[tuple[str, str], Reading] = {}
    for reading in (r for m in rounds for r in m.readings):
        key = reading.what, reading.size
        best[key] = min(best.get(key, reading), reading, key=lambda r: r.time_s)
    notes = tuple(dict.fromkeys(note for m in rounds for note in m.notes))
    return Measured(rounds[0].machine, tuple(best.values()), notes, sum(m.time_s for m in rounds))
