"""Devices and their links, from texts such as ``v5e:4x4``.

| text | meaning |
|---|---|
| ``v5e:4x4``, ``v5p:4x4x4`` | one slice of TPU chips, as libtpu writes it; missing dimensions are 1 |
| ``v3:2x4`` | 8 chips, 16 devices: dimensions count chips, and a v3 chip has two devices |
| ``2*v5e:16x16`` | two slices, linked by the data center network |
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
from dataclasses import dataclass
from typing import Final

from shardwise.errors import HardwareError
from shardwise.hardware.load import is_known_name, is_path, load_profile
from shardwise.hardware.profile import LinkTier, Profile

EXAMPLES: Final = "v5e:4x4, v5p:4x4x4, 2*v5e:16x16, h100:8x8, v5litepod-16 or '16 v5e'"
_TORUS_AXES: Final = "xyzuvw"


@dataclass(frozen=True, slots=True)
class PhysicalAxis:
    """A row of devices. ``bytes_per_s`` is per direction and device when all use the axis at once; ``tier`` counts from the
    inside. On a torus neighbors are linked, and with ``wrap`` the ends; on a switch all devices are."""

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

    def __str__(self) -> str:
        axes = ", ".join(f"{a.name} {a.size}{' ring' if a.wrap else ''}" for a in self.axes)
        count = f"{self.devices} device{'s' if self.devices != 1 else ''}"
        return f"{self.text} ({count}{': ' + axes if axes else ''})"


def topology(text: str) -> Topology:
    """Returns the topology that a text describes (see the module's table).

    >>> topology("v3:2x4").devices, topology("v4-32").text, topology("16 h100").text, topology("8v5e").text
    (16, 'v4:2x2x4', 'h100:8x2', 'v5e:2x4')
    """
    rest = text.strip().replace("×", "x")
    slices = 1
    if match := re.fullmatch(r"(\d+)\s*\*\s*(.+)", rest):
        slices, rest = int(match[1]), match[2]
    head, colon, tail = rest.rpartition(":")
    if colon and re.fullmatch(r"\s*\d+(\s*x\s*\d+)*\s*", tail, re.IGNORECASE):
        profile, dims = load_profile(head.strip()), tuple(int(size) for size in tail.lower().split("x"))
        return _shaped(text, profile, slices, dims) if len(dims) > 1 else _counted(text, profile, slices, dims[0], 1)
    match = re.fullmatch(r"(\d+)(\s*)(?:x\s+)?(\D.*)", rest)
    if match and (match[2] or is_known_name(match[3])):
        profile = load_profile(match[3])
        return _counted(text, profile, slices, int(match[1]), profile.devices_per_chip)
    if not is_known_name(rest) and (match := re.fullmatch(r"(.+)-(\d+)", rest)) and is_known_name(match[1]):
        profile = load_profile(match[1])
        return _counted(text, profile, slices, int(match[2]), profile.type_count)
    if colon and not is_path(rest):
        raise HardwareError(f"{text!r} is no topology: {tail!r} is not a shape; write {EXAMPLES}")
    return _counted(text, load_profile(rest), slices, 1, 1)


def _counted(text: str, profile: Profile, slices: int, count: int, per: int) -> Topology:
    """Returns ``count`` devices (or chips, or what the cloud's names count), ``per`` on each chip, in their natural shape."""
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
    tier, *outer = _growing(profile)
    groups = -(-chips // math.prod(tier.largest)) if tier.largest else 1
    if chips % groups or (groups > 1 and not outer):
        return None
    size = chips // groups
    if tier.kind == "switch":
        return 1, (size, groups) if groups > 1 else (size,)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    shapes = itertools.combinations_with_replacement(divisors, tier.dims)
    existing = [shape for shape in shapes if math.prod(shape) == size and _within(shape, tier)]
    if not existing:
        return None
    best = min(existing, key=lambda shape: (max(shape), sum(shape)))
    return groups, tuple(s for s in best if s > 1) + (1,) * best.count(1)


def _within(shape: tuple[int, ...], tier: LinkTier) -> bool:
    """Returns whether a torus of a shape exists, in any order of its dimensions."""
    bounds = sorted(tier.largest) or itertools.repeat(math.inf)
    return all(size <= most for size, most in zip(sorted(shape), bounds, strict=False))


def _growing(profile: Profile) -> list[LinkTier]:
    """Returns the tiers that shapes are about."""
    return [tier for tier in profile.links if not tier.size]


def _shaped(text: str, profile: Profile, slices: int, dims: tuple[int, ...]) -> Topology:
    problems: list[str] = []
    if slices < 1 or any(size < 1 for size in dims):
        problems.append("every size is at least 1")
    growing = _growing(profile)
    # Slices are written as a factor before the name, nodes as a further dimension.
    room = growing[0].dims if growing[0].kind == "torus" else sum(tier.dims for tier in growing)
    if len(dims) > room:
        problems.append(f"it has {len(dims)} dimensions; {_say_shapes(profile)}")
    left = dims[:room]
    axes: list[PhysicalAxis] = []
    stated: list[tuple[int, ...]] = []  # the shapes of growing tiers
    sharing = 1
    for k, tier in enumerate(profile.links):
        shape: tuple[int, ...] = (tier.size,)
        if not tier.size:
            shape, left = left[: tier.dims], left[tier.dims :]
            if not shape and slices > 1:
                shape, slices = (slices,), 1
            if not _within(shape, tier):
                problems.append(f"{tier.name} links at most {_by(tier.largest)}, not {_by(shape)}")
            shape += (1,) * (tier.dims - len(shape))
            stated.append(shape)
        torus = tier.kind == "torus"
        rate = tier.bytes_per_s / (sharing if torus else 1)
        names = _TORUS_AXES if torus else (tier.name.lower(),)
        for name, size, ring in zip(names, shape, tier.rings(shape), strict=False):
            if size > 1:
                axes.append(PhysicalAxis(name, size, k, tier.kind, ring, rate, tier.latency_s))
        sharing *= tier.size or 1
    if slices > 1:
        problems.append(f"there are no links between {slices} such groups")
    if problems:
        raise HardwareError(f"{text!r} is no topology of {profile.name}: {'; '.join(problems)}")
    return Topology(profile, _written(profile, *stated), tuple(axes))


def _written(profile: Profile, inner: tuple[int, ...], *outer: tuple[int, ...]) -> str:
    """Returns the topology's text in its usual form."""
    name = profile.file if is_path(profile.file) and not is_known_name(profile.name) else profile.name
    groups = [size for shape in outer for size in shape]
    while groups and groups[-1] == 1:
        groups.pop()
    if _growing(profile)[0].kind == "torus":
        return "".join(f"{size}*" for size in groups) + f"{name}:{_by(inner)}"
    return f"{name}:{_by((*inner, *groups))}"


def _say_shapes(profile: Profile) -> str:
    parts = []
    for tier in _growing(profile):
        bound = f" of at most {_by(tier.largest)}" if tier.largest else ""
        parts.append(f"{tier.dims} dimension{'s' if tier.dims > 1 else ''} of {tier.name}{bound}")
    if _growing(profile)[0].kind == "torus":
        return f"its shapes have {parts[0]}, and several slices are written as in 2*{profile.name}:…"
    return "its shapes have " + ", then ".join(parts)


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in sizes)
