"""``python -m benchmarks.fidelity.gpu``: the cost model against one real GPU, on programs of other packages.

``export FOLDER`` traces the programs of the corpus at full size, writes each step and the function that makes its arguments as
serialized StableHLO. ``measure FOLDER OUT.jsonl`` needs JAX, flatbuffers and a GPU, and none of the packages: it compiles
and times what was exported. ``compare`` predicts anew and prints errors; with ``--page`` it writes docs/benchmarks/gpu.md. The
test set is named nowhere, as in ``benchmarks.fidelity.corpus``. Nothing is donated, so that a step can run many times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Final

RECORDS: Final = Path(__file__).parent / "measured" / "corpus_h200.jsonl"
PAGE: Final = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md"
TOPOLOGY: Final = "h200:1"
MODULE: Final = "benchmarks.fidelity.gpu"
#: Programs that are predicted to need more are not exported; the GPU has 140 GB.
MOST_BYTES: Final = 110e9
#: Nor are those that would take most of a measurement's time.
MOST_S: Final = 20.0
LIMIT_S: Final = 300
_INTRODUCTION: Final = """\
`python -m benchmarks.fidelity.gpu compare --page`: programs of [the corpus](corpus.md) at full size on one NVIDIA H200 with JAX
0.11.2, predicted for `h200:1`. Time is the median of at least five steps, memory the compiler's peak. The **test set** is only
evaluated; constants and terms come from other programs."""
Record = dict[str, Any]


def export(folder: Path, only: list[str]) -> None:
    """Exports every program in a process with a time limit."""
    from benchmarks.fidelity.corpus import in_child
    from corpus.registry import programs

    folder.mkdir(parents=True, exist_ok=True)
    for program in programs():
        target = folder / program.name
        if (only and program.name not in only) or target.exists():
            continue
        row = in_child(MODULE, [program.name, str(target)], LIMIT_S)
        print(f"{program.name}: {row.get('error', 'done')}", flush=True)


def exported(name: str, target: Path) -> Record:
    """Writes one program's step and arguments to a folder."""
    import jax
    from jax import export as jax_export

    program, case, plan = planned(name)
    if plan.predicted.peak_bytes > MOST_BYTES or plan.predicted.time_s > MOST_S:
        return {"error": f"{plan.predicted.peak_bytes / 1e9:.0f} GB, {plan.predicted.time_s:.1f} s on one device"}
    shapes = jax.tree.leaves(jax.eval_shape(case.make))
    structure = jax.tree.structure(jax.eval_shape(case.make))
    step = jax.jit(lambda *leaves: jax.tree.leaves(case.fn(*jax.tree.unflatten(structure, leaves))))
    make = jax.jit(lambda: jax.tree.leaves(case.make()))
    made = {
        "step": jax_export.export(step, platforms=["cuda"])(*shapes).serialize(),
        "make": jax_export.export(make, platforms=["cuda"])().serialize(),
    }
    target.mkdir()
    for part, what in made.items():
        (target / part).write_bytes(what)
    (target / "case.json").write_text(json.dumps({"program": name, "split": program.split}))
    return {}


def planned(name: str) -> tuple[Any, Any, Any]:
    """A program, its case, and its plan for one device."""
    import jax

    import shardwise
    from corpus.registry import programs

    program = next(p for p in programs() if p.name == name)
    case = program.build(**program.full)
    args = jax.eval_shape(case.make)
    plan = shardwise.plan(case.fn, *args, mesh={"x": 1}, topology=TOPOLOGY, tactics=[], allow_infeasible=True)
    return program, case, plan


def measure(folder: Path, out: Path, limit_s: float) -> None:
    """Compiles and times what was exported, the test set first; a failure is a line, too."""
    import jax
    from jax import export as jax_export

    from benchmarks.fidelity.single import memory, record_all, timed

    def steps() -> Any:
        cases = [json.loads(path.read_text()) for path in folder.glob("*/case.json")]
        for case in sorted(cases, key=lambda c: (c["split"] != "test", c["program"])):
            yield case, lambda case=case: measured(folder / case["program"])

    def measured(path: Path) -> Record:
        step, make = (jax_export.deserialize((path / part).read_bytes()) for part in ("step", "make"))
        args = jax.block_until_ready(jax.jit(make.call)())
        compiled = jax.jit(step.call).lower(*args).compile()
        times = timed(lambda a: compiled(*a), lambda a, r: a, args)
        return {"memory": memory(compiled), "times_s": times[:20], "median_s": statistics.median(times)}

    record_all(out, limit_s, steps())


def load() -> dict[str, Record]:
    """The latest measurement of every program."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    return {r["program"]: r for r in map(json.loads, lines) if "median_s" in r}


def compare(name_test_set: bool, page: bool) -> None:
    """Predicts every measured program anew and prints errors of the two sets."""
    from benchmarks.fidelity.corpus import summary

    found: dict[str, list[Record]] = {"test": [], "fit": []}
    for name, row in load().items():
        try:
            predicted = planned(name)[2].predicted
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            continue
        true_bytes = row["memory"]["peak_memory_in_bytes"]
        figures = {
            "name": name,
            "time_s": predicted.time_s,
            "true_s": row["median_s"],
            "time": predicted.time_s / row["median_s"],
            "peak_bytes": predicted.peak_bytes,
            "true_bytes": true_bytes,
            "memory": predicted.peak_bytes / true_bytes,
        }
        found[row["split"]].append(figures)
        if row["split"] == "fit" or name_test_set:
            print(_line(figures), flush=True)
    lines = ["# Programs that nothing was fitted to, on a GPU", "", _INTRODUCTION, ""]
    lines += ["| set | figure | programs | predicted / measured |", "|---|---|---:|---|"]
    for split, cases in found.items():
        for what, title in (("time", "step time"), ("memory", "peak memory")):
            text = summary([c[what] for c in cases])
            print(f"{split} set, {len(cases)} programs, {title}: {text}")
            lines.append(f"| {split} | {title} | {len(cases)} | {text} |")
    lines += ["", "The programs of the fit set, the largest errors of the step time first:", ""]
    lines += [
        "| program | step ms | measured | ratio | peak MiB | compiled | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for f in sorted(found["fit"], key=lambda f: -abs(f["time"] - 1)):
        times = f"{f['time_s'] * 1e3:.2f} | {f['true_s'] * 1e3:.2f} | {f['time']:.2f}"
        sizes = f"{f['peak_bytes'] / 2**20:.0f} | {f['true_bytes'] / 2**20:.0f} | {f['memory']:.2f}"
        lines.append(f"| {f['name']} | {times} | {sizes} |")
    if page:
        PAGE.write_text("\n".join(lines) + "\n")


def _line(f: Record) -> str:
    times = f"{f['time_s'] * 1e3:10.2f} {f['true_s'] * 1e3:10.2f} ms {f['time']:6.2f}"
    return f"{f['name']:32} {times}  {f['peak_bytes'] / 1e6:10.0f} {f['true_bytes'] / 1e6:10.0f} MB {f['memory']:6.2f}"


def main() -> int:
    from benchmarks.fidelity.corpus import write_result

    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export", help="write programs as StableHLO")
    exporting.add_argument("folder", type=Path)
    exporting.add_argument("--only", nargs="*", default=[])
    measuring = commands.add_parser("measure", help="time what was exported on the first device")
    measuring.add_argument("folder", type=Path)
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--limit-s", type=float, default=400.0)
    comparing = commands.add_parser("compare", help="predict anew and print errors")
    comparing.add_argument("--page", action="store_true", help="write docs/benchmarks/gpu.md")
    comparing.add_argument("--name-test-set", action="store_true")
    one = commands.add_parser("child", help=argparse.SUPPRESS)
    one.add_argument("name")
    one.add_argument("target", type=Path)
    one.add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "export":
        export(asked.folder, asked.only)
    elif asked.command == "measure":
        measure(asked.folder, asked.out, asked.limit_s)
    elif asked.command == "compare":
        compare(asked.name_test_set, asked.page)
    else:
        write_result(asked.folder, lambda: exported(asked.name, asked.target))
    return 0


if __name__ == "__main__":
    sys.exit(main())
