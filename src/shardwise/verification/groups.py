"""Which devices talk to each other: replica groups in all the ways HLO writes them, and the mesh axes they mean.

Four spellings stand for the same thing, here the second axis of a mesh of 2 × 4 devices:

- ``{{0,1,2,3},{4,5,6,7}}``, every group in full; ``{}`` is one group of all devices;
- ``[2,4]<=[8]``, the numbers 0 to 7 laid out as two rows; with ``<=[4,2]T(1,0)`` they are laid out as 4 × 2 and transposed
  first;
- ``mesh['a'=2,'b'=4] {'b'}``, named axes of the compiler's own mesh, whose names are not the user's; ``'b':(2)2`` is the part
  of an axis of size 2 that has 2 before it, and ``device_ids=(…)`` gives the mesh another device order;
- ``source_target_pairs={{0,1},{1,0},…}`` for permutes.

Numbers are positions in the program's device assignment, which for JAX is the row-major order of the mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Final

from shardwise.errors import HloError
from shardwise.hardware.mesh import MeshAxes

Groups = tuple[tuple[int, ...], ...]

_IOTA: Final = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(r"(?:mesh\[([^\]]*)\]|@mesh<([^>]*)>)(?:,?\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}$")
_AXIS: Final = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_AXIS_REF: Final = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")
_ATTRIBUTE: Final = re.compile(
    r"replica_groups=((?:mesh\[|@mesh<)[^{]*\{[^}]*\}|\{\{.*?\}\}|\{\}|\[[\d,]+\](?:<=\[[\d,]+\])?(?:T\([\d,]+\))?)"
)
_PAIRS: Final = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups an instruction's attributes state; one group of all ``devices`` where they state none."""
    found = _ATTRIBUTE.search(attributes)
    return parse_groups(found.group(1), devices) if found else (tuple(range(devices)),)


def parse_groups(text: str, devices: int) -> Groups:
    """
    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    """
    if text.startswith("{"):
        listed = tuple(_numbers(inner) for inner in re.findall(r"\{([\d,\s]+)\}", text))
        return listed or (tuple(range(devices)),)
    if text.startswith("["):
        rows, numbers = _iota(text)
        return _rows(numbers, rows[-1])
    found = _MESH.match(text)
    if not found:
        raise HloError(f"replica groups in a form that is not known: {text[:200]}")
    axes = [(name, int(size)) for name, size in _AXIS.findall(found.group(1) or found.group(2) or "")]
    order = _order(found.group(3), math.prod(size for _, size in axes))
    return _mesh_groups(axes, [_reference(r) for r in found.group(4).split(",") if r.strip()], order)


def pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Sources and targets of a permute."""
    found = _PAIRS.search(attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", found.group(1))) if found else ()


def connected(links: Sequence[tuple[int, int]]) -> Groups:
    """The devices that a chain of permutes connects.

    >>> connected([(0, 1), (1, 0), (2, 3), (3, 2)])
    ((0, 1), (2, 3))
    """
    home = {device: device for link in links for device in link}

    def find(device: int) -> int:
        while home[device] != device:
            device = home[device]
        return device

    for a, b in links:
        home[max(find(a), find(b))] = min(find(a), find(b))
    members: dict[int, list[int]] = {}
    for device in sorted(home):
        members.setdefault(find(device), []).append(device)
    return tuple(tuple(group) for group in members.values())


class AxisNames:
    """Names the mesh axes of groups and of permutes.

    Args:
      mesh: the axes, major first.
      order: for every mesh position in row-major order its number in the program; by default its position.
    """

    def __init__(self, mesh: MeshAxes, order: Sequence[int] | None = None):
        self._mesh = mesh
        ids = list(range(mesh.devices)) if order is None else list(order)
        if sorted(ids) != list(range(mesh.devices)):
            raise HloError(f"the device order of a mesh of {mesh.devices} devices must number all of them once")
        self._place = {device: position for position, device in enumerate(ids)}
        self._known: dict[frozenset[frozenset[int]], tuple[str, ...]] = {}
        real = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
        for count in range(len(real) + 1):
            for axes in itertools.combinations(real, count):
                self._known.setdefault(_partition(self._groups(axes)), tuple(mesh.names[a] for a in axes))

    def _groups(self, axes: Sequence[int]) -> Groups:
        members: dict[tuple[int, ...], list[int]] = {}
        for position in range(self._mesh.devices):
            at = self._coordinates(position)
            members.setdefault(tuple(c for a, c in enumerate(at) if a not in axes), []).append(position)
        return tuple(tuple(group) for group in members.values())

    def _coordinates(self, position: int) -> tuple[int, ...]:
        at = []
        for size in reversed(self._mesh.sizes):
            position, rest = divmod(position, size)
            at.append(rest)
        return tuple(reversed(at))

    def of_groups(self, groups: Groups) -> tuple[str, ...] | None:
        """The axes, major first, or ``None`` where the groups are no product of whole axes."""
        try:
            return self._known.get(_partition([[self._place[d] for d in group] for group in groups]))
        except KeyError:
            return None

    def together(self, first: tuple[str, ...] | None, second: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Two sets of axes in the mesh's order, ``None`` where they are unknown or overlap."""
        if first is None or second is None or set(first) & set(second):
            return None
        return tuple(name for name in self._mesh.names if name in first or name in second)

    def of_pairs(self, links: Sequence[tuple[int, int]]) -> tuple[str, ...] | None:
        """The axes along which anything moves."""
        moved = set[int]()
        for source, target in links:
            if source not in self._place or target not in self._place:
                return None
            here, there = self._coordinates(self._place[source]), self._coordinates(self._place[target])
            moved.update(a for a, (c, d) in enumerate(zip(here, there, strict=True)) if c != d)
        return tuple(self._mesh.names[a] for a in sorted(moved))


def _partition(groups: Sequence[Sequence[int]]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(group) for group in groups)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.replace(" ", "").split(",") if n)


def _rows(numbers: Sequence[int], length: int) -> Groups:
    return tuple(tuple(numbers[start : start + length]) for start in range(0, len(numbers), length))


def _iota(text: str) -> tuple[tuple[int, ...], list[int]]:
    """The shape and, in row-major order, the numbers of ``[shape]<=[reshape]T(permutation)``."""
    found = _IOTA.match(text)
    if not found:
        raise HloError(f"replica groups in a form that is not known: {text[:200]}")
    shape = _numbers(found.group(1))
    reshape = _numbers(found.group(2) or found.group(1))
    permutation = _numbers(found.group(3) or "") or tuple(range(len(reshape)))
    strides = [math.prod(reshape[axis + 1 :]) for axis in range(len(reshape))]
    moved = itertools.product(*(range(reshape[axis]) for axis in permutation))
    return shape, [sum(c * strides[a] for c, a in zip(at, permutation, strict=True)) for at in moved]


def _order(text: str | None, devices: int) -> list[int]:
    if not text:
        return list(range(devices))
    return _iota(text)[1] if text.startswith("[") else list(_numbers(text))


def _reference(text: str) -> tuple[str, int, int]:
    """Axis name, size before the part, size of the part; 0 for the whole axis."""
    found = _AXIS_REF.match(text.strip())
    if not found:
        raise HloError(f"a mesh axis of replica groups cannot be read: {text[:100]}")
    return found.group(1), int(found.group(2) or 1), int(found.group(3) or 0)


def _mesh_groups(axes: list[tuple[str, int]], wanted: list[tuple[str, int, int]], order: list[int]) -> Groups:
    """Split axes where only a part is wanted, then group the devices that differ along wanted parts only."""
    parts: list[tuple[str, int, int]] = []  # axis name, size before, size
    for name, size in axes:
        cuts = {1, size}
        for axis, before, length in wanted:
            if axis == name:
                cuts |= {before, before * (length or size // before)}
        bounds = sorted(cuts)
        parts += [(name, a, b // a) for a, b in itertools.pairwise(bounds)]
    sizes = [size for _, _, size in parts]
    place = []
    for axis, before, length in wanted:
        end = before * length if length else dict(axes)[axis]
        place += [
            p for p, (name, first, size) in enumerate(parts) if name == axis and before <= first and first * size <= end
        ]
    rest = [p for p in range(len(parts)) if p not in place]
    strides = [math.prod(sizes[p + 1 :]) for p in range(len(parts))]

    def offsets(chosen: list[int]) -> list[int]:
        ranges = (range(0, sizes[p] * strides[p], strides[p]) for p in chosen)
        return [sum(at) for at in itertools.product(*ranges)]

    return tuple(tuple(order[base + inner] for inner in offsets(place)) for base in offsets(rest))
