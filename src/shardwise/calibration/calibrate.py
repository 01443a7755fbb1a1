"""A hardware profile from readings of a machine: what ``shardwise hardware calibrate`` makes of what it measured.

Problem: readings are times of programs; a profile has peaks, efficiencies and latencies, and more of them than can be measured.
Idea: take what cannot be measured from a shipped profile, the *base*, and fit the rest so that the cost model's own formulas
give back the times. The readings come from ``shardwise.calibration.measure``.

Peak and efficiency. Where the kind of device has a shipped profile, peaks and memory size are that profile's, and efficiency
is the share of them that was reached. Elsewhere (host CPUs) the peak is the best rate measured and efficiency what the median
of the large sizes reaches of it. There is one ``matrix.efficiency``, that of the reference type (bf16, on hosts f32): the
figure of another type is its measured rate divided by it, so that the product of both is what was measured.

Passes over arrays (``_fit_passes``): ``t = round_s + elements/elements_per_s + nbytes/(bytes_per_s·efficiency)``, the last two
terms as in ``shardwise.cost.compute``; the first is the measuring loop's and is dropped. Where no term by the element is seen,
``vector.elements_per_s`` is so high that it does not matter.

Links (``_fit_links``): ``t = collective_s + steps·latency_s + load·nbytes/(bytes_per_s·efficiency)`` with steps and load of
each kind from ``shardwise.hardware.collectives``; the rate is that of the fastest kind, and ``efficiency`` of each kind its
share of it. Both fits are non-negative least squares of relative errors, of all sizes together, in which the smallest
collectives decide about latency: they were read between products, as they stand in a step, and the products' own time is taken
off (``_alone``).

Products of few rows (``_operand_rate``): ``t = flops/rate + operands/operand_bytes_per_s``. Arrays that are read the other way
round (``_turned_rate``): what such a pass takes longer, by the byte.

Differences (of a pass turned and straight, of a product with a collective and without) are taken here, after
``shardwise.calibration.readings.fastest`` has joined readings of different times.

Memory. JAX's limit on a GPU is what it takes beforehand, 75% of the memory unless told otherwise. Only what it was told is
taken for the usable share; else that is the base's.

Weak: one tier of links; one rate by the element for all types; on a busy machine passes scatter, and nothing is fitted to them.
An all-reduce is taken for twice the steps of a gather, which on hosts take the same time when they are small.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardwise.calibration.readings import KINDS, THIN, Machine, Measured, Reading
from shardwise.errors import HardwareError
from shardwise.files import check_writable, write_whole
from shardwise.hardware.collectives import collective
from shardwise.hardware.layout import place
from shardwise.hardware.load import BY_KIND, FIGURES, canonical, known, load_profile
from shardwise.hardware.profile import MATRIX_TYPES, Profile
from shardwise.hardware.topology import Topology, topology

#: What is not measured comes from here where the kind of device is not known.
_STAND_INS: Final = {"cpu": "cpu", "gpu": "a100-40", "tpu": "v5e"}
#: What JAX takes of a GPU's memory unless told otherwise.
_TAKEN: Final = 0.75
#: Elements a second that no memory can keep up with.
_NO_MATTER: Final = 1e16
#: The share of a reading that a collective must have to show.
_SHOWS: Final = 0.02
#: How much more the smallest collectives count where latency is concerned.
_LATENCY_WEIGHT: Final = 10.0
#: The share of some pass that a term must have to be told from noise.
_SEEN: Final = 0.1
#: The median relative error above which passes are no ground for a fit.
_SCATTER: Final = 0.15


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured profile. ``data`` is laid out as the file is; ``figures`` are those that were timed, ``told`` those that the
    machine says of itself; the others are the base's."""

    data: dict[str, Any]
    base: str
    figures: frozenset[str]
    told: frozenset[str]
    measured: Measured
    #: The median relative error of the collectives' times under the fitted links; None where none were timed.
    links_error: float | None
    notes: tuple[str, ...]

    def toml(self) -> str:
        return to_toml(self.data)

    def write(self, path: str | os.PathLike[str]) -> Profile:
        """Writes the profile, checked, and gives it as it is read back. The file is complete or not there."""
        target = Path(path)
        check_output(target)
        write_whole(target, self.toml(), HardwareError, check=load_profile)
        return load_profile(str(target))


def check_output(path: Path) -> None:
    """Raises what ``write`` would, before minutes are spent on measuring."""
    if path.suffix != ".toml":
        raise HardwareError(f"cannot write {path}: the name of a hardware profile ends in .toml")
    check_writable(path, HardwareError)


def base_of(device_kind: str, platform: str) -> tuple[str, bool]:
    """The name of the profile to start from, and whether it is one of this kind of device.

    >>> base_of("NVIDIA H100 80GB HBM3", "gpu"), base_of("NVIDIA L4", "gpu"), base_of("TPU v5 lite", "tpu")
    (('h100', True), ('a100-40', False), ('v5e', True))
    """
    words = canonical(device_kind).replace("-sxm4", "").split("-")
    if platform != "cpu" and "mig" not in words:
        for count in range(len(words), 1, -1):
            if known(name := "-".join(words[:count])):
                return load_profile(name).name, True
    return _STAND_INS.get(platform, "cpu"), False


def calibrate(measured: Measured, name: str | None = None) -> Calibration:
    """A profile from readings.

    Args:
      measured: what ``shardwise.calibration.measure`` gives.
      name: of the profile; by default that of the profile it starts from, with ``-measured``.
    """
    machine, readings = measured.machine, measured.readings
    base_name, is_known = base_of(machine.device_kind, machine.platform)
    base = load_profile(base_name)
    notes = list(measured.notes)
    by_whom = f"shardwise hardware calibrate with jax {machine.jax} on {machine.device_kind}"
    passes = _fit_passes([r for r in readings if r.what == "memory"])
    links = _fit_links(_alone(readings), machine.devices, base)
    figures = _figures(readings, base, is_known, passes, links)
    told = _told(machine, base, is_known)
    sources = dict.fromkeys(figures, f"measured by {by_whom}") | dict.fromkeys(
        told, f"told by the machine to {by_whom}"
    )
    if figures.get("vector.elements_per_s") == _NO_MATTER:
        sources["vector.elements_per_s"] += ": no cost by the element was seen; a rate so high that it does not matter"
    if passes is None:
        notes.append(f"vector.elements_per_s is that of {base_name}: the passes' times scatter; is the machine busy?")
    if machine.platform == "gpu" and "memory.usable_share" not in told:
        notes.append(f"memory.usable_share is that of {base_name}, not the limit of this process")
    if machine.devices > 1 and links is None:
        notes.append(f"links were not measured: those of {base_name} have several tiers here")
    elif links and links.bytes_per_s is None:
        notes.append("the links' rate was not measured: times did not grow with bytes; is the machine busy?")
    title = f"{machine.device_kind} as measured ({machine.devices} device{'s' if machine.devices > 1 else ''} at once)"
    data = _compose(base, is_known, figures | told, sources, name or f"{base_name}-measured", title)
    error = links.error if links else None
    return Calibration(data, base_name, frozenset(figures), frozenset(told), measured, error, tuple(notes))


# From readings to figures.


def _fit(
    rows: Sequence[Sequence[float]], times: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[list[float], float]:
    """Coefficients, none negative, with which the rows' sums come nearest to the times, and the median relative error."""
    from scipy.optimize import nnls

    relative = np.array(rows) / np.array(times)[:, None]
    # Columns of like size, as times are 1e-5 and rates 1e10.
    sizes = np.maximum(np.abs(relative).max(0), 1e-300)
    weight = np.ones(len(rows)) if weights is None else np.array(weights)
    solved, _ = nnls(relative / sizes * weight[:, None], weight)
    found = solved / sizes
    return [float(x) for x in found], float(np.median(np.abs(relative @ found - 1)))


@dataclass(frozen=True, slots=True)
class _Passes:
    bytes_per_s: float
    #: None where no cost by the element was seen.
    elements_per_s: float | None


def _fit_passes(readings: Sequence[Reading]) -> _Passes | None:
    """What a byte and what an element costs in passes over arrays; None if they scatter too much to say."""
    times = [r.time_s for r in readings]
    # With one count of elements a round of the loop cannot be told from them: it is small.
    per_round = float(len({r.elements for r in readings}) > 1)
    (_, s_per_element, s_per_byte), error = _fit([[per_round, r.elements, r.work] for r in readings], times)
    if max(s_per_element * r.elements / r.time_s for r in readings) < _SEEN:
        (_, s_per_byte), error = _fit([[per_round, r.work] for r in readings], times)
        s_per_element = 0.0
    if error > _SCATTER or max(s_per_byte * r.work / r.time_s for r in readings) < _SEEN:
        return None
    return _Passes(1 / s_per_byte, 1 / s_per_element if s_per_element else None)


def _alone(readings: Sequence[Reading]) -> list[Reading]:
    """Collectives without the products between which they were read; those that do not show beside them are left out."""
    between_s = next((r.time_s for r in readings if r.what == "between"), 0.0)
    taken = ((r, r.time_s - between_s * r.between) for r in readings if r.what in KINDS)
    return [dataclasses.replace(r, time_s=left) for r, left in taken if left > _SHOWS * r.time_s]


@dataclass(frozen=True, slots=True)
class _Links:
    tier: str
    collective_s: float
    latency_s: float
    #: That of the fastest kind; None where no time grew with its bytes, which happens on a busy machine.
    bytes_per_s: float | None
    #: Of every kind whose times grew with its bytes, the share of that rate.
    shares: Mapping[str, float]
    error: float


def _fit_links(readings: Sequence[Reading], devices: int, base: Profile) -> _Links | None:
    """The links' figures under which the collectives' formulas come nearest to the readings; None if there are no readings or
    several tiers are used.

    Latency is what the small ones say, which were read between products: the large ones follow each other closely.

    The formulas are linear in (collective_s, latency_s, 1/(bytes_per_s·efficiency) of every kind): with the latter set to one
    and the first to zero, they give the other coefficients.
    """
    where = topology(f"{devices} {base.name}")
    if not readings or len({axis.tier for axis in where.axes}) != 1:
        return None
    unit = Topology(
        dataclasses.replace(base, collective_s=0.0, scatters=True, efficiency=()),
        where.text,
        tuple(dataclasses.replace(axis, bytes_per_s=1.0, latency_s=1.0) for axis in where.axes),
    )
    kinds = [kind for kind in KINDS if any(r.what == kind for r in readings)]
    rows = []
    for r in readings:
        group = r.group or devices
        cost = collective(r.what, ["d"], place({"other": devices // group, "d": group}, unit))
        rows.append([1.0, cost.alpha_s, *(cost.s_per_byte * r.work * (r.what == kind) for kind in kinds)])
    small = min(r.work for r in readings)
    weights = [_LATENCY_WEIGHT if r.work == small else 1.0 for r in readings]
    (fixed_s, latency_s, *per_byte), error = _fit(rows, [r.time_s for r in readings], weights)
    rates = {kind: 1 / s for kind, s in zip(kinds, per_byte, strict=True) if s > 0}
    rate = max(rates.values(), default=None)
    shares = {kind: own / rate for kind, own in rates.items()} if rate else {}
    return _Links(base.links[where.axes[0].tier].name, fixed_s, latency_s, rate, shares, error)


def _turned_rate(by_what: Mapping[str, list[Reading]]) -> float | None:
    """Bytes a second that explain what a pass takes longer if it reads one of its arrays the other way round."""
    if "turned" not in by_what:
        return None
    (straight,), (turned,) = by_what["straight"], by_what["turned"]
    more_s = turned.time_s - straight.time_s
    return 4 * turned.elements / more_s if more_s > _SEEN * straight.time_s else None


def _figures(
    readings: Iterable[Reading], base: Profile, is_known: bool, passes: _Passes | None, links: _Links | None
) -> dict[str, Any]:
    """Measured figures by their dotted keys."""
    by_what: dict[str, list[Reading]] = {}
    for reading in readings:
        by_what.setdefault(reading.what, []).append(reading)
    found = _matrix_figures(by_what, base, is_known)
    streams = [r.rate for r in by_what["memory"]]
    best = base.memory_bytes_per_s if is_known else max(streams)
    peak, found["memory.efficiency"] = _share(passes.bytes_per_s if passes else statistics.median(streams), best)
    if not is_known or peak != best:
        found["memory.bytes_per_s"] = peak
    if turned := _turned_rate(by_what):
        found["memory.turned_bytes_per_s"] = turned
    found["vector.flops_per_s"] = by_what["vector"][0].rate
    found["vector.transcendentals_per_s"] = by_what["transcendentals"][0].rate
    if passes:
        found["vector.elements_per_s"] = passes.elements_per_s or _NO_MATTER
    found["latency.launch_s"] = by_what["launch"][0].time_s
    if links:
        found["latency.collective_s"] = links.collective_s
        found[f"links.{links.tier}.latency_s"] = links.latency_s
        if links.bytes_per_s:
            found[f"links.{links.tier}.bytes_per_s"] = links.bytes_per_s
        found |= {f"efficiency.{kind}": share for kind, share in links.shares.items()}
    return found


def _matrix_figures(by_what: Mapping[str, list[Reading]], base: Profile, is_known: bool) -> dict[str, Any]:
    read = [t for t in MATRIX_TYPES if f"matrix.{t}" in by_what]
    typical = {t: statistics.median(r.rate for r in by_what[f"matrix.{t}"][-3:]) for t in read}
    peaks = dict(base.matrix_flops_per_s)
    main = "bf16" if is_known and "bf16" in typical and "bf16" in peaks else "f32"
    best = peaks[main] if is_known else max(r.rate for r in by_what[f"matrix.{main}"])
    peak, efficiency = _share(typical[main], best)
    found = {f"matrix.{t}": rate / efficiency for t, rate in typical.items() if t != main}
    if not is_known or peak != best:
        found[f"matrix.{main}"] = peak
    thin = [r for what in THIN for r in by_what.get(what, ())]
    rate = _operand_rate(thin, typical["f32"])
    return found | {"matrix.efficiency": efficiency} | ({"matrix.operand_bytes_per_s": rate} if rate else {})


def _operand_rate(thin: Sequence[Reading], flops_per_s: float) -> float | None:
    """Bytes of operands a second that explain what thin products take beside their FLOPs; None if there is nothing to say."""
    left = [(4 * r.elements / r.time_s, 1 - r.work / flops_per_s / r.time_s) for r in thin]
    s_per_byte = sum(b * rest for b, rest in left) / max(sum(b * b for b, _ in left), 1e-300)
    return 1 / s_per_byte if s_per_byte > 0 else None


def _share(rate: float, peak: float) -> tuple[float, float]:
    """The peak and the share of it that a rate is; a peak that is surpassed was none."""
    return (rate, 1.0) if rate > peak else (peak, rate / peak)


def _told(machine: Machine, base: Profile, is_known: bool) -> dict[str, Any]:
    """Figures that the machine says of itself."""
    clock: dict[str, Any] = {"clock_hz": machine.clock_hz} if machine.clock_hz else {}
    if machine.scatters is not None and not is_known:
        clock["reduce_scatter"] = int(machine.scatters)
    if machine.minor_copies is not None and not is_known:
        clock["minor_copies"] = int(machine.minor_copies)
    if not machine.memory_bytes:
        return clock
    if machine.platform == "gpu":
        taken = machine.memory_fraction or _TAKEN
        size = base.memory_bytes if is_known else round(machine.memory_bytes / taken)
        found: dict[str, Any] = {} if is_known else {"memory.bytes": size}
        if machine.memory_fraction:
            found["memory.usable_share"] = min(1.0, machine.memory_bytes / size)
        return clock | found
    if machine.platform == "cpu":
        return clock | {"memory.bytes": machine.memory_bytes}
    # libtpu refuses programs by a bound of its own, which the shipped profile has.
    return clock | ({} if is_known else {"memory.bytes": machine.memory_bytes, "memory.usable_share": 1.0})


# The file.


def _compose(
    base: Profile, is_known: bool, figures: Mapping[str, Any], sources: Mapping[str, str], name: str, title: str
) -> dict[str, Any]:
    """The data of a file that says everything itself: the base's figures, the measured ones over them, and all sources."""
    plain = base.to_json()
    matrix = plain["matrix"]
    data: dict[str, Any] = {
        "name": name,
        "title": title,
        **({"type_count": base.type_count} if base.type_count != 1 else {}),
        **({} if base.scatters else {"reduce_scatter": 0}),
        **({"minor_copies": 1} if base.minor_copies else {}),
        "clock_hz": base.clock_hz,
        "memory": {k: v for k, v in plain["memory"].items() if k != "usable_bytes"},
        "matrix": {**matrix["flops_per_s"], **{k: v for k, v in matrix.items() if k != "flops_per_s"}},
        "vector": plain["vector"],
        "latency": plain["latency"],
        **{table: plain[table] for table in BY_KIND if plain[table]},
        "links": plain["links"],
    }
    # What the base's file does not say follows from what it says: here it follows from what was measured.
    implied = {f.key for f in FIGURES if not f.required and base.source(f.key) == "not stated"}
    for part in ("matrix", "vector"):
        data[part] = {k: v for k, v in data[part].items() if f"{part}.{k}" not in implied}
    if not is_known:  # The rates of another device are further off than that of the next wider type.
        data["matrix"] = {k: v for k, v in data["matrix"].items() if k not in MATRIX_TYPES}
    for key, value in figures.items():
        *tables, leaf = key.split(".")
        if tables and tables[0] == "links":
            table = next(link for link in data["links"] if link["name"] == tables[1])
        else:
            table = data.setdefault(tables[0], {}) if tables else data
        table[leaf] = _rounded(value)
    data["sources"] = {
        key: sources.get(key, f"taken from profile {base.name}: {base.source(key)}") for key in _figure_keys(data)
    }
    return data


def _figure_keys(data: Mapping[str, Any]) -> Iterable[str]:
    yield from (key for key in ("reduce_scatter", "minor_copies", "clock_hz") if key in data)
    for table in ("memory", "matrix", "vector", "latency", *BY_KIND):
        yield from (f"{table}.{leaf}" for leaf in data.get(table, ()))
    for link in data["links"]:
        yield from (f"links.{link['name']}.{leaf}" for leaf in link if leaf not in ("name", "kind"))


def _rounded(value: float) -> float | int:
    """Four digits: no more is repeatable. Whole numbers stay."""
    return value if isinstance(value, int) or not math.isfinite(value) else float(f"{value:.4g}")


def to_toml(data: Mapping[str, Any]) -> str:
    """A profile's data as TOML: plain values, tables, lists of tables for links.

    >>> print(to_toml({"name": "x", "memory": {"bytes": 8}, "links": [{"name": "a b", "largest": [8]}]}))
    name = "x"
    <BLANKLINE>
    [memory]
    bytes = 8
    <BLANKLINE>
    [[links]]
    name = "a b"
    largest = [8]
    <BLANKLINE>
    """
    lines = [f"{key} = {_value(value)}" for key, value in data.items() if not _is_table(value)]
    for key, value in data.items():
        if _is_table(value):
            for table in value if isinstance(value, list) else [value]:
                lines += ["", f"[[{key}]]" if isinstance(value, list) else f"[{key}]"]
                lines += [f"{_key(leaf)} = {_value(v)}" for leaf, v in table.items()]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    # A JSON string, number or list of them is a TOML one too.
    return json.dumps(value, ensure_ascii=False)
