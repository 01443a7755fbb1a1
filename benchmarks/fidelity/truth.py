"""``python -m benchmarks.fidelity.truth``: what XLA's TPU compiler says about every case, kept in ``truth.jsonl``.

Needs libtpu (``shardwise[tpu]``), no TPU. There are two kernels. The first stops each compile when the compiler has scheduled
the program and assigned its buffers, which takes seconds, and records memory, verdict and collectives; also of programs that do
not fit. The second (``--cycles``) lets it finish, which takes up to minutes, for the compiler's cycles: they are written while
code is generated.

Lines are only appended: a run can be stopped at any time and started again. A case is skipped if its plan (and the compiler)
is the one that was compiled; a plan that changed on paper but gives the compiler the same text keeps its figures. Each compile
has a process of its own, and a time limit.

``--summary`` prints a table of what is there. Scheduled programs and buffer assignments are kept under ``--hlo``, outside the
repository, as they are large.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.cases import Case, cases

TRUTH: Final = Path(__file__).parent / "truth.jsonl"
HLO: Final = Path(tempfile.gettempdir()) / "fidelity_hlo"
LIMIT_S: Final = 240
#: What the second pass adds or makes better.
_WITH_CYCLES: Final = ("cycles", "collectives", "flops", "bytes_accessed", "memory", "compile_s")
Record = dict[str, Any]


def load(path: Path = TRUTH) -> dict[str, Record]:
    """The latest line of every case, by key. A line with ``again`` says only that an older one still holds."""
    found: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        key = record["case"]
        found[key] = found[key] | record["again"] if "again" in record else record
    return found


def plan_digest(plan: Any) -> str:
    """A short hash of all that a plan says to the compiler."""
    arrays = [[a.path, a.shape, a.dtype, a.spec, a.donated] for a in (*plan.arguments, *plan.outputs)]
    return _digest(json.dumps([arrays, plan.sharded.to_json()]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_digest() -> str:
    import shardwise

    root = Path(shardwise.__file__).parent
    return _digest("".join(_digest(path.read_text()) for path in sorted(root.rglob("*.py"))))


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def collect(wanted: Iterable[Case], path: Path, hlo: Path, cycles: bool, retry: bool, limit_s: float = LIMIT_S) -> None:
    """Compiles what is not known yet. ``retry``: also what ended in an error."""
    known, source, versions = load(path), _source_digest(), _versions()
    for case in wanted:
        old = known.get(case.key)
        if old is not None and (old["versions"] != versions or (retry and "error" in old)):
            old = None
        done = old is not None and (not cycles or "cycles" in old or "memory" not in old or "oom" in old)
        if old is not None and done and old["source"] == source:
            continue
        start = time.perf_counter()
        record = _in_child(case, old if done else None, hlo, cycles, limit_s)
        if old is not None and not done and "error" in record:
            record = {"again": {"cycles": None, "cycles_error": record["error"]}}
        elif old is not None and "cycles" in record and record["plan"] == old["plan"]:
            record = {"again": {k: record[k] for k in _WITH_CYCLES}}
        record = {"case": case.key, **record} if "again" in record else _named(case, versions) | record
        record.get("again", record)["source"] = source
        with path.open("a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
        print(f"{time.perf_counter() - start:6.1f} s  {case.key}  {_verdict(record)}", flush=True)


def _named(case: Case, versions: dict[str, str]) -> Record:
    own = {"program": case.program.label, "strategy": case.strategy, "topology": case.topology}
    return {"case": case.key, **own, "mesh": dict(case.mesh), "versions": versions}


def _verdict(record: Record) -> str:
    for word in ("again", "no_case", "error", "oom"):
        if word in record:
            return f"{word}: {str(record[word])[:160]}"
    cycles = f", {record['cycles']['total'] / 1e6:.1f} Mcycles" if "cycles" in record else ""
    return f"{record['memory']['peak'] / 1e9:.2f} GB{cycles}"


def _in_child(case: Case, old: Record | None, hlo: Path, cycles: bool, limit_s: float) -> Record:
    from shardwise.verification.compiled import tpu_environment

    with tempfile.TemporaryDirectory(prefix="fidelity") as folder:
        given = Path(folder) / "given.json"
        given.write_text(json.dumps({k: (old or {}).get(k) for k in ("plan", "text")}))
        dump = f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text --xla_dump_hlo_as_proto"
        command = [sys.executable, "-m", "benchmarks.fidelity.truth", "--child", case.key, folder, "--hlo", str(hlo)]
        command += ["--cycles"] * cycles
        with (Path(folder) / "log").open("wb") as log:
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | tpu_environment() | {"XLA_FLAGS": dump}
            )
            try:
                child.wait(limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                return {"plan": None, "error": f"not compiled in {limit_s:.0f} s"}
        result = Path(folder) / "result.json"
        if result.exists():
            found: Record = json.loads(result.read_text())
            return found
        said = (Path(folder) / "log").read_text(errors="replace").strip().splitlines()
        return {"plan": None, "error": f"exit status {child.returncode}: {' '.join(said[-2:])[-300:]}"}


def child(key: str, folder: Path, hlo: Path, cycles: bool) -> None:
    """Plans and compiles one case, and writes what came into ``result.json``."""
    case = next(c for c in cases() if c.key == key)
    result = _compile(case, folder, hlo, cycles)
    (folder / "part.json").write_text(json.dumps(result))
    (folder / "part.json").rename(folder / "result.json")
    sys.stdout.flush()
    os._exit(0)  # the compiler may still be at work in its thread


def _compile(case: Case, folder: Path, hlo: Path, cycles: bool) -> Record:
    import jax

    import shardwise
    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace
    from shardwise.errors import DecisionError
    from shardwise.planner.apply import Applied
    from shardwise.verification.compiled import make_mesh

    program = case.program.load()
    start = time.perf_counter()
    try:
        plan = shardwise.plan(
            program.fn,
            *program.args,
            mesh=dict(case.mesh),
            topology=case.planned_for,
            tactics=case.tactics(),
            roles={"batch": "batch", "params": "params"},
            donate_argnums=program.donate_argnums,
        )
    except DecisionError as error:
        return {"plan": None, "no_case": str(error)[:300]}
    old = json.loads((folder / "given.json").read_text())
    outcome: Record = {"plan": plan_digest(plan)}
    if old["plan"] == outcome["plan"]:
        return {"again": outcome}
    outcome["plan_s"] = round(time.perf_counter() - start, 1)
    outcome["predicted_bytes"] = [[kind, axes, nbytes] for (kind, axes), (_, nbytes) in plan.moved().items()]
    try:
        mesh = make_mesh(dict(case.mesh), case.topology)
        traced = trace(program.fn, program.args, {}, JitOptions())
        applied = Applied(plan, traced, lower(traced), mesh)
        lowered = applied.jitted(donate=bool(program.donate_argnums)).lower(*jax.tree.leaves(program.args))
        outcome["text"] = _digest(lowered.as_text())
        if old["text"] == outcome["text"]:
            return {"again": outcome}
        executable, oom, seconds = _run_compiler(lowered, folder / "dump", cycles)
    except Exception as error:
        return outcome | {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    outcome["compile_s"] = round(seconds, 1)
    if oom:
        outcome["oom"] = refusal(oom)
    return outcome | _read(executable, mesh, folder / "dump", hlo / case.file)


def refusal(message: str) -> Record:
    """Bytes that the compiler says are needed and there, and its words.

    >>> refusal("RESOURCE_EXHAUSTED: ... temporaries (1.50G) exceeds available HBM (1G).")["needed"]
    1610612736
    """
    figures = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)", message)
    needed, unit, available, other = figures.groups() if figures else ("0", "", "0", "")
    sizes = [int(float(x) * 1024 ** " KMGT".index(u or " ")) for x, u in ((needed, unit), (available, other))]
    return {"needed": sizes[0], "available": sizes[1], "message": re.sub(r"\s+", " ", message)[:200]}


def _run_compiler(lowered: Any, dump: Path, to_the_end: bool) -> tuple[Any, str, float]:
    """The executable, None if it was not waited for or does not fit; what the compiler said then; seconds."""
    made: list[Any] = []

    def work() -> None:
        try:
            made.append(lowered.compile())
        except Exception as error:
            made.append(error)

    start = time.perf_counter()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        # The last file before code is generated; those that are read are whole by then.
        if not to_the_end and any(dump.glob("*after_optimizations_after_buffer_assignment.hlo.pb")):
            return None, "", time.perf_counter() - start
    seconds = time.perf_counter() - start
    if isinstance(made[0], Exception):
        if "RESOURCE_EXHAUSTED" not in str(made[0]):
            raise made[0]
        return None, str(made[0]), seconds
    return made[0], "", seconds


def _read(executable: Any, mesh: Any, dump: Path, keep: Path) -> Record:
    """The figures of one case; the texts go to files that begin with ``keep``."""
    from benchmarks.fidelity.buffers import names, read_assignment
    from benchmarks.fidelity.reading import Reader, live
    from benchmarks.fidelity.windowed import merge_windowed
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.verification import hlo
    from shardwise.verification.collectives import read_collectives, totals

    def file(end: str) -> Path:
        return next(dump.glob(f"*.{end}"))

    text = executable.as_text() if executable is not None else file("after_optimizations.txt").read_text()
    buffers = file("after_optimizations-buffer-assignment.txt").read_text()
    keep.parent.mkdir(parents=True, exist_ok=True)
    _zip(Path(f"{keep}.txt.gz"), text)
    _zip(Path(f"{keep}.buffers.txt.gz"), buffers)
    assignment = read_assignment(file("after_optimizations.hlo.pb"))
    module = hlo.read(text)
    axes = MeshAxes.of(mesh)
    reader, found = Reader(module), merge_windowed(module, axes, read_collectives(module, axes))
    outcome: Record = {
        "memory": assignment.figures() | reader.arguments(),
        "live": live(assignment, names(buffers, assignment), module),
        "loops": sorted((trips or 0 for trips in module.trips.values()), reverse=True)[:12],
        "remats": sum(".remat" in i.name for i in module.instructions()),
        "unknown_trips": sum(trips is None for trips in module.trips.values()),
        "collectives": reader.collectives(found),
        "compiled_bytes": [[*key, total.nbytes] for key, total in totals(found).items()],
    }
    if executable is not None:
        stats, costs = executable.memory_analysis(), executable.cost_analysis() or {}
        outcome["cycles"] = reader.cycles()
        outcome["flops"], outcome["bytes_accessed"] = costs.get("flops", 0.0), costs.get("bytes accessed", 0.0)
        outcome["memory"] |= {"temp": stats.temp_size_in_bytes, "analysis_peak": stats.peak_memory_in_bytes}
    return outcome


def _zip(path: Path, text: str) -> None:
    with gzip.open(path, "wt", compresslevel=6) as file:
        file.write(text)


def moved_bytes(record: Record) -> int:
    """Bytes that one device moves in collectives in one run of the program."""
    return sum(c["bytes"] * c["runs"] * c["count"] for c in record["collectives"])


def summary(records: Iterable[Record]) -> str:
    """A table of cases, and what there is of each kind."""
    columns = {
        "case": -76,
        "peak GB": 8,
        "alloc GB": 9,
        "fits": 5,
        "Mcycles": 9,
        "matmul": 7,
        "moved GB": 9,
        "compile s": 9,
    }
    head = " ".join(f"{name:{'<' if width < 0 else '>'}{abs(width)}}" for name, width in columns.items())
    lines, counts = [head], Counter[str]()
    for r in records:
        word = next((w for w in ("no_case", "error") if w in r), "")
        if word:
            counts[word] += 1
            lines.append(f"{r['case']:76} {word}: {r[word][:90]}")
            continue
        fits = "oom" not in r
        counts["fits" if fits else "does not fit"] += 1
        m, cycles = r["memory"], r.get("cycles")
        shares = f"{'':9} {'':7}"
        if cycles:
            counts["with cycles"] += 1
            matmul = sum(v for k, v in cycles["by_kind"].items() if k.startswith("matmul")) / max(1, cycles["total"])
            shares = f"{cycles['total'] / 1e6:9.1f} {matmul:7.0%}"
        figures = f"{m['peak'] / 1e9:8.2f} {m['allocated'] / 1e9:9.2f} {'yes' if fits else 'no':>5} {shares}"
        lines.append(f"{r['case']:76} {figures} {moved_bytes(r) / 1e9:9.3f} {r['compile_s']:9.1f}")
    lines.append(", ".join(f"{word}: {count}" for word, count in sorted(counts.items())))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.truth", description=__doc__)
    parser.add_argument("--summary", action="store_true", help="print what is there, compile nothing")
    parser.add_argument("--only", default="", help="only cases whose key has this in it")
    parser.add_argument("--first", type=int, default=None, help="only so many cases, in the order of breadth")
    parser.add_argument("--cycles", action="store_true", help="the second pass: compile to the end")
    parser.add_argument("--retry", action="store_true", help="once more what ended in an error")
    parser.add_argument("--truth", type=Path, default=TRUTH)
    parser.add_argument("--hlo", type=Path, default=HLO)
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        child(given.child[0], Path(given.child[1]), given.hlo, given.cycles)
    elif given.summary:
        known = load(given.truth)
        print(summary(known[c.key] for c in cases() if c.key in known and given.only in c.key))
        print(f"{len(known)} of {len(cases())} cases")
    else:
        chosen = [c for c in cases() if given.only in c.key][: given.first]
        collect(chosen, given.truth, given.hlo, given.cycles, given.retry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
