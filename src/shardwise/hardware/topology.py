"""Devices and their links, from texts such as ``v5e:4x4``.

| text | meaning |
|---|---|
| ``v5e:4x4``, ``v5p:4x4x4`` | one slice of TPU chips, as libtpu writes it; missing dimensions are 1 |
| ``v3:2x4`` | 8 chips, 16 devices: dimensions count chips, and a v3 chip has two devices |
| ``2*v5e:16x16`` | two slices, linked by the data centre network |
| ``h100:8x8`` | 8 GPUs a node, 8 nodes |
| ``v5e:16``, ``a100:16`` | a number of chips or GPUs in their natural shape: 4x4, 8x2 |
| ``v5litepod-16``, ``v4-32`` | the cloud's names: chips on v5e and v6e, TensorCores before |
| ``16 v5e`` | 16 devices in their natural shape |
| ``v5e`` | one chip |
| ``mine.toml:4x4`` | a profile of the user |

The natural shape of a torus is the one nearest to a cube, shorter dimensions first and ones last (2x4, 2x2x1), in as few
slices as will do; that of a switched tier is full nodes.

Physical axes are listed innermost first, and devices are numbered with the first axis fastest: the core of a chip, x, y, z,
the slice; the GPU of a node, the node. These are the ``id``s that libtpu gives (JAX lists devices by host instead).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from shardwise.errors import HardwareError
from shardwise.hardware.load import is_known_name, is_path, load_profile
from shardwise.hardware.profile import LinkTier, Profile
from shardwise.hardware.wrap import wraps

EXAMPLES: Final = "v5e:4x4, v5p:4x4x4, 2*v5e:16x16, h100:8x8, v5litepod-16 or '16 v5e'"
_TORUS_AXES: Final = "xyzuvw"


@dataclass(frozen=True, slots=True)
class PhysicalAxis:
    """A row of devices. ``bytes_per_s`` is per direction and device when all devices use the axis at once.

    ``tier`` counts from the inside. On a torus neighbors are linked, and with ``wrap`` the ends; on a switch all devices are.
    """

    name: str
    size: int
    tier: int
    kind: str
    wrap: bool
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices of one kind and their links; axes of size 1 are left out.

    >>> print(topology("v5e:4x4"))
    v5e:4x4 (16 devices: x 4, y 4)
    """

    profile: Profile
    text: str
    axes: tuple[PhysicalAxis, ...]

    @property
    def devices(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "hardware": self.profile.name,
            "devices": self.devices,
            "axes": [
                {"name": a.name, "size": a.size, "links": self.profile.links[a.tier].name, "wrap": a.wrap}
                for a in self.axes
            ],
        }

    def __str__(self) -> str:
        axes = ", ".join(f"{a.name} {a.size}{' ring' if a.wrap else ''}" for a in self.axes)
        count = f"{self.devices} device{'s' if self.devices != 1 else ''}"
        return f"{self.text} ({count}{': ' + axes if axes else ''})"


def topology(text: str) -> Topology:
    """Returns the topology that a text describes (see the module's table).

    >>> topology("v3:2x4").devices, topology("v4-32").text, topology("16 h100").text, topology("8v5e").text
    (16, 'v4:2x2x4', 'h100:8x2', 'v5e:2x4')
    """
    cleaned = text.strip().replace("×", "x")
    slices, rest = 1, cleaned
    if match := re.fullmatch(r"(\d+)\s*\*\s*(.+)", cleaned):
        slices, rest = int(match[1]), match[2]
    head, colon, tail = rest.rpartition(":")
    if colon and re.fullmatch(r"\s*\d+(\s*x\s*\d+)*\s*", tail, re.IGNORECASE):
        profile = load_profile(head.strip())
        dims = tuple(int(size) for size in tail.lower().split("x"))
        if len(dims) == 1:
            return _counted(text, profile, slices, dims[0], "chips")
        return _shaped(text, profile, slices, dims)
    match = re.fullmatch(r"(\d+)(\s*)(?:x\s+)?(\D.*)", rest)
    if match and (match[2] or is_known_name(match[3])):
        profile = load_profile(match[3])
        return _counted(text, profile, slices, int(match[1]), "devices")
    if not is_known_name(rest) and (match := re.fullmatch(r"(.+)-(\d+)", rest)) and is_known_name(match[1]):
        profile = load_profile(match[1])
        return _counted(text, profile, slices, int(match[2]), "names")
    if colon and not is_path(rest):
        raise HardwareError(f"{text!r} is no topology: {tail!r} is not a shape; write {EXAMPLES}")
    return _counted(text, load_profile(rest), slices, 1, "chips")


def _counted(text: str, profile: Profile, slices: int, count: int, unit: str) -> Topology:
    """Returns a number of chips (or of devices, or as the cloud's names count) in its natural shape."""
    per = {"chips": 1, "devices": profile.devices_per_chip, "names": profile.type_count}[unit]
    if count < 1:
        raise HardwareError(f"{text!r} is no topology: at least one device is needed")
    if count % per:
        raise HardwareError(f"{text!r}: one chip of {profile.name} counts {per}, and {count} is not a multiple of that")
    chips = count // per
    shape = _natural(profile, chips)
    if shape is None:
        raise HardwareError(f"{text!r}: {chips} chips of {profile.name} make no regular shape; {_say_shapes(profile)}")
    if shape[0] > 1 and slices > 1:
        raise HardwareError(f"{text!r}: {chips} chips of {profile.name} are {shape[0]} slices already; give the shape")
    return _shaped(text, profile, max(slices, shape[0]), shape[1])


def _natural(profile: Profile, chips: int) -> tuple[int, tuple[int, ...]] | None:
    """Returns the number of slices and the shape of one (with the nodes, where GPUs have several)."""
    inner = _first_growing(profile)
    tier = profile.links[inner]
    groups = -(-chips // math.prod(tier.largest)) if tier.largest else 1
    if chips % groups or (groups > 1 and len(profile.links) == inner + 1):
        return None
    size = chips // groups
    if tier.kind == "switch":
        return 1, (size, groups) if groups > 1 else (size,)
    shapes = [shape for shape in _factorings(size, tier.dims) if _within(shape, tier)]
    if not shapes:
        return None
    best = min(shapes, key=lambda shape: (max(shape), sum(shape)))
    return groups, tuple(s for s in best if s > 1) + (1,) * best.count(1)


def _factorings(size: int, dims: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields the shapes with ``size`` devices, shorter dimensions first."""
    if dims == 1:
        if size >= least:
            yield (size,)
        return
    for first in range(least, size + 1):
        if first**dims > size:
            return
        if size % first == 0:
            yield from ((first, *rest) for rest in _factorings(size // first, dims - 1, first))


def _within(shape: tuple[int, ...], tier: LinkTier) -> bool:
    """Returns whether a torus of a shape exists, in any order of its dimensions."""
    if not tier.largest:
        return True
    return all(size <= most for size, most in zip(sorted(shape), sorted(tier.largest), strict=True))


def _first_growing(profile: Profile) -> int:
    return next(k for k, tier in enumerate(profile.links) if not tier.size)


def _shaped(text: str, profile: Profile, slices: int, dims: tuple[int, ...]) -> Topology:
    problems: list[str] = []
    if slices < 1 or any(size < 1 for size in dims):
        problems.append("every size is at least 1")
    growing = [tier for tier in profile.links if not tier.size]
    # Slices are written as a factor before the name, nodes as a further dimension.
    room = growing[0].dims if growing[0].kind == "torus" else sum(tier.dims for tier in growing)
    if len(dims) > room:
        problems.append(f"it has {len(dims)} dimensions; {_say_shapes(profile)}")
    left = dims[:room]
    shapes: dict[str, tuple[int, ...]] = {}
    for tier in growing:
        shape, left = left[: tier.dims], left[tier.dims :]
        if not shape and slices > 1:
            shape, slices = (slices,), 1
        shapes[tier.name] = shape + (1,) * (tier.dims - len(shape))
        if not _within(shapes[tier.name], tier):
            problems.append(f"{tier.name} links at most {_by(tier.largest)}, not {_by(shape)}")
    if slices > 1:
        problems.append(f"there are no links between {slices} such groups")
    if problems:
        raise HardwareError(f"{text!r} is no topology of {profile.name}: {'; '.join(problems)}")
    sizes = [(tier.size,) if tier.size else shapes[tier.name] for tier in profile.links]
    return Topology(profile, _written(profile, sizes), tuple(_axes(profile, sizes)))


def _axes(profile: Profile, sizes: list[tuple[int, ...]]) -> Iterator[PhysicalAxis]:
    sharing = 1
    for k, (tier, shape) in enumerate(zip(profile.links, sizes, strict=True)):
        torus = tier.kind == "torus"
        closed = wraps(tier.wrap, shape, _bounds_by_size(shape, tier.largest)) if torus else (False,) * len(shape)
        rate = tier.bytes_per_s / (sharing if torus else 1)
        for d, size in enumerate(shape):
            name = _TORUS_AXES[d] if torus else tier.name.lower()
            if size > 1:
                yield PhysicalAxis(name, size, k, tier.kind, closed[d], rate, tier.latency_s)
        sharing *= tier.size or 1


def _bounds_by_size(shape: tuple[int, ...], largest: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the bounds in the order in which the shape's dimensions use them."""
    order = sorted(range(len(shape)), key=lambda d: shape[d])
    bounds = [0] * len(shape)
    for d, most in zip(order, sorted(largest), strict=False):
        bounds[d] = most
    return tuple(bounds)


def _written(profile: Profile, sizes: list[tuple[int, ...]]) -> str:
    """Returns the topology's text in its usual form."""
    growing = [shape for tier, shape in zip(profile.links, sizes, strict=True) if not tier.size]
    inner = profile.links[_first_growing(profile)]
    outer = list(itertools.chain.from_iterable(growing[1:]))
    while outer and outer[-1] == 1:
        outer.pop()
    name = profile.file if is_path(profile.file) and not is_known_name(profile.name) else profile.name
    if inner.kind == "torus":
        return "".join(f"{size}*" for size in outer) + f"{name}:{_by(growing[0])}"
    return f"{name}:{_by((*growing[0], *outer))}"


def _say_shapes(profile: Profile) -> str:
    parts = []
    for tier in profile.links:
        if tier.size:
            continue
        bound = f" of at most {_by(tier.largest)}" if tier.largest else ""
        parts.append(f"{tier.dims} dimension{'s' if tier.dims > 1 else ''} of {tier.name}{bound}")
    if profile.links[_first_growing(profile)].kind == "torus":
        return f"its shapes have {parts[0]}, and several slices are written as in 2*{profile.name}:…"
    return "its shapes have " + ", then ".join(parts)


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)
