"""What is installed, and whether it works: the facts behind ``shardwise doctor``.

JAX is asked for its devices, and a tiny plan is made, in another process: a backend may abort or hang. This module needs
nothing but Python, as it says what else is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from typing import Any, Final

import shardwise
from shardwise.report.units import binary, plural, seconds, wrapped

#: Shown even if no requirement names them.
_SHOWN: Final = ("jax", "jaxlib", "numpy", "scipy")
_TESTED_JAX: Final = "tested from 0.9.0 to 0.12"
_PYTHON: Final = (3, 11)
#: Packages of the extras that commands use.
_EXTRAS: Final = {"tpu": ("libtpu",), "zoo": ("flax", "optax")}
_TIMEOUT_S: Final = 120.0

_PROBE: Final = """
import json, jax
devices = jax.devices()
print(json.dumps({"devices": [[d.platform, d.device_kind] for d in devices]}), flush=True)
import jax.numpy as jnp, numpy, shardwise
step = lambda w, x: jnp.tanh(x @ w)
arguments = jnp.eye(16), jnp.ones((8 * len(devices), 16))
made = shardwise.plan(step, *arguments, mesh={"data": len(devices)}, budget_evals=20)
same = numpy.allclose(made.jit(step)(*arguments), step(*arguments), atol=1e-2)
print(json.dumps({"works": bool(same)}), flush=True)
"""


def examine() -> dict[str, Any]:
    """Versions, devices, extras and problems of this installation, as plain data; takes some seconds."""
    python = sys.version.split()[0]
    needed = {**dict.fromkeys(_SHOWN, ""), **_requirements()}
    packages = [{"name": name, "version": _version(name), "wanted": wanted} for name, wanted in needed.items()]
    extras = [
        {
            "name": name,
            "missing": [package for package in required if not _version(package)],
            "install": f'pip install "shardwise[{name}]"',
        }
        for name, required in _EXTRAS.items()
    ]
    problems = []
    if sys.version_info < _PYTHON:
        problems.append(f"Python is {python}, and {'.'.join(map(str, _PYTHON))} or newer is needed")
    for name, wanted in needed.items():
        version = _version(name)
        if not version or _numbers(version) < _numbers(wanted):
            problems.append(f'{name} {f"is {version}" if version else "is missing"}: pip install "{name}{wanted}"')
    devices, problem, time_s = probe() if all(map(_version, needed)) else ([], "", 0.0)
    return {
        "schema": 1,
        "shardwise": shardwise.__version__,
        "python": python,
        "jax_range": ", ".join(filter(None, (needed["jax"], _TESTED_JAX))),
        "packages": packages,
        "extras": extras,
        "devices": [{"platform": platform, "kind": kind} for platform, kind in devices],
        "works": bool(devices) and not problem,
        "time_s": time_s,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": _memory_bytes(),
        "problems": [*problems, *filter(None, [problem])],
    }


def doctor_text(data: dict[str, Any], width: int = 80) -> str:
    """One fact per line, then the problems. Without Rich, which may be what is missing."""
    lines = [f"shardwise  {data['shardwise']}", f"python     {data['python']}"]
    for package in data["packages"]:
        wanted = data["jax_range"] if package["name"] == "jax" else package["wanted"]
        lines.append(f"{package['name']:10} {package['version'] or 'missing':10} {wanted}".rstrip())
    kinds = Counter((device["kind"], device["platform"]) for device in data["devices"])
    devices = ", ".join(f"{count} × {kind} ({platform})" for (kind, platform), count in kinds.items()) or "not known"
    platforms = os.environ.get("JAX_PLATFORMS")
    lines += [
        "",
        f"devices    {devices}{f', JAX_PLATFORMS={platforms}' if platforms else ''}",
        f"machine    {plural(data['cores'], 'core')}, {binary(data['memory_bytes'])}",
        "",
    ]
    for extra in data["extras"]:
        missing = ", ".join(extra["missing"])
        state = f"{missing} missing: {extra['install']}" if missing else "installed"
        lines.append(f"extra {extra['name']:9} {state}")
    works = f"a tiny plan was made, compiled and run: all well ({seconds(data['time_s'])})"
    lines += ["", *([f"problem: {problem}" for problem in data["problems"]] or [works])]
    return wrapped("\n".join(lines), width)


def probe(
    command: tuple[str, ...] = (sys.executable, "-P", "-c", _PROBE), timeout_s: float = _TIMEOUT_S
) -> tuple[list[tuple[str, str]], str, float]:
    """Lets another process ask JAX for its devices and make, compile and run a tiny plan. Returns (platform, kind) of each
    device, the problem if there was one, and the seconds it took."""
    started = time.perf_counter()
    # A GPU that another process uses has little memory left.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    options: dict[str, Any] = {"env": environment, "capture_output": True, "check": False, "timeout": timeout_s}
    try:
        done = subprocess.run(command, **options)
        out, code, error = done.stdout, done.returncode, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        out, code, error = late.stdout or b"", 1, f"no answer within {timeout_s:g} s"
    answer: dict[str, Any] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            answer |= json.loads(line) if line.startswith(b"{") else {}
    devices = [(str(platform), str(kind)) for platform, kind in answer.get("devices", ())]
    problem = ""
    if code or "works" not in answer:
        what = "a tiny plan cannot be made and run here" if devices else "JAX cannot start"
        problem = f"{what}: {_reason(code, error)}"
    elif not answer["works"]:
        problem = "a tiny plan gave other numbers than the plain program"
    return devices, problem, time.perf_counter() - started


def _reason(code: int, error: str) -> str:
    """Why a process failed: its signal, or the exception at the end of its traceback."""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    lines = [line for line in error.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or [f"exit code {code}"])[-1]


def _version(name: str) -> str:
    """The installed version of a package, empty if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _requirements() -> dict[str, str]:
    """The lower bounds of versions that Shardwise requires, such as ``{"jax": ">=0.9"}``."""
    try:
        lines = metadata.requires("shardwise") or []
    except metadata.PackageNotFoundError:
        return {}
    return dict(re.findall(r"^([\w.-]+)(.*)$", "\n".join(line for line in lines if "extra" not in line), re.M))


def _numbers(version: str) -> list[int]:
    """
    >>> _numbers("0.10.2.dev3+cpu") >= _numbers(">=0.9"), _numbers("0.8.1") >= _numbers(">=0.9")
    (True, False)
    """
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _memory_bytes() -> int:
    """Zero where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
