"""Judges of finalists: XLA's TPU compiler without a TPU, and devices of this process, which run them.

A judge yields a verdict for each finalist as soon as there is one; ``hopeless`` tells it which ones need no verdict any more.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

import jax
import numpy as np

from shardwise.capture.trace import Traced
from shardwise.errors import CompileError
from shardwise.hardware.topology import Topology
from shardwise.ir.program import Program
from shardwise.planner.apply import Applied, compiler_options
from shardwise.planner.devices import make_mesh as mesh_of
from shardwise.planner.devices import named_sharding, placed_shape, under_mesh
from shardwise.planner.mesh import devices_at_hand
from shardwise.plans.evidence import CompiledMoves, Judged
from shardwise.plans.plan import Plan
from shardwise.tuning.compiling import RUNNING, Cache, Result, digest, job_of, run_job
from shardwise.verification.collectives import totals
from shardwise.verification.compiled import make_mesh, read_compiled
from shardwise.verification.step_time import NO_CYCLES, Transfer, step_time

#: Rounds in which every finalist is run once, after one that does not count.
_ROUNDS: Final = 7
#: How often a person sees that compiles go on, in seconds.
_WAITING_S: Final = 0.25


@dataclass(frozen=True)
class Finalist:
    """A plan to be judged, with the traced function and program that it is for."""

    name: str
    plan: Plan
    traced: Traced
    program: Program

    def lowered(self, mesh: Any, rounds: bool | None = None) -> Any:
        """What ``jax.jit(...).lower(...)`` returns for the plan on a mesh."""
        with under_mesh(mesh):
            applied = Applied(self.plan, self.traced, self.program, mesh, rounds=rounds)
            return applied.jitted().lower(*(placed_shape(a, mesh) for a in self.plan.arguments))


#: Whether a finalist cannot win any more.
Hopeless = Callable[[Finalist], bool]
#: Called with what is done and for how many seconds.
Phase = Callable[[str, float], None]


class Judge(Protocol):
    """``name`` says who judged, such as "XLA's compiler for v5e:4x4"."""

    @property
    def name(self) -> str: ...

    def judge(self, finalists: Sequence[Finalist], hopeless: Hopeless, phase: Phase) -> Iterator[tuple[int, Judged]]:
        """Yields the number of a finalist and its verdict; nothing for those that are hopeless."""
        ...


class TpuCompiler:
    """Compiles ahead of time for a TPU topology, ``jobs`` at once. Time is the compiler's estimate of compute with collectives
    on links (``verification/step_time.py``), memory the compiler's; results are kept in a cache."""

    def __init__(self, backend: str, executor: Executor, jobs: int, timeout_s: float, cache: Cache):
        self._backend, self._executor, self._jobs = backend, executor, jobs
        self._timeout_s, self._cache = timeout_s, cache
        self._taken_s: list[float] = []

    @property
    def name(self) -> str:
        return f"XLA's TPU compiler for {self._backend}"

    def judge(self, finalists: Sequence[Finalist], hopeless: Hopeless, phase: Phase) -> Iterator[tuple[int, Judged]]:
        queue, running, start = list(range(len(finalists))), dict[Future[Result], tuple[int, str]](), time.monotonic()
        try:
            while queue or running:
                while queue and len(running) < self._jobs:
                    if hopeless(finalists[number := queue.pop(0)]):
                        continue
                    try:
                        key, started = self._start(finalists[number])
                    except Exception as error:  # a program that cannot be lowered loses that finalist
                        yield number, Judged(refused=f"{type(error).__name__}: {str(error)[:200]}")
                        continue
                    if isinstance(started, dict):
                        yield number, self._verdict(finalists[number], started)
                    else:
                        running[started] = number, key
                done, _ = wait(running, _WAITING_S, FIRST_COMPLETED)
                phase(self._progress(len(finalists), len(queue), len(running)), time.monotonic() - start)
                for future in done:
                    number, key = running.pop(future)
                    result = _result(future)
                    self._cache.put(key, result)
                    self._taken_s += [result["seconds"]] if "seconds" in result else []
                    yield number, self._verdict(finalists[number], result)
        finally:
            if running:
                for future in running:
                    future.cancel()
                RUNNING.stop()

    def _progress(self, count: int, queued: int, running: int) -> str:
        text = f"compiling: {count - queued - running} of {count} finalists done"
        if not self._taken_s:
            return text
        left_s = statistics.mean(self._taken_s) * (queued + running / 2) / max(1, self._jobs)
        return f"{text}, about {left_s:.0f} s left"

    def _start(self, finalist: Finalist) -> tuple[str, Result | Future[Result]]:
        """A known result, or one to wait for."""
        plan = finalist.plan
        mesh = make_mesh(plan.mesh, self._backend, plan.device_order)
        lowered, options = finalist.lowered(mesh, rounds=True), compiler_options(plan, mesh)
        key = digest(lowered, self._backend, plan.device_order, options)
        known = self._cache.get(key)
        if known is not None:
            return key, known
        job = job_of(lowered, self._backend, plan.mesh, plan.device_order, options, self._timeout_s)
        return key, self._executor.submit(run_job, job)

    def _verdict(self, finalist: Finalist, result: Result) -> Judged:
        if refused := result.get("refused") or result.get("failed"):
            return Judged(refused=refused)
        if not 0 < result["cycles"] < NO_CYCLES:
            return Judged(refused="the compiler has no estimate of its time")
        transfers = [Transfer(kind, axes and tuple(axes), *counts) for kind, axes, *counts in result["transfers"]]
        step = step_time(result["cycles"], transfers, finalist.plan.inquiry.cost.placement)
        moves = tuple(CompiledMoves(kind, tuple(axes), count, nbytes) for kind, axes, count, nbytes in result["moves"])
        return Judged(step.time_s, result["peak_bytes"], moves, compute_s=step.compute_s)


def _result(future: Future[Result]) -> Result:
    """What a job returned; a failure of the executor itself loses that job alone."""
    try:
        return future.result()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}


class Devices:
    """Runs finalists on devices of this process with random data, in rounds that take turns; the time is the median."""

    def __init__(self, devices: Sequence[Any]):
        self._devices = devices

    @property
    def name(self) -> str:
        kind = "host" if self._devices[0].platform == "cpu" else self._devices[0].device_kind
        return f"{len(self._devices)} {kind} devices"

    def judge(self, finalists: Sequence[Finalist], hopeless: Hopeless, phase: Phase) -> Iterator[tuple[int, Judged]]:
        start = time.monotonic()
        runs: dict[int, Callable[[], float]] = {}
        verdicts: dict[int, Judged] = {}
        for number, finalist in enumerate(finalists):
            phase(f"compiling: {number} of {len(finalists)} finalists done", time.monotonic() - start)
            try:
                verdicts[number], runs[number] = self._compiled(finalist)
                runs[number]()
            except Exception as error:  # does not fit, or cannot be compiled
                runs.pop(number, None)
                yield number, Judged(refused=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        times: dict[int, list[float]] = {number: [] for number in runs}
        for k in range(_ROUNDS):
            phase(f"running: round {k + 1} of {_ROUNDS}", time.monotonic() - start)
            for number, run in runs.items():
                times[number].append(run())
        for number, seconds in times.items():
            one = verdicts[number]
            spread = f"{min(seconds):.4g} to {max(seconds):.4g} s in {_ROUNDS} rounds"
            yield number, Judged(statistics.median(seconds), one.peak_bytes, one.collectives, detail=spread)

    def _compiled(self, finalist: Finalist) -> tuple[Judged, Callable[[], float]]:
        plan = finalist.plan
        mesh = mesh_of(plan.mesh, self._devices, plan.device_order)
        executable = finalist.lowered(mesh).compile()
        read = read_compiled(executable, mesh)
        moves = tuple(
            CompiledMoves(kind, axes or (), total.values, total.nbytes)
            for (kind, axes), total in totals(read.collectives).items()
        )
        arrays = random_arrays(plan)
        shardings = [named_sharding(a, mesh) for a in plan.arguments]

        def run() -> float:
            placed = jax.block_until_ready([jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)])
            begin = time.perf_counter()
            jax.block_until_ready(executable(*placed))
            return time.perf_counter() - begin

        return Judged(None, None if read.memory is None else read.memory.peak_bytes, moves), run


def random_arrays(plan: Plan) -> list[Any]:
    """Returns arguments of a plan's shapes: small random numbers, and zeros and ones where they are integers."""
    generator = np.random.default_rng(0)
    arrays: list[Any] = []
    for a in plan.arguments:
        if a.dtype.startswith("key<"):
            keys = jax.random.split(jax.random.key(0), a.shape) if a.shape else jax.random.key(0)
            arrays.append(keys)
            continue
        dtype = jax.numpy.dtype(a.dtype)
        floating = jax.numpy.issubdtype(dtype, jax.numpy.inexact)
        numbers = generator.normal(0, 0.05, a.shape) if floating else generator.integers(0, 2, a.shape)
        arrays.append(np.asarray(numbers).astype(dtype))
    return arrays


def find_judge(
    how: str, topology: Topology, count: int, compiler: Callable[[str], Judge], devices: Sequence[Any] | None = None
) -> Judge:
    """Returns the judge for plans on a number of devices: these themselves where JAX has them, else the TPU compiler.

    Args:
      how: ``"auto"``, ``"devices"`` or ``"compiler"``.
      compiler: makes the judge for a TPU topology.
      devices: those of a mesh that was given.
    """
    if how != "compiler":
        found = jax.devices() if devices is None else devices
        name = devices_at_hand()[0]
        on_host = found[0].platform == "cpu"  # any number of them is like as many
        if name == topology.profile.name and (len(found) == count or (on_host and len(found) > count)):
            return Devices(found[:count])
        if how == "devices":
            raise CompileError(
                f"the plan is for {count} devices of {topology.profile.name}; JAX has {len(found)} of {name}"
            )
    is_tpu = any(tier.kind == "torus" for tier in topology.profile.links)
    if is_tpu and importlib.util.find_spec("libtpu") is not None:
        return compiler(topology.text)
    raise CompileError(
        f"nothing here can judge plans for {topology.text}: TPU topologies are compiled for by libtpu "
        '(pip install "shardwise[tpu]"), and other devices must be there'
    )
