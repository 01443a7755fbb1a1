"""``shardwise hardware``: the profiles of devices and links, with their sources."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.cli import options
from shardwise.cli.options import Result, argument, flag
from shardwise.hardware.profile import MATRIX_TYPES
from shardwise.units import si

if TYPE_CHECKING:
    from shardwise.hardware.profile import LinkTier, Profile
    from shardwise.hardware.topology import Topology

#: Units of figures, by the end of their key.
_UNITS: Final = {"bytes_per_s": "B/s", "flops_per_s": "FLOP/s", "_per_s": "/s", "hz": "Hz"} | dict.fromkeys(
    MATRIX_TYPES, "FLOP/s"
)
#: Parts of a profile that are no figures.
_UNSHOWN: Final = ("schema", "file", "name", "title", "aliases", "base", "kind", "dims")


@options.command("list", options.JSON)
def _list(arguments: argparse.Namespace) -> Result:
    """List all profiles: those that come with Shardwise, and those in SHARDWISE_HARDWARE_PATH.

    shardwise hardware list
    """
    from shardwise.hardware.load import profiles
    from shardwise.report.page import Page

    loaded, problems = profiles()
    if arguments.json:
        return {"schema": 1, "profiles": [_data(p) for p in loaded], "problems": list(problems)}
    rows = []
    for p in loaded:
        rates = dict(p.matrix_flops_per_s)
        kind = next((t for t in ("bf16", "f16") if t in rates), "f32")
        rate, links = f"{si(rates[kind])} {kind}", ", ".join(_tier_text(tier) for tier in p.links)
        rows.append([p.name, _value("bytes", p.memory_bytes), rate, si(p.memory_bytes_per_s, "B/s"), links])
    page = Page(options.width())
    page.table(["name", "memory", "16-bit peak", "bandwidth", "*links (GB/s one way)"], rows)
    return page.text() + "".join(f"\n{problem}\n" for problem in problems)


def _data(profile: Profile) -> dict[str, Any]:
    """Returns the profile in the layout of its file."""
    from shardwise.hardware.load import profile_data

    return {"schema": 1, "file": profile.file} | profile_data(profile.file)


def _tier_text(tier: LinkTier) -> str:
    members = tier.size or (tier.largest[0] if tier.largest else 0)
    shape = f" {tier.dims}-D" if tier.kind == "torus" else f"×{members}" if members else ""
    return f"{tier.name}{shape} {tier.bytes_per_s / 1e9:.3g}"


@options.command(
    "show",
    argument("name", metavar="NAME", help="a name, a path to a .toml file, or a topology such as v5e:4x4"),
    options.JSON,
)
def _show(arguments: argparse.Namespace) -> Result:
    """Show every figure of a profile with its source, and the links of a topology.

    shardwise hardware show v5e
    shardwise hardware show '2*v5e:16x16'
    """
    from shardwise.hardware.load import is_known_name, load_profile
    from shardwise.hardware.topology import topology

    place = None if is_known_name(arguments.name) else topology(arguments.name)
    profile = place.profile if place else load_profile(arguments.name)
    if arguments.json:
        return _data(profile) | ({"topology": dataclasses.asdict(place) | {"profile": profile.name}} if place else {})
    lines = [f"topology {place}", *(f"  {line}" for line in _axis_lines(place)), ""] if place else []
    return _profile_text(profile, lines)


def _profile_text(profile: Profile, more: list[str]) -> str:
    """Returns every figure of a profile with its source."""
    from shardwise.units import wrapped

    lines = [f"{profile.title} ({profile.name})"]
    if profile.aliases:
        lines.append(f"also called {', '.join(profile.aliases)}")
    lines += [f"read from {profile.file}", "", *more]
    cited: dict[str, int] = {}
    for figure, value in figures(_data(profile)):
        number = cited.setdefault(profile.source(figure), len(cited) + 1)
        lines.append(f"{figure:30} {value:24} [{number}]")
    lines += ["", "Sources", *(f"[{number}] {source}" for source, number in cited.items())]
    return wrapped("\n".join(lines), options.width())


def _axis_lines(place: Topology) -> list[str]:
    lines = []
    for axis in place.axes:
        kind = ("ring" if axis.wrap else "line") if axis.kind == "torus" else "switch"
        link = place.profile.links[axis.tier].name
        lines.append(f"{axis.name:12} {axis.size:4}  {link}, {kind}, {si(axis.bytes_per_s, 'B/s')} one way a device")
    return lines


def figures(data: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the figures of a profile in the layout of its file, each with its key and unit."""
    from shardwise.hardware.load import figures_of

    ordered = sorted(figures_of(data), key=lambda figure: (figure[0].startswith("links."), "." in figure[0]))
    leaves = [(key, key.rpartition(".")[2], value) for key, value in ordered]
    return [(key, _value(leaf, value)) for key, leaf, value in leaves if leaf not in _UNSHOWN]


def _value(key: str, value: Any) -> str:
    """
    >>> _value("launch_s", 2e-6), _value("f32", 1.97e14), _value("tile", [8, 128]), _value("efficiency", 0.8)
    ('2 µs', '197 TFLOP/s', '8×128', '0.8')
    """
    if isinstance(value, list):
        return "×".join(map(str, value))
    if key == "bytes":
        return f"{value / 2**30:.4g} GiB"
    for end, unit in _UNITS.items():
        if key.endswith(end):
            return si(value, unit)
    return f"{value * 1e6:.4g} µs" if key.endswith("_s") else value if isinstance(value, str) else f"{value:g}"


@options.command(
    "calibrate",
    argument("--name", help="the profile's name (default: the kind of device with -measured)"),
    argument("--output", metavar="FILE.toml", type=Path, help="where it goes (default: NAME.toml, here)"),
    argument("--devices", metavar="N", type=int, help="use N devices; on a CPU make N host devices"),
    options.JSON,
    options.QUIET,
    flag("--verbose", "say what is measured, terminal or not; the full traceback where something fails"),
    accelerators=True,
)
def _calibrate(arguments: argparse.Namespace) -> Result:
    """Measure this machine's devices and write a profile.

    Products, memory, elementwise work, kernels and collectives are timed on all devices at once. Let nothing
    else run meanwhile.

      shardwise hardware calibrate --name ours --devices 8
    """
    from shardwise.calibration.calibrate import calibrate, check_output

    flag = "--xla_force_host_platform_device_count"
    if (arguments.devices or 0) > 1 and flag not in os.environ.get("XLA_FLAGS", ""):
        # Read when JAX first looks for devices; other platforms do not mind.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={arguments.devices}".strip()
    check_output(arguments.output or Path(f"{arguments.name or 'measured'}.toml"))

    from shardwise.calibration.measure import measure  # imports JAX

    def say(what: str) -> None:
        if sys.stderr is not None and (arguments.verbose or (not arguments.quiet and sys.stderr.isatty())):
            print(f"measuring {what} ...", file=sys.stderr)

    measured = measure(arguments.devices, say=say)
    calibration = calibrate(measured, arguments.name or (arguments.output and arguments.output.stem))
    path = arguments.output or Path(f"{calibration.data['name']}.toml")
    profile = calibration.write(path)
    if arguments.json:
        return _data(profile) | {"measured": dataclasses.asdict(measured), "links_error": calibration.links_error}
    count = measured.machine.devices
    notes = [f"all {count} devices busy at once, {measured.time_s:.0f} s"]
    if calibration.links_error is not None:
        notes.append(f"median error of the collectives' times under the fitted links: {calibration.links_error:.0%}")
    notes += [f"note: {note}" for note in calibration.notes]
    return _profile_text(profile, [*notes, ""]) + (
        f"\nWritten to {path}. Use it by its path, or by its name:\n  --topology {path}:{count}\n"
        f"  SHARDWISE_HARDWARE_PATH={path.resolve().parent}  --topology {profile.name}:{count}\n"
    )
