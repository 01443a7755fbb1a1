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
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from shardwise.errors import HloError
from shardwise.hardware.mesh import MeshAxes

Groups = Sequence[Sequence[int]]
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


def spanned_axes(groups: Groups, mesh: MeshAxes) -> Axes | None:
    """Returns the axes along which devices of a group differ, major first; ``None`` for devices outside of the mesh."""
    if any(device >= mesh.devices for group in groups for device in group):
        return None
    coordinates = np.argwhere(np.ones(mesh.sizes, bool))
    spanned = np.zeros(len(mesh.sizes), bool)
    for group in groups:
        spanned |= (coordinates[list(group)] != coordinates[group[0]]).any(0)
    return tuple(itertools.compress(mesh.names, spanned))


def is_hop(pairs: Groups, mesh: MeshAxes) -> bool:
    """Does a permute lead from every device to the next along the axes that it spans, and from the last to the first?"""
    axes = spanned_axes(pairs, mesh)
    if not axes or len(pairs) < mesh.devices:
        return False
    coordinates = np.argwhere(np.ones(mesh.sizes, bool))
    place, count = np.zeros(len(coordinates), int), 1
    for d in reversed([mesh.index(a) for a in axes]):
        place, count = place + coordinates[:, d] * count, count * mesh.sizes[d]
    return len({(place[target] - place[source]) % count for source, target in pairs} | {1}) == 1


def group_axes(groups: Groups, mesh: MeshAxes) -> Axes | None:
    """Returns the axes whose product the groups are, ``None`` where they are no product of whole axes."""
    axes = spanned_axes(groups, mesh)
    if axes is None:
        return None
    every = {device for group in groups for device in group}
    complete = all(len(set(group)) == math.prod(mesh.shape[a] for a in axes) for group in groups)
    return axes if complete and len(every) == mesh.devices else None


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
    """Returns the groups of ``mesh[axes] {sub-axes}``."""
    match = _MESH.match(text)
    if not match:
        raise HloError(f"replica groups in an unknown notation: {text[:200]}")
    sizes = {name: int(size) for name, size in _AXIS.findall(match.group(1) or match.group(2) or "")}
    names, total = list(sizes), math.prod(sizes.values())
    position = np.arange(total)
    member, group, group_size = np.zeros(total, int), position.copy(), 1
    for name, before, part in _SUB_AXIS.findall(match.group(4)):
        size = int(part or sizes[name])
        minor = sizes[name] // (int(before or 1) * size)
        stride = minor * math.prod(sizes[other] for other in names[names.index(name) + 1 :])
        index = position // stride % size
        member, group, group_size = member * size + index, group - index * stride, group_size * size
    ids = match.group(3) or ""
    devices = _iota(ids).reshape(-1) if ids.startswith("[") else np.array(_numbers(ids) or range(total))
    return devices[np.lexsort((member, group))].reshape(-1, group_size)
