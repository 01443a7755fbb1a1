"""``make bench-exactness``: bytes and memory of device-local programs, predicted beside what XLA's TPU compiler makes of them.

Every strategy of the fidelity page on v5e:4x4 (``benchmarks.fidelity.cases``), and programs of other packages
(``tests/programs``) under the default search, are planned and compiled up to the assignment of buffers, without a TPU. Compared
are the bytes that one device moves by kind of collective and mesh axes, rewrites of XLA taken off as ``shardwise.verify`` does,
and the peak memory with the gaps that the compiler leaves.

``--record`` plans and compiles anew, about 40 minutes on one core; without it the page is written from what was recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity import compare, truth
from benchmarks.fidelity.cases import SERIAL, cases

TOPOLOGY: Final = "v5e:4x4"
MESH: Final = {"data": 4, "model": 4}
RECORDS: Final = Path(__file__).with_suffix(".jsonl")
PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "exactness.md"
_KEPT: Final = ("case", "predicted_bytes", "compiled_bytes", "memory", "oom", "predicted_peak", "error")
_LIMIT_S: Final = 300

HEAD: Final = f"""# Exactness of device-local programs

Written by `make bench-exactness`. Programs planned for {TOPOLOGY} and compiled by XLA's TPU compiler without a TPU: the \
strategies of the [fidelity page](fidelity.md), and programs of other packages under the default search. *Bytes as predicted* \
is the share of bytes that one device moves in collectives of the predicted kind over the predicted axes; the emitted program \
itself has exactly the predicted collectives, which `tests/spmd/test_exact.py` asserts. Peak memory is compared with what the \
compiler allocates, gaps included. Programs of a few megabytes stay in on-chip memory, which is not part of the compiled peak: \
too much is predicted for them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One program: the share of bytes as predicted, predicted and compiled peak, and whether it fits."""

    name: str
    matched: float
    peak_bytes: float
    compiled_peak_bytes: float
    refused: bool
    differences: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.compiled_peak_bytes


def shares(record: dict[str, Any]) -> tuple[float, tuple[str, ...]]:
    """The share of bytes as predicted, and in words where there are more or fewer."""
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for side, key in enumerate(("predicted_bytes", "compiled_bytes")):
        for kind, axes, nbytes in record[key]:
            sums.setdefault((kind, tuple(sorted(axes or ()))), [0.0, 0.0])[side] += nbytes
    total = max(sum(both[side] for both in sums.values()) for side in (0, 1)) if sums else 0.0
    if not total:
        return 1.0, ()
    words = [
        f"{kind} over {'·'.join(axes)} {both[0] / 1e6:,.0f} MB predicted, {both[1] / 1e6:,.0f} MB compiled"
        for (kind, axes), both in sums.items()
        if abs(both[0] - both[1]) > 0.005 * total
    ]
    return sum(map(min, sums.values())) / total, tuple(words)


def rows(records: Iterable[dict[str, Any]]) -> list[Row]:
    """The records of programs that were compiled; of refused ones, the compiler says what they would need."""
    found = []
    for record in records:
        if "compiled_bytes" in record:
            oom = record.get("oom")
            needed = oom["needed"] if oom else record["memory"]["allocated"]
            figures = float(record["predicted_peak"]), float(needed), bool(oom)
            matched, words = shares(record)
            found.append(Row(record["case"], matched, *figures, words))
    return found


def record_strategies(folder: Path) -> list[dict[str, Any]]:
    """Compiles the strategies of the fidelity page, and predicts their memory."""
    wanted = [c for c in cases() if c.topology == TOPOLOGY and c.strategy != SERIAL]
    truth.collect(wanted, folder / "truth.jsonl", folder / "hlo", cycles=False, retry=False)
    known, predictor = truth.load(folder / "truth.jsonl"), compare.Predictor()
    found = []
    for case in sorted(wanted, key=lambda c: c.program.label):
        record = known[case.key]
        if "compiled_bytes" in record:
            record["predicted_peak"] = predictor.predict(case).peak_bytes
        if "no_case" not in record:
            found.append(record)
    return found


def record_programs() -> list[dict[str, Any]]:
    """Compiles programs of other packages, each in a separate process."""
    from shardwise.verification.compiled import tpu_environment
    from tests.programs.table import PROGRAMS

    found = []
    for program in PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.exactness", "--child", program.name, folder]
            dump = f"--xla_dump_to={folder}/dump --xla_dump_hlo_as_text --xla_dump_hlo_as_proto"
            environment = os.environ | tpu_environment() | {"XLA_FLAGS": dump}
            try:
                ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
                said = [line for line in ended.stderr.splitlines() if "Error: " in line][-1:]
            except subprocess.TimeoutExpired:
                said = [f"not compiled in {_LIMIT_S} s"]
            result = Path(folder) / "result.json"
            record = json.loads(result.read_text()) if result.exists() else {"error": " ".join(said)[-300:]}
        found.append({"case": f"{program.package}: {program.name}"} | record)
        print(found[-1]["case"], found[-1].get("error", "compiled"), flush=True)
    return found


def child(name: str, folder: Path) -> None:
    """Plans and compiles one program of another package, and writes what came of it."""
    import jax

    import shardwise
    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace
    from shardwise.planner.apply import Applied
    from shardwise.verification.compiled import make_mesh
    from tests.programs.table import PROGRAMS

    fn, shapes = next(p for p in PROGRAMS if p.name == name).build()
    plan = shardwise.plan(fn, *shapes, mesh=MESH, topology=TOPOLOGY, budget_evals=300)
    mesh, traced = make_mesh(MESH, TOPOLOGY), trace(fn, shapes, {}, JitOptions())
    lowered = Applied(plan, traced, lower(traced), mesh).jitted(donate=False).lower(*jax.tree.leaves(shapes))
    executable, oom, _ = truth._run_compiler(lowered, folder / "dump", False)
    figures: dict[str, Any] = {"predicted_peak": plan.predicted.peak_bytes} | (
        {"oom": truth.refusal(oom)} if oom else {}
    )
    figures["predicted_bytes"] = [[kind, axes, nbytes] for (kind, axes), (_, nbytes) in plan.moved().items()]
    figures |= truth._read(executable, mesh, folder / "dump", folder / "hlo" / "program")
    (folder / "part.json").write_text(json.dumps({k: figures[k] for k in _KEPT if k in figures}))
    (folder / "part.json").rename(folder / "result.json")
    os._exit(0)  # the compiler may still be at work in its thread


def summary(title: str, found: Sequence[Row]) -> list[str]:
    """How near a group of programs is, and which are not."""
    fitting = [r for r in found if not r.refused]
    exact = sum(r.matched >= 0.99 for r in fitting)
    low = [r for r in fitting if r.ratio < 0.9]
    errors = [abs(r.ratio - 1) for r in fitting]
    lines = [
        f"## {title}",
        "",
        f"{len(fitting)} programs that fit, {len(found) - len(fitting)} that the compiler refuses (it computes things again to "
        f"fit, so they are left out). At least 99% of bytes as predicted: {exact} of {len(fitting)}; median "
        f"{statistics.median(r.matched for r in fitting):.1%}. Peak memory: median error {statistics.median(errors):.1%}; more "
        f"than 10% low: {len(low)}.",
        "",
    ]
    far = sorted((r for r in fitting if r.matched < 0.99), key=lambda r: r.matched)
    if far:
        lines += ["| program | bytes as predicted | where not |", "|---|---|---|"]
        lines += [f"| {r.name} | {r.matched:.1%} | {'; '.join(r.differences)} |" for r in far] + [""]
    if low:
        lines += ["| program | predicted GB | compiled GB | ratio |", "|---|---|---|---|"]
        lines += [
            f"| {r.name} | {r.peak_bytes / 1e9:.3f} | {r.compiled_peak_bytes / 1e9:.3f} | {r.ratio:.2f} |"
            for r in sorted(low, key=lambda r: r.ratio)
        ] + [""]
    return lines


def page(records: Sequence[dict[str, Any]]) -> str:
    """The page of what was recorded."""
    groups = {
        "Strategies": [r for r in records if TOPOLOGY in r["case"]],
        "Programs of other packages": [r for r in records if TOPOLOGY not in r["case"]],
    }
    lines = [HEAD, ""]
    for title, own in groups.items():
        found = rows(own)
        lines += summary(title, found) if found else []
        failed = [r for r in own if "error" in r]
        lines += (
            [f"Not compiled: {', '.join(r['case'] + ' (' + r['error'] + ')' for r in failed)}.", ""] if failed else []
        )
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "exactness")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], Path(given.child[1]))
    if given.record:
        given.folder.mkdir(parents=True, exist_ok=True)
        records = [*record_strategies(given.folder), *record_programs()]
        kept = [json.dumps({k: r[k] for k in _KEPT if k in r}, separators=(",", ":")) for r in records]
        RECORDS.write_text("\n".join(kept) + "\n")
    text = page([json.loads(line) for line in RECORDS.read_text().splitlines()])
    print(text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
