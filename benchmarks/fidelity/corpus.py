"""``python -m benchmarks.fidelity.corpus``: the cost model against the TPU compiler on programs of other packages.

``record`` plans programs of the corpus and of the zoo at full width for v5e:4x4, under the default search and under named
strategies, compiles each plan to the end, and appends what the compiler says to ``corpus.jsonl``, with the decisions of the
plan. ``compare`` predicts the same decisions anew and prints errors, those of the test set apart from those of the fit set;
with ``--page`` it writes docs/benchmarks/unseen.md.
Nothing in Shardwise is fitted to or tuned on the test set; ``compare`` names programs of the fit set only, unless
``--name-test-set`` is given. ``benchmarks.scoreboard`` compares the compiled times of the strategies.

Needs the corpus environment (``make .venv-corpus/.installed``). Every program runs in a process with a time limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.reading import UNTIMED, is_untimed
from corpus.registry import Case, Program, programs

RECORDS: Final = Path(__file__).parent / "corpus.jsonl"
PAGE: Final = Path(__file__).parents[2] / "docs" / "benchmarks" / "unseen.md"
HLO: Final = Path(tempfile.gettempdir()) / "corpus_hlo"
TOPOLOGY: Final = "v5e:4x4"
SEARCH: Final = "search"
#: The named strategy that the cost model ranks first on the mesh of the found plan.
NAMED: Final = "named"
#: FSDP over all chips, partitioned by XLA.
BY_XLA: Final = "fsdp by XLA"
STRATEGIES: Final = (SEARCH, NAMED, "fsdp", "dp", BY_XLA)
LIMIT_S: Final = 420
MODULE: Final = "benchmarks.fidelity.corpus"
#: Of the page.
_INTRODUCTION: Final = f"""\
`python -m benchmarks.fidelity.corpus compare --page`: programs of [the corpus](corpus.md) and of the zoo at full size, each
under the found plan and under named strategies, and small programs of many kinds (`benchmarks/fidelity/kinds.py` and
`kinds_more.py`, of the fit set), compiled to the end by XLA's TPU compiler for {TOPOLOGY}. The table has
predicted over compiled step time (the compiler's cycles, and collectives on the links), compute alone, and peak memory. *After
learning*: compute is corrected by the median error of the other strategies of the same program, as `shardwise.tune` does. The
**test set** is only evaluated; constants and terms come from the fit set. Gathers, scatters, sorts, pools and decompositions
are left out on both sides, since the compiler gives no cycles for most of them; of older records, those among the four largest
kernels. `python -m benchmarks.fidelity.ablation` predicts all cases without one special term at a time."""
Record = dict[str, Any]


def load() -> dict[str, Record]:
    """The latest record of every case, by "program strategy"."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    return {record["case"]: record for record in map(json.loads, lines)}


def every_program() -> list[Program]:
    """The programs of the corpus, and those of the zoo, which are part of the fit set."""
    from benchmarks.fidelity import kinds, kinds_more
    from benchmarks.partitioners import ZOO
    from shardwise import zoo

    assert kinds_more.kind is kinds.kind  # both files have filled the table

    def build(target: str) -> Callable[[], Case]:
        def built() -> Case:
            made = zoo.parse(target)
            return Case(made.fn, lambda: made.args, made.donate_argnums)

        return built

    kind = {True: "train", False: "infer"}
    return [
        *programs(),
        *kinds.PROGRAMS.values(),
        *(
            Program(f"zoo {name}", "shardwise", kind["itx" not in name], "fit", target, build(target), {}, {})
            for name, target in ZOO.items()
        ),
    ]


def record(
    only: Iterable[str], strategies: Iterable[str], split: str, again: bool, processes: int, containing: Iterable[str]
) -> None:
    """Compiles what has no record yet, in so many processes at a time; or the recorded decisions of programs that contain ops
    of some kinds."""
    known, wanted, kinds = load(), [], tuple(containing)
    for program in every_program():
        if (only and program.name not in only) or (split and program.split != split):
            continue
        cases = [f"{program.name} {strategy}" for strategy in strategies]
        if kinds:
            compiled = [c for c in cases if "memory" in known.get(c, ())]
            cases = compiled if compiled and any(k.startswith(kinds) for k in _kinds(program)) else []
        elif not again:
            cases = [c for c in cases if c not in known]
        wanted.extend((program, case.removeprefix(f"{program.name} ")) for case in cases)
    with ThreadPoolExecutor(processes) as pool:
        how = ["--recorded"] if kinds else []
        running = {
            pool.submit(in_child, MODULE, [*how, p.name, strategy], LIMIT_S): (p, strategy) for p, strategy in wanted
        }
        for done in as_completed(running):
            program, strategy = running[done]
            row = {"case": f"{program.name} {strategy}", "program": program.name, "split": program.split}
            row |= {"strategy": strategy} | done.result()
            if "error" not in row or not kinds:
                append(RECORDS, row)
            print(f"{row.get('compile_s', 0):6.1f} s  {row['case']}  {row.get('error', 'done')}", flush=True)


def _kinds(program: Program) -> frozenset[str]:
    """The kinds of ops that a program contains; none where it cannot be traced here."""
    import jax

    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace

    try:
        case = program.build(**program.full)
        traced = trace(case.fn, jax.eval_shape(case.make), {}, JitOptions(donate_argnums=case.donate))
        return frozenset(op.kind for op in lower(traced).ops)
    except Exception:
        return frozenset()


def append(path: Path, row: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def in_child(module: str, arguments: list[str], limit_s: float) -> Record:
    """What ``child`` of a module writes to ``result.json`` in a process with the TPU compiler, or why it did not."""
    from shardwise.verification.compiled import tpu_environment

    with tempfile.TemporaryDirectory(prefix="fidelity") as folder:
        dump = f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text --xla_dump_hlo_as_proto"
        environment = os.environ | tpu_environment() | {"XLA_FLAGS": dump}
        command = [sys.executable, "-m", module, "child", *arguments, folder]
        row: Record = {"error": f"not done in {limit_s} s"}
        try:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
            row = {"error": f"exit status {ended.returncode}: {ended.stderr.strip()[-200:]}"}
        except subprocess.TimeoutExpired:
            pass
        result = Path(folder) / "result.json"
        return json.loads(result.read_text()) if result.exists() else row


def write_result(folder: Path, compiled: Callable[[], Record]) -> None:
    """Writes a result, or the error, and ends the process: the compiler's threads may still run."""
    try:
        result = compiled()
    except Exception as error:
        result = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:110]}
    (folder / "part.json").write_text(json.dumps(result))
    (folder / "part.json").rename(folder / "result.json")
    os._exit(0)


def _compiled(program: Program, strategy: str, folder: Path, recorded: bool) -> Record:
    from shardwise.plans import codec

    case = program.build(**program.full)
    start = time.process_time()
    plan = predicted(case, load()[f"{program.name} {strategy}"]) if recorded else _planned(case, strategy)
    row: Record = {
        "plan_s": round(time.process_time() - start, 2),
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "microbatches": plan.variant.microbatches,
        "remat": plan.variant.remat,
        "decisions": [codec.encode(d) for d in plan.decisions],
    }
    partitioner = "xla" if strategy == BY_XLA else "shardwise"
    keep = HLO / f"{program.name}.{strategy}"
    found = compiled_plan(plan, case, folder / "dump", keep, to_the_end=True, partitioner=partitioner)
    return row | _shortened(found)


def _planned(case: Case, strategy: str) -> Any:
    """The plan of a strategy; named ones are over all chips."""
    import jax

    import shardwise

    options: dict[str, Any] = {"topology": TOPOLOGY, "donate_argnums": case.donate, "allow_infeasible": True}
    args = jax.eval_shape(case.make)
    if strategy not in (SEARCH, NAMED):
        tactics = "fsdp" if strategy == BY_XLA else strategy
        return shardwise.plan(case.fn, *args, mesh={"data": 16}, tactics=tactics, remat="auto", **options)
    plan = shardwise.plan(case.fn, *args, remat="auto", **options)
    if strategy == SEARCH:
        return plan
    variant, baseline = plan.asked.best_baselines[0]
    variant = variant or plan.variant
    return shardwise.plan(
        case.fn,
        *args,
        mesh=dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        tactics=[_Saved(baseline.decisions)],
        remat=variant.remat,
        microbatches=variant.microbatches if variant.microbatches > 1 else None,
        **options,
    )


def _shortened(found: Record) -> Record:
    """A record without what nobody reads in the repository."""
    from benchmarks.fidelity.compare import merged

    kept = ("compile_s", "oom", "memory", "remats", "flops")
    row = {k: found[k] for k in kept if k in found} | {"collectives": list(merged(found["collectives"]))}
    if "cycles" in found:
        row["cycles"] = found["cycles"] | {"largest": found["cycles"]["largest"][:4]}
    return row | {"largest": found["live"]["largest"][:4]}


def compiled_plan(
    plan: Any, case: Case, dump: Path, keep: Path, to_the_end: bool, partitioner: str = "shardwise"
) -> Record:
    """What the TPU compiler says of a plan; it stops when buffers are assigned, unless it goes on ``to_the_end``."""
    import jax

    from benchmarks.fidelity.truth import _read, _run_compiler, refusal
    from shardwise.capture.lower import lower
    from shardwise.planner.apply import Applied
    from shardwise.planner.bind import static_options
    from shardwise.transforms.variants import trace_variant
    from shardwise.verification.compiled import make_mesh

    mesh, args = make_mesh(plan.mesh, TOPOLOGY), jax.eval_shape(case.make)
    traced = trace_variant(case.fn, args, {}, static_options(plan, case.fn), plan.variant)
    applied = Applied(plan, traced, lower(traced), mesh, partitioner, rounds=True)
    lowered = applied.jitted(donate=bool(case.donate)).lower(*jax.tree.leaves(args))
    executable, oom, seconds = _run_compiler(lowered, dump, to_the_end)
    row: Record = {"compile_s": round(seconds, 1)} | ({"oom": refusal(oom)} if oom else {})
    return row | _read(executable, mesh, dump, keep)


class _Saved:
    """Decisions that were taken before, as a tactic."""

    def __init__(self, decisions: Iterable[Any]):
        self._decisions = decisions

    def decide(self, context: Any, taken: Any) -> list[Any]:
        return list(self._decisions)


def predicted(case: Any, row: Record) -> Any:
    """The plan of a record, predicted by the cost model of this source."""
    import jax

    import shardwise
    from shardwise.lowering.decisions import Decision
    from shardwise.plans import codec

    return shardwise.plan(
        case.fn,
        *jax.eval_shape(case.make),
        mesh=row["mesh"],
        topology=TOPOLOGY,
        tactics=[_Saved([codec.decode(Decision, data, "decisions") for data in row["decisions"]])],
        microbatches=row["microbatches"] if row["microbatches"] > 1 else None,
        remat=row["remat"],
        donate_argnums=case.donate,
        allow_infeasible=True,
    )


def figures(plan: Any, row: Record) -> dict[str, float]:
    """What is predicted and what the compiler says, in seconds and bytes."""
    from benchmarks.fidelity.compare import exposed_s, moved_s
    from shardwise.hardware.layout import place
    from shardwise.hardware.topology import topology

    placement = place(plan.mesh, topology(TOPOLOGY))
    cycles = row["cycles"]["total"] - _untimed(row["cycles"]) if "cycles" in row else 0
    compute_s = cycles / placement.topology.profile.clock_hz
    predicted = plan.predicted
    silent_s = sum(r.time_s for r in predicted.rows if r.kind == "compute" and r.op.startswith(UNTIMED))
    return {
        "predicted_s": predicted.time_s - silent_s,
        "compiled_s": compute_s + exposed_s(row, placement) if compute_s else 0.0,
        "predicted_compute_s": predicted.compute_s - silent_s,
        "compiled_compute_s": compute_s,
        "predicted_comm_s": predicted.comm_s,
        "compiled_comm_s": moved_s(row, placement),
        "predicted_bytes": predicted.peak_bytes,
        "compiled_bytes": row["oom"]["needed"] if "oom" in row else row["memory"]["allocated"],
        "refused": "oom" in row,
        "fits": predicted.fits,
    }


def _untimed(cycles: Record) -> int:
    """The cycles of ops that are left out; of older records, those among their largest kernels."""
    largest = sum(k["cycles"] * k["runs"] * k["count"] for k in cycles["largest"] if is_untimed(k["op_name"]))
    return int(cycles.get("untimed", largest))


def compare(only: Iterable[str], split: str, name_test_set: bool, page: bool) -> None:
    """Predicts every recorded case anew, and prints errors of the two sets or writes the page of all cases."""
    rows = [
        r for r in load().values() if "memory" in r and r["strategy"] != BY_XLA and (not only or r["program"] in only)
    ]
    every = {p.name: p for p in every_program()}
    found: dict[str, list[tuple[Record, dict[str, float]]]] = {"fit": [], "test": []}
    built: dict[str, Any] = {}
    for row in rows:
        if split and row["split"] != split:
            continue
        name = row["program"]
        if name not in built:
            built = {name: every[name].build(**every[name].full)}
        try:
            f = figures(predicted(built[name], row), row)
        except Exception as error:
            print(f"{row['case']}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            continue
        found[row["split"]].append((row, f))
        if row["split"] == "fit" or name_test_set:
            print(_line(row, f), flush=True)
    for name, cases in found.items():
        if cases:
            print(f"{name} set, {len(cases)} cases of {len({r['program'] for r, _ in cases})} programs")
            for what, ratios in _ratios(cases).items():
                print(f"  {what}: {summary(ratios)}")
    if page and found["test"]:
        PAGE.write_text(_page(found))


def _ratios(cases: list[tuple[Record, dict[str, float]]]) -> dict[str, list[float]]:
    """Predicted over compiled, by what is predicted."""
    kinds = {"step time": "s", "compute": "compute_s", "peak memory": "bytes"}
    ratios = {name: [r for _, f in cases if (r := _ratio(f, what))] for name, what in kinds.items()}
    return ratios | {"step time, after learning": list(_learned(cases))}


def _page(found: dict[str, list[tuple[Record, dict[str, float]]]]) -> str:
    """The page: the test set first, in figures alone; then every case of the fit set, the worst times first."""
    lines = [
        "# Programs that nothing was fitted to",
        "",
        _INTRODUCTION,
        "",
        "| set | figure | cases | median error | 90th percentile | predicted / compiled |",
        "|---|---|---:|---:|---:|---|",
    ]
    for name in ("test", "fit"):
        for what, ratios in _ratios(found[name]).items():
            errors = sorted(abs(r - 1) for r in ratios)
            ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
            between = f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(
                f"| {name} | {what} | {len(ratios)} | {statistics.median(errors):.1%} | {ninth:.1%} | {between} |"
            )
    lines += [
        "",
        "The cases of the fit set, the largest errors of the step time first:",
        "",
        "| case | step ms | compiled | ratio | compute | peak MB | compiled | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row, f in sorted(found["fit"], key=lambda case: -abs(_ratio(case[1], "s") - 1)):
        lines.append(
            f"| {row['case']} | {f['predicted_s'] * 1e3:.2f} | {f['compiled_s'] * 1e3:.2f} | {_ratio(f, 's'):.2f} "
            f"| {_ratio(f, 'compute_s'):.2f} | {f['predicted_bytes'] / 1e6:.0f} | {f['compiled_bytes'] / 1e6:.0f} "
            f"| {_ratio(f, 'bytes'):.2f} |"
        )
    return "\n".join(lines) + "\n"


def _learned(cases: list[tuple[Record, dict[str, float]]]) -> Iterator[float]:
    """Predicted over compiled step times, if other strategies of the same program were compiled before, as ``tune`` learns from
    them: compute is corrected by the median of their errors. Strategies that made the same plan count once."""
    by_program: dict[str, dict[str, dict[str, float]]] = {}
    for row, f in cases:
        if f["compiled_compute_s"] and f["predicted_compute_s"]:
            by_program.setdefault(row["program"], {})[json.dumps([row["mesh"], row["decisions"]])] = f
    for plans in by_program.values():
        for f in plans.values() if len(plans) > 1 else ():
            factor = statistics.median(1 / _ratio(g, "compute_s") for g in plans.values() if g is not f)
            yield (f["predicted_s"] + (factor - 1) * f["predicted_compute_s"]) / f["compiled_s"]


def _ratio(f: dict[str, float], what: str) -> float:
    return f[f"predicted_{what}"] / f[f"compiled_{what}"] if f[f"compiled_{what}"] else 0.0


def _line(row: Record, f: dict[str, float]) -> str:
    times = f"{f['predicted_s'] * 1e3:10.3f} {f['compiled_s'] * 1e3:10.3f} ms {_ratio(f, 's'):6.2f}"
    compute = f"compute {_ratio(f, 'compute_s'):6.2f}"
    sizes = f"{f['predicted_bytes'] / 1e6:10.1f} {f['compiled_bytes'] / 1e6:10.1f} MB {_ratio(f, 'bytes'):6.2f}"
    verdict = "" if f["refused"] != f["fits"] else "  WRONG VERDICT"
    return f"{row['case']:36} {times}  {compute}  {sizes}{verdict}"


def summary(ratios: list[float]) -> str:
    """Median and 90th percentile of errors, and the range of predicted / compiled."""
    errors = sorted(abs(r - 1) for r in ratios)
    if not errors:
        return "no cases"
    ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    low = min(ratios)
    return (
        f"error: median {statistics.median(errors):.1%}, 90th percentile {ninth:.1%}; "
        f"predicted / compiled: median {statistics.median(ratios):.2f}, {low:.2f} to {max(ratios):.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.corpus", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile what has no record")
    recording.add_argument("--only", nargs="*", default=[])
    recording.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    recording.add_argument("--split", choices=["", "fit", "test"], default="")
    recording.add_argument("--processes", type=int, default=1)
    recording.add_argument("--again", action="store_true", help="also what has a record")
    recording.add_argument("--containing", nargs="*", default=[], help="recorded decisions, with such ops")
    comparing = commands.add_parser("compare", help="predict anew and print errors")
    comparing.add_argument("--only", nargs="*", default=[])
    comparing.add_argument("--split", choices=["", "fit", "test"], default="")
    comparing.add_argument("--page", action="store_true", help="write docs/benchmarks/unseen.md")
    comparing.add_argument("--name-test-set", action="store_true", help="also print cases of the test set")
    one = commands.add_parser("child", help=argparse.SUPPRESS)
    one.add_argument("--recorded", action="store_true")
    one.add_argument("name")
    one.add_argument("strategy")
    one.add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.only, asked.strategies, asked.split, asked.again, asked.processes, asked.containing)
    elif asked.command == "compare":
        compare(asked.only, asked.split, asked.name_test_set, asked.page)
    else:
        program = next(p for p in every_program() if p.name == asked.name)
        write_result(asked.folder, lambda: _compiled(program, asked.strategy, asked.folder, asked.recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
