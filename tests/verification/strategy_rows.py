"""The strategies of design section 6 on small programs: what is planned, and what each row of the table says must come out.

Run as a module it compiles the rows that are named (all without names) and prints what it found as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import shardwise
from shardwise import zoo
from shardwise.hardware.layout import ideal
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.tactics import strategies as s
from shardwise.verification.collectives import totals
from shardwise.verification.verify import Verification

TRANSFORMER = "t2b:layers=2,d=512,heads=8,head=64,ffn=2048,vocab=1024,batch=32,seq=256"
EXPERTS = "mixtral:layers=2,batch=32,seq=256,d=512,heads=8,kv_heads=8,head=64,ffn=1024,group=512,vocab=1024,experts=16"
GRAPH = "gns:tiny"
#: So small that it is compiled for four TPUs in seconds. Some of its gradients go round in rings, others do not.
SMALL = "t2b:layers=1,d=256,heads=4,head=64,ffn=512,vocab=256,batch=8,seq=64"
#: So wide that the textbook is cheapest for every product.
WIDE = "llama3:layers=2,d=8192,heads=64,kv_heads=64,head=128,ffn=16384,vocab=1024,batch=64,seq=512"
SEQUENCE = ("batch/inputs", 1)
#: Gradients may go round in a ring of permutes.
SCATTERS = "reduce-scatter collective-permute"
WEIGHTS = ("params/layers/experts/up", 1)


@dataclasses.dataclass(frozen=True)
class Row:
    """``kinds`` are those that may move more than a hundredth of all bytes."""

    target: str
    axes: tuple[str, ...]
    tactics: tuple[Any, ...]
    kinds: frozenset[str]
    topology: str = "v5e:4x4"

    def mesh(self, devices: int) -> dict[str, int]:
        if len(self.axes) == 1:
            return {self.axes[0]: devices}
        return {self.axes[0]: devices // 4, self.axes[1]: 4}

    def plan(self, devices: int) -> tuple[Any, shardwise.Plan]:
        program = zoo.parse(self.target)
        roles = {"batch": "batch", "params": "params"}
        plan = shardwise.plan(
            program.fn,
            *program.args,
            topology=ideal(MeshAxes.of(self.mesh(devices)), "v5e"),
            tactics=self.tactics,
            roles=roles,
            donate_argnums=program.donate_argnums,
        )
        return program, plan

    def verified(self, devices: int, backend: str) -> Verification:
        program, plan = self.plan(devices)
        return shardwise.verify(plan, program.fn, *program.args, backend=backend)


def _row(target: str, axes: str, *tactics: Any, kinds: str) -> Row:
    return Row(target, tuple(axes.split()), tactics, frozenset(kinds.split()))


ROWS = {
    "data parallel": _row(TRANSFORMER, "data", s.DataParallel("data"), kinds="all-reduce"),
    # The output projection gathers the heads where that is cheaper than reducing its result.
    "megatron": _row(
        TRANSFORMER, "data model", s.DataParallel("data"), s.Megatron("model"), kinds="all-reduce all-gather"
    ),
    "megatron, wide": _row(WIDE, "data model", s.DataParallel("data"), s.Megatron("model"), kinds="all-reduce"),
    "megatron, sequence": _row(
        TRANSFORMER,
        "data model",
        s.DataParallel("data"),
        s.Megatron("model"),
        s.SequenceParallel("model", SEQUENCE),
        kinds=f"all-gather all-to-all all-reduce {SCATTERS}",
    ),
    "fsdp": _row(TRANSFORMER, "data", s.FSDP("data"), kinds=f"all-gather all-to-all {SCATTERS}"),
    "zero2": _row(TRANSFORMER, "data", s.ZeRO2("data"), kinds=f"all-gather all-to-all {SCATTERS}"),
    "context": _row(
        TRANSFORMER,
        "data seq",
        s.DataParallel("data"),
        s.ContextParallel("seq", SEQUENCE),
        kinds=f"all-reduce all-gather {SCATTERS}",
    ),
    "experts": _row(
        EXPERTS,
        "data expert",
        s.DataParallel("data"),
        s.ExpertParallel("expert", WEIGHTS),
        kinds="all-reduce all-gather all-to-all",
    ),
    "edges": _row(GRAPH, "edge", s.EdgeSharding("edge", ("batch/edges", 0)), kinds="all-reduce"),
    "fsdp, megatron": _row(
        TRANSFORMER,
        "data model",
        s.FSDP("data"),
        s.Megatron("model"),
        s.Shard("params/embed", 0, "model"),
        kinds=f"all-gather all-reduce {SCATTERS}",
    ),
}


ROWS["fsdp, small"] = dataclasses.replace(ROWS["fsdp"], target=SMALL, topology="v5e:2x2")


def large_kinds(found: dict[str, float]) -> set[str]:
    """Kinds that move more than a hundredth of all bytes."""
    whole = sum(found.values())
    return {kind for kind, nbytes in found.items() if nbytes > 0.01 * whole}


def bytes_by_kind(verification: Verification) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in verification.rows:
        found[row.kind] = found.get(row.kind, 0.0) + row.compiled_bytes
    return found


def main(names: list[str]) -> None:
    results = {}
    for name in names or ROWS:
        row = ROWS[name]
        found = row.verified(topology(row.topology).devices, row.topology)
        results[name] = {
            "matched": found.matched,
            "bytes": bytes_by_kind(found),
            "runs": {
                f"{kind} {' '.join(axes or ())}": t.runs
                for (kind, axes), t in totals(found.compiled.collectives).items()
            },
            "text": str(found),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
