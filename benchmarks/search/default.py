"""``python -m benchmarks.search.default``: plans with default settings beside longer searches and named strategies.

Each case is a program and a topology, with a mesh or without. The default plan is compared with a search of 5,000 evaluations,
and with the best named strategy of the plan's mesh. Variants (rematerialized, in micro-batches) are open, as on the command
line. ``--only TEXT`` chooses cases, ``--evaluations N`` the longer search (0 leaves it out).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

RECORDS: Final = Path(__file__).with_suffix(".json")
CASES: Final[tuple[tuple[str, str, dict[str, int] | None], ...]] = (
    ("t7b:7b,remat", "v5e:4x4", {"data": 4, "model": 4}),
    ("t2b:2b,remat", "v5e:4x4", None),
    ("llama3:70b", "v5p:4x4x8", None),
    ("llama3:70b", "v5p:4x4x8", {"a": 8, "b": 16}),
    ("mixtral", "h100:8x8", None),
    ("mixtral:layers=1", "v5p:2x2x4", None),
    ("gns", "v5e:4x4", None),
    ("gpt:6.7b", "h100:8", {"data": 2, "model": 4}),
    ("vit:l16", "v5e:4x4", None),
    ("t5", "v5e:4x4", {"data": 4, "model": 4}),
    ("itx:decode", "v5e:4x4", None),
    ("llama3:layers=2,batch=1,seq=32768", "v5e:4x4", None),
)


def planned(target: str, topology: str, mesh: dict[str, int] | None, **budget: int) -> tuple[Any, float]:
    import shardwise
    from shardwise import zoo

    program = zoo.parse(target)
    start = time.perf_counter()
    plan = shardwise.plan(
        program.fn,
        *program.args,
        mesh=mesh,
        topology=topology,
        donate_argnums=program.donate_argnums,
        microbatches="auto",
        remat="auto",
        allow_infeasible=True,
        **budget,
    )
    return plan, time.perf_counter() - start


def figures(plan: Any, seconds: float) -> dict[str, Any]:
    p = plan.predicted
    return {
        "time_s": p.time_s,
        "peak_bytes": p.peak_bytes,
        "fits": p.fits,
        "mesh": str(plan.mesh),
        "variant": str(plan.variant),
        "evaluations": plan.search.evaluations,
        "ended": plan.search.ended.name,
        "seconds": round(seconds, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.default", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--evaluations", type=int, default=5000)
    given = parser.parse_args()
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    for target, topology, mesh in CASES:
        key = f"{target} on {topology}, {'mesh ' + str(mesh) if mesh else 'any mesh'}"
        if given.only not in key:
            continue
        plan, seconds = planned(target, topology, mesh)
        row = {"default": figures(plan, seconds)}
        best = plan.baselines[0] if plan.baselines else None
        if best is not None:
            row["strategy"] = {"name": best.name, "time_s": best.time_s, "fits": best.fits}
        if given.evaluations:
            row["long"] = figures(*planned(target, topology, mesh, budget_evals=given.evaluations))
        records[key] = row
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
        print(key, json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
