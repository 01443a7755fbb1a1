"""Replica groups: which devices communicate, in all HLO notations, and which mesh axes that corresponds to.

Four notations for the second axis of a mesh of 2 × 4 devices:

- ``{{0,1,2,3},{4,5,6,7}}`` lists every group; ``{}`` is one group of all devices;
- ``[2,4]<=[8]`` is an iota reshaped to two rows; with ``<=[4,2]T(1,0)`` it is first reshaped to 4 × 2 and transposed;
- ``mesh['a'=2,'b'=4] {'b'}`` names axes of a mesh that the compiler chose, with names that are not the user's; ``'b':(2)2``
  is the sub-axis of size 2 with a size of 2 before it, and ``device_ids=(…)`` is another device order;
- ``source_target_pairs={{0,1},{1,0},…}`` for permutes.

Numbers are positions in the program's device assignment, which for JAX is the row-major order of the mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from shardwise.errors import HloError
from shardwise.hardware.mesh import MeshAxes

Groups = tuple[tuple[int, ...], ...]
Axes = tuple[str, ...]

_IOTA: Final = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(r"(?:mesh\[([^\]]*)\]|@mesh<([^>]*)>)(?:,?\s*device_ids=\((.*?)\))?\s*\{([^}]*)\}$")
_AXIS: Final = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_SUB_AXIS: Final = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")
_ATTRIBUTE: Final = re.compile(
    r"replica_groups=((?:mesh\[|@mesh<)[^{]*\{[^}]*\}|\{\{.*?\}\}|\{\}|\[[\d,]+\](?:<=\[[\d,]+\])?(?:T\([\d,]+\))?)"
)
_PAIRS: Final = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def replica_groups(attributes: str, devices: int) -> Groups:
    """Returns the groups in an instruction's attributes, one group of all ``devices`` where there are none.

    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> replica_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}", 4)
    ((0, 2), (1, 3))
    """
    match = _ATTRIBUTE.search(attributes)
    return parse_groups(match.group(1), devices) if match else (tuple(range(devices)),)


def parse_groups(text: str, devices: int) -> Groups:
    if text.startswith("{"):
        listed = tuple(_numbers(inner) for inner in re.findall(r"\{([\d,\s]+)\}", text))
        return listed or (tuple(range(devices)),)
    return tuple(map(tuple, (_iota(text) if text.startswith("[") else _mesh_groups(text)).tolist()))


def source_target_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Returns the (source, target) pairs of a permute."""
    match = _PAIRS.search(attributes)
    return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", match.group(1))) if match else ()


class AxisNames:
    """Maps replica groups and permutes to the names of mesh axes, major first."""

    def __init__(self, mesh: MeshAxes):
        self._mesh = mesh
        self._names: dict[frozenset[frozenset[int]], Axes] = {}
        grid = np.arange(mesh.devices).reshape(mesh.sizes)
        large = [axis for axis, size in enumerate(mesh.sizes) if size > 1]
        for axes in itertools.chain.from_iterable(itertools.combinations(large, n) for n in range(len(large) + 1)):
            groups = np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(-1, math.prod(mesh.sizes[a] for a in axes))
            self._names.setdefault(_partition(groups.tolist()), tuple(mesh.names[a] for a in axes))

    def of_groups(self, groups: Groups) -> Axes | None:
        """Returns the axes, or ``None`` where the groups are no product of whole axes."""
        return self._names.get(_partition(groups))

    def of_pairs(self, pairs: Sequence[tuple[int, int]]) -> Axes | None:
        """Returns the axes along which a permute sends anything, ``None`` for devices outside of the mesh."""
        if any(device >= self._mesh.devices for pair in pairs for device in pair):
            return None
        moved = np.zeros(len(self._mesh.sizes), bool)
        for pair in pairs:
            source, target = (np.array(np.unravel_index(device, self._mesh.sizes)) for device in pair)
            moved |= source != target
        return tuple(itertools.compress(self._mesh.names, moved))


def _partition(groups: Iterable[Iterable[int]]) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(group) for group in groups)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.replace(" ", "").split(",") if n)


def _iota(text: str) -> Any:
    """Returns the array that ``[shape]<=[reshape]T(permutation)`` denotes."""
    match = _IOTA.match(text)
    if not match:
        raise HloError(f"replica groups in an unknown notation: {text[:200]}")
    shape, reshape = _numbers(match.group(1)), _numbers(match.group(2) or match.group(1))
    order = _numbers(match.group(3) or "") or range(len(reshape))
    return np.arange(math.prod(reshape)).reshape(reshape).transpose(order).reshape(shape)


def _mesh_groups(text: str) -> Any:
    """Returns the groups of ``mesh[axes] {wanted}``: axes are cut into sub-axes where only a part is wanted."""
    match = _MESH.match(text)
    if not match:
        raise HloError(f"replica groups in an unknown notation: {text[:200]}")
    sizes = {name: int(size) for name, size in _AXIS.findall(match.group(1) or match.group(2) or "")}
    wanted = []  # axis name, where the sub-axis begins and where it ends as products of sizes
    for reference in filter(str.strip, match.group(4).split(",")):
        sub_axis = _SUB_AXIS.match(reference.strip())
        if not sub_axis:
            raise HloError(f"a mesh axis of replica groups cannot be read: {text[:100]}")
        name, begin = sub_axis.group(1), int(sub_axis.group(2) or 1)
        wanted.append((name, begin, begin * int(sub_axis.group(3)) if sub_axis.group(3) else sizes[name]))
    parts = []
    for name, size in sizes.items():
        cuts = sorted({1, size, *(cut for axis, *bounds in wanted if axis == name for cut in bounds)})
        parts += [(name, begin, end) for begin, end in itertools.pairwise(cuts)]
    inner = [
        position
        for axis, first, last in wanted
        for position, (name, begin, end) in enumerate(parts)
        if name == axis and first <= begin and end <= last
    ]
    outer = [position for position in range(len(parts)) if position not in inner]
    ids = match.group(3) or ""
    devices = _iota(ids) if ids.startswith("[") else np.array(_numbers(ids) or range(math.prod(sizes.values())))
    grid = devices.reshape([end // begin for _, begin, end in parts]).transpose(outer + inner)
    return grid.reshape(-1, math.prod(parts[p][2] // parts[p][1] for p in inner))
