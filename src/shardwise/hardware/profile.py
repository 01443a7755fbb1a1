"""The figures of one kind of device and of its links, with their sources.

All figures are per JAX device (on TPU v2 and v3 that is one of the two cores of a chip) and come from TOML files
(``shardwise.hardware.load``), never from code. Links come in tiers, innermost first: the cores of a chip, the chips of a
slice or the GPUs of a node, the slices or nodes of a cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

#: The dtype whose rate counts where one is missing: a device computes in a wider dtype what it has no unit for.
WIDER: Final = {"i4": "i8", "i8": "bf16", "f8": "bf16", "f16": "f32", "bf16": "f32", "f64": "f32"}

#: The collectives that profiles have figures for.
COLLECTIVES: Final = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "halo")

#: The names of dtypes in profiles.
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

    ``bytes_per_s`` is per direction: of one link of a torus (the devices of a chip share it), of one device's port on a switch.
    ``size`` is set where the number of members is fixed (the cores of a chip); ``largest`` bounds each dimension of a torus or
    the members of a switch; both are empty where there is no such bound. ``wrap`` is a rule of ``shardwise.hardware.wrap``.
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

    - ``matrix_efficiency``, ``memory_efficiency``: the fraction of the peak that a large product and a long stream reach;
    - ``matrix_tile``: the (rows, columns, depth) to which a product is padded; ``vector_tile``: the same for the last two
      dimensions of any array;
    - ``elements_per_s``: the cost of a kernel over an array beside its bytes, whatever is computed;
    - ``launch_s``, ``collective_s``: the fixed cost of a kernel and of a collective;
    - ``hidden``: by kind of collective, the fraction of its time that overlaps with compute where its operand is ready early
      or, of a reduction, where its result is used late; ``efficiency``: the fraction of the links' rate that it reaches;
    - ``operand_bytes_per_s``: the cost of laying out a product's operands beside its FLOPs; ``turned_bytes_per_s``: the cost of
      a transposed read beside its bytes (both infinite where unknown);
    - ``minor_copies``: whether the compiler transposes an array around a gather along any dimension but the first;
    - ``scatters``: whether the compiler has reduce-scatters; if not, it all-reduces and slices;
    - ``rings``: whether permutes overlap with compute and reduce-scatters do not, as with XLA's TPU compiler, which has
      reduce-scatters along some dimensions only;
    - ``rounds``: whether products of float32 arrays at default precision read bfloat16;
    - ``type_count``: what one chip counts in names such as v4-32; ``sources``: the source of every figure.
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
        """The memory that a program may use."""
        return int(self.memory_bytes * self.usable_share)

    @property
    def calls_library(self) -> bool:
        """Whether products are library calls, as on GPUs: arrays have no tiles in memory."""
        return self.vector_tile[0] == 1

    @property
    def turns(self) -> bool:
        """Whether a transposed read has a cost."""
        return math.isfinite(self.turned_bytes_per_s)

    @property
    def devices_per_chip(self) -> int:
        return math.prod(tier.size or 1 for tier in self.links)

    def matrix_rate(self, dtype: str) -> float:
        """Returns the peak FLOP/s of products of a dtype, named as in the profile (``bf16``) or in NumPy (``bfloat16``).

        A dtype without a rate has that of the next wider one (``WIDER``); any other dtype that of ``f32``.
        """
        rates = dict(self.matrix_flops_per_s)
        short: str | None = short_type(dtype)
        while short is not None and short not in rates:
            short = WIDER.get(short)
        return rates[short or "f32"]

    def hidden_share(self, kind: str) -> float:
        """Returns the fraction of a collective's time that can overlap with compute."""
        return dict(self.hidden).get(kind, 0.0)

    def link_share(self, kind: str) -> float:
        """Returns the fraction of the links' rate that a kind of collective reaches; a halo is a permute to neighbors."""
        shares = dict(self.efficiency)
        return shares.get(kind, shares.get("collective-permute", 1.0) if kind == "halo" else 1.0)

    def source(self, figure: str) -> str:
        return dict(self.sources).get(figure, "not stated")

    def to_json(self) -> dict[str, Any]:
        """Returns plain data in the layout of the file."""
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
