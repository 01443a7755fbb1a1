"""``python -m benchmarks.recorded_plans``: plans of the zoo, kept so that a change of the code can be compared with them.

Each case is a program of the zoo, a topology with a mesh (or none: the mesh is searched for), and a search method or named
tactics. A record has decisions, specs, collectives and predicted figures. All budgets count evaluations, so that a plan does
not depend on how busy the machine is. Without ``--record`` every case is planned again and compared: a plan that is equal, or
predicted faster, is fine; anything else is listed, and the exit status is 1.

``--only TEXT`` chooses cases by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RECORDS: Final = Path(__file__).with_suffix(".json")
EVALUATIONS: Final = 150
PROGRAMS: Final = (
    "t2b:layers=3,batch=16,seq=1024",
    "t2b:layers=2,batch=16,seq=1024,remat=True",
    "gpt:layers=2,batch=32",
    "llama3:layers=2,batch=16,seq=2048",
    "mixtral:layers=2,batch=16,seq=1024",
    "mixtral:layers=2,batch=16,seq=1024,dropless=True",
    "mlp:layers=4",
    "itx:decode,layers=2,generate=16",
    "itx:prefill,layers=2,batch=64",
    "vit:layers=2,batch=256",
    "gns:layers=2",
    "t5:layers=2,batch=64",
    "unet:tiny",
    "wresnet:tiny",
    "ssm:layers=2,batch=16,seq=512",
    "dlrm:tiny",
)
#: By topology the mesh that is given.
MESHES: Final[dict[str, dict[str, int] | None]] = {
    "v5e:4x4": {"data": 4, "model": 4},
    "h100:8": {"data": 2, "model": 4},
    "v5p:2x2x2": None,
}
METHODS: Final = ("mcts", "greedy", "beam", "random")


@dataclass(frozen=True, slots=True)
class Case:
    """``how`` is the name of a search method, or of tactics."""

    program: str
    topology: str
    how: str

    @property
    def key(self) -> str:
        return f"{self.program} {self.topology} {self.how}"


def cases() -> Iterator[Case]:
    """All programs on all topologies by the default method; some by the other methods and by named tactics."""
    for topology in MESHES:
        for program in PROGRAMS:
            yield Case(program, topology, "mcts")
    for number, program in enumerate(PROGRAMS):
        yield Case(program, "v5e:4x4", METHODS[1 + number % 3])
        yield Case(program, "v5e:4x4", ("dp+fsdp", "fsdp", "dp")[number % 3])


def record(case: Case) -> dict[str, Any]:
    """What a case's plan is."""
    import shardwise
    from shardwise import zoo
    from shardwise.tactics.strategies import FSDP, DataParallel

    tactics = {
        "dp": [DataParallel("data")],
        "fsdp": [FSDP("data")],
        "dp+fsdp": [DataParallel("data"), FSDP("model")],
    }
    program = zoo.parse(case.program)
    how: dict[str, Any] = {"tactics": tactics[case.how]} if case.how in tactics else {"method": case.how}
    plan = shardwise.plan(
        program.fn,
        *program.args,
        mesh=MESHES[case.topology],
        topology=case.topology,
        roles={"batch": "batch", "params": "params"},
        donate_argnums=program.donate_argnums,
        budget_evals=EVALUATIONS,
        allow_infeasible=True,
        **how,
    )
    moved = {
        f"{kind} {'·'.join(axes)}": [count, nbytes] for (kind, axes), (count, nbytes) in sorted(plan.moved().items())
    }
    return {
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "decisions": sorted(map(str, plan.decisions)),
        "specs": {a.path: str(a.spec) for a in (*plan.arguments, *plan.outputs) if any(a.spec)},
        "collectives": moved,
        "time_s": plan.predicted.time_s,
        "peak_bytes": plan.predicted.peak_bytes,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is not equal, in words."""
    return [key for key in before if before[key] != after.get(key)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorded_plans", description=__doc__)
    parser.add_argument("--record", action="store_true", help="plan the cases that have no record, and write theirs")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    known = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    worse = compared = missing = 0
    for case in cases():
        if given.only not in case.key or (given.record and case.key in known):
            continue
        if case.key not in known and not given.record:
            missing += 1
            continue
        start = time.perf_counter()
        now = json.loads(json.dumps(record(case)))
        took = time.perf_counter() - start
        if given.record:
            known[case.key] = now
            print(f"{took:5.1f} s  {case.key}: {now['time_s'] * 1e3:.2f} ms", flush=True)
            continue
        before, compared = known[case.key], compared + 1
        changed = differences(before, now)
        better = now["time_s"] < before["time_s"]
        worse += bool(changed) and not better
        verdict = "equal" if not changed else ("better" if better else "WORSE") + ": " + ", ".join(changed)
        figures = f"{before['time_s'] * 1e3:.2f} -> {now['time_s'] * 1e3:.2f} ms" if changed else ""
        print(f"{took:5.1f} s  {case.key}: {verdict} {figures}".rstrip(), flush=True)
    if given.record:
        RECORDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    else:
        print(f"{compared} compared, {worse} worse, {missing} without a record")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
