"""The figures of one kind of device and of its links, with their sources.

All figures are per JAX device (on TPU v2 and v3 that is one of the two cores of a chip) and come from TOML files
(``shardwise.hardware.load``), never from code. Links come in tiers, innermost first: the cores of a chip, the chips of a
slice or the GPUs of a node, the slices or nodes of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
class Figure:
    """A number in a profile: its key, its bounds, and the field of ``Profile`` that it sets. With a default it is optional."""

    key: str
    low: float
    high: float
    hint: str
    field: str = ""
    kind: type = float
    default: float | None = None
    optional: bool = False

    def problem(self, values: Mapping[str, Any]) -> str | None:
        if self.key not in values:
            return None if self.optional or self.default is not None else f"{self.key} is missing"
        value = values[self.key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"{self.key} is {value!r}, not a number"
        if self.kind is not float and value != int(value):
            return f"{self.key} is {value!r}, not a whole number"
        if not self.low <= value <= self.high:
            return f"{self.key} is {value:g}, which cannot be: {self.hint}"
        return None


_SHARE: Final = "a share lies above 0 and is at most 1"
_RATE: Final = "a rate per second, in FLOPs and not in TFLOPs"
_FLOW: Final = "bytes per second, not GB"
_TIME: Final = "seconds, at most 1"

FIGURES: Final = (
    Figure("clock_hz", 1e7, 1e11, "in Hz, not GHz", "clock_hz"),
    Figure("type_count", 1, 8, "1 or 2: what one chip counts in names like v4-32", "type_count", int, 1),
    Figure("rings", 0, 1, "1 if permutes run beside compute and reduce-scatters do not, else 0", "rings", bool, 0),
    Figure("rounds", 0, 1, "1 if products of float32 read bfloat16 by default, else 0", "rounds", bool, 0),
    Figure("reduce_scatter", 0, 1, "1 if the compiler makes reduce-scatters, else 0", "scatters", bool, 1),
    Figure("minor_copies", 0, 1, "1 if arrays are transposed to be gathered, else 0", "minor_copies", bool, 0),
    Figure("memory.bytes", 2**20, 2**50, "in bytes, not GB", "memory_bytes", int),
    Figure("memory.usable_share", 1e-3, 1, _SHARE, "usable_share"),
    Figure("memory.bytes_per_s", 1e6, 1e16, _FLOW, "memory_bytes_per_s"),
    Figure("memory.efficiency", 1e-3, 1, _SHARE, "memory_efficiency"),
    Figure("memory.turned_bytes_per_s", 1e6, 1e18, _FLOW, "turned_bytes_per_s", default=math.inf),
    *(Figure(f"matrix.{t}", 1e6, 1e19, _RATE, optional=t != "f32") for t in MATRIX_TYPES),
    Figure("matrix.efficiency", 1e-3, 1, _SHARE, "matrix_efficiency"),
    Figure("matrix.operand_bytes_per_s", 1e6, 1e16, _FLOW, "operand_bytes_per_s", default=math.inf),
    Figure("vector.flops_per_s", 1e6, 1e18, _RATE, "vector_flops_per_s"),
    Figure("vector.transcendentals_per_s", 1e6, 1e18, _RATE, "transcendentals_per_s"),
    Figure("vector.elements_per_s", 1e6, 1e18, "elements per second", "elements_per_s", optional=True),
    Figure("latency.launch_s", 0, 1, _TIME, "launch_s"),
    Figure("latency.collective_s", 0, 1, _TIME, "collective_s"),
    *(Figure(f"hidden.{kind}", 0, 1, "a share between 0 and 1", optional=True) for kind in COLLECTIVES),
    *(Figure(f"efficiency.{kind}", 1e-3, 1, _SHARE, optional=True) for kind in COLLECTIVES),
)
LINK_FIGURES: Final = (
    Figure("bytes_per_s", 1e3, 1e16, _FLOW, "bytes_per_s"),
    Figure("latency_s", 0, 1, _TIME, "latency_s"),
    Figure("dims", 1, 6, "a torus has 1 to 6 dimensions", "dims", int, 1),
    Figure("size", 2, 1024, "the fixed number of members is 2 or more", "size", int, 0),
)


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
        data: dict[str, Any] = {"schema": 1, "name": self.name, "title": self.title, "aliases": list(self.aliases)}
        data |= {"file": self.file, "devices_per_chip": self.devices_per_chip}
        for figure in FIGURES:
            value = getattr(self, figure.field) if figure.field else math.inf
            if value != math.inf:
                *table, leaf = figure.key.split(".")
                (data.setdefault(table[0], {}) if table else data)[leaf] = int(value) if figure.kind is bool else value
        data["memory"]["usable_bytes"] = self.usable_bytes
        data["matrix"] |= {"flops_per_s": dict(self.matrix_flops_per_s), "tile": list(self.matrix_tile)}
        data["vector"]["tile"] = list(self.vector_tile)
        data |= {"hidden": dict(self.hidden), "efficiency": dict(self.efficiency)}
        return data | {"links": [_link_json(tier) for tier in self.links], "sources": dict(self.sources)}


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
