"""Which meshes are searched, and how their axes are named: shapes for the devices of a topology that lie well on its links.

Of all ways to write the number of devices as a product, those whose axes cut at most one row of a torus in two (a switch can
be cut freely). Meshes that differ only in the order of their axes are one, unless somebody uses the axes by name.
``shardwise.planner.racing`` chooses among them.

Axes of a mesh that was searched for are named by what they carry: ``data``, ``fsdp``, ``model``, ``expert``, ``context``. On a
given mesh, axes of equal size exchange what they carry so that it agrees with their names, where that costs nothing.

Weak: each shape is searched on the default placement of ``shardwise.hardware.layout``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from shardwise.dims.analysis import Group
from shardwise.errors import MeshError
from shardwise.hardware.layout import Placement, Segment, ideal, place
from shardwise.hardware.load import nearest_profile
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Spec, Value
from shardwise.lowering.decisions import Decision, Pin, Shard
from shardwise.tactics.places import PathDim
from shardwise.tactics.tactic import Context

_MOST_MESHES: Final = 16
_MOST_AXES: Final = 3
_MOST_SPLITS: Final = 2
_NAMES: Final = "abc"
#: What an axis carries, by usual names of axes.
_USUAL: Final = {
    name: carried
    for carried, names in {
        "data": "data fsdp dp batch replica",
        "model": "model tensor tp mp",
        "expert": "expert experts ep",
        "context": "context sequence seq cp sp",
    }.items()
    for name in names.split()
}


@dataclass(frozen=True, slots=True)
class OpenMesh:
    """Axes of which some have no size yet; no axes at all where even their number is open.

    >>> OpenMesh.of({"data": None, "model": 4})
    OpenMesh(names=('data', 'model'), sizes=(None, 4))
    >>> OpenMesh.of({"data": 4, "model": 4}) is None
    True
    """

    names: tuple[str, ...] = ()
    sizes: tuple[int | None, ...] = ()

    @staticmethod
    def of(mesh: Any) -> OpenMesh | None:
        """From None, or a mapping with sizes of None or -1; None for any other mesh."""
        if mesh is None:
            return OpenMesh()
        if not isinstance(mesh, Mapping) or not any(_is_open(size) for size in mesh.values()):
            return None
        MeshAxes.of({name: 1 if _is_open(size) else size for name, size in mesh.items()})
        return OpenMesh(tuple(mesh), tuple(None if _is_open(size) else int(size) for size in mesh.values()))

    def __str__(self) -> str:
        return " × ".join(f"{n} {s or '?'}" for n, s in zip(self.names, self.sizes, strict=True)) or "any mesh"


def _is_open(size: Any) -> bool:
    return size is None or (size == -1 and not isinstance(size, bool))


def devices_at_hand(mesh: Any = None) -> tuple[str, int, str]:
    """The profile and the number of the devices of a mesh, or of ``jax.devices()``; and their kind where the profile is that of
    another one."""
    devices = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else jax.devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    name, described = nearest_profile(kind, platform)
    return name, len(devices), "" if described or platform == "cpu" else kind


def placement_of(mesh: Any, topology: str | Topology | Placement | None) -> Placement:
    """The mesh on a topology; without one, on the kind of devices at hand with a row of links for every axis."""
    if isinstance(topology, Placement):
        if mesh is not None and MeshAxes.of(mesh) != topology.mesh:
            raise MeshError(f"the mesh is {MeshAxes.of(mesh)}, and the placement is one of {topology.mesh}")
        return topology
    axes = MeshAxes.of(mesh)
    if topology is None:
        return ideal(axes, devices_at_hand(mesh)[0])
    return place(axes, topology_of(topology) if isinstance(topology, str) else topology)


def outer_sizes(placement: Placement) -> set[int]:
    """The sizes of mesh axes over the slowest links alone.

    >>> outer_sizes(placement_of({"stage": 4, "model": 8}, topology_of("h100:8x4")))
    {4}
    """
    tier = max((axis.tier for axis in placement.topology.axes), default=0)
    outer = (all(placement.topology.axes[s.axis].tier == tier for s in row) for row in placement.segments)
    return set(itertools.compress(placement.mesh.sizes, outer)) - {1}


def meshes(wanted: OpenMesh, topology: Topology, ordered: bool = True) -> tuple[Placement, ...]:
    """The placed meshes to search, those that lie best first.

    ``ordered``: axes have meanings, so that 2 × 8 is not 8 × 2.

    >>> from shardwise.hardware.topology import topology
    >>> [str(p.mesh) for p in meshes(OpenMesh(), topology("v5e:2x4"), ordered=False)]
    ['a 8', 'a 2 × b 4', 'a 2 × b 2 × c 2']
    >>> [str(p.mesh) for p in meshes(OpenMesh.of({"data": None, "model": None}), topology("v5e:2x2"))]
    ['data 1 × model 4', 'data 4 × model 1', 'data 2 × model 2']
    """
    placed: dict[object, Placement] = {}
    for mesh in _shapes(wanted, topology.devices):
        placement = place(mesh, topology)
        placed.setdefault(mesh if ordered else _unordered(placement), placement)
    if not placed:
        fixed = math.prod(size for size in wanted.sizes if size)
        raise MeshError(
            f"{topology.text} has {topology.devices} devices: the mesh {wanted} cannot have as many, since its sizes multiply "
            f"to {fixed}"
        )
    fewest = min(map(cuts, placed.values()))
    candidates = [p for p in placed.values() if cuts(p) <= max(1, fewest)]

    def order(placement: Placement) -> tuple[object, ...]:
        sizes = placement.mesh.sizes
        return cuts(placement), sum(size > 1 for size in sizes), sum(map(len, placement.segments)), sizes

    return tuple(sorted(candidates, key=order)[:_MOST_MESHES])


def splits(placement: Placement, groups: Sequence[Group]) -> list[Placement]:
    """The mesh with one axis split in two, so that a size that the axis does not divide can be sharded on a part of it: eight
    key-value heads on 16 devices become 2 × 8. The groups with the most work come first."""
    candidates: dict[tuple[int, int], None] = {}
    for group in sorted((g for g in groups if g.matters), key=lambda g: -g.flops):
        for axis, size in enumerate(placement.mesh.sizes):
            part = max(math.gcd(size, other) for other in group.sizes)
            if 1 < part < size:
                candidates[axis, part] = None
    placed = []
    for axis, part in candidates:
        with contextlib.suppress(MeshError):
            placed.append(placement.split(axis, part))
    return placed[:_MOST_SPLITS]


def carried_over(decisions: Sequence[Decision], mesh: MeshAxes, finer: MeshAxes) -> Iterator[tuple[Decision, ...]]:
    """The same decisions on a finer mesh, for each way to split the axes of the one into those of the other.

    >>> from shardwise.lowering.decisions import Shard
    >>> eight, finer = MeshAxes(("a",), (8,)), MeshAxes(("a", "b"), (2, 4))
    >>> [[str(d) for d in decisions] for decisions in carried_over([Shard((3,), "a")], eight, finer)]
    [['color 3 over a', 'color 3 over b']]
    """
    if len(finer.names) <= len(mesh.names):
        return
    for owners in itertools.product(range(len(mesh.names)), repeat=len(finer.names)):
        parts = [[k for k, owner in enumerate(owners) if owner == axis] for axis in range(len(mesh.names))]
        if [finer.pieces(part) for part in parts] == list(mesh.sizes):
            names = {name: [finer.names[k] for k in part] for name, part in zip(mesh.names, parts, strict=True)}
            axes = ((d, axis) for d in decisions if not isinstance(d, Pin) for axis in names[d.axis])
            yield tuple(replace(d, axis=axis) for d, axis in axes)


def on_axes(decisions: Sequence[Decision], axes: Mapping[str, str]) -> tuple[Decision, ...]:
    """The same decisions on other axes.

    >>> [str(d) for d in on_axes([Pin(0, (("a", "b"), None), (0, 1))], {"a": "data", "b": "model"})]
    ['value 0 pinned to [data·model, open]']
    """

    def other(spec: Spec) -> Spec:
        return tuple(None if names is None else tuple(axes[name] for name in names) for names in spec)

    return tuple(
        replace(d, spec=other(d.spec)) if isinstance(d, Pin) else replace(d, axis=axes[d.axis]) for d in decisions
    )


def carried_names(context: Context, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """A name for each axis of the mesh. Experts come first, then the batch, alone or with parameters, then parameters alone,
    then the sequence; an axis that shards nothing of these keeps its name."""
    colors = {name: set[int]() for name in context.mesh.names}
    for decision in decisions:
        if isinstance(decision, Shard):
            colors[decision.axis].update(decision.colors)
    batch = _colors(context, [(v.path, 0) for v in _arguments(context, "batch") if v.shape])
    params = {c for v in _arguments(context, "params") for _, c in context.colors_of(v)} - batch
    experts, sequences = (_colors(context, places) for places in (context.places.experts, context.places.sequences))
    names = []
    for axis, sharded in colors.items():
        if sharded & experts:
            names.append("expert")
        elif sharded & batch:
            names.append("fsdp" if sharded & params else "data")
        else:
            names.append("model" if sharded & params else "context" if sharded & sequences else axis)
    return numbered(names)


def numbered(names: Sequence[str]) -> tuple[str, ...]:
    """Names with a number for each of several equal ones.

    >>> numbered(["data", "model", "data"])
    ('data1', 'model', 'data2')
    """
    count = Counter(names)
    numbers = {name: iter(range(1, len(names) + 1)) for name in names}
    return tuple(f"{name}{next(numbers[name])}" if count[name] > 1 else name for name in names)


def exchanged(context: Context, decisions: Sequence[Decision]) -> Iterator[tuple[Decision, ...]]:
    """The same decisions with axes of equal size exchanged, those first that suit the names of more axes than now."""
    names, sizes = context.mesh.names, context.mesh.sizes
    if any(isinstance(d, Pin) for d in decisions):
        return
    carried = [_USUAL.get(name.rstrip("0123456789"), "") for name in carried_names(context, decisions)]

    def suited(order: Sequence[int]) -> int:
        """Axes with a usual name for what they would carry, if axis ``k`` carries what axis ``order[k]`` does."""
        return sum(_USUAL.get(name) == carried[k] for name, k in zip(names, order, strict=True))

    here = tuple(range(len(names)))
    orders = [
        o for o in itertools.permutations(here) if [sizes[k] for k in o] == list(sizes) and suited(o) > suited(here)
    ]
    for order in sorted(orders, key=lambda o: -suited(o)):
        yield on_axes(decisions, {names[old]: names[k] for k, old in enumerate(order)})


def _arguments(context: Context, role: str) -> list[Value]:
    return context.arguments(context.roles.get(role, ()))


def _colors(context: Context, places: Sequence[PathDim]) -> set[int]:
    found = (context.analysis.color_of(*place) for place in places)
    return {color.id for color in found if color is not None}


def _shapes(wanted: OpenMesh, devices: int) -> Iterator[MeshAxes]:
    if wanted.names:
        open_devices, rest = divmod(devices, math.prod(size for size in wanted.sizes if size))
        for factors in _products(open_devices, wanted.sizes.count(None), 1) if not rest else ():
            sizes = iter(factors)
            yield MeshAxes(wanted.names, tuple(size or next(sizes) for size in wanted.sizes))
        return
    for count in range(1, _MOST_AXES + 1):
        for factors in _products(devices, count, min(2, devices) if count == 1 else 2):
            yield MeshAxes(tuple(_NAMES[:count]), factors)


def _products(total: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product of ``count`` factors."""
    if count == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total // least ** (count - 1) + 1):
        if total % first == 0:
            yield from ((first, *rest) for rest in _products(total // first, count - 1, least))


def cuts(placement: Placement) -> int:
    """How often rows of a torus are cut."""
    axes = placement.topology.axes
    torus = sum(axis.kind == "torus" for axis in axes)
    return sum(axes[segment.axis].kind == "torus" for row in placement.segments for segment in row) - torus


def _unordered(placement: Placement) -> object:
    """Equal for meshes that differ in the order of their axes, or by exchanging equal rows of devices or the inner and the
    outer part of one."""

    def segment_key(segment: Segment) -> tuple[int, ...]:
        axis = placement.topology.axes[segment.axis]
        return axis.tier, axis.size, axis.wrap, segment.size

    return tuple(sorted(tuple(sorted(map(segment_key, row))) for row in placement.segments))
