"""``shardwise hardware``: the profiles of devices and links, with their sources."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli import completers, options
from shardwise.report.units import si

if TYPE_CHECKING:
    from shardwise.calibration.calibrate import Calibration
    from shardwise.calibration.readings import Measured
    from shardwise.hardware.profile import LinkTier, Profile
    from shardwise.hardware.topology import Topology


def add_command(commands: Any) -> None:
    """Registers ``hardware list``, ``hardware show`` and ``hardware calibrate``."""
    hardware = commands.add_parser(
        "hardware",
        help="list the devices Shardwise knows, or show the figures of one with their sources",
        description="Profiles of devices and links: what planning assumes about the hardware, and where it is from.",
        formatter_class=options.Help,
    )
    actions = hardware.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = options.add_command(
        actions,
        "list",
        help="list all profiles, yours included",
        description="Lists all profiles: those that come with Shardwise, and those in SHARDWISE_HARDWARE_PATH.",
        examples="shardwise hardware list",
    )
    listing.set_defaults(run=_list)
    show = options.add_command(
        actions,
        "show",
        help="show every figure of a profile with its source, and the links of a topology",
        description="Shows every figure of a profile with its source, and the links of a topology.",
        examples="""
        shardwise hardware show v5e
        shardwise hardware show '2*v5e:16x16'
        """,
    )
    shown = "a name, a path to a .toml file, or a topology such as v5e:4x4"
    options.completed(show.add_argument("name", metavar="NAME", help=shown), completers.hardware)
    show.set_defaults(run=_show)
    calibrate = options.add_command(
        actions,
        "calibrate",
        help="measure this machine's devices and write a profile",
        description="Measures the devices that JAX has here (products, memory, elementwise work, kernels, collectives), all "
        "of them busy at once, and writes a hardware profile. Let nothing else run meanwhile.",
        examples="""
        shardwise hardware calibrate --name ours --devices 8 --readings ours.json
        shardwise hardware calibrate --name ours --from ours.json
        """,
    )
    calibrate.add_argument("--name", help="the profile's name (default: the kind of device with -measured)")
    options.completed(
        calibrate.add_argument(
            "--output", metavar="FILE.toml", type=Path, help="where it goes (default: NAME.toml, here)"
        ),
        completers.files("toml"),
    )
    calibrate.add_argument("--quick", action="store_true", help="coarse figures within 15 s rather than 90 s")
    calibrate.add_argument("--devices", metavar="N", type=int, help="use N devices; on a CPU make N host devices")
    options.completed(
        calibrate.add_argument("--readings", metavar="FILE.json", type=Path, help="keep what was read there as well"),
        completers.files("json"),
    )
    options.completed(
        calibrate.add_argument(
            "--from",
            dest="given",
            metavar="FILE.json",
            type=Path,
            nargs="+",
            help="measure nothing: make a profile of readings that were kept, of several the fastest",
        ),
        completers.files("json"),
    )
    calibrate.set_defaults(run=_calibrate)
    for action in (listing, show, calibrate):
        options.add_json(action)
    options.add_loudness(calibrate, "say what is measured, terminal or not")


def _list(arguments: argparse.Namespace) -> str:
    from shardwise.hardware.load import profiles

    found, problems = profiles()
    if arguments.json:
        data = {"schema": 1, "profiles": [p.to_json() for p in found], "problems": list(problems)}
        return json.dumps(data, indent=2) + "\n"
    return list_text(found, problems)


def list_text(found: tuple[Profile, ...], problems: tuple[str, ...]) -> str:
    """One line a profile, 80 columns wide unless names are long. Figures are those of one device."""
    rows = [("name", "memory", "16-bit peak", "bandwidth", "links (GB/s one way)")]
    for profile in found:
        rates = dict(profile.matrix_flops_per_s)
        kind = next((t for t in ("bf16", "f16") if t in rates), "f32")
        links = ", ".join(_tier_text(tier) for tier in profile.links)
        rows.append(
            (
                profile.name,
                _size(profile.memory_bytes),
                f"{si(rates[kind])} {kind}",
                si(profile.memory_bytes_per_s, "B/s"),
                links,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]]) for row in rows]
    return "".join(f"{line.rstrip()}\n" for line in lines) + "".join(f"\n{problem}\n" for problem in problems)


def _tier_text(tier: LinkTier) -> str:
    members = tier.size or (tier.largest[0] if tier.largest else 0)
    shape = f" {tier.dims}-D" if tier.kind == "torus" else f"×{members}" if members else ""
    return f"{tier.name}{shape} {tier.bytes_per_s / 1e9:.3g}"


def _show(arguments: argparse.Namespace) -> str:
    from shardwise.hardware.load import is_known_name, load_profile
    from shardwise.hardware.topology import topology

    place = None if is_known_name(arguments.name) else topology(arguments.name)
    profile = place.profile if place else load_profile(arguments.name)
    if arguments.json:
        data = profile.to_json() | ({"topology": place.to_json()} if place else {})
        return json.dumps(data, indent=2) + "\n"
    return show_text(profile, place, options.terminal_width())


def show_text(profile: Profile, place: Topology | None = None, width: int = 80) -> str:
    """Every figure, with the number of its source in the list below."""
    from shardwise.report.wrapping import wrapped

    cited: dict[str, int] = {}
    lines = [f"{profile.title} ({profile.name})"]
    if profile.aliases:
        lines.append(f"also called {', '.join(profile.aliases)}")
    lines += [f"read from {profile.file}", ""]
    if place:
        lines += [f"topology {place}", *(f"  {line}" for line in _axis_lines(place)), ""]
    for figure, value in _figures(profile):
        source = profile.source(figure)
        lines.append(f"{figure:30} {value:24} [{cited.setdefault(source, len(cited) + 1)}]")
    lines += ["", "Sources", *(f"[{number}] {source}" for source, number in cited.items())]
    return wrapped("\n".join(lines), width)


def _axis_lines(place: Topology) -> list[str]:
    lines = []
    for axis in place.axes:
        kind = ("ring" if axis.wrap else "line") if axis.kind == "torus" else "switch"
        link = place.profile.links[axis.tier].name
        lines.append(f"{axis.name:12} {axis.size:4}  {link}, {kind}, {si(axis.bytes_per_s, 'B/s')} one way a device")
    return lines


def _figures(profile: Profile) -> list[tuple[str, str]]:
    from shardwise.hardware.load import BY_KIND

    tile = "×".join
    rows = [
        ("clock_hz", si(profile.clock_hz, "Hz")),
        ("memory.bytes", _size(profile.memory_bytes)),
        ("memory.usable_share", f"{profile.usable_share:g} ({_size(profile.usable_bytes)})"),
        ("memory.bytes_per_s", si(profile.memory_bytes_per_s, "B/s")),
        ("memory.efficiency", f"{profile.memory_efficiency:g}"),
        *([("memory.transposed_bytes_per_s", si(profile.transposed_bytes_per_s, "B/s"))] if profile.transposes else []),
        *((f"matrix.{t}", si(rate, "FLOP/s")) for t, rate in profile.matrix_flops_per_s),
        ("matrix.efficiency", f"{profile.matrix_efficiency:g}"),
        *(
            [("matrix.operand_bytes_per_s", si(rate, "B/s"))]
            if (rate := profile.operand_bytes_per_s) < math.inf
            else []
        ),
        ("matrix.tile", tile(map(str, profile.matrix_tile))),
        ("vector.flops_per_s", si(profile.vector_flops_per_s, "FLOP/s")),
        ("vector.transcendentals_per_s", si(profile.transcendentals_per_s, "/s")),
        ("vector.elements_per_s", si(profile.elements_per_s, "/s")),
        ("vector.tile", tile(map(str, profile.vector_tile))),
        ("latency.launch_s", _time(profile.launch_s)),
        ("latency.collective_s", _time(profile.collective_s)),
        *([] if profile.scatters else [("reduce_scatter", "none: all-reduce, slice")]),
        *([("rings", "late reduce-scatters")] if profile.rings else []),
        *([("rounds", "float32 products read bfloat16")] if profile.rounds else []),
        *([("minor_copies", "around gathers")] if profile.minor_copies else []),
        *((f"{table}.{kind}", f"{v:g}") for table in BY_KIND for kind, v in getattr(profile, table)),
    ]
    for tier in profile.links:
        where = f"links.{tier.name}."
        rows.append((where + "bytes_per_s", si(tier.bytes_per_s, "B/s")))
        rows.append((where + "latency_s", _time(tier.latency_s)))
        if tier.kind == "torus":
            rows.append((where + "wrap", tier.wrap))
        if tier.size:
            rows.append((where + "size", str(tier.size)))
        if tier.largest:
            rows.append((where + "largest", tile(map(str, tier.largest))))
    return rows


def _calibrate(arguments: argparse.Namespace) -> str:
    from shardwise.calibration.calibrate import calibrate, check_output
    from shardwise.calibration.readings import fastest, read_measured

    flag = "--xla_force_host_platform_device_count"
    if (arguments.devices or 0) > 1 and flag not in os.environ.get("XLA_FLAGS", ""):
        # Read when JAX first looks for devices; other platforms do not mind.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={arguments.devices}".strip()
    if arguments.name or arguments.output:
        check_output(arguments.output or Path(f"{arguments.name}.toml"))
    else:
        check_output(Path("measured.toml"))

    measured = fastest(*map(read_measured, arguments.given)) if arguments.given else _measured(arguments)
    found = calibrate(measured, arguments.name or (arguments.output and arguments.output.stem))
    path = arguments.output or Path(f"{found.data['name']}.toml")
    profile = found.write(path)
    if not arguments.json:
        return calibration_text(found, profile, path)
    data = {
        "device_kind": measured.machine.device_kind,
        "devices": measured.machine.devices,
        "jax": measured.machine.jax,
        "base": found.base,
        "figures": sorted(found.figures),
        "time_s": measured.time_s,
        "links_error": found.links_error,
        "notes": list(found.notes),
        "readings": [dataclasses.asdict(r) | {"rate": r.rate} for r in measured.readings],
    }
    return json.dumps(profile.to_json() | {"measured": data}, indent=2) + "\n"


def _measured(arguments: argparse.Namespace) -> Measured:
    from shardwise.errors import HardwareError
    from shardwise.files import check_writable, write_whole

    if arguments.readings:
        check_writable(arguments.readings, HardwareError)

    from shardwise.calibration.measure import measure  # brings JAX

    def say(what: str) -> None:
        if sys.stderr is not None and (arguments.verbose or (not arguments.quiet and sys.stderr.isatty())):
            print(f"measuring {what} ...", file=sys.stderr)

    measured = measure(arguments.devices, arguments.quick, say=say)
    if arguments.readings:
        write_whole(arguments.readings, json.dumps(measured.to_json(), indent=1) + "\n", HardwareError)
    return measured


def calibration_text(found: Calibration, profile: Profile, path: Path) -> str:
    """What was measured and what was not, then where the file is and how it is used; 80 columns unless names are long."""
    machine = found.measured.machine
    count = f"{machine.devices} device{'s' if machine.devices > 1 else ''}"
    time_s = found.measured.time_s
    lines = [f"{machine.device_kind}: {count}, all busy at once, jax {machine.jax}, {time_s:.0f} s", ""]
    for figure, value in _figures(profile):
        timed, reported = figure in found.figures, figure in found.reported
        origin = "measured" if timed else "reported by the machine" if reported else f"from profile {found.base}"
        lines.append(f"{figure:30} {value:24} {origin}")
    if found.links_error is not None:
        lines += [
            "",
            f"Collectives are off by {found.links_error:.0%} from the fitted links (the median of all sizes).",
        ]
    for note in found.notes:
        lines += textwrap.wrap(f"Note: {note}", 80, subsequent_indent="  ")
    folder = path.resolve().parent
    lines += [
        "",
        f"Written to {path}. Use it by its path, or by its name:",
        f"  --topology {path}:{machine.devices}",
        f"  SHARDWISE_HARDWARE_PATH={folder}  --topology {profile.name}:{machine.devices}",
    ]
    return "\n".join(lines) + "\n"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.4g} GiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} µs"
