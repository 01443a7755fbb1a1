"""Assigns mesh axes to physical axes of a topology.

Problem. A mesh is names and sizes; collectives run on links. Each mesh axis gets factors of physical axes whose product is its
size; together the mesh axes use every physical axis. A physical axis may be split: of a row of 16 split into 4 × 4 the groups
of the inner factor are 4 neighbors (stride 1), those of the outer factor 4 devices at distance 4 (stride 4).

Idea. Enumerate the factorings, first those that do not split physical axes, and rank them by
1. tiers: the outer (slow) tiers go to the first mesh axes, since meshes are usually written with the busiest axis last;
2. split torus axes, fewer first (a switch can be split freely);
3. order: the later mesh axis has the inner factor of a split axis.
Placements that differ only by exchanging equal physical axes are one.

Weak. The rank does not depend on the program; ``placements`` returns the others for a search to try. JAX's
``topologies.make_mesh`` builds only placements without split axes; for others build the mesh from ``Placement.order``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

import numpy as np

from shardwise.errors import MeshError
from shardwise.hardware.load import load_profile
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import PhysicalAxis, Topology

#: The most candidates that are ranked: those without split axes come first, so that none of them is missed.
_MOST: Final = 5000


@dataclass(frozen=True, slots=True)
class Segment:
    """A factor of a physical axis: ``size`` devices at distance ``stride``."""

    axis: int
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Run:
    """A group of devices along one physical axis. ``bytes_per_s`` is per direction and device, ``latency_s`` of one step."""

    kind: str  # "ring", "line" or "switch"
    size: int
    tier: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh on a topology: for each mesh axis its segments, major first."""

    mesh: MeshAxes
    topology: Topology
    segments: tuple[tuple[Segment, ...], ...]

    def order(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns device numbers (``device.id``) in the mesh's shape: ``Mesh(np.array(sorted(devices, key=lambda d:
        d.id))[placement.order()], names)``."""
        sizes = [axis.size for axis in self.topology.axes]
        number = np.zeros((), np.int64)
        for row in self.segments:
            offset = np.zeros((), np.int64)
            for segment in row:
                step = segment.stride * math.prod(sizes[: segment.axis])
                offset = np.add.outer(offset, np.arange(segment.size, dtype=np.int64) * step)
            number = np.add.outer(number, offset.reshape(-1))
        return number.reshape(self.mesh.sizes)

    def runs(self, axes: Iterable[int | str]) -> tuple[Run, ...]:
        """Returns the groups of a collective over mesh axes, one for each contiguous piece of a physical axis."""
        chosen = [axis if isinstance(axis, int) else self.mesh.index(axis) for axis in axes]
        pieces = [segment for m in sorted(set(chosen)) for segment in self.segments[m]]
        runs: list[Run] = []
        for p, axis in enumerate(self.topology.axes):
            segments = sorted((s for s in pieces if s.axis == p), key=lambda s: s.stride)
            if axis.kind == "switch" and segments:
                segments = [Segment(p, math.prod(s.size for s in segments), 1)]
            joined: list[Segment] = []
            for segment in segments:
                if joined and joined[-1].stride * joined[-1].size == segment.stride:
                    segment = replace(joined[-1], size=joined.pop().size * segment.size)
                joined.append(segment)
            for size, stride in ((s.size, s.stride) for s in joined):
                torus = "ring" if axis.wrap and stride * size == axis.size else "line"
                kind = "switch" if axis.kind == "switch" else torus
                runs.append(Run(kind, size, axis.tier, axis.bytes_per_s / stride, axis.latency_s * stride))
        return tuple(runs)

    def split(self, axis: int, inner: int) -> Placement:
        """Returns the same devices in the same order with a mesh axis as two, the second of them of size ``inner``.

        >>> from shardwise.hardware.topology import topology
        >>> placement = place({"data": 4, "model": 16}, topology("v5p:4x4x4"))
        >>> placement.split(1, 8).lines()
        ('data 4: ICI x 4', 'model_0 2: ICI y 4 in pieces of 2 at distance 2', 'model_1 8: ICI y 4 in pieces of 2 × ICI z 4')
        >>> (placement.split(1, 8).order().reshape(4, 16) == placement.order()).all()
        np.True_
        """
        outer, minor, rest = list[Segment](), list[Segment](), inner
        for segment in reversed(self.segments[axis]):
            part = math.gcd(segment.size, rest)
            if part > 1 and outer:
                break
            rest //= part
            if part > 1:
                minor.insert(0, replace(segment, size=part))
            if part < segment.size:
                outer.insert(0, replace(segment, size=segment.size // part, stride=segment.stride * part))
        if rest > 1:
            raise MeshError(f"the axis {self.mesh.names[axis]} has no blocks of {inner} devices in a row")
        name, size = self.mesh.names[axis], self.mesh.sizes[axis]
        names, sizes, rows = list(self.mesh.names), list(self.mesh.sizes), list(self.segments)
        names[axis : axis + 1] = [f"{name}_0", f"{name}_1"]
        sizes[axis : axis + 1] = [size // inner, inner]
        rows[axis : axis + 1] = [tuple(outer), tuple(minor)]
        return Placement(MeshAxes(tuple(names), tuple(sizes)), self.topology, tuple(rows))

    def limited(self, usable_bytes: int) -> Placement:
        """Returns the same with another usable memory of each device.

        >>> from shardwise.hardware.topology import topology
        >>> place({"data": 4}, topology("v5e:2x2")).limited(2**30).topology.profile.usable_bytes == 2**30
        True
        """
        if usable_bytes == self.topology.profile.usable_bytes:
            return self
        profile = replace(self.topology.profile, memory_bytes=usable_bytes, usable_share=1.0)
        return replace(self, topology=replace(self.topology, profile=profile))

    def lines(self) -> tuple[str, ...]:
        """Returns one line for each mesh axis.

        >>> from shardwise.hardware.topology import topology
        >>> place({"data": 4, "model": 16}, topology("v5p:4x4x4")).lines()
        ('data 4: ICI x 4', 'model 16: ICI y 4 × ICI z 4')
        """
        texts = []
        for name, size, row in zip(self.mesh.names, self.mesh.sizes, self.segments, strict=True):
            parts = " × ".join(self._say(segment) for segment in row) or "one device"
            texts.append(f"{name} {size}: {parts}")
        return tuple(texts)

    def _say(self, segment: Segment) -> str:
        axis = self.topology.axes[segment.axis]
        link = self.topology.profile.links[axis.tier].name
        text = f"{link} {axis.name} {axis.size}" if axis.kind == "torus" else f"{link} {axis.size}"
        if segment.size == axis.size:
            return text
        text += f" in pieces of {segment.size}"
        return text + (f" at distance {segment.stride}" if segment.stride > 1 and axis.kind == "torus" else "")

    def __str__(self) -> str:
        return "\n".join(self.lines())


def place(mesh: Any, topology: Topology) -> Placement:
    """Returns the default placement of a mesh."""
    return placements(mesh, topology, limit=1)[0]


def placements(mesh: Any, topology: Topology, *, limit: int = 32) -> tuple[Placement, ...]:
    """Returns at most ``limit`` placements of a mesh (in any form of ``MeshAxes.of``) that differ in cost, the default one
    first."""
    axes = MeshAxes.of(mesh)
    if axes.devices != topology.devices:
        raise MeshError(
            f"the mesh {axes} has {axes.devices} devices and {topology.text} has {topology.devices}: its sizes must "
            f"multiply to {topology.devices}"
        )
    sizes, unnamed = tuple(axis.size for axis in topology.axes), [astuple(axis)[1:] for axis in topology.axes]
    ranked: dict[tuple[Any, ...], tuple[tuple[Any, ...], Cut]] = {}
    matrices = ((m, _outer(m, topology)) for m in _matrices(axes.sizes, sizes, sizes))
    cuts = ((m, outer, cut) for m, outer in matrices for cut in _cuts(m, topology))
    torus = [axis.kind == "torus" for axis in topology.axes]
    for matrix, outer, cut in itertools.islice(cuts, _MOST):
        split = sum([len(pieces) > 1 for pieces, wraps in zip(cut, torus, strict=True) if wraps])
        reversed_pieces = sum([a < b for pieces in cut for (a, _), (b, _) in itertools.pairwise(pieces)])
        rank = (outer, split, reversed_pieces, tuple([tuple([-f for f in row]) for row in matrix]), cut)
        # Placements with the same key differ by exchanging equal physical axes.
        key = tuple(sorted(zip(unnamed, cut, strict=True)))
        ranked[key] = min(ranked.get(key, (rank, cut)), (rank, cut))
    return tuple(_placement(axes, topology, cut) for _, cut in sorted(ranked.values())[:limit])


def ideal(mesh: MeshAxes, hardware: str = "v5e") -> Placement:
    """Returns the placement without a topology: every mesh axis is a row of the first tier that can grow."""
    profile = replace(load_profile(hardware), rounds=False)
    number, tier = next((k, tier) for k, tier in enumerate(profile.links) if not tier.size)
    axes = tuple(
        PhysicalAxis(name, size, number, tier.kind, False, tier.bytes_per_s, tier.latency_s)
        for name, size in mesh.shape.items()
    )
    segments = tuple((Segment(k, axis.size, 1),) if axis.size > 1 else () for k, axis in enumerate(axes))
    return Placement(mesh, Topology(profile, f"{mesh.devices} {profile.name}", axes), segments)


Matrix = tuple[tuple[int, ...], ...]
#: For each physical axis its pieces (mesh axis, size), innermost first.
Cut = tuple[tuple[tuple[int, int], ...], ...]


def _matrices(mesh: tuple[int, ...], left: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[Matrix]:
    """Yields factors of every physical axis for every mesh axis, those without splits first. There are no dead ends."""
    if not mesh:
        yield ()
        return
    divisors = [[f for f in range(1, size + 1) if math.gcd(mesh[0], size) % f == 0] for size in left]
    rows = [row for row in itertools.product(*divisors) if math.prod(row) == mesh[0]]
    rows.sort(key=lambda row: (sum(f not in (1, s) for f, s in zip(row, sizes, strict=True)), [-f for f in row]))
    for row in rows:
        rest = tuple(size // f for size, f in zip(left, row, strict=True))
        yield from ((row, *more) for more in _matrices(mesh[1:], rest, sizes))


def _cuts(matrix: Matrix, topology: Topology) -> Iterator[Cut]:
    """Yields the orders of the factors of every physical axis, later mesh axes inside first; on a switch just one."""
    columns = []
    for p, axis in enumerate(topology.axes):
        pieces = [(m, row[p]) for m, row in enumerate(matrix) if row[p] > 1][::-1]
        columns.append([tuple(pieces)] if axis.kind == "switch" else list(itertools.permutations(pieces)))
    yield from itertools.product(*columns)


def _placement(mesh: MeshAxes, topology: Topology, cut: Cut) -> Placement:
    rows: list[list[Segment]] = [[] for _ in mesh.sizes]
    for p, pieces in enumerate(cut):
        stride = 1
        for m, size in pieces:
            rows[m].append(Segment(p, size, stride))
            stride *= size
    # Major first: the outer tier, and on a torus x before y.
    tier = [axis.tier for axis in topology.axes]
    return Placement(mesh, topology, tuple(tuple(sorted(row, key=lambda s: (-tier[s.axis], s.axis))) for row in rows))


def _outer(matrix: Matrix, topology: Topology) -> float:
    """Returns how much of later mesh axes lies on outer tiers."""
    tiers = [axis.tier for axis in topology.axes]
    return round(sum(m * tier * math.log2(row[p]) for m, row in enumerate(matrix) for p, tier in enumerate(tiers)), 6)
