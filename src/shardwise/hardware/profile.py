"""What one device can do and how devices are linked, as figures with their sources.

All figures are those of one JAX device (on TPU v2 and v3 that is one of the two cores of a chip) and come from TOML files
(``shardwise.hardware.load``), never from code. Links come in tiers, innermost first: the cores of a chip, the chips of a
slice or the GPUs of a node, the slices or nodes of a cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

#: Where a rate is missing the next wider type's is taken: what a device lacks it computes in something wider.
WIDER: Final = {"i4": "i8", "i8": "bf16", "f8": "bf16", "f16": "f32", "bf16": "f32", "f64": "f32"}

#: Element types as the rates of a profile call them.
MATRIX_TYPES: Final = ("f64", "f32", "bf16", "f16", "f8", "i8", "i4")

_LONG_NAMES: Final = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "int8": "i8",
    "uint8": "i8",
    "int4": "i4",
    "uint4": "i4",
}


@dataclass(frozen=True, slots=True)
class LinkTier:
    """One kind of link.

    ``bytes_per_s`` is one way: of one link of a torus (the devices of a chip share it), of one device's port on a switch.
    ``size`` is set where the number of members never changes (the cores of a chip); ``largest`` bounds each dimension of a
    torus or the members of a switch; both are empty where there is no such bound. ``wrap`` is the rule in words
    (``shardwise.hardware.topology``).
    """

    name: str
    kind: str
    bytes_per_s: float
    latency_s: float
    dims: int = 1
    wrap: str = "never"
    size: int = 0
    largest: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of device.

    ``matrix_efficiency`` and ``memory_efficiency`` are the shares of the peak that a large product and a long stream reach.
    ``matrix_tile`` is (rows, columns, depth), the sizes to which a product is padded; ``vector_tile`` the last two
    dimensions of any array. ``elements_per_s`` is what a pass over an array costs beside its bytes, whatever is computed.
    ``launch_s`` is paid once a kernel, ``collective_s`` once a collective. ``hidden`` says, for each kind of collective, which
    share of its time hides behind compute where its operand is ready early or, of a reduction, where its result is used late;
    ``efficiency`` which share of the links' rate it reaches. ``operand_bytes_per_s`` is what a product takes to lay out its
    operands beside its FLOPs, ``turned_bytes_per_s`` what a pass takes to read an array the other way round beside its bytes
    (both infinite where that is not known). ``minor_copies`` says whether the compiler turns an array round before and after it
    is gathered along any dimension but the first. ``type_count`` is what one chip counts in names such as v4-32. ``sources``
    has one entry a figure. ``scatters`` says whether the compiler makes a reduce-scatter of a sum of which every device keeps a
    piece; where it does not, it all-reduces and slices. ``rings`` says whether it runs permutes beside compute and
    reduce-scatters never, as XLA's TPU compiler does, which has reduce-scatters along some dimensions only. ``rounds`` says
    whether products of float32 arrays at default precision read bfloat16.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    clock_hz: float
    memory_bytes: int
    usable_share: float
    memory_bytes_per_s: float
    memory_efficiency: float
    matrix_flops_per_s: tuple[tuple[str, float], ...]
    matrix_efficiency: float
    matrix_tile: tuple[int, int, int]
    vector_flops_per_s: float
    transcendentals_per_s: float
    elements_per_s: float
    vector_tile: tuple[int, int]
    launch_s: float
    collective_s: float
    hidden: tuple[tuple[str, float], ...]
    type_count: int
    links: tuple[LinkTier, ...]
    sources: tuple[tuple[str, str], ...]
    file: str = ""
    scatters: bool = True
    rings: bool = False
    rounds: bool = False
    efficiency: tuple[tuple[str, float], ...] = ()
    operand_bytes_per_s: float = math.inf
    turned_bytes_per_s: float = math.inf
    minor_copies: bool = False

    @property
    def usable_bytes(self) -> int:
        """What a program may take of a device's memory."""
        return int(self.memory_bytes * self.usable_share)

    @property
    def calls_library(self) -> bool:
        """Are products calls of a library, as on GPUs? So they are where arrays lie in memory without tiles."""
        return self.vector_tile[0] == 1

    @property
    def turns(self) -> bool:
        """Does it cost to read an array the other way round?"""
        return math.isfinite(self.turned_bytes_per_s)

    @property
    def devices_per_chip(self) -> int:
        count = 1
        for tier in self.links:
            count *= tier.size or 1
        return count

    def matrix_rate(self, dtype: str) -> float:
        """Peak FLOP/s of products of a type, named as in the profile (``bf16``) or as NumPy does (``bfloat16``).

        A type without a rate has that of the next wider one (``WIDER``); any other type that of ``f32``.
        """
        rates = dict(self.matrix_flops_per_s)
        short: str | None = short_type(dtype)
        while short is not None and short not in rates:
            short = WIDER.get(short)
        return rates[short or "f32"]

    def hidden_share(self, kind: str) -> float:
        """The share of a collective's time that hides behind compute where it can (``hidden``)."""
        return dict(self.hidden).get(kind, 0.0)

    def link_share(self, kind: str) -> float:
        """The share of the links' rate that a kind of collective reaches; a halo is a permute to neighbours."""
        shares = dict(self.efficiency)
        return shares.get(kind, shares.get("collective-permute", 1.0) if kind == "halo" else 1.0)

    def source(self, figure: str) -> str:
        return dict(self.sources).get(figure, "not stated")

    def to_json(self) -> dict[str, Any]:
        """Plain data, laid out as the file is."""
        return {
            "schema": 1,
            "name": self.name,
            "title": self.title,
            "aliases": list(self.aliases),
            "file": self.file,
            "devices_per_chip": self.devices_per_chip,
            "type_count": self.type_count,
            "reduce_scatter": int(self.scatters),
            **({"rings": 1} if self.rings else {}),
            **({"rounds": 1} if self.rounds else {}),
            "minor_copies": int(self.minor_copies),
            "clock_hz": self.clock_hz,
            "memory": {
                "bytes": self.memory_bytes,
                "usable_share": self.usable_share,
                "usable_bytes": self.usable_bytes,
                "bytes_per_s": self.memory_bytes_per_s,
                "efficiency": self.memory_efficiency,
                **({"turned_bytes_per_s": self.turned_bytes_per_s} if self.turns else {}),
            },
            "matrix": {
                "flops_per_s": dict(self.matrix_flops_per_s),
                "efficiency": self.matrix_efficiency,
                "tile": list(self.matrix_tile),
                **({"operand_bytes_per_s": rate} if math.isfinite(rate := self.operand_bytes_per_s) else {}),
            },
            "vector": {
                "flops_per_s": self.vector_flops_per_s,
                "transcendentals_per_s": self.transcendentals_per_s,
                "elements_per_s": self.elements_per_s,
                "tile": list(self.vector_tile),
            },
            "latency": {"launch_s": self.launch_s, "collective_s": self.collective_s},
            "hidden": dict(self.hidden),
            "efficiency": dict(self.efficiency),
            "links": [_link_json(tier) for tier in self.links],
            "sources": dict(self.sources),
        }


def _link_json(tier: LinkTier) -> dict[str, Any]:
    data: dict[str, Any] = {"name": tier.name, "kind": tier.kind}
    if tier.kind == "torus":
        data |= {"dims": tier.dims, "wrap": tier.wrap}
    if tier.size:
        data["size"] = tier.size
    if tier.largest:
        data["largest"] = list(tier.largest)
    return data | {"bytes_per_s": tier.bytes_per_s, "latency_s": tier.latency_s}


def short_type(dtype: str) -> str:
    """
    >>> short_type("bfloat16"), short_type("float8_e4m3fn"), short_type("f32"), short_type("complex64")
    ('bf16', 'f8', 'f32', 'complex64')
    """
    if dtype.startswith(("float8", "f8")):
        return "f8"
    return _LONG_NAMES.get(dtype, dtype)
