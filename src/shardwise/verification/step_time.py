"""The step time of a compiled program: the TPU compiler's estimates of compute, and collectives timed on links.

Problem. ``estimated_cycles`` stands on instructions of the scheduled program, but collectives have none.

Idea. Collectives are timed by ``shardwise.hardware.collectives``. One that the schedule runs beside compute counts as far as it
lasts longer than the kernels between its start and its end; and all of these together no less than they last longer than all
kernels of the program.

Weak. Kernels without an estimate (Pallas) count as nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from shardwise.hardware.collectives import KINDS, collective
from shardwise.hardware.layout import Placement
from shardwise.verification.collectives import Collective
from shardwise.verification.hlo import Instruction, Module

#: Cycles above this are the compiler's way to say that it has no estimate.
NO_CYCLES: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives of a kind (a permute around a ring is a ``hop``) over the same axes, which are all of the mesh where there
    are none: the number of runs in a step, bytes of all of them on one device, and cycles of compute that the schedule puts
    beside all of them."""

    kind: str
    axes: tuple[str, ...] | None
    runs: int
    nbytes: int
    beside_cycles: int = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of compute, of all collectives, and of what of these is not overlapped."""

    compute_s: float
    comm_s: float
    exposed_s: float

    @property
    def time_s(self) -> float:
        return self.compute_s + self.exposed_s


def step_time(cycles: int, transfers: Iterable[Transfer], placement: Placement) -> StepTime:
    """Returns the time of a step with these cycles and collectives on the links of a placement."""
    clock_hz = placement.topology.profile.clock_hz
    compute_s = cycles / clock_hz
    waited = left = drawn = 0.0
    for transfer in transfers:
        link = collective(
            transfer.kind if transfer.kind in KINDS else "all-to-all",
            placement.mesh.names if transfer.axes is None else transfer.axes,
            placement,
        )
        seconds = link.alpha_s * transfer.runs + link.s_per_byte * transfer.nbytes
        if transfer.beside_cycles:
            drawn += seconds
            left += max(0.0, seconds - transfer.beside_cycles / clock_hz)
        else:
            waited += seconds
    return StepTime(compute_s, waited + drawn, waited + max(left, drawn - compute_s))


class Schedule:
    """A compiled program, whose instructions stand in the order of execution."""

    def __init__(self, module: Module):
        self._module = module
        self._by_name = {i.name: i for i in module.instructions()}

    def transfers(self, collectives: Iterable[Collective]) -> Iterator[Transfer]:
        for c in collectives:
            kind = "hop" if c.hop else c.kind
            yield Transfer(kind, c.axes, c.runs, c.nbytes * c.runs, self.beside_cycles(c))

    def beside_cycles(self, c: Collective) -> int:
        """Returns the cycles between start and end in all runs; what several steps share counts once."""
        if c.form in ("plain", "fused"):
            return 0
        beside: dict[tuple[str, str], int] = {}
        for step in filter(None, map(self._by_name.get, c.instructions)):
            for i in self._window(step):
                beside[i.computation, i.name] = self._cycles(i) * self._module.runs[i.computation]
        return sum(beside.values())

    def _window(self, i: Instruction) -> Iterator[Instruction]:
        """What runs while a step of a collective does: up to its end, or the fusion it is part of."""
        if i.opcode.endswith("-start") or i.opcode == "recv":
            inside = self._module.computations[i.computation].instructions
            first = inside.index(i) + 1
            ends = [k for k, x in enumerate(inside) if i.name in x.operands and x.opcode.endswith("-done")]
            yield from inside[first : min(ends, default=first)]
            return
        for caller in self._module.callers.get(i.computation, ()):
            if caller.opcode.endswith("-start"):
                yield from self._window(caller)
            else:
                yield caller

    def _cycles(self, i: Instruction) -> int:
        """Cycles of an instruction with the loop it may be."""
        if i.opcode != "while":
            return i.estimated_cycles
        body = self._module.computations[i.attribute("body")]
        return (self._module.trips[i] or 1) * sum(self._cycles(x) for x in body.instructions)
