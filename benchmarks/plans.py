"""``make bench-plans``: named strategies, planned, compiled by XLA for v5e:4x4, predicted against compiled.

Needs the extra ``shardwise[tpu]`` (libtpu), no TPU. The program is a Gemma-2B-shaped training step with three layers. For each
strategy: bytes that one device moves by kind (predicted and compiled), the share that agrees, peak
memory, and the compiler's own estimate of cycles for the compute. The
table is printed and written to docs/benchmarks/plans.md.
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

from shardwise.verification.compiled import tpu_environment

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks" / "plans.md"
TARGET = "t2b:layers=3,batch=16,seq=1024"
TOPOLOGY = "v5e:4x4"


def main() -> int:
    import os

    os.environ.update(tpu_environment())
    import jax

    import shardwise
    from shardwise import zoo
    from shardwise.tactics.strategies import (
        FSDP,
        ContextParallel,
        DataParallel,
        Megatron,
        SequenceParallel,
        Shard,
        ZeRO2,
    )

    sequence = ("batch/inputs", 1)
    data, model = {"data": 16}, {"data": 4, "model": 4}
    strategies = {
        "FSDP": (data, [FSDP("data")]),
        "ZeRO-2": (data, [ZeRO2("data")]),
        "data + Megatron": (model, [DataParallel("data"), Megatron("model")]),
        "data + Megatron + sequence": (
            model,
            [DataParallel("data"), Megatron("model"), SequenceParallel("model", sequence)],
        ),
        "data + context": ({"data": 4, "seq": 4}, [DataParallel("data"), ContextParallel("seq", sequence)]),
        "FSDP + Megatron": (model, [FSDP("data"), Megatron("model")]),
        "FSDP + Megatron + vocabulary": (
            model,
            [FSDP("data"), Megatron("model"), Shard("params/embed", 0, "model")],
        ),
    }
    program = zoo.parse(TARGET)
    columns = "strategy, plan s, predicted MB, compiled MB, agree, peak GB, Mcycles"
    lines = [f"| {columns.replace(', ', ' | ')} |", "|---|" + "---:|" * 6]
    details = []

    def measure(name: str, plan: shardwise.Plan, plan_s: float) -> None:
        found = shardwise.verify(plan, program.fn, *program.args, backend=TOPOLOGY)
        predicted = sum(r.predicted_bytes for r in found.rows) / 1e6
        compiled = sum(r.compiled_bytes for r in found.rows) / 1e6
        memory = found.compiled.memory
        peak = f"{memory.peak_bytes / 1e9:.2f}" if memory is not None else "does not fit"
        cycles = found.compiled.estimated_cycles / 1e6
        lines.append(
            f"| {name} | {plan_s:.1f} | {predicted:,.0f} | {compiled:,.0f} "
            f"| {found.matched:.1%} | {peak} | {cycles:,.0f} |"
        )
        print(lines[-1], flush=True)
        rows = [
            f"| {r.kind} | {' '.join(r.axes)} | {r.predicted_bytes / 1e6:,.1f} | {r.compiled_bytes / 1e6:,.1f} |"
            for r in found.rows
        ]
        table = ["| kind | axes | predicted MB | compiled MB |", "|---|---|---:|---:|", *rows]
        details.extend(["", f"### {name}", "", *table])

    for name, (mesh, tactics) in strategies.items():
        start = time.perf_counter()
        roles = {"batch": "batch", "params": "params"}
        plan = shardwise.plan(
            program.fn, *program.args, mesh=mesh, tactics=tactics, roles=roles, donate_argnums=program.donate_argnums
        )
        measure(name, plan, time.perf_counter() - start)
    versions = f"shardwise {shardwise.__version__}, JAX {jax.__version__}, Python {platform.python_version()}"
    head = [
        "# Plans: predicted against compiled",
        "",
        f"Written by `make bench-plans` with {versions}: `zoo:{TARGET}`, a full training step with Adam,",
        f"compiled by XLA for {TOPOLOGY} without a TPU. Bytes are those that one device moves in a step.",
        "Cycles are the compiler's own estimate for the compute; collectives are not in them.",
        "",
    ]
    TABLE.write_text("\n".join([*head, *lines, "", "## By kind and axes", *details, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
