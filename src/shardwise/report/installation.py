"""What is installed, and whether it works: the facts behind ``shardwise doctor``.

Another process asks JAX for its devices and makes a tiny plan, since a backend may abort or hang. This module needs nothing
but Python: it reports what else is missing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata
from typing import Any, Final

import shardwise
from shardwise.units import wrapped

#: Shown even if no requirement names them.
_SHOWN: Final = ("jax", "jaxlib", "numpy", "scipy")
_TESTED_JAX: Final = "tested from 0.9.0 to 0.12"
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
plan = shardwise.plan(step, *arguments, mesh={"data": len(devices)}, budget_evals=20)
same = numpy.allclose(plan.jit(step)(*arguments), step(*arguments), atol=1e-2)
print(json.dumps({"works": bool(same)}), flush=True)
"""


def examine() -> dict[str, Any]:
    """Versions, devices, extras and problems of this installation, as plain data; takes some seconds."""
    needed = {**dict.fromkeys(_SHOWN, ""), **_requirements()}
    versions = {name: _version(name) for name in needed}
    problems = [
        f'{name} {f"is {versions[name]}" if versions[name] else "is missing"}: pip install "{name}{wanted}"'
        for name, wanted in needed.items()
        if not versions[name] or _numbers(versions[name]) < _numbers(wanted)
    ]
    devices, problem = probe() if all(versions.values()) else ([], "")
    return {
        "schema": 1,
        "shardwise": shardwise.__version__,
        "python": sys.version.split()[0],
        "packages": [{"name": name, "version": versions[name], "wanted": wanted} for name, wanted in needed.items()],
        "extras": {name: [p for p in required if not _version(p)] for name, required in _EXTRAS.items()},
        "devices": [{"platform": platform, "kind": kind} for platform, kind in devices],
        "works": bool(devices) and not problem,
        "problems": [*problems, *filter(None, [problem])],
    }


def doctor_text(data: dict[str, Any], width: int = 80) -> str:
    """Returns one fact per line, then the problems. Rich, which may be missing, is not used."""
    lines = [f"shardwise   {data['shardwise']}", f"python      {data['python']}"]
    for package in data["packages"]:
        tested = f", {_TESTED_JAX}" if package["name"] == "jax" else ""
        lines.append(f"{package['name']:11} {package['version'] or 'missing':10} {package['wanted']}{tested}".rstrip())
    kinds = Counter((device["kind"], device["platform"]) for device in data["devices"])
    devices = ", ".join(f"{count} × {kind} ({platform})" for (kind, platform), count in kinds.items()) or "not known"
    platforms = os.environ.get("JAX_PLATFORMS")
    lines += ["", f"devices     {devices}{f', JAX_PLATFORMS={platforms}' if platforms else ''}", ""]
    for name, missing in data["extras"].items():
        state = f'{", ".join(missing)} missing: pip install "shardwise[{name}]"' if missing else "installed"
        lines.append(f"extra {name:9} {state}")
    works = ["a tiny plan was made, compiled and run: all well"]
    lines += ["", *([f"problem: {problem}" for problem in data["problems"]] or works)]
    return wrapped("\n".join(lines), width)


def probe(
    command: tuple[str, ...] = (sys.executable, "-P", "-c", _PROBE), timeout_s: float = _TIMEOUT_S
) -> tuple[list[tuple[str, str]], str]:
    """Lets another process ask JAX for its devices and make, compile and run a tiny plan. Returns (platform, kind) of each
    device, and the problem if there was one."""
    # A GPU that another process uses has little memory left.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=timeout_s)
        out, code, error = done.stdout, done.returncode, done.stderr.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        out, code, error = late.stdout or b"", 1, f"no answer within {timeout_s:g} s"
    answer: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith(b'{"'):
            answer |= json.loads(line)
    devices = [(str(platform), str(kind)) for platform, kind in answer.get("devices", ())]
    if code or "works" not in answer:
        what = "a tiny plan cannot be made and run here" if devices else "JAX cannot start"
        lines = [line for line in error.splitlines() if line.strip()] or [""]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)] or lines
        return devices, f"{what}: {f'ended by signal {-code}' if code < 0 else errors[-1]}"
    return devices, "" if answer["works"] else "a tiny plan gave other numbers than the plain program"


def _version(name: str) -> str:
    """Returns the installed version of a package, empty if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _requirements() -> dict[str, str]:
    """Returns the lower bounds of versions that Shardwise requires, such as ``{"jax": ">=0.9"}``."""
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
