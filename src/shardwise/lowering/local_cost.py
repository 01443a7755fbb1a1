"""The small cost interface that the compute rule asks, and what a placement on hardware answers.

A collective costs what ``shardwise.hardware.collectives`` says of the links under its axes; an op is a roofline: FLOPs over the
rate of its unit, bytes over the memory's. The rule asks with one flat latency for every collective: counting hops it would
gather the batch of a tiny program instead of reducing its gradients, and how a program is computed should not turn on its size
being that of a test. Predictions (``step_s``) count them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from shardwise.hardware.collectives import AlphaBeta, collective
from shardwise.hardware.layout import Placement, ideal
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.ir.program import HEAVY, Op
from shardwise.lowering.sharding import REDUCING, ArrayType, Axes, Collective, Kind, Ring
from shardwise.rules.tables import ANGLES

#: Collectives along several dimensions, and how many times as long as a plain copy of the larger side the copies take that
#: XLA puts before or after them (libtpu's cycles, benchmarks/fidelity).
CROSSING: Final = {Kind.ALL_GATHER: 3.0, Kind.ALL_TO_ALL: 1.5}


def operations(profile: Profile, op: Op) -> float:
    """Returns the FLOPs of an op as a device takes them."""
    return op.flops * profile.angle_factor if op.kind in ANGLES else op.flops


class LocalCost(Protocol):
    """Seconds on one device."""

    def communication_s(self, steps: Iterable[Collective], early: bool) -> float:
        """Returns the time of collectives one after another; ``early``: their operand is ready long before, so that other work
        can run beside them."""
        ...

    def compute_s(self, op: Op, devices: float, nbytes: float, dtype: str) -> float:
        """Returns the time of an op that some ``devices`` share, where each moves ``nbytes``."""
        ...

    def ring(self, array: ArrayType, overlapped: bool) -> Ring: ...

    @property
    def rounds(self) -> bool:
        """Do products of float32 arrays at default precision read bfloat16?"""
        ...


class HardwareCost:
    """Costs on a placement; without one, on TPU v5e chips with a row of links for every mesh axis.

    >>> step = Collective(Kind.ALL_GATHER, (1,), 15e6, 60e6)
    >>> cost = HardwareCost.of(MeshAxes.of({"data": 4, "model": 4}))
    >>> f"{cost.communication_s([step], False) * 1e3:.3f} ms, early {cost.communication_s([step], True) * 1e3:.3f} ms"
    '1.001 ms, early 0.451 ms'
    """

    def __init__(self, placement: Placement):
        self.placement, self.profile = placement, placement.topology.profile
        self._links: dict[tuple[str, Axes], AlphaBeta] = {}
        self._hidden = {kind: self.profile.hidden_share(kind.value) for kind in Kind}
        self._early = {kind: 0.0 if kind in REDUCING else self._hidden[kind] for kind in Kind}
        self._memory_bytes_per_s = self.profile.memory_bytes_per_s * self.profile.memory_efficiency
        # An efficiency that was measured has the copies of an all-to-all in it.
        known = {} if self.profile.efficiency else CROSSING
        self._crossing = {kind: copies * 2 / self._memory_bytes_per_s for kind, copies in known.items()}
        self._plain_copy = 2 / self._memory_bytes_per_s
        self._copy = self._plain_copy * self.profile.minor_copies
        self._turn = self._copy + 1 / self.profile.transposed_bytes_per_s * self.profile.minor_copies
        self._combined = {Kind.ALL_REDUCE} if self.profile.scatters else {Kind.ALL_REDUCE, Kind.REDUCE_SCATTER}
        self._matrix: dict[str, float] = {}

    @staticmethod
    def of(mesh: MeshAxes) -> HardwareCost:
        return HardwareCost(ideal(mesh))

    @property
    def rounds(self) -> bool:
        return self.profile.rounds

    def link(self, step: Collective) -> AlphaBeta:
        kind = "hop" if step.hops else "halo" if step.near else step.kind.value
        if (kind, step.axes) not in self._links:
            self._links[kind, step.axes] = collective(kind, step.axes, self.placement)
        return self._links[kind, step.axes]

    def ring(self, array: ArrayType, overlapped: bool) -> Ring:
        """Which reductions into shards are rings of permutes, where the compiler runs permutes beside compute and
        reduce-scatters not (``Profile.rings``): those that other work can run beside, and those that would be all-reduces; none
        of small pieces."""
        mesh = self.placement.mesh
        if not (self.profile.rings and array.reducer == "sum" and mesh.devices > 1):
            return Ring.NEVER
        axis = max(range(len(mesh.sizes)), key=mesh.sizes.__getitem__)
        nbytes = array.nbytes / mesh.devices
        piece = Collective(Kind.PERMUTE, (axis,), nbytes, nbytes, near=True)
        if self.link(piece).s_per_byte * piece.nbytes <= self.profile.collective_s:
            return Ring.NEVER
        return Ring.ALWAYS if overlapped else Ring.MISSING

    def step_s(self, step: Collective, late: bool = False) -> float:
        """One collective, nothing hidden. Reductions of values used ``late`` are combined: their hops are not counted."""
        if step.kind is Kind.SLICE:
            return 0.0
        if late and step.kind in self._combined:
            return self.profile.collective_s + self.link(step).s_per_byte * step.nbytes
        return step.count * self.link(step).time_s(step.nbytes)

    def copy_s(self, step: Collective) -> float:
        """The copies that bring pieces of several dimensions into the order of the array, and those that turn both sides of a
        gather round (``Profile.minor_copies``): along the last dimension by the element, along others by the row."""
        if step.hops:  # what arrives is added
            return 2.5 * step.hops * step.nbytes * self._plain_copy
        crossing = self._crossing.get(step.kind, 0.0) * step.nbytes if step.crossing else 0.0
        if self._copy and step.minor and step.kind is Kind.ALL_GATHER:
            return crossing + (self._turn if step.last else self._copy) * (step.bytes_in + step.bytes_out)
        return crossing

    def hidden_s(self, step: Collective, early: bool, late: bool) -> float:
        """What of a collective hides behind compute: a share of its transfer, for a gather whose operand is ready ``early`` and
        a reduction whose result is used ``late``, as gradients are."""
        kind = step.purpose
        if kind is Kind.REDUCE_SCATTER and self.profile.rings and not step.hops:
            return 0.0
        share = self._hidden[kind] if (late if kind in REDUCING else early) else 0.0
        if step.hops:  # each starts when the last one has ended, beside the same work
            return share * step.hops * self.link(step).time_s(step.nbytes)
        return share * self.link(step).s_per_byte * step.nbytes if share else 0.0

    def communication_s(self, steps: Iterable[Collective], early: bool) -> float:
        total = 0.0
        for step in steps:
            if step.kind is not Kind.SLICE:
                # How much there is to hide behind is not known here: a ring counts as an early gather does.
                hidden = self._early[Kind.ALL_GATHER if step.hops else step.kind] if early or step.beside else 0.0
                moved_s = step.count * self.link(step).s_per_byte * step.nbytes
                total += self.profile.collective_s + moved_s * (1 - hidden)
                total += self.copy_s(step)
        return total

    def compute_s(self, op: Op, devices: float, nbytes: float, dtype: str) -> float:
        if op.unit in HEAVY:
            if dtype not in self._matrix:
                self._matrix[dtype] = self.profile.matrix_rate(dtype) * self.profile.matrix_efficiency
            rate = self._matrix[dtype]
        else:
            rate = self.profile.vector_flops_per_s
        return max(operations(self.profile, op) / devices / rate, nbytes / self._memory_bytes_per_s)
