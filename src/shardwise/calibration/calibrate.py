"""A hardware profile from measurements of a machine: the fits behind ``shardwise hardware calibrate``.

Problem. Readings are times of programs; a profile has peaks, efficiencies and latencies, and more of them than can be
measured. Idea. Take what cannot be measured from a shipped profile, the *base*, and fit the rest so that the formulas of the
cost model reproduce the times (``shardwise.calibration.measure``).

Peak and efficiency. Where the kind of device has a shipped profile, peaks and memory size are those of the profile, and
efficiency is the fraction of them that was reached. Elsewhere (host CPUs) the peak is the best rate measured, and efficiency
the fraction of it that the median of the large sizes reaches. There is one ``matrix.efficiency``, that of the reference dtype
(bf16, on hosts f32); the peak of another dtype is its measured rate divided by it.

Kernels over arrays: ``t = elements/elements_per_s + nbytes/(bytes_per_s·efficiency)`` as in ``shardwise.cost.compute``, with
the base's ``elements_per_s`` as far as it explains no more than half of the time.

Links (``_fit_links``): ``t = collective_s + steps·latency_s + load·nbytes/(bytes_per_s·efficiency)`` with steps and load of
each kind from ``shardwise.hardware.collectives``, by non-negative least squares of relative errors. The rate is that of the
fastest kind, and ``efficiency`` of a kind its fraction of it.

Products of few rows (``_operand_rate``): ``t = flops/rate + operands/operand_bytes_per_s``. Transposed reads
(``_transposed_rate``): the additional time of such a kernel, per byte.

Weak. One tier of links; the rate per element is the base's. An all-reduce counts twice the steps of a gather, although small
ones take the same time on hosts.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardwise.errors import HardwareError
from shardwise.files import check_writable, write_whole
from shardwise.hardware.collectives import collective
from shardwise.hardware.layout import place
from shardwise.hardware.load import build_profile, figures_of, load_profile, nearest_profile, profile_data
from shardwise.hardware.profile import COLLECTIVES, MATRIX_TYPES, Profile
from shardwise.hardware.topology import Topology, topology

#: Collectives that are measured.
KINDS: Final = tuple(kind for kind in COLLECTIVES if kind != "halo")
#: The fraction of a reading that a collective must have to be used.
_MIN_COLLECTIVE: Final = 0.02
#: The weight of the smallest collectives, which determine latency.
_LATENCY_WEIGHT: Final = 10.0
#: The fraction of a kernel's time that a transposed read must add to be distinguished from noise.
_MIN_TRANSPOSED: Final = 0.1


@dataclass(frozen=True, slots=True)
class Reading:
    """The time that one device takes for some work.

    ``what`` is ``"matrix.bf16"`` and so on (FLOPs), ``"thin"`` (FLOPs of a product of few rows, and the ``elements`` of its
    operands), ``"memory"`` (bytes that a kernel over ``elements`` reads and writes), ``"vector"`` (operations), ``"launch"``
    (kernels), ``"straight"`` and ``"transposed"`` (bytes of a kernel over ``elements``, without and with a transposed read),
    or one of ``KINDS`` (bytes). ``between``: it was measured between products, whose time is the reading ``"between"``
    (FLOPs).
    """

    what: str
    size: str
    work: float
    time_s: float
    elements: float = 0.0
    between: bool = False

    @property
    def rate(self) -> float:
        return self.work / self.time_s


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine reports. ``memory_bytes`` is a device's share of a host's memory, or JAX's limit (0 if there is none);
    ``scatters`` says whether the compiler has reduce-scatters; ``minor_copies`` whether it transposes arrays to gather them.
    ``None`` means not set, or not tried."""

    device_kind: str
    platform: str
    devices: int
    jax: str
    memory_bytes: int = 0
    scatters: bool | None = None
    minor_copies: bool | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A machine, its readings, and notes on what could not be measured."""

    machine: Machine
    readings: tuple[Reading, ...]
    notes: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured profile. ``data`` has the layout of the file. ``links_error`` is the median relative error of the collectives'
    times under the fitted links, ``None`` where none were measured."""

    data: dict[str, Any]
    links_error: float | None
    notes: tuple[str, ...]

    def write(self, path: str | os.PathLike[str]) -> Profile:
        """Writes the profile, checked, and returns it as it is read back. No partial file is left behind."""
        target = Path(path)
        check_output(target)
        build_profile(self.data, target)
        write_whole(target, to_toml(self.data), HardwareError)
        return load_profile(str(target))


def check_output(path: Path) -> None:
    """Raises what ``write`` would raise, before minutes are spent on measuring."""
    if path.suffix != ".toml":
        raise HardwareError(f"cannot write {path}: the name of a hardware profile ends in .toml")
    check_writable(path, HardwareError)


def calibrate(measured: Measured, name: str | None = None) -> Calibration:
    """Returns a profile fitted to measurements; by default its name is that of the base with ``-measured``."""
    machine, readings = measured.machine, measured.readings
    base_name, same_device = nearest_profile(machine.device_kind, machine.platform)
    base = load_profile(base_name)
    notes = list(measured.notes)
    figures = _figures(readings, base, same_device)
    links, links_error = _fit_links(_without_products(readings), machine.devices, base)
    figures |= links | _reported(machine, same_device)
    if machine.devices > 1 and not links:
        notes.append(f"links were not measured: those of {base_name} have several tiers here")
    elif links and not any(figure.endswith(".bytes_per_s") for figure in links):
        notes.append("the links' rate was not measured: times did not grow with bytes; is the machine busy?")
    title = f"{machine.device_kind} as measured ({machine.devices} device{'s' if machine.devices > 1 else ''} at once)"
    data = {"name": name or f"{base_name}-measured", "title": title}
    source = f"measured by shardwise hardware calibrate with jax {machine.jax} on {machine.device_kind}"
    data |= _compose(base, same_device, figures, source)
    return Calibration(data, links_error, tuple(notes))


def _without_products(readings: Sequence[Reading]) -> list[Reading]:
    """Returns the collectives without the time of the products around them, if what is left is more than noise."""
    product_s = next((r.time_s for r in readings if r.what == "between"), 0.0)
    alone = ((r, r.time_s - product_s * r.between) for r in readings if r.what in KINDS)
    return [replace(r, time_s=time_s) for r, time_s in alone if time_s > _MIN_COLLECTIVE * r.time_s]


def _fit_links(readings: Sequence[Reading], devices: int, base: Profile) -> tuple[dict[str, float], float | None]:
    """Returns the figures of links fitted to collectives, and their median relative error; none if there are no readings or
    several tiers are used."""
    from scipy.optimize import nnls

    used = topology(f"{devices} {base.name}")
    if not readings or len({axis.tier for axis in used.axes}) != 1:
        return {}, None
    # The formulas are linear in collective_s, latency_s and 1/(bytes_per_s·efficiency) of every kind: with a latency and rate
    # of one and without collective_s, they return the coefficients.
    profile = replace(base, collective_s=0.0, scatters=True, efficiency=())
    unit = Topology(profile, used.text, tuple(replace(axis, bytes_per_s=1.0, latency_s=1.0) for axis in used.axes))
    kinds = [kind for kind in KINDS if any(r.what == kind for r in readings)]
    costs = {kind: collective(kind, ["d"], place({"d": devices}, unit)) for kind in kinds}
    rows = [
        [1.0, costs[r.what].alpha_s, *(costs[r.what].s_per_byte * r.work * (r.what == kind) for kind in kinds)]
        for r in readings
    ]
    relative = np.array(rows) / np.array([r.time_s for r in readings])[:, None]
    scales = np.maximum(relative.max(0), 1e-300)  # times are 1e-5 and rates 1e10
    small = min(r.work for r in readings)
    weights = np.array([_LATENCY_WEIGHT if r.work == small else 1.0 for r in readings])
    coefficients = nnls(relative / scales * weights[:, None], weights)[0] / scales
    fixed_s, latency_s, *per_byte = map(float, coefficients)
    error = float(np.median(np.abs(relative @ coefficients - 1)))
    rates = {kind: 1 / s for kind, s in zip(kinds, per_byte, strict=True) if s > 0}
    tier = f"links.{base.links[used.axes[0].tier].name}"
    figures = {"latency.collective_s": fixed_s, f"{tier}.latency_s": latency_s}
    if rates:
        best = figures[f"{tier}.bytes_per_s"] = max(rates.values())
        figures |= {f"efficiency.{kind}": rate / best for kind, rate in rates.items()}
    return figures, error


def _figures(readings: Iterable[Reading], base: Profile, same_device: bool) -> dict[str, float]:
    """Returns the measured figures of one device by their dotted keys."""
    by_what: dict[str, list[Reading]] = {}
    for reading in readings:
        by_what.setdefault(reading.what, []).append(reading)
    figures = _matrix_figures(by_what, base, same_device)
    elements = ((r, r.elements / base.elements_per_s) for r in by_what["memory"])
    streams = [r.work / max(r.time_s - elements_s, r.time_s / 2) for r, elements_s in elements]
    best = base.memory_bytes_per_s if same_device else max(streams)
    figures |= _peak("memory.bytes_per_s", statistics.median(streams), best, same_device)
    if rate := _transposed_rate(by_what):
        figures["memory.transposed_bytes_per_s"] = rate
    figures["vector.flops_per_s"] = by_what["vector"][0].rate
    return figures | {"latency.launch_s": by_what["launch"][0].time_s}


def _matrix_figures(by_what: Mapping[str, list[Reading]], base: Profile, same_device: bool) -> dict[str, float]:
    dtypes = [t for t in MATRIX_TYPES if f"matrix.{t}" in by_what]
    typical = {t: statistics.median(r.rate for r in by_what[f"matrix.{t}"][-3:]) for t in dtypes}
    peaks = dict(base.matrix_flops_per_s)
    main = "bf16" if same_device and "bf16" in typical and "bf16" in peaks else "f32"
    best = peaks[main] if same_device else max(r.rate for r in by_what[f"matrix.{main}"])
    figures = _peak(f"matrix.{main}", typical[main], best, same_device)
    figures |= {f"matrix.{t}": rate / figures["matrix.efficiency"] for t, rate in typical.items() if t != main}
    if rate := _operand_rate(by_what.get("thin", ()), typical["f32"]):
        figures["matrix.operand_bytes_per_s"] = rate
    return figures


def _operand_rate(thin: Sequence[Reading], flops_per_s: float) -> float | None:
    """Returns the operand bytes per second that explain what thin products take beside their FLOPs, ``None`` if nothing."""
    terms = [(4 * r.elements / r.time_s, 1 - r.work / flops_per_s / r.time_s) for r in thin]
    s_per_byte = sum(b * rest for b, rest in terms) / max(sum(b * b for b, _ in terms), 1e-300)
    return 1 / s_per_byte if s_per_byte > 0 else None


def _transposed_rate(by_what: Mapping[str, list[Reading]]) -> float | None:
    """Returns the bytes per second that explain the additional time of a transposed read, ``None`` if there is none."""
    if "transposed" not in by_what:
        return None
    (straight,), (transposed,) = by_what["straight"], by_what["transposed"]
    additional_s = transposed.time_s - straight.time_s
    return 4 * transposed.elements / additional_s if additional_s > _MIN_TRANSPOSED * straight.time_s else None


def _peak(key: str, rate: float, peak: float, same_device: bool) -> dict[str, float]:
    """Returns the efficiency at a rate, and the peak if it is not that of the base. A rate above the peak is the new peak."""
    figures = {f"{key.partition('.')[0]}.efficiency": min(1.0, rate / peak)}
    return figures if same_device and rate <= peak else figures | {key: max(rate, peak)}


def _reported(machine: Machine, same_device: bool) -> dict[str, Any]:
    """Returns the figures that the machine reports about itself; those of a device with a shipped profile are the profile's."""
    if same_device:
        return {}
    flags = {"reduce_scatter": machine.scatters, "minor_copies": machine.minor_copies}
    figures: dict[str, Any] = {key: int(flag) for key, flag in flags.items() if flag is not None}
    if machine.memory_bytes:
        figures["memory.bytes"] = machine.memory_bytes
        if machine.platform != "cpu":  # the limit of JAX
            figures["memory.usable_share"] = 1.0
    return figures


def _compose(base: Profile, same_device: bool, figures: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the figures of a complete file: the base's, replaced by the measured ones, with all sources."""
    excluded = ("name", "title", "aliases", "base", "sources")
    data = {key: value for key, value in profile_data(base.name).items() if key not in excluded}
    if not same_device:  # The rates of another device are further off than that of the next wider dtype.
        data["matrix"] = {k: v for k, v in data["matrix"].items() if k not in MATRIX_TYPES}
    for key, value in figures.items():
        *tables, leaf = key.split(".")
        if tables and tables[0] == "links":
            table = next(link for link in data["links"] if link["name"] == tables[1])
        else:
            table = data.setdefault(tables[0], {}) if tables else data
        # No more than four digits are repeatable.
        table[leaf] = value if isinstance(value, int) else float(f"{value:.4g}")
    texts = tuple(f"links.{link['name']}.{key}" for link in data["links"] for key in ("name", "kind"))
    keys = [key for key, _ in figures_of(data) if key not in texts]
    taken = f"taken from profile {base.name}: "
    return data | {"sources": {key: source if key in figures else taken + base.source(key) for key in keys}}


def to_toml(data: Mapping[str, Any]) -> str:
    """Returns the data of a profile as TOML: values, tables, and lists of tables for links.

    >>> to_toml({"name": "x", "memory": {"bytes": 8}, "links": [{"name": "a b", "largest": [8]}]})
    'name = "x"\\n\\n[memory]\\nbytes = 8\\n\\n[[links]]\\nname = "a b"\\nlargest = [8]\\n'
    """

    def lines(table: Mapping[str, Any]) -> Iterator[str]:
        for key, value in table.items():
            # JSON strings, numbers and lists of them are also TOML.
            name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
            yield f"{name} = {json.dumps(value, ensure_ascii=False)}"

    tables = {k: v for k, v in data.items() if isinstance(v, dict) or k == "links"}
    text = [*lines({k: v for k, v in data.items() if k not in tables})]
    for name, value in tables.items():
        for table in value if isinstance(value, list) else [value]:
            text += ["", f"[[{name}]]" if isinstance(value, list) else f"[{name}]", *lines(table)]
    return "\n".join(text) + "\n"
