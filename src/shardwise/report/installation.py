"""What is installed, and whether it works: the facts behind ``shardwise doctor``.

What must be there and what the extras are is read from the metadata of the installed package, which pip made from
``pyproject.toml``. Devices are asked for, and the tiny plan is made, in a process of its own: a backend that aborts or hangs
takes nobody along. This module needs nothing but Python: it is there to say what else is missing.
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
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Final

import shardwise

#: Shown even if no requirement names them.
_SHOWN: Final = ("jax", "jaxlib", "numpy", "scipy")
_TESTED_JAX: Final = "tested from 0.9.0 to 0.12"
_PYTHON: Final = (3, 11)
_EXTRAS: Final = ("tpu", "zoo", "recipes", "programs")
_PATIENCE_S: Final = 120.0

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


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is needed: its version, empty where it is missing, and what is ``wanted`` of it."""

    name: str
    version: str
    wanted: str

    @property
    def problem(self) -> str:
        if not self.version:
            return f'{self.name} is missing: pip install "{self.name}{self.wanted}"'
        if not _satisfies(self.version, self.wanted):
            return f'{self.name} is {self.version}: pip install "{self.name}{self.wanted}"'
        return ""


@dataclass(frozen=True, slots=True)
class Extra:
    """An optional set of packages, and those of it that are missing."""

    name: str
    missing: tuple[str, ...]

    @property
    def install(self) -> str:
        return f'pip install "shardwise[{self.name}]"'


@dataclass(frozen=True, slots=True)
class Probed:
    """What came of asking JAX: (platform, kind) of each device, ``trouble`` if that or the tiny plan failed. Nothing was asked
    where packages are missing."""

    devices: tuple[tuple[str, str], ...]
    trouble: str
    time_s: float


@dataclass(frozen=True, slots=True)
class Installation:
    """Everything. ``cores`` and ``memory_bytes`` are what this process may use and what the machine has."""

    python: str
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    probed: Probed
    cores: int
    memory_bytes: int

    @property
    def problems(self) -> tuple[str, ...]:
        """What is needed and is not there or does not work."""
        found = [p.problem for p in self.packages if p.problem]
        if sys.version_info < _PYTHON:
            found.insert(0, f"Python is {self.python}, and {'.'.join(map(str, _PYTHON))} or newer is needed")
        return (*found, *([self.probed.trouble] if self.probed.trouble else []))

    @property
    def jax_range(self) -> str:
        wanted = next((p.wanted for p in self.packages if p.name == "jax"), "")
        return ", ".join(filter(None, (wanted, _TESTED_JAX)))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "shardwise": shardwise.__version__,
            "python": self.python,
            "jax_range": self.jax_range,
            "packages": [asdict(p) for p in self.packages],
            "extras": [asdict(e) | {"install": e.install} for e in self.extras],
            "devices": [{"platform": platform, "kind": kind} for platform, kind in self.probed.devices],
            "works": bool(self.probed.devices) and not self.probed.trouble,
            "cores": self.cores,
            "memory_bytes": self.memory_bytes,
            "problems": list(self.problems),
        }


def examine() -> Installation:
    """Looks at everything; takes some seconds."""
    wanted = {**dict.fromkeys(_SHOWN, ""), **dict(_requirements("shardwise"))}
    packages = tuple(Package(name, _version(name), specifier) for name, specifier in wanted.items())
    extras = tuple(
        Extra(name, tuple(_missing("shardwise", name))) for name in _EXTRAS if _requirements("shardwise", name)
    )
    missing = [p.name for p in packages if not p.version]
    probed = Probed((), "", 0.0) if missing else probe()
    return Installation(sys.version.split()[0], packages, extras, probed, _cores(), _memory_bytes())


def probe(command: tuple[str, ...] = (sys.executable, "-P", "-c", _PROBE), patience_s: float = _PATIENCE_S) -> Probed:
    """Asks JAX for its devices and has a tiny plan made, compiled and run, in another process."""
    started = time.perf_counter()
    # A GPU that somebody else computes on has little memory left.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=patience_s, check=False
        )
        out, code, said = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        code, said = 1, f"no answer within {patience_s:g} s"
    except OSError as error:
        out, code, said = "", 1, str(error)
    told: dict[str, Any] = {}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            told |= json.loads(line) if line.startswith("{") else {}
    devices = tuple((str(platform), str(kind)) for platform, kind in told.get("devices", ()))
    trouble = ""
    if code or "works" not in told:
        what = "a tiny plan cannot be made and run here" if devices else "JAX cannot start"
        trouble = f"{what}: {_last_words(code, said)}"
    elif not told["works"]:
        trouble = "a tiny plan gave other numbers than the plain program"
    return Probed(devices, trouble, time.perf_counter() - started)


def _last_words(code: int, said: str) -> str:
    """Why a process failed: its signal, or the exception at the end of its traceback."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or [f"exit code {code}"])[-1]


# Packages.


def _version(name: str) -> str:
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
    """(name, specifier) of what a package requires, always or for an extra. ``a[b]`` is what a requires for b as well."""
    found: list[tuple[str, str]] = []
    for line in _requires(package):
        requirement, _, marker = line.partition(";")
        named = re.search(r"""extra\s*==\s*["']([^"']+)""", marker)
        parts = re.match(r"\s*([\w.-]+)(?:\[([\w.,-]+)\])?\s*(.*)", requirement)
        if parts is None or (named.group(1) if named else "") != extra:
            continue
        name, inner, specifier = parts.groups()
        found.append((name, specifier.strip(" ()")))
        for more in (inner or "").split(",") if inner else []:
            found += _requirements(name, more)
    return found


def _missing(package: str, extra: str) -> list[str]:
    return [
        name for name, wanted in _requirements(package, extra) if not (v := _version(name)) or not _satisfies(v, wanted)
    ]


def _satisfies(version: str, wanted: str) -> bool:
    """Lower and upper bounds; of what else a specifier may say pip takes care.

    >>> _satisfies("0.10.2", ">=0.9"), _satisfies("0.8.1", ">=0.9"), _satisfies("0.9", ">=0.9,<0.9")
    (True, False, False)
    """
    have = _numbers(version)
    for bound in filter(None, (part.strip() for part in wanted.split(","))):
        if bound.startswith(">=") and have < _numbers(bound):
            return False
        if bound.startswith("<") and not bound.startswith("<=") and have >= _numbers(bound):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers(">=0.9.0"), _numbers("0.10.2.dev3+cpu")
    ((0, 9), (0, 10, 2))
    """
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[a-z+]", version.lstrip("<>=! "))[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


# The machine.


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _memory_bytes() -> int:
    """Zero where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
