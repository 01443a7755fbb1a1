"""Compiles of finalists in processes of their own, with a time limit, and the results of earlier ones on disk.

A job is plain data: the lowered program as bytes, the devices and the options. Any ``concurrent.futures.Executor`` can run it,
since :func:`run_job` starts a fresh Python process: a crash of the compiler or a time-out loses that compile alone, and neither
the caller's functions nor its main module have to be imported there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax

import shardwise
from shardwise.capture import jax_internals as internals
from shardwise.errors import ShardwiseError
from shardwise.files import write_whole
from shardwise.hardware.mesh import MeshAxes
from shardwise.verification.collectives import totals
from shardwise.verification.compiled import make_mesh, read_text, tpu_environment
from shardwise.verification.step_time import Schedule

#: The form of results; those of another form are not read.
_READING: Final = 1
#: Names the folder of the cache.
CACHE_VARIABLE: Final = "SHARDWISE_CACHE"
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A program to compile for a TPU topology."""

    module: bytes
    tuple_arguments: bool
    backend: str
    mesh: Mapping[str, int]
    device_order: tuple[int, ...]
    options: Mapping[str, str]
    timeout_s: float


def job_of(
    lowered: Any, backend: str, mesh: MeshAxes, order: Sequence[int], options: Mapping[str, str], limit_s: float
) -> Job:
    tupled = internals.has_tuple_arguments(lowered)
    return Job(internals.module_bytes(lowered), tupled, backend, mesh.shape, tuple(order), dict(options), limit_s)


def digest(lowered: Any, backend: str, order: Sequence[int], options: Mapping[str, str]) -> str:
    """Returns a digest of everything that the compiler's result depends on: the program's text, without source lines."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
    data = [_READING, backend, list(order), dict(options), versions, os.environ.get("LIBTPU_INIT_ARGS", "")]
    text = json.dumps(data, sort_keys=True) + lowered.as_text()
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# In the executor.


class Running:
    """The compilers that run in this process, so that an interruption can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()

    def run(self, command: Sequence[str], timeout_s: float, **options: Any) -> int | None:
        """Returns the exit status; None after the time limit."""
        child = subprocess.Popen(command, **options)
        with self._lock:
            self._children.add(child)
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            child.kill()
            child.wait()
            with self._lock:
                self._children.discard(child)

    def stop(self) -> None:
        with self._lock:
            for child in self._children:
                child.kill()


RUNNING: Final = Running()


def run_job(job: Job) -> Result:
    """Compiles in a fresh process. The result has the compiler's figures, or ``refused``, or ``failed``."""
    with tempfile.TemporaryDirectory(prefix="shardwise") as folder:
        given, result, log = (Path(folder, name) for name in ("job", "result.json", "log"))
        given.write_bytes(pickle.dumps(job))
        paths = [str(Path(shardwise.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | tpu_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "shardwise.tuning.compiling", folder]
        start = time.monotonic()
        with log.open("wb") as output:
            status = RUNNING.run(
                command, job.timeout_s, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        if result.exists():
            found: Result = json.loads(result.read_text())
            return found | {"seconds": round(time.monotonic() - start, 1)}
        if status is None:
            return {"failed": f"not compiled in {job.timeout_s:g} s"}
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return {"failed": f"the compiler ended with status {status}: {' '.join(said[-1:])[-200:]}"}


# In the process of the compiler.


def compiled(job: Job) -> Result:
    """Compiles in this process, and reads the result."""
    mesh = make_mesh(job.mesh, job.backend, job.device_order)
    try:
        executable = internals.compile_bytes(job.module, list(mesh.devices.flat), job.options, job.tuple_arguments)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": " ".join(str(error).split())[:240]}
    text = "\n\n".join(m.to_string() for m in executable.hlo_modules())
    module, read = read_text(text, executable.get_compiled_memory_stats(), mesh, job.backend)
    transfers, moves = Schedule(module).transfers(read.collectives), totals(read.collectives)
    return {
        "cycles": read.estimated_cycles,
        "peak_bytes": read.memory and read.memory.peak_bytes,
        "transfers": [[t.kind, t.axes, t.runs, t.nbytes, t.beside_cycles] for t in transfers],
        "moves": [[kind, axes or (), total.values, total.nbytes] for (kind, axes), total in moves.items()],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        result = compiled(pickle.loads((folder / "job").read_bytes()))
    except Exception as error:
        result = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"}
    write_whole(folder / "result.json", json.dumps(result))
    os._exit(0)  # threads of the compiler may not end


# On disk.


def cache_folder() -> Path:
    """Returns the folder of ``SHARDWISE_CACHE``, or one in the user's cache folder of the platform."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "shardwise" / "tune"


class Cache:
    """Results by digest, a file for each. Files are complete or not there, so that several processes can share a folder. A
    folder that cannot be written is a cache that keeps nothing."""

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self._folder = Path(folder) if folder is not None else cache_folder()

    def get(self, key: str) -> Result | None:
        try:
            result = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) else None

    def put(self, key: str, result: Result) -> None:
        """Keeps what the compiler decided; not a crash or a time-out, which may not happen again."""
        if "failed" in result:
            return
        with contextlib.suppress(OSError, ShardwiseError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / f"{key}.json", json.dumps(result))


if __name__ == "__main__":
    main()
