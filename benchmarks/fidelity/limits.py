"""``python -m benchmarks.fidelity.limits``: programs that nearly fill the memory, beside what the TPU compiler allocates.

The worst that a plan can do is to say that a program fits which the compiler then refuses. Programs of the zoo and of the
corpus are made larger (more examples, nodes, particles) until their default plan for v5e:4x4 takes 70 to 100% of the usable
memory, and are compiled up to the assignment of buffers. ``record`` appends to ``limits.jsonl`` what has no line there yet;
``predict`` predicts the recorded plans anew, without a search and without compiling, and prints the fit set's by name,
``--write`` appends the predictions to the records; without a command the page docs/benchmarks/limits.md is written. Nothing is
fitted to the test set.

Needs the corpus environment (``make .venv-corpus/.installed``). Every program runs in a separate process with a time limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.fidelity import cases
from benchmarks.fidelity.corpus import append, compiled_plan, in_child, predicted, write_result
from corpus.registry import Case, programs

RECORDS: Final = Path(__file__).with_suffix(".jsonl")
PAGE: Final = Path(__file__).parents[2] / "docs" / "benchmarks" / "limits.md"
TOPOLOGY: Final = "v5e:4x4"
#: Programs are made larger by one of these, the first that they have.
KNOBS: Final = ("batch", "nodes", "population", "chains", "rows", "cells", "atoms", "poses", "side", "points", "size")
SHARES: Final = (0.7, 1.0)
LIMIT_S: Final = 500
_TRIALS: Final = 9
Record = dict[str, Any]


class Scalable(NamedTuple):
    """A program with a size that can be multiplied."""

    name: str
    split: str
    knob: str
    size: int
    build: Callable[[int], Case]


def scalable() -> Iterator[Scalable]:
    """The programs of the zoo and of the corpus that have such a size."""
    from shardwise.zoo import registry as zoo

    for program in cases.PROGRAMS:
        size = zoo.config_of(
            program.name, program.config or zoo.configs(program.name)[0], **dict(program.options)
        ).batch

        def build(batch: int, program: cases.Program = program) -> Case:
            made = zoo.load(program.name, program.config or "", **dict(program.options) | {"batch": batch})
            return Case(made.fn, lambda: made.args, made.donate_argnums)

        yield Scalable(f"zoo {program.label}", "fit", "batch", size, build)
    for entry in programs():
        knob = next((knob for knob in KNOBS if knob in entry.full), None)
        if knob is not None:

            def full(size: int, entry: Any = entry, knob: str = knob) -> Case:
                made: Case = entry.build(**dict(entry.full) | {knob: size})
                return made

            yield Scalable(entry.name, entry.split, knob, entry.full[knob], full)


def record(only: Sequence[str], again: bool) -> None:
    """Compiles what has no record yet."""
    known = load()
    for program in scalable():
        if (only and program.name not in only) or (program.name in known and not again):
            continue
        start = time.perf_counter()
        found = in_child("benchmarks.fidelity.limits", [program.name], LIMIT_S)
        row = {"case": program.name, "split": program.split} | found
        append(RECORDS, row)
        print(f"{time.perf_counter() - start:6.1f} s  {_line(row)}", flush=True)


def sized(program: Scalable) -> tuple[Any, Case, int]:
    """The plan, the program and its size with which the plan takes as much of the memory as is possible. The sizes that are
    tried begin with the recorded one."""
    import jax

    import shardwise

    factor, step = Fraction(load().get(program.name, {}).get(program.knob, program.size), program.size), Fraction(2)
    best: tuple[float, Any, Case, int] | None = None
    tried: set[Fraction] = set()
    for _ in range(_TRIALS):
        tried.add(factor)
        size = max(1, int(program.size * factor))
        case = program.build(size)
        args = jax.eval_shape(case.make)
        plan = shardwise.plan(
            case.fn, *args, topology=TOPOLOGY, donate_argnums=case.donate, remat="auto", allow_infeasible=True
        )
        share = plan.predicted.peak_bytes / plan.predicted.usable_bytes
        if share <= SHARES[1] and (best is None or share > best[0]):
            best = share, plan, case, size
        if SHARES[0] <= share <= SHARES[1]:
            break
        factor = factor * step if share < SHARES[0] else factor / step
        if factor in tried:
            step = Fraction(3, 2)
            factor = factor * step if share > SHARES[1] else factor / step
            if factor in tried:
                break
    if best is None:
        raise ValueError("nothing that fits was found")
    return best[1:]


def _compiled(program: Scalable, folder: Path) -> Record:
    from shardwise.plans import codec

    plan, case, size = sized(program)
    row: Record = {
        program.knob: size,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "variant": str(plan.variant),
        "microbatches": plan.variant.microbatches,
        "remat": plan.variant.remat,
        "decisions": [codec.encode(d) for d in plan.decisions],
        "predicted": plan.predicted.peak_bytes,
        "usable": plan.predicted.usable_bytes,
        "tight": is_tight(plan),
        "alive": [[a.label, a.nbytes, a.source] for a in plan.predicted.alive[:12]],
    }
    keep = Path(tempfile.gettempdir()) / "limits_hlo" / program.name
    found = compiled_plan(plan, case, folder / "dump", keep, to_the_end=False)
    live = found["live"]["largest"]
    return row | {k: found[k] for k in ("compile_s", "oom", "memory", "remats") if k in found} | {"largest": live}


def load() -> dict[str, Record]:
    """The latest record of every program."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def predicted_again(only: Sequence[str], write: bool) -> None:
    """Predicts the recorded plans by the cost model of this source. Programs of the test set are not named."""
    every, rows = {p.name: p for p in scalable()}, []
    for name, row in load().items():
        if "decisions" not in row or "memory" not in row or (only and name not in only):
            continue
        plan = predicted(every[name].build(row[every[name].knob]), row)
        rows.append(row | {"predicted": plan.predicted.peak_bytes, "tight": is_tight(plan)})
        if row["split"] == "fit":
            print(f"{_line(rows[-1])} (was {row['predicted'] / compiled_bytes(row):.2f})", flush=True)
        if write:
            append(RECORDS, rows[-1])
    for split in ("test", "fit"):
        print(f"{split} set: {summary([r for r in rows if r['split'] == split])}")


def is_tight(plan: Any) -> bool:
    """Does the plan say that it may not fit?"""
    return any(note.startswith("tight") for note in plan.notes)


def said(row: Record) -> str:
    """What the prediction says of a record: it fits, is tight, or is over the memory."""
    return "over" if row["predicted"] > row["usable"] else "tight" if row.get("tight", False) else "fits"


def compiled_bytes(row: Record) -> float:
    return float(row["oom"]["needed"] if "oom" in row else row["memory"]["allocated"])


def _line(row: Record) -> str:
    if "error" in row:
        return f"{row['case']:44} {row['error'][:120]}"
    expected, compiled = row["predicted"], compiled_bytes(row)
    verdict = "tight " * row.get("tight", False)
    verdict += "REFUSED" if "oom" in row else "over" if compiled > row["usable"] else ""
    return (
        f"{row['case']:44} {expected / 2**30:6.2f} GiB, compiled {compiled / 2**30:6.2f}, {expected / compiled:5.2f} "
        f"{row['variant']} {verdict}"
    )


def summary(rows: Sequence[Record]) -> str:
    """How near the predictions of a set are, for programs that nearly fill the memory."""
    near = [r for r in rows if r["predicted"] / r["usable"] >= SHARES[0]]
    if not near:
        return "nothing is recorded."
    ratios = sorted(r["predicted"] / compiled_bytes(r) for r in near)
    errors = [abs(ratio - 1) for ratio in ratios]
    counts, refused = Counter(map(said, rows)), Counter(said(r) for r in rows if "oom" in r)
    return (
        f"{len(rows)} programs. {counts['fits']} are said to fit, of which the compiler refuses **{refused['fits']}**; "
        f"{counts['tight']} are said to be tight, of which it refuses {refused['tight']}; {counts['over']} not to fit, "
        f"of which it refuses {refused['over']}. {len(near)} take {SHARES[0]:.0%} of "
        f"the memory or more by our prediction; of these, predicted over compiled is {ratios[0]:.2f} to {ratios[-1]:.2f}, the "
        f"median error {statistics.median(errors):.1%}, and {sum(ratio < 0.92 for ratio in ratios)} are more than 8% low."
    )


def page() -> str:
    """The records as a page, refused programs and those that are predicted too low first."""
    rows = list(load().values())
    compiled = [r for r in rows if "memory" in r]
    lines = [
        "# Programs near the memory limit",
        "",
        f"Written by `python -m benchmarks.fidelity.limits`. Programs of the zoo and of the corpus, made larger until their "
        f"default plan for {TOPOLOGY} takes 70 to 100% of the usable memory where that is possible, and compiled by XLA's TPU "
        "compiler up to the assignment of buffers, without a TPU. A plan that is said to fit and is refused is the worst that "
        "can happen. A plan is tight if its peak may be over the memory, by how the compiler lays out arrays, and over if "
        "the predicted peak is ([cost](../cost.md#how-it-is-made)). Predictions are newer than the compiled plans where "
        "the plan is still made: sizes and plans were chosen by an older model, so that some take less or more than that.",
        "",
        "The zoo and half of the corpus are the fit set, to which the cost model may be fitted; the other half is the test "
        "set, to which nothing is fitted.",
        "",
    ]
    for split in ("test", "fit"):
        own = [r for r in compiled if r["split"] == split]
        lines += [f"- {split} set: {summary(own)}"]
    lines += [
        "",
        "| program | set | size | plan | predicted GiB | compiled GiB | ratio | |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for r in sorted(compiled, key=lambda r: ("oom" not in r, r["predicted"] / compiled_bytes(r))):
        knob = next(k for k in KNOBS if k in r)
        name, mesh = r["case"].removeprefix("zoo "), " × ".join(f"{axis} {n}" for axis, n in r["mesh"].items())
        figures = (
            f"{r['predicted'] / 2**30:.2f} | {compiled_bytes(r) / 2**30:.2f} | {r['predicted'] / compiled_bytes(r):.2f}"
        )
        refused = ", ".join([said(r)] * (said(r) != "fits") + ["refused"] * ("oom" in r))
        lines.append(f"| {name} | {r['split']} | {knob} {r[knob]:,} | {mesh}, {r['variant']} | {figures} | {refused} |")
    failed = [f"{r['case']} ({r['error'].splitlines()[0][:80]})" for r in rows if "error" in r]
    lines += ["", f"Not compiled: {', '.join(failed)}."] if failed else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.limits", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    recording = commands.add_parser("record", help="compile what has no record")
    recording.add_argument("--only", nargs="*", default=[])
    recording.add_argument("--again", action="store_true", help="also what has a record")
    predicting = commands.add_parser("predict", help="predict the recorded plans anew")
    predicting.add_argument("--only", nargs="*", default=[])
    predicting.add_argument("--write", action="store_true", help="append the predictions to the records")
    one = commands.add_parser("child", help=argparse.SUPPRESS)
    one.add_argument("name")
    one.add_argument("folder", type=Path)
    asked = parser.parse_args()
    if asked.command == "record":
        record(asked.only, asked.again)
    elif asked.command == "predict":
        predicted_again(asked.only, asked.write)
    elif asked.command == "child":
        program = next(p for p in scalable() if p.name == asked.name)
        write_result(asked.folder, lambda: _compiled(program, asked.folder))
    else:
        PAGE.write_text(page())
        print(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
