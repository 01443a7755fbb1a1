"""``python -m benchmarks.fidelity.single --measure --out FILE.jsonl``: what programs of the zoo take on one real device.

Each program runs on the first device of ``jax.devices()``: compiled once, with its donated arguments, which are fed back from
its results; warmed up; then timed at least five times and a second in all. A JSON line a program holds all times, the
compiler's memory analysis and its counts; a program that fails is a line with ``error``. No program is started after
``--limit-s``. Depth is cut so that each takes well under 100 GB and 5 to 500 ms on an H200; ``--scale tiny`` is a smoke test
for a CPU.

``--compile8`` compiles plans for eight devices of the kind that is there, without having eight: memory analysis and the number
of collectives by kind. It needs a GPU to describe the target; what cannot be done is recorded as an error.

These scripts measure and record; predictions are compared elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.fidelity.cases import _ROWS, Case, Program

Record = dict[str, Any]
LIMIT_S: Final = 400.0
TIMES: Final = 5
TOTAL_S: Final = 1.0
#: A slow program is not timed longer than this once it has run often enough.
MOST: Final = 200


def _program(name: str, config: str | None = None, **options: Any) -> Program:
    return Program(name, config, tuple(options.items()), ())


#: In the order of importance: kinds of programs first, those whose compilation tunes many convolutions last.
FULL: Final = (
    _program("gpt", layers=3, batch=16),
    _program("llama3", layers=2, batch=4, seq=2048),
    _program("mlp", layers=4),
    _program("itx", "decode", layers=4, generate=64),
    _program("t2b", layers=3, batch=8, seq=1024),
    _program("itx", "prefill", layers=4, batch=16),
    _program("mixtral", layers=1, batch=4, seq=2048),
    _program("itx", "step", layers=24, batch=512),
    _program("gns", layers=4),
    _program("t5", layers=2, batch=32),
    _program("dlrm", rows=_ROWS),
    _program("ssm", layers=2, batch=4, seq=512),
    _program("vit", layers=4, batch=256),
    _program("llama3", layers=4, batch=8, seq=2048, train=False),
    _program("mlp", layers=8, train=False),
    _program("gpt", "6.7b", layers=2, batch=16, remat=True),
    _program("vit", "h14", layers=4, batch=256, train=False),
    _program("t2b", layers=4, batch=8, seq=1024, remat=True),
    _program("wresnet", batch=64, stages=(1, 1, 1, 1)),
    _program("unet", batch=32, blocks=1),
    _program("t2b", layers=4, batch=16, seq=1024, train=False),
    _program("gpt", layers=6, batch=8, scan=False),
)
TINY: Final = (
    *(_program(name, "tiny") for name in "t2b gpt llama3 mlp vit t5 unet wresnet gns dlrm ssm mixtral itx".split()),
    _program("itx", "tiny-prefill"),
    _program("itx", "tiny-step"),
    _program("gpt", "tiny", train=False),
    _program("llama3", "tiny", remat=True),
)
#: What is compiled for eight devices: programs, and strategies with their meshes.
EIGHT: Final = tuple(
    Program(p.name, p.config, p.options, (), ("batch/tokens" if p.name == "itx" else "batch/inputs", 1))
    for p in (FULL[0], FULL[1], FULL[2], FULL[4], FULL[5], FULL[6])
)
STRATEGIES8: Final = (
    ("dp", (("data", 8),)),
    ("fsdp", (("data", 8),)),
    ("megatron", (("model", 8),)),
    ("dp+megatron", (("data", 2), ("model", 4))),
    ("fsdp+megatron", (("data", 4), ("model", 2))),
    ("zero2", (("data", 8),)),
)


def programs(scale: str) -> tuple[Program, ...]:
    return TINY if scale == "tiny" else FULL


# Arguments.


class _FastRandom:
    """Stands in for NumPy's generator where billions of numbers are wanted: one block of normal values, repeated."""

    def __init__(self, seed: int):
        import numpy as np

        self._true = np.random.Generator(np.random.PCG64(seed))
        self._block = self._true.standard_normal(1 << 20, dtype=np.float32)

    def normal(self, mean: float, deviation: float, shape: Any) -> Any:
        import numpy as np

        return np.resize(self._block * np.float32(deviation) + np.float32(mean), shape)

    def integers(self, low: Any, high: Any, shape: Any) -> Any:
        return self._true.integers(low, high, shape)


def make_args(program: Any) -> tuple[Any, ...]:
    """The zoo's own arguments (indices in range, a fresh optimizer), drawn fast."""
    import numpy as np

    with mock.patch.object(np.random, "default_rng", _FastRandom):
        made: tuple[Any, ...] = program.make_args()
    return made


# Reading what was compiled.


def memory(compiled: Any) -> dict[str, int] | None:
    """The fields of the memory analysis that are numbers."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    fields = (f for f in dir(stats) if f.endswith("_in_bytes"))
    return {f: int(v) for f in fields if isinstance(v := getattr(stats, f), int)}


def costs(compiled: Any) -> dict[str, float]:
    """XLA's count of operations and bytes; loop bodies count once."""
    found = compiled.cost_analysis() or {}
    found = found[0] if isinstance(found, list) else found
    keys = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")
    return {key.replace(" ", "_"): float(found[key]) for key in keys if key in found}


def collective_counts(text: str) -> dict[str, int]:
    """Collectives of compiled HLO by kind; started ones count once."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return dict(sorted(Counter(re.findall(rf"\s({kinds})(?:-start)?\(", text)).items()))


# Timing.


def timed(run: Callable[[Any], Any], feed: Callable[[Any, Any], Any], args: Any, least: int = TIMES) -> list[float]:
    """Seconds of every call after two; ``feed(args, results)`` makes the next arguments outside of what is timed."""
    import jax

    times: list[float] = []
    warm = 2
    while warm or len(times) < least or (sum(times) < TOTAL_S and len(times) < MOST):
        start = time.perf_counter()
        results = jax.block_until_ready(run(args))  # type: ignore[no-untyped-call]
        seconds = time.perf_counter() - start
        args = jax.block_until_ready(feed(args, results))  # type: ignore[no-untyped-call]
        del results
        if warm:
            warm -= 1
        else:
            times.append(seconds)
    return times


def fed(args: tuple[Any, ...], results: Any, donated: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments of the next step: in the zoo result k takes the place of a donated argument k."""
    import jax

    new = list(args)
    for k in donated:
        if jax.tree.structure(results[k]) != jax.tree.structure(args[k]):  # type: ignore[operator]
            raise ValueError(f"result {k} is no argument {k}")
        new[k] = results[k]
    return tuple(new)


def measure(program: Program) -> Record:
    """One program on the first device."""
    import jax

    device = jax.devices()[0]
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    loaded = program.load()
    outcome: Record = {"description": loaded.description, "donated": list(loaded.donate_argnums)}
    start = time.perf_counter()
    lowered = jax.jit(loaded.fn, donate_argnums=loaded.donate_argnums).lower(*loaded.args)
    outcome["lower_s"] = time.perf_counter() - start
    start = time.perf_counter()
    compiled = lowered.compile()
    outcome["compile_s"] = time.perf_counter() - start
    outcome |= {"memory": memory(compiled), "cost": costs(compiled)}
    start = time.perf_counter()
    args = jax.block_until_ready(jax.device_put(make_args(loaded), device))  # type: ignore[no-untyped-call]
    outcome["arguments_s"] = time.perf_counter() - start
    times = timed(lambda a: compiled(*a), lambda a, r: fed(a, r, loaded.donate_argnums), args)
    outcome |= {"times_s": times, "median_s": statistics.median(times)}
    after = (device.memory_stats() or {}).get("peak_bytes_in_use")
    # JAX keeps the peak of the process: it is this program's only where it rose.
    outcome["peak_bytes_in_use"] = after if after is not None and after != before else None
    return outcome


# Eight devices that are not there.


def eight_devices() -> tuple[list[Any], list[str]]:
    """Compile-only devices of the attached GPU's kind, and what was tried in vain."""
    import jax
    from jax.experimental import topologies

    tried: list[str] = []

    def from_attached() -> Any:
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        return xla_client.get_topology_for_devices(jax.devices("gpu")).target_config

    ways: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("topology", lambda: {"topology": "1x1x8"}),
        ("topology and target_config", lambda: {"topology": "1x1x8", "target_config": from_attached()}),
    ]
    for way, options in ways:
        try:
            found = topologies.get_topology_desc(platform="cuda", **options()).devices
            if len(found) == 8:
                return list(found), tried
            tried.append(f"{way}: {len(found)} devices")
        except Exception as error:
            tried.append(f"{way}: {_words(error)}")
    return [], tried


def compile8(program: Program, strategy: str, mesh_sizes: tuple[tuple[str, int], ...], devices: list[Any]) -> Record:
    """A plan's program for eight devices, compiled and read."""
    import jax

    import shardwise
    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.planner.apply import Applied
    from shardwise.planner.devices import make_mesh

    loaded = program.load()
    start = time.perf_counter()
    plan = shardwise.plan(
        loaded.fn,
        *loaded.args,
        mesh=dict(mesh_sizes),
        tactics=Case(program, strategy, "", mesh_sizes).tactics(),
        roles={"batch": "batch", "params": "params"},
        donate_argnums=loaded.donate_argnums,
    )
    outcome: Record = {"plan_s": time.perf_counter() - start}
    traced = trace(loaded.fn, loaded.args, {}, JitOptions())
    applied = Applied(plan, traced, lower(traced), make_mesh(MeshAxes.of(dict(mesh_sizes)), devices))
    lowered = applied.jitted(donate=bool(loaded.donate_argnums)).lower(*jax.tree.leaves(loaded.args))
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        # Tuning kernels needs the device that is compiled for.
        outcome["first_error"] = _words(error)
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"})
    outcome["compile_s"] = time.perf_counter() - start
    outcome |= {"memory": memory(compiled), "cost": costs(compiled)}
    with contextlib.suppress(Exception):
        outcome["collectives"] = collective_counts(compiled.as_text() or "")
    return outcome


# Lines.


def named(program: Program) -> Record:
    """What identifies a program."""
    return {"program": program.label, "zoo": program.name, "config": program.config, "options": dict(program.options)}


def versions() -> Record:
    import jax

    device = jax.devices()[0]
    return {"device_kind": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def record_all(out: Path, limit_s: float, work: Iterator[tuple[Record, Callable[[], Record]]]) -> int:
    """Does the work until the time is up, one flushed line each; failures are lines too."""
    import jax

    started, common, failed = time.perf_counter(), versions(), 0
    with out.open("a") as file:
        for what, run in work:
            begun = time.perf_counter()
            if begun - started > limit_s:
                print(f"stopped after {limit_s:.0f} s before {' '.join(map(str, what.values()))[:80]}", flush=True)
                break
            try:
                outcome = run()
            except Exception as error:
                outcome, failed = {"error": _words(error)}, failed + 1
            file.write(json.dumps({**what, **common, **outcome}) + "\n")
            file.flush()
            time_s = (
                f"{outcome['median_s'] * 1e3:.2f} ms" if "median_s" in outcome else outcome.get("error", "compiled")
            )
            label = " ".join(str(what[key]) for key in ("program", "strategy", "mesh") if key in what)
            print(f"{time.perf_counter() - begun:6.1f} s  {label}  {time_s[:160]}", flush=True)
            jax.clear_caches()  # type: ignore[no-untyped-call]
            gc.collect()
    return failed


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.single", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true", help="run programs on the first device")
    what.add_argument("--compile8", action="store_true", help="compile plans for eight devices that are not there")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="lines are appended")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="start no program after so many seconds")
    parser.add_argument("--only", default="", help="only programs whose label has this in it")
    given = parser.parse_args(arguments)
    if given.measure:
        chosen = [p for p in programs(given.scale) if given.only in p.label]
        record_all(given.out, given.limit_s, ((named(p) | {"scale": given.scale}, partial(measure, p)) for p in chosen))
        return 0
    devices, tried = eight_devices()
    if not devices:
        line = versions() | {"error": "no compile-only devices", "tried": tried}
        with given.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line, indent=1))
        return 1
    work = (
        (named(p) | {"strategy": s, "mesh": dict(m), "tried": tried}, partial(compile8, p, s, m, devices))
        for s, m in STRATEGIES8
        for p in EIGHT
        if given.only in p.label
    )
    record_all(given.out, given.limit_s, work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
