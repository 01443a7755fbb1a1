"""``python -m benchmarks.fidelity.host OUT --within S``: planned steps on eight host devices, and a profile of these devices.

Host devices are slow but real: their collectives, their waiting for each other and their memory traffic take time, and a plan
that is better on paper must be better there, under a profile of the same machine at the same time.

A machine that others use is disturbed for minutes, and a disturbance only ever slows. So there is one rule for all that is
timed: it is read in several rounds that are spread over the whole time, and the fastest counts. In this order:

1. the machine is calibrated (as ``shardwise hardware calibrate --devices 8`` does, f32 only);
2. every case (``parallel.cases``) is planned under that profile, in processes of their own, and compiled;
3. all cases run in rounds of a few steps, one case after another, until the time is nearly up. Each step is what ``plan.jit``
   runs, with donated arguments fed back;
4. the machine is calibrated again.

OUT gets ``readings1.json``, ``readings2.json``, the profile of the first, ``planned8.toml``, that of both, ``host8.toml``, and
``parallel.jsonl``: a line a case with program, strategy, mesh and all times. Each is written as soon as there is something, so
that a run that is killed leaves what it has. ``python -m benchmarks.fidelity.measured --measured OUT`` compares.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fidelity.cases import Case
from benchmarks.fidelity.parallel import COMPUTE, DEVICES, TUNABLES, cases, computing
from benchmarks.fidelity.single import Record, collective_counts, costs, fed, make_args, memory, named, versions

#: Steps of a case in a round; the first is not counted.
STEPS: Final = 3
#: What the second calibration takes, as a multiple of the first: its programs are the same.
_AGAIN: Final = 1.2


@dataclass(slots=True)
class Ready:
    """A case that can run: its step, its next arguments, what is known of it, and its times so far."""

    case: Case
    step: Callable[[Any], Any]
    feed: Callable[[Any, Any], Any]
    args: Any
    figures: Record
    times_s: list[float] = field(default_factory=list)

    def run(self, steps: int) -> None:
        """Steps one after another, timed but for the first."""
        import jax

        for k in range(steps):
            start = time.perf_counter()
            results = jax.block_until_ready(self.step(self.args))  # type: ignore[no-untyped-call]
            seconds = time.perf_counter() - start
            self.args = jax.block_until_ready(self.feed(self.args, results))  # type: ignore[no-untyped-call]
            if k:
                self.times_s.append(seconds)

    def line(self) -> Record:
        return self.figures | {
            "times_s": self.times_s,
            "median_s": statistics.median(self.times_s),
            "fastest_s": min(self.times_s),
        }


def planned(case: Case, profile: str, file: str) -> tuple[Case, str, float]:
    """Plans a case and writes the plan: the work of a process of its own."""
    import shardwise

    with computing(COMPUTE):
        loaded = case.program.load()
        start = time.perf_counter()
        plan = shardwise.plan(
            loaded.fn,
            *loaded.args,
            mesh=dict(case.mesh),
            topology=f"{profile}:{DEVICES}",
            tactics=case.tactics(),
            roles={"batch": "batch", "params": "params"},
            donate_argnums=loaded.donate_argnums,
        )
        plan.save(file)
    return case, file, time.perf_counter() - start


def ready(case: Case, file: str, given: Any) -> Ready:
    """A planned case, compiled, with its arguments on the devices."""
    import jax

    import shardwise
    from shardwise.planner.devices import make_mesh

    loaded = case.program.load()
    plan = shardwise.load_plan(file).bind(loaded.fn, *loaded.args)
    plan = plan.on_mesh(make_mesh(plan.mesh, jax.devices("cpu")))
    shardings = plan.in_shardings
    start = time.perf_counter()
    compiled = plan.jit(loaded.fn).lower(*loaded.args).compile()
    figures: Record = {"donated": list(loaded.donate_argnums), "compile_s": time.perf_counter() - start}
    figures |= {"memory": memory(compiled), "cost": costs(compiled)}
    figures["collectives"] = collective_counts(compiled.as_text() or "")
    figures["moved"] = [[kind, list(axes), count, nbytes] for (kind, axes), (count, nbytes) in plan.moved().items()]

    def placed(args: Any) -> Any:
        return tuple(jax.device_put(a, s) for a, s in zip(args, shardings, strict=True))

    return Ready(
        case,
        # What ``plan.jit(fn)`` runs: calling that would compile once more.
        lambda args: compiled(*args),
        lambda args, results: placed(fed(args, results, loaded.donate_argnums)),
        placed(given),
        figures,
    )


def fastest(rounds: Sequence[Any]) -> Any:
    """The fastest of each reading of several calibrations, since other work on a machine only ever slows it."""
    best: dict[tuple[str, str], Any] = {}
    for reading in (r for measured in rounds for r in measured.readings):
        key = reading.what, reading.size
        best[key] = min(best.get(key, reading), reading, key=lambda r: r.time_s)
    notes = tuple(dict.fromkeys(note for measured in rounds for note in measured.notes))
    seconds = sum(measured.time_s for measured in rounds)
    return dataclasses.replace(rounds[0], readings=tuple(best.values()), notes=notes, time_s=seconds)


class Session:
    """One run: its folder, when it began, and how long it may take."""

    def __init__(self, out: Path, within_s: float, scale: str):
        self.out, self.within_s, self.scale = out, within_s, scale
        self.started, self.measured = time.perf_counter(), []
        out.mkdir(parents=True, exist_ok=True)

    @property
    def spent_s(self) -> float:
        return time.perf_counter() - self.started

    def say(self, words: str) -> None:
        print(f"{self.spent_s:6.1f} s  {words}", flush=True)

    def calibrate(self, number: int) -> float:
        """Reads the machine, and writes the readings and the profile of all readings so far; gives the seconds it took."""
        from shardwise.calibration.calibrate import calibrate
        from shardwise.calibration.measure import measure
        from shardwise.calibration.timing import HOST

        sizes = dataclasses.replace(HOST, types=("f32",))
        if self.scale == "tiny":
            sizes = dataclasses.replace(sizes, products=HOST.products[:2], target_s=0.01, limit_s=0.2, budget_s=11.0)
        found = measure(DEVICES, scale=sizes)
        (self.out / f"readings{number}.json").write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
        self.measured.append(found)
        made = calibrate(fastest(self.measured), "host8")
        made.write(self.out / "host8.toml")
        if number == 1:
            made.write(self.planned)
        self.say(f"calibrated; links off by {made.links_error or 0:.0%}; {'; '.join(made.notes)}")
        return found.time_s

    @property
    def planned(self) -> Path:
        return self.out / "planned8.toml"

    def prepare(self, chosen: Sequence[Case], until_s: float) -> list[Ready]:
        """Plans and compiles, as far as there is time, in the order of the cases."""
        import jax

        workers = max(1, min(12, (os.cpu_count() or 2) * 3 // 4))
        programs = dict.fromkeys(case.program for case in chosen)
        # As plain arrays: those of JAX would be donated with the first case that takes them.
        arguments = {p.label: jax.tree.map(np.asarray, make_args(p.load())) for p in programs}
        found: dict[Case, Ready] = {}
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as processes,
            ThreadPoolExecutor(max(1, min(6, workers // 2))) as threads,
        ):
            plans = [
                processes.submit(planned, case, str(self.planned), f"{folder}/{n}.json")
                for n, case in enumerate(chosen)
            ]
            compiling = {}
            for plan in as_completed(plans):
                if self.spent_s > until_s:
                    break
                try:
                    case, file, plan_s = plan.result()
                except Exception as error:
                    self.say(f"no plan: {error}")
                    continue
                compiling[threads.submit(ready, case, file, arguments[case.program.label])] = case, plan_s
            for compiled in as_completed(compiling):
                case, plan_s = compiling[compiled]
                try:
                    found[case] = compiled.result()
                except Exception as error:
                    self.say(f"{case.key} does not compile: {error}")
                    continue
                found[case].figures["plan_s"] = plan_s
            processes.shutdown(wait=False, cancel_futures=True)
        return [found[case] for case in chosen if case in found]

    def rounds(self, prepared: Sequence[Ready], until_s: float) -> int:
        """Times all cases in turns until the time is up, at least once; gives the number of rounds."""
        common = versions() | {
            "scale": self.scale,
            "cores": os.cpu_count(),
            "tunables": os.environ.get("GLIBC_TUNABLES", ""),
            "compute": COMPUTE,
        }
        done, longest = 0, 0.0
        while prepared and (not done or self.spent_s + longest < until_s):
            begun = self.spent_s
            for one in prepared:
                one.run(STEPS)
            with (self.out / "parallel.jsonl").open("w") as file:
                for one in prepared:
                    about = named(one.case.program) | {"strategy": one.case.strategy, "mesh": dict(one.case.mesh)}
                    file.write(json.dumps(about | common | one.line()) + "\n")
            done, longest = done + 1, max(longest, self.spent_s - begun)
            self.say(
                f"round {done}: {sum(min(one.times_s) for one in prepared):.3f} s, the fastest of all cases added up"
            )
        return done


def run(out: Path, within_s: float, scale: str = "full", only: str = "", first: int | None = None) -> list[Ready]:
    """All of it; gives the cases as they are after the last round."""
    session = Session(out, within_s, scale)
    took_s = session.calibrate(1)
    end_s = within_s - _AGAIN * took_s
    with computing(COMPUTE):
        # Cases of further meshes come last: one mesh of each strategy is what is compared.
        chosen = [c for c in cases(scale) if only in c.key]
        chosen = [c for c in chosen if c.mesh == next(d.mesh for d in chosen if _named(d) == _named(c))][:first]
        prepared = session.prepare(chosen, until_s=session.spent_s + (end_s - session.spent_s) / 2)
        session.say(f"{len(prepared)} of {len(chosen)} cases are ready")
        session.rounds(prepared, end_s)
    session.calibrate(2)
    for one in prepared:
        times = f"{min(one.times_s) * 1e3:8.2f} ms, median {statistics.median(one.times_s) * 1e3:8.2f} of {len(one.times_s)}"
        print(f"{one.case.program.name:8} {one.case.strategy:22} {times}")
    return prepared


def _named(case: Case) -> tuple[str, str]:
    return case.program.label, case.strategy


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.host", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder for what is measured")
    parser.add_argument("--within", type=float, default=520.0, metavar="S", help="seconds that all of it may take")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--only", default="", help="only cases whose key has this in it")
    parser.add_argument("--first", type=int, default=None, help="only so many cases, in the order of breadth")
    given = parser.parse_args(arguments)
    run(given.out, given.within, given.scale, given.only, given.first)
    return 0


def start(module: str) -> None:
    """Sets what JAX and the C library read when they start; for the latter the process starts itself again."""
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    if TUNABLES not in os.environ.get("GLIBC_TUNABLES", ""):
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), TUNABLES)))
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    start("benchmarks.fidelity.host")
    sys.exit(main())
