"""``shardwise doctor``: what is installed here, and whether it works."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import shardwise
from shardwise.cli import options
from shardwise.cli.answer import Answer
from shardwise.report.units import binary, plural, seconds

if TYPE_CHECKING:
    from shardwise.report.installation import Installation


def add_command(commands: Any) -> None:
    """Registers ``doctor``."""
    doctor = options.add_command(
        commands,
        "doctor",
        help="say what is installed on this machine, what is missing, and whether planning works",
        description="Shows versions, the devices that JAX sees, extras, cores and memory, and makes, compiles and runs a tiny "
        "plan. The exit code is 1 if something that is needed is missing or does not work.",
        examples="shardwise doctor --json",
    )
    options.add_json(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> Answer:
    from shardwise.report.installation import examine

    found = examine()
    text = json.dumps(found.to_json(), indent=2) + "\n" if arguments.json else doctor_text(found)
    return Answer(text, 1 if found.problems else 0)


def doctor_text(found: Installation, width: int = 80) -> str:
    """A line each, then what is wrong. Without Rich, which may be what is missing."""
    from shardwise.report.wrapping import wrapped

    lines = [f"shardwise  {shardwise.__version__}", f"python     {found.python}"]
    for package in found.packages:
        wanted = found.jax_range if package.name == "jax" else package.wanted
        lines.append(f"{package.name:10} {package.version or 'missing':10} {wanted}".rstrip())
    kinds = Counter(found.probed.devices)
    devices = ", ".join(f"{count} × {kind} ({platform})" for (platform, kind), count in kinds.items()) or "not known"
    platforms = os.environ.get("JAX_PLATFORMS")
    lines += [
        "",
        f"devices    {devices}{f', JAX_PLATFORMS={platforms}' if platforms else ''}",
        f"machine    {plural(found.cores, 'core')}, {binary(found.memory_bytes)}",
        "",
    ]
    for extra in found.extras:
        state = f"{', '.join(extra.missing)} missing: {extra.install}" if extra.missing else "there"
        lines.append(f"extra {extra.name:9} {state}")
    if found.extras:
        lines.append("")
    if found.problems:
        lines += [f"problem: {problem}" for problem in found.problems]
    else:
        lines.append(f"a tiny plan was made, compiled and run: all well ({seconds(found.probed.time_s)})")
    return wrapped("\n".join(lines), width)
