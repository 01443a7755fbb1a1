"""``make bench-analysis``: how long capture and analysis take, and whether depth matters.

Tracing is JAX's own work and is reported beside, not inside. Every row is the median of a few runs in one process, after
one warm-up on another program. The table is printed and written to docs/benchmarks/analysis.md.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from shardwise import __version__, zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import Analysis, analyze_program

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks" / "analysis.md"

#: Target, and the bar in seconds for capture and analysis together (None: reported only).
TARGETS: tuple[tuple[str, float | None], ...] = (
    ("t7b", 0.3),
    ("t2b", None),
    ("llama3:405b", None),
    ("mixtral", None),
    ("gns", None),
    ("unet", None),
    ("ssm", None),
    ("itx", None),
    ("dlrm", None),
    ("t5", None),
    ("wresnet", None),
    ("vit", None),
    ("gpt:39b,unrolled", 5.0),
)
DEPTHS = (2, 12, 24, 48, 96)


@dataclass(frozen=True)
class Row:
    target: str
    ops: int
    trace_s: float
    capture_s: float
    analysis_s: float
    bar_s: float | None
    analysis: Analysis

    @property
    def total_s(self) -> float:
        return self.capture_s + self.analysis_s


def measure(target: str, bar_s: float | None = None, runs: int = 3) -> Row:
    program = zoo.parse(target)
    start = time.perf_counter()
    traced = trace(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums or None))
    trace_s = time.perf_counter() - start
    captures, analyses = [], []
    for _ in range(runs):
        gc.collect()
        start = time.perf_counter()
        captured = lower(traced)
        middle = time.perf_counter()
        analysis = analyze_program(captured)
        captures.append(middle - start)
        analyses.append(time.perf_counter() - middle)
    return Row(
        target,
        len(captured.ops),
        trace_s,
        statistics.median(captures),
        statistics.median(analyses),
        bar_s,
        analysis,
    )


def line(row: Row) -> str:
    a = row.analysis
    groups = sum(g.matters for g in a.groups)
    bar = f"{row.bar_s:.1f}" if row.bar_s else ""
    return (
        f"| {row.target} | {row.ops:,} | {row.trace_s:.2f} | {row.capture_s:.3f} | {row.analysis_s:.3f} "
        f"| {row.total_s:.3f} | {bar} | {len(a.colors)} | {groups} | {a.bits} | {len(a.opaque_ops)} |"
    )


def growth_line(row: Row, layers: int) -> str:
    """Microseconds a layer: at most linear growth means this column does not rise."""
    a = row.analysis
    groups = sum(g.matters for g in a.groups)
    return f"| {layers} | {row.ops:,} | {row.total_s:.3f} | {row.total_s / row.ops * 1e6:.1f} | {groups} | {a.bits} |"


def main() -> int:
    measure("mlp", runs=1)
    columns = "target, ops, trace s, capture s, analysis s, capture + analysis s, bar s, colors, groups, bits, opaque"
    lines = [f"| {columns.replace(', ', ' | ')} |", "|---|" + "---:|" * 10]
    missed = []
    for target, bar_s in TARGETS:
        row = measure(target, bar_s)
        lines.append(line(row))
        print(lines[-1], flush=True)
        if bar_s is not None and row.total_s > bar_s:
            missed.append(f"{target}: {row.total_s:.2f} s against {bar_s} s")
    growth = ["| layers | ops | capture + analysis s | µs an op | groups | bits |", "|---:|" + "---:|" * 5]
    per_op = []
    for layers in DEPTHS:
        row = measure(f"gpt:39b,unrolled,layers={layers}", runs=2)
        per_op.append(row.total_s / row.ops)
        growth.append(growth_line(row, layers))
        print(growth[-1], flush=True)
    scanned = measure("gpt:39b", runs=2)
    growth.append(growth_line(scanned, 48).replace("| 48 |", "| 48 scanned |", 1))
    print(growth[-1])
    # From 12 layers on: below that, fixed costs are what is measured.
    if per_op[-1] > 1.15 * per_op[1]:
        missed.append(f"time an op rose from {per_op[1] * 1e6:.1f} to {per_op[-1] * 1e6:.1f} µs")
    versions = f"shardwise {__version__}, JAX {jax.__version__}, Python {platform.python_version()}, one core"
    text = "\n".join(
        [
            "# Capture and analysis: time",
            "",
            f"Written by `make bench-analysis` with {versions}. Tracing is JAX's own time and stands beside.",
            "",
            *lines,
            "",
            "## Depth: unrolled `gpt:39b`, full training step",
            "",
            *growth,
            "",
        ]
    )
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(text)
    for problem in missed:
        print("missed:", problem, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
