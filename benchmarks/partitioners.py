"""``python -m benchmarks.partitioners``: found plans as device-local programs and by constraints, compiled for v5e:4x4.

Each program is planned by the default search, and the same plan is compiled twice by XLA's TPU compiler (libtpu, no TPU is
needed). Compute is the compiler's own estimate of cycles; collectives are timed by our link formulas, those that the schedule
puts beside compute only as far as they last longer (``benchmarks.fidelity.compare.exposed_s``). Results are appended to
``benchmarks/partitioners.jsonl``; ``--table`` prints the latest of each case.

``--only TEXT`` chooses cases by name, ``--how explicit`` one of the two executions, ``--again`` compiles what is known already.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

TOPOLOGY: Final = "v5e:4x4"
MESH: Final = {"data": 4, "model": 4}
#: The way in which compiled programs are read; 2 counts small collectives that run beside compute as overlapped.
READING: Final = 2
RECORDS: Final = Path(__file__).with_suffix(".jsonl")
HOST: Final = Path(__file__).parent / "host_partitioners.json"
PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "partitioners.md"
HEAD: Final = [
    "# The device-local program against XLA's partitioner",
    "",
    "Written by `make bench-partitioners`. Found plans (1,000 evaluations, mesh data 4 × model 4), each compiled twice by "
    f"XLA's TPU compiler for {TOPOLOGY} without a TPU: as the device-local program, and by constraints. Compute is "
    "the compiler's estimate of cycles; collectives are timed by our link formulas, those beside compute only as far as "
    "they last longer; in brackets all one after another. Memory is the compiler's peak.",
    "",
]
LIMIT_S: Final = 900
HOW: Final = {"explicit": "shardwise", "constraints": "xla"}

#: Zoo targets by name; depth is cut so that a compile takes a minute, width is not.
ZOO: Final = {
    "t2b": "t2b:layers=3,batch=16,seq=1024",
    "t2b remat": "t2b:layers=4,batch=32,seq=2048,remat=True",
    "t7b": "t7b:layers=2,batch=16,seq=1024",
    "gpt": "gpt:layers=3,batch=32",
    "gpt 6.7b remat": "gpt:6.7b,layers=4,batch=64,remat=True",
    "llama3": "llama3:layers=2,batch=16,seq=2048",
    "llama3 forward": "llama3:layers=4,batch=16,seq=2048,train=False",
    "llama3 70b": "llama3:70b,layers=2,batch=16,seq=2048",
    "mixtral": "mixtral:layers=2,batch=16,seq=2048",
    "mixtral dropless": "mixtral:layers=1,batch=16,seq=1024,dropless=True",
    "mlp": "mlp:layers=4",
    "itx decode": "itx:decode,layers=4,generate=64",
    "itx prefill": "itx:prefill,layers=4,batch=64",
    "itx step": "itx:step,layers=8,batch=512",
    "vit": "vit:layers=4,batch=256",
    "gns": "gns:layers=4",
    "t5": "t5:layers=2,batch=64",
    "unet": "unet:batch=32,blocks=1",
    "wresnet": "wresnet:batch=128",
    "ssm": "ssm:layers=2,batch=16,seq=512",
    # Programs that the tool was not built with.
    "long context": "llama3:layers=2,batch=1,seq=32768,remat=True,d=1024,heads=8,kv_heads=8,head=128,ffn=4096,vocab=32768",
    "small decoder": "llama3:layers=4,batch=32,seq=1024,d=1024,heads=16,kv_heads=16,head=64,ffn=4096,vocab=32768",
    "1b grouped": "llama3:layers=4,batch=16,seq=2048,d=2048,heads=32,kv_heads=8,head=64,ffn=8192,vocab=32768",
}


def planned(program: Any, mesh: dict[str, int], **how: Any) -> Any:
    """The plan of a program of the zoo; ``how`` goes to ``shardwise.plan``."""
    import shardwise

    return shardwise.plan(
        program.fn,
        *program.args,
        mesh=mesh,
        topology=TOPOLOGY,
        roles={"batch": "batch", "params": "params"},
        donate_argnums=program.donate_argnums,
        **how,
    )


def lowered_plan(program: Any, plan: Any, mesh: Any, partitioner: str = "shardwise") -> Any:
    """A planned program of the zoo, ready to be compiled."""
    import jax

    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace
    from shardwise.planner.apply import Applied

    traced = trace(program.fn, program.args, {}, JitOptions())
    applied = Applied(plan, traced, lower(traced), mesh, partitioner)
    return applied.jitted(donate=bool(program.donate_argnums)).lower(*jax.tree.leaves(program.args))


def compiled_figures(lowered: Any, mesh: Any, placement: Any, folder: Path) -> dict[str, Any]:
    """What the compiler makes of a lowered program: ``compiled`` with time, memory and collectives, or ``oom``; ``compile_s``.

    Dumps must go to ``folder / "dump"`` (``run`` says so to XLA).
    """
    from benchmarks.fidelity.compare import exposed_s, moved_s
    from benchmarks.fidelity.truth import _read, _run_compiler, refusal

    executable, oom, seconds = _run_compiler(lowered, folder / "dump", True)
    outcome: dict[str, Any] = {"compile_s": round(seconds, 1), "reading": READING}
    if oom:
        return outcome | {"oom": refusal(oom)}
    record = _read(executable, mesh, folder / "dump", folder / "hlo")
    compute = record["cycles"]["total"] / placement.topology.profile.clock_hz
    figures = {
        "compute_s": compute,
        "serial_s": compute + moved_s(record, placement),
        "time_s": compute + exposed_s(record, placement),
        "peak": record["memory"]["analysis_peak"],
        "by_kind": record["cycles"]["by_kind"],
        "collectives": record["collectives"][:12],
    }
    return outcome | {"compiled": figures}


def finish(outcome: dict[str, Any], folder: Path) -> None:
    """Writes the result of a child process, and ends it: the compiler's threads may still be at work."""
    (folder / "part.json").write_text(json.dumps(outcome))
    (folder / "part.json").rename(folder / "result.json")
    os._exit(0)


def child(name: str, how: str, folder: Path) -> None:
    """Plans and compiles one case, and writes what came of it into ``result.json``."""
    from shardwise import zoo
    from shardwise.verification.compiled import make_mesh

    program = zoo.parse(ZOO[name])
    plan = planned(program, MESH, budget_evals=1000)
    p = plan.predicted
    outcome: dict[str, Any] = {
        "predicted": {"time_s": p.time_s, "compute_s": p.compute_s, "comm_s": p.comm_s, "peak": p.peak_bytes},
        "specs": [str(d) for d in plan.decisions],
        "moved": {f"{kind} {'·'.join(axes)}": nbytes for (kind, axes), (_, nbytes) in plan.moved().items()},
    }
    mesh = make_mesh(MESH, TOPOLOGY)
    lowered = lowered_plan(program, plan, mesh, HOW[how])
    finish(outcome | compiled_figures(lowered, mesh, plan.asked.cost.placement, folder), folder)


def run(name: str, how: str, module: str) -> dict[str, Any]:
    """The result of one case, compiled by ``python -m module --child`` in a process with a time limit."""
    from shardwise.verification.compiled import tpu_environment

    with tempfile.TemporaryDirectory(prefix="partitioners") as folder:
        dump = f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text --xla_dump_hlo_as_proto"
        command = [sys.executable, "-m", module, "--child", name, how, folder]
        with (Path(folder) / "log").open("wb") as log:
            try:
                subprocess.run(
                    command,
                    stdout=log,
                    stderr=log,
                    env=os.environ | tpu_environment() | {"XLA_FLAGS": dump},
                    timeout=LIMIT_S,
                )
            except subprocess.TimeoutExpired:
                return {"error": f"not compiled in {LIMIT_S} s"}
        result = Path(folder) / "result.json"
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text())
            return found
        said = (Path(folder) / "log").read_text(errors="replace").strip().splitlines()
        return {"error": " ".join(said[-3:])[-500:]}


def load(records: Path = RECORDS) -> dict[tuple[str, str], dict[str, Any]]:
    """The latest record of each case, by name and execution."""
    found = {}
    for line in records.read_text().splitlines() if records.exists() else ():
        record = json.loads(line)
        found[record["name"], record["how"]] = record
    return found


def _mixed(ratios: dict[str, tuple[float, bool]]) -> str:
    """A sentence about the pairs whose two records count overlapped small collectives differently."""
    mixed = [name for name, (_, alike) in ratios.items() if not alike]
    if not mixed:
        return ""
    alike = _mean([ratio for ratio, alike in ratios.values() if alike])
    return (
        f"\n\nIn {len(mixed)} pairs ({', '.join(mixed)}) one of the two records is older and counts small collectives that run "
        f"beside compute as exposed, which favors the other; the {len(ratios) - len(mixed)} pairs that are read alike have "
        f"{alike:.3f}."
    )


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(records: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Predicted, explicit and by constraints, side by side; speed-ups where both compiled the same plan."""
    lines = [
        "| program | predicted ms, GiB | by constraints ms (serial), GiB | explicit ms (serial), GiB | speed-up | compile s |",
        "|---|---|---|---|---|---|",
    ]
    ratios: dict[str, tuple[float, bool]] = {}
    for name in ZOO:
        both = [records.get((name, how)) for how in ("constraints", "explicit")]
        if not any(both):
            continue
        first = next(r for r in reversed(both) if r)
        cells = [_figures(r) for r in both]
        compiled = [r for r in both if r and "compiled" in r]
        ratio = math.nan
        if len(compiled) == 2 and compiled[0]["specs"] == compiled[1]["specs"]:
            ratio = compiled[0]["compiled"]["time_s"] / compiled[1]["compiled"]["time_s"]
            ratios[name] = ratio, compiled[0].get("reading", 1) == compiled[1].get("reading", 1)
        p = first.get("predicted")
        own = f"{p['time_s'] * 1e3:,.1f}, {p['peak'] / 2**30:.2f}" if p else "-"
        seconds = " / ".join(str(r.get("compile_s", "-")) if r else "-" for r in both)
        lines.append(f"| {name} | {own} | {cells[0]} | {cells[1]} | {ratio:.2f} | {seconds} |")
    if ratios:
        mean = _mean([ratio for ratio, _ in ratios.values()])
        lines.append(f"\n{len(ratios)} pairs, geometric mean {mean:.3f}{_mixed(ratios)}")
    return "\n".join(lines)


def host_table() -> list[str]:
    """What was measured on host devices."""
    measured = json.loads(HOST.read_text())
    seconds = {(row["program"], row["how"]): row["seconds"] for row in measured["fastest"]}
    lines = [
        "## On host devices",
        "",
        f"Measured on eight host devices, {measured['cores']} cores, JAX {measured['jax']} (`make bench-host-partitioners`): "
        "the fastest step of each, in rounds that take turns.",
        "",
        "| program | by constraints ms | explicit ms | speed-up |",
        "|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _ in seconds):
        explicit, constrained = seconds[name, "shardwise"], seconds[name, "xla"]
        lines.append(f"| {name} | {constrained * 1e3:.1f} | {explicit * 1e3:.1f} | {constrained / explicit:.2f} |")
    return lines


def _figures(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if "compiled" not in record:
        return f"{'does not fit' if 'oom' in record else record.get('error', '?')[:60]}"
    c = record["compiled"]
    return f"{c['time_s'] * 1e3:,.1f} ({c['serial_s'] * 1e3:,.1f}), {c['peak'] / 2**30:.2f}"


def arguments(prog: str, description: str | None, hows: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--how", choices=tuple(hows))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def collect(given: argparse.Namespace, cases: Iterable[tuple[str, str]], records: Path, module: str) -> None:
    """Compiles the chosen cases that are not known and appends them to the records."""
    known = load(records)
    for name, how in cases if not given.table else ():
        if given.only in name and given.how in (None, how) and (given.again or (name, how) not in known):
            record = {"name": name, "how": how} | run(name, how, module)
            with records.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(name, how, _figures(record), flush=True)


def main() -> int:
    given = arguments("benchmarks.partitioners", __doc__, HOW)
    if given.child:
        child(given.child[0], given.child[1], Path(given.child[2]))
    collect(given, itertools.product(ZOO, HOW), RECORDS, "benchmarks.partitioners")
    page = "\n".join([*HEAD, table(load()), "", *host_table()])
    print(page)
    PAGE.write_text(page + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
