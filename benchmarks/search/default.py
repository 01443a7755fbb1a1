"""``python -m benchmarks.search.default``: plans with default settings beside longer searches and named strategies.

Each case is a program and a topology, with a mesh and without one, and variants (rematerialized, in micro-batches) are open, as
on the command line. The default plan is compared with a search of 5,000 evaluations, and with the best combination of named
strategies on the plan's mesh over all variants: with and without remat, in 1, 2, 4, ... micro-batches. ``--only TEXT`` chooses
cases, ``--evaluations N`` the longer search, ``--processes N`` runs N cases at a time, and ``--busy N`` keeps N further
processes busy beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.search.parallel import in_processes

FOLDER: Final = Path(__file__).parent
#: Program, topology, and the mesh of one of its two cases.
CASES: Final[tuple[tuple[str, str, dict[str, int]], ...]] = (
    ("t7b:7b,remat", "v5e:4x4", {"data": 4, "model": 4}),
    ("t2b:2b,remat", "v5e:4x4", {"data": 4, "model": 4}),
    ("llama3:70b", "v5p:4x4x8", {"a": 8, "b": 16}),
    ("mixtral", "h100:8x8", {"data": 8, "model": 8}),
    ("mixtral:layers=1", "v5p:2x2x4", {"data": 4, "model": 4}),
    ("gns", "v5e:4x4", {"data": 4, "model": 4}),
    ("gpt:6.7b", "h100:8", {"data": 2, "model": 4}),
    ("vit:l16", "v5e:4x4", {"data": 4, "model": 4}),
    ("t5", "v5e:4x4", {"data": 4, "model": 4}),
    ("itx:decode", "v5e:4x4", {"data": 4, "model": 4}),
    ("llama3:layers=2,batch=1,seq=32768", "v5e:4x4", {"data": 4, "model": 4}),
    ("ssm", "v5e:4x4", {"data": 4, "model": 4}),
)

#: Program, topology, mesh as items.
Case = tuple[str, str, tuple[tuple[str, int], ...] | None]


def planned(case: Case, **budget: int) -> tuple[Any, float]:
    import shardwise
    from shardwise import zoo

    target, topology, mesh = case
    program = zoo.parse(target)
    start = time.perf_counter()
    plan = shardwise.plan(
        program.fn,
        *program.args,
        mesh=None if mesh is None else dict(mesh),
        topology=topology,
        donate_argnums=program.donate_argnums,
        microbatches="auto",
        remat="auto",
        allow_infeasible=True,
        **budget,
    )
    return plan, time.perf_counter() - start


def figures(plan: Any, seconds: float) -> dict[str, Any]:
    from shardwise.cost.uncertainty import is_tight

    p = plan.predicted
    return {
        "time_s": p.time_s,
        "peak_bytes": p.peak_bytes,
        "fits": p.fits,
        "tight": is_tight(p.peak_bytes, p.usable_bytes),
        "mesh": str(plan.mesh),
        "variant": str(plan.variant),
        "evaluations": plan.search.evaluations,
        "ended": plan.search.ended.name,
        "said": [n for n in plan.notes if "fit" in n],
        "seconds": round(seconds, 1),
    }


def best_strategy(case: Case, plan: Any) -> dict[str, Any] | None:
    """Returns the best named strategy on a plan's mesh over all variants; every combination and variant is costed."""
    from shardwise import zoo
    from shardwise.capture.trace import JitOptions
    from shardwise.cost.uncertainty import is_tight
    from shardwise.errors import VariantError
    from shardwise.planner.inquiry import Variants
    from shardwise.transforms.variants import AS_IS, AUTO, Wanted

    program = zoo.parse(case[0])
    variants = Variants(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums))
    placement, roles = plan.asked.cost.placement, plan.asked.roles
    found = []
    for variant in Wanted(AUTO, AUTO).variants(variants[AS_IS].traced, roles):
        try:
            rows = variants[variant].inquiry(placement, roles).baselines
        except VariantError:
            continue
        found += [(baseline.rank, baseline, str(variant)) for baseline in rows[:1]]
    if not found:
        return None
    _, best, text = min(found, key=lambda row: row[0])
    tight = is_tight(best.cost.peak_bytes, plan.predicted.usable_bytes)
    figures = {"time_s": best.cost.time_s, "fits": best.fits, "tight": tight}
    return {"name": best.name, "variant": text, "variants": len(found)} | figures


def compared(case: Case, evaluations: int) -> dict[str, Any]:
    plan, seconds = planned(case)
    row = {"default": figures(plan, seconds), "strategy": best_strategy(case, plan)}
    if evaluations:
        row["long"] = figures(*planned(case, budget_evals=evaluations))
    return row


def spin() -> None:
    while True:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.default", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--evaluations", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    meshes = [(t, p, m) for t, p, mesh in CASES for m in (tuple(mesh.items()), None)]
    names = {case: f"{case[0]} on {case[1]}, {f'mesh {dict(case[2])}' if case[2] else 'any mesh'}" for case in meshes}
    busy = [multiprocessing.get_context("spawn").Process(target=spin, daemon=True) for _ in range(given.busy)]
    for process in busy:
        process.start()
    records: dict[str, Any] = {}
    cases = [case for case in meshes if given.only in names[case]]
    for case, row in in_processes(partial(compared, evaluations=given.evaluations), cases, given.processes):
        records[names[case]] = row
        ordered = {name: records[name] for name in names.values() if name in records}
        (given.out / "default.json").write_text(json.dumps(ordered, indent=1) + "\n")
        print(names[case], json.dumps(row), flush=True)
    for process in busy:
        process.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
