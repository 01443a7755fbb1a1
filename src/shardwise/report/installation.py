"""What is installed, and whether it works: the facts behind ``shardwise doctor``.

Requirements and extras are read from the metadata of the installed package. JAX is asked for its devices, and a tiny plan is
made, in another process: a backend may abort or hang. This module needs nothing but Python, as it says what else is missing.
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
_EXTRAS: Final = ("tpu", "zoo", "recipes", "programs")
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
    needed = {**dict.fromkeys(_SHOWN, ""), **dict(_requirements("shardwise"))}
    packages = [{"name": name, "version": _version(name), "wanted": wanted} for name, wanted in needed.items()]
    extras = [
        {"name": name, "missing": _missing(required), "install": f'pip install "shardwise[{name}]"'}
        for name in _EXTRAS
        if (required := _requirements("shardwise", name))
    ]
    problems = []
    if sys.version_info < _PYTHON:
        problems.append(f"Python is {python}, and {'.'.join(map(str, _PYTHON))} or newer is needed")
    for name in _missing(needed.items()):
        state = f"is {version}" if (version := _version(name)) else "is missing"
        problems.append(f'{name} {state}: pip install "{name}{needed[name]}"')
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


def _requires(package: str) -> list[str]:
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def _requirements(package: str, extra: str = "") -> list[tuple[str, str]]:
    """(name, specifier) of what a package requires, always or for an extra. ``a[b]`` includes what a requires for b."""
    requirements: list[tuple[str, str]] = []
    for line in _requires(package):
        requirement, _, marker = line.partition(";")
        named = re.search(r"""extra\s*==\s*["']([^"']+)""", marker)
        parts = re.match(r"\s*([\w.-]+)(?:\[([\w.,-]+)\])?\s*(.*)", requirement)
        if parts is not None and (named[1] if named else "") == extra:
            name, inner, specifier = parts.groups()
            requirements.append((name, specifier.strip(" ()")))
            for more in inner.split(",") if inner else []:
                requirements += _requirements(name, more)
    return requirements


def _missing(requirements: Any) -> list[str]:
    return [name for name, wanted in requirements if not (v := _version(name)) or not _satisfies(v, wanted)]


def _satisfies(version: str, wanted: str) -> bool:
    """Checks lower and upper bounds; pip takes care of the rest of a specifier.

    >>> _satisfies("0.10.2", ">=0.9"), _satisfies("0.8.1", ">=0.9"), _satisfies("0.9", ">=0.9,<0.9")
    (True, False, False)
    """
    have = _numbers(version)
    bounds = re.findall(r"(>=|<(?!=))\s*([\w.]+)", wanted)
    return all(have >= _numbers(v) if sign == ">=" else have < _numbers(v) for sign, v in bounds)


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("0.9.0"), _numbers("0.10.2.dev3+cpu")
    ((0, 9), (0, 10, 2))
    """
    release = re.sub(r"(\.0)+$", "", re.match(r"[\d.]*\d|", version)[0])  # type: ignore[index]
    return tuple(map(int, filter(None, release.split("."))))


def _memory_bytes() -> int:
    """Zero where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
