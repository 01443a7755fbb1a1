"""The figures of one kind of device and of its links, with their sources. All figures are per JAX device and come from TOML
files (``shardwise.hardware.load``), never from code. Links come in tiers, innermost first: the cores of a chip, the chips of a
slice or the GPUs of a node, the slices or nodes of a cluster."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: The dtype whose rate counts where one is missing: a device computes in a wider dtype what it has no unit for.
WIDER: Final = {"i4": "i8", "i8": "bf16", "f8": "bf16", "f16": "f32", "bf16": "f32", "f64": "f32"}

#: The collectives that profiles have figures for.
COLLECTIVES: Final = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "halo")

#: The names of dtypes in profiles.
MATRIX_TYPES: Final = ("f64", "f32", "bf16", "f16", "f8", "i8", "i4")

#: Which axes of a torus wrap around into rings, by the rule of a tier (``LinkTier.rings``).
WRAP_RULES: Final = ("never", "always", "whole", "at least N", "cubes of N")
WRAP_RULE: Final = re.compile(r"(never|always|whole)|(at least|cubes of) ([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Figure:
    """A key of a profile: a number within bounds, a text, or a list of ``count`` whole numbers."""

    key: str
    low: float = 0
    high: float = 0
    hint: str = ""
    kind: type = float
    count: int = 0
    required: bool = True

    def problem(self, values: Mapping[str, Any]) -> str | None:
        if self.key not in values:
            return f"{self.key} is missing" if self.required else None
        value = values[self.key]
        expected = "a number"
        if self.kind is str:
            valid, expected = isinstance(value, str), "a text"
        elif self.kind is tuple:
            valid = (
                isinstance(value, list) and len(value) == self.count and all(type(v) is int and v > 0 for v in value)
            )
            expected = f"{self.count} whole numbers"
        else:
            valid = type(value) in (int, float) and math.isfinite(value)
            if valid and self.kind is not float:
                valid, expected = value == int(value), "a whole number"
            if valid and not self.low <= value <= self.high:
                return f"{self.key} is {value:g}, which cannot be: {self.hint}"
        return None if valid else f"{self.key} is {value!r}, not {expected}"


_SHARE: Final = "a share is above 0 and at most 1"
_RATE: Final = "a rate per second, in FLOPs and not in TFLOPs"
_FLOW: Final = "bytes per second, not GB"
_TIME: Final = "seconds, at most 1"


def _figure(key: str, low: float = 0, high: float = 0, hint: str = "", default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"figure": (key, low, high, hint)})


def figures(of: type) -> dict[str, Figure]:
    """Returns the keys of a profile that are fields of a class, by the names of the fields."""
    kinds = {"float": float, "int": int, "bool": bool, "str": str}
    result = {}
    for f in dataclasses.fields(of):
        if "figure" in f.metadata:
            key, low, high, hint = f.metadata["figure"]
            kind, count = kinds.get(str(f.type), tuple), str(f.type).count("int")
            result[f.name] = Figure(key, low, high, hint, kind, count, required=f.default is dataclasses.MISSING)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTier:
    """One kind of link.

    ``bytes_per_s`` is per direction: of one link of a torus (the devices of a chip share it), of one device's port on a switch.
    ``size`` is set where the number of members is fixed (the cores of a chip); ``largest`` bounds each dimension of a torus or
    the members of a switch; both are empty where there is no such bound. ``wrap`` says which axes of a torus are rings:

    | rule | an axis wraps around when |
    |---|---|
    | ``never`` | never |
    | ``always`` | it has more than two members |
    | ``at least N`` | it has N members or more (TPU v5e and v6e: 16) |
    | ``cubes of N`` | every axis is a multiple of N: optical switches close whole cubes only (TPU v4 and v5p: 4) |
    | ``whole`` | it is as long as the largest torus there is (TPU v2 and v3) |
    """

    name: str = _figure("name")
    kind: str = _figure("kind")
    bytes_per_s: float = _figure("bytes_per_s", 1e3, 1e16, _FLOW)
    latency_s: float = _figure("latency_s", 0, 1, _TIME)
    dims: int = _figure("dims", 1, 6, "a torus has 1 to 6 dimensions", 1)
    wrap: str = _figure("wrap", default="never")
    size: int = _figure("size", 2, 1024, "the fixed number of members is 2 or more", 0)
    largest: tuple[int, ...] = ()

    def rings(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Returns which axes of a shape are rings; two members are neighbors already, and never one."""
        match = WRAP_RULE.fullmatch(self.wrap)
        assert match is not None
        rule, count = match[1] or match[2], int(match[3] or 0)
        if rule == "whole":  # the bounds hold in any order of the dimensions
            order = sorted(range(len(shape)), key=lambda d: shape[d])
            bounds = dict(zip(order, sorted(self.largest), strict=True))
            wrapped = [size == bounds[d] for d, size in enumerate(shape)]
        elif rule == "cubes of":
            wrapped = [all(size % count == 0 for size in shape)] * len(shape)
        else:
            wrapped = [rule != "never" and size >= count for size in shape]
        return tuple(ring and size > 2 for ring, size in zip(wrapped, shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of device.

    - ``matrix_efficiency``, ``memory_efficiency``: the fraction of the peak that a large product and a long stream reach;
    - ``matrix_tile``: the (rows, columns, depth) to which a product is padded; ``vector_tile``: the same for the last two
      dimensions of any array;
    - ``on_chip_bytes``: the memory of a chip in which the compiler keeps temporaries that fit; none on GPUs, whose caches the
      compiler does not manage;
    - ``host_bytes_per_s``: the rate at which one device reads or writes the memory of its host
      (infinite where unknown);
    - ``elements_per_s``: the cost of a kernel over an array beside its bytes, whatever is computed;
    - ``angle_factor``: how many times as long as other transcendental functions those of angles take (``rules.tables.ANGLES``);
    - ``launch_s``, ``collective_s``: the fixed cost of a kernel and of a collective;
    - ``hidden``: by kind of collective, the fraction of its time that overlaps with compute where its operand is ready early
      or, of a reduction, where its result is used late; ``efficiency``: the fraction of the links' rate that it reaches;
    - ``operand_bytes_per_s``: the cost of laying out a product's operands beside its FLOPs; ``transposed_bytes_per_s``: the
      cost of a transposed read beside its bytes (both infinite where unknown);
    - ``minor_copies``: whether the compiler transposes an array around a gather along any dimension but the first;
    - ``scatters``: whether the compiler has reduce-scatters; if not, it all-reduces and slices;
    - ``rings``: whether permutes overlap with compute and reduce-scatters do not, as with XLA's TPU compiler, which has
      reduce-scatters along some dimensions only;
    - ``rounds``: whether products of float32 arrays at default precision read bfloat16;
    - ``type_count``: what one chip counts in names such as v4-32; ``sources``: the source of every figure.
    """

    name: str = _figure("name")
    title: str = _figure("title")
    aliases: tuple[str, ...]
    file: str
    links: tuple[LinkTier, ...]
    sources: tuple[tuple[str, str], ...]
    clock_hz: float = _figure("clock_hz", 1e7, 1e11, "in Hz, not GHz")
    type_count: int = _figure("type_count", 1, 8, "1 or 2: what one chip counts in names like v4-32", 1)
    rings: bool = _figure("rings", 0, 1, "1 if permutes overlap with compute and reduce-scatters do not, else 0", False)
    rounds: bool = _figure("rounds", 0, 1, "1 if products of float32 read bfloat16 by default, else 0", False)
    scatters: bool = _figure("reduce_scatter", 0, 1, "1 if the compiler makes reduce-scatters, else 0", True)
    minor_copies: bool = _figure("minor_copies", 0, 1, "1 if arrays are transposed to be gathered, else 0", False)
    memory_bytes: int = _figure("memory.bytes", 2**20, 2**50, "in bytes, not GB")
    usable_share: float = _figure("memory.usable_share", 1e-3, 1, _SHARE)
    on_chip_bytes: int = _figure("memory.on_chip_bytes", 0, 2**40, "in bytes, not MB", 0)
    memory_bytes_per_s: float = _figure("memory.bytes_per_s", 1e6, 1e16, _FLOW)
    memory_efficiency: float = _figure("memory.efficiency", 1e-3, 1, _SHARE)
    host_bytes_per_s: float = _figure("memory.host_bytes_per_s", 1e6, 1e16, _FLOW, math.inf)
    transposed_bytes_per_s: float = _figure("memory.transposed_bytes_per_s", 1e6, 1e18, _FLOW, math.inf)
    matrix_flops_per_s: tuple[tuple[str, float], ...]
    matrix_efficiency: float = _figure("matrix.efficiency", 1e-3, 1, _SHARE)
    operand_bytes_per_s: float = _figure("matrix.operand_bytes_per_s", 1e6, 1e16, _FLOW, math.inf)
    matrix_tile: tuple[int, int, int] = _figure("matrix.tile")
    vector_flops_per_s: float = _figure("vector.flops_per_s", 1e6, 1e18, _RATE)
    elements_per_s: float = _figure("vector.elements_per_s", 1e6, 1e18, "elements per second", math.inf)
    angle_factor: float = _figure("vector.angle_factor", 1, 1e3, "1 or more: a multiple of other functions", 1.0)
    vector_tile: tuple[int, int] = _figure("vector.tile")
    launch_s: float = _figure("latency.launch_s", 0, 1, _TIME)
    collective_s: float = _figure("latency.collective_s", 0, 1, _TIME)
    hidden: tuple[tuple[str, float], ...] = ()
    efficiency: tuple[tuple[str, float], ...] = ()

    @property
    def usable_bytes(self) -> int:
        """The memory that a program may use."""
        return int(self.memory_bytes * self.usable_share)

    @property
    def calls_library(self) -> bool:
        """Whether products are library calls, as on GPUs: arrays have no tiles in memory."""
        return self.vector_tile[0] == 1

    @property
    def transposes(self) -> bool:
        """Whether a transposed read has a cost."""
        return math.isfinite(self.transposed_bytes_per_s)

    @property
    def devices_per_chip(self) -> int:
        return math.prod(tier.size or 1 for tier in self.links)

    def matrix_rate(self, dtype: str) -> float:
        """Returns the peak FLOP/s of products of a dtype (``bf16`` or ``bfloat16``): its own, or of the next wider one
        (``WIDER``)."""
        rates = dict(self.matrix_flops_per_s)
        short = re.sub("^u?int", "i", re.sub("^(b?f)loat", r"\1", dtype))
        short = "f8" if short.startswith("f8") else short
        while short not in rates:
            short = WIDER.get(short, "f32")
        return rates[short]

    def hidden_share(self, kind: str) -> float:
        """Returns the fraction of a collective's time that can overlap with compute."""
        return dict(self.hidden).get(kind, 0.0)

    def link_share(self, kind: str) -> float:
        """Returns the fraction of the links' rate that a kind of collective reaches; halos and hops are permutes."""
        shares = dict(self.efficiency)
        return shares.get(kind, shares.get("collective-permute", 1.0) if kind in ("halo", "hop") else 1.0)

    def source(self, figure: str) -> str:
        return dict(self.sources).get(figure, "not stated")


#: All figures of a profile but those of its links.
FIGURES: Final = (
    *figures(Profile).values(),
    Figure("base", kind=str, required=False),
    *(Figure(f"matrix.{t}", 1e6, 1e19, _RATE, required=t == "f32") for t in MATRIX_TYPES),
    *(Figure(f"hidden.{kind}", 0, 1, "a share between 0 and 1", required=False) for kind in COLLECTIVES),
    *(Figure(f"efficiency.{kind}", 1e-3, 1, _SHARE, required=False) for kind in COLLECTIVES),
)
