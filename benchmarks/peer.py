"""``make bench-peer``: found plans beside those of the auto-partitioner that XLA had until spring 2026, both compiled by it.

XLA's ``auto_sharding`` (Alpa's integer program) is no longer in JAX or XLA; the last release that has it, ``jax[tpu]==0.10.0``,
goes into an environment of its own. Both get the same function, the same mesh of 4 × 4 chips and the same compiler, and
each has a process of its own. Of each, the seconds from function to executable; and for a step, the compiler's cycles and its
collectives over the same links, one after another, as in ``benchmarks/search``. The size of the memory is an option of
the peer.

``--only TEXT`` for some programs. Results are appended to ``peer.jsonl``; the page is docs/benchmarks/peer.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.compare import moved_s
from shardwise import __version__
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology

RESULTS: Final = Path(__file__).parent / "peer.jsonl"
PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "peer.md"
TOPOLOGY: Final = "v5e:4x4"
MESH: Final = {"data": 4, "model": 4}
LIMIT_S: Final = 900
PROGRAMS: Final = (
    "mlp:layers=4",
    "itx:step,layers=4,batch=256",
    "gpt:layers=2,batch=32",
    "t2b:layers=2,batch=16,seq=1024",
    "mixtral:layers=1,batch=16,seq=1024",
    "gns:layers=2",
    "vit:layers=2",
)
Row = dict[str, Any]


def child(who: str, target: str) -> Row:
    """Plans and compiles one program."""
    import jax

    from benchmarks.fidelity.windowed import merge_windowed
    from shardwise import zoo
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.verification import hlo
    from shardwise.verification.compiled import make_mesh, read_compiled

    program = zoo.parse(target)
    mesh = make_mesh(MESH, TOPOLOGY)
    start = time.perf_counter()
    plan_s = 0.0
    if who == "peer":
        from jax.experimental.pjit import AUTO

        jax.config.update("jax_use_shardy_partitioner", False)
        options = {"in_shardings": AUTO(mesh), "out_shardings": AUTO(mesh), "donate_argnums": program.donate_argnums}
        usable = topology(TOPOLOGY).profile.usable_bytes // 2**30
        compiler_options = {"xla_tpu_auto_spmd_partitioning_memory_budget_gb": usable}
        executable = jax.jit(program.fn, **options).lower(*program.args).compile(compiler_options=compiler_options)
    else:
        import shardwise

        where: Row = {"mesh": MESH, "topology": TOPOLOGY, "donate_argnums": program.donate_argnums}
        plan = shardwise.plan(program.fn, *program.args, **where)
        plan_s = time.perf_counter() - start
        executable = plan.on_mesh(mesh).jit(program.fn).lower(*program.args).compile()
    seconds = time.perf_counter() - start
    found = read_compiled(executable, mesh, TOPOLOGY)
    collectives = merge_windowed(hlo.read(executable.as_text()), MeshAxes.of(mesh), found.collectives)
    rows = [{"kind": c.kind, "axes": c.axes, "bytes": c.nbytes, "runs": c.runs, "count": 1} for c in collectives]
    assert found.memory is not None
    figures = {"plan_s": plan_s, "seconds": seconds, "cycles": found.estimated_cycles}
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    return {"peak": found.memory.peak_bytes, "collectives": rows, "versions": versions} | figures


def measure(who: str, target: str) -> Row:
    """In a process of its own, since the peer may hang, or abort."""
    from shardwise.verification.compiled import tpu_environment

    command = [sys.executable, "-m", "benchmarks.peer", "--child", who, target]
    environment = os.environ | tpu_environment()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: Row = json.loads(lines[-1])
        return found
    said = [line for line in done.stderr.splitlines() if "Error" in line or "RESOURCE_EXHAUSTED" in line]
    return {"error": (said or ["the process ended"])[-1][:300]}


def step_s(row: Row) -> float:
    """Compute and collectives, one after another."""
    placement = place(MeshAxes.of(MESH), topology(TOPOLOGY))
    return float(row["cycles"] / placement.topology.profile.clock_hz + moved_s(row, placement))


def load() -> dict[tuple[str, str], Row]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else ()
    return {(row["program"], row["who"]): row for row in map(json.loads, lines)}


def page() -> str:
    known = load()
    versions = next((row["versions"] for row in known.values() if "versions" in row), {})
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        "# Beside the auto-partitioner that XLA had",
        "",
        f"Written by `make bench-peer`, shardwise {__version__}, {names}.",
        "",
        "XLA's `auto_sharding` (Alpa's integer program inside the compiler, `jax.experimental.pjit.AUTO`) was removed in "
        "spring 2026; this is the last release that has it. Both partition the same function for 16 v5e chips as a mesh of "
        "4 × 4, and the same compiler compiles both. Seconds are from the function to the executable; of ours those to the "
        "plan are in brackets. A step is the compiler's cycles, and its collectives over the same links one after another. "
        "Recorded with other work on the machine, so that seconds are rough. In sample: the search was worked on with "
        "programs of the zoo in view, the peer was not.",
        "",
        "| program | ours s (plan) | peer s | ours step ms | peer step ms | peer / ours | ours GB | peer GB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for program in PROGRAMS:
        ours, peer = known.get((program, "ours")), known.get((program, "peer"))
        if ours is None or peer is None:
            continue
        cells = [program]
        if "error" in ours or "error" in peer:
            cells += [ours.get("error") or f"{ours['seconds']:.0f} ({ours['plan_s']:.1f})"]
            cells += [peer.get("error") or f"{peer['seconds']:.0f}"]
            cells += [f"{step_s(row) * 1e3:.2f}" if "error" not in row else "" for row in (ours, peer)]
            cells += ["", *(f"{row['peak'] / 1e9:.2f}" if "error" not in row else "" for row in (ours, peer))]
        else:
            mine, theirs = step_s(ours), step_s(peer)
            cells += [f"{ours['seconds']:.0f} ({ours['plan_s']:.1f})", f"{peer['seconds']:.0f}"]
            cells += [f"{mine * 1e3:.2f}", f"{theirs * 1e3:.2f}", f"{theirs / mine:.2f}"]
            cells += [f"{row['peak'] / 1e9:.2f}" for row in (ours, peer)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="programs that have this text")
    parser.add_argument("--child", nargs=2, metavar=("WHO", "TARGET"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(*given.child)))
        return
    for program in PROGRAMS:
        for who in ("ours", "peer"):
            if given.only in program and (program, who) not in load():
                row = {"program": program, "who": who} | measure(who, program)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                said = row.get("error") or f"{row['seconds']:.0f} s, {step_s(row) * 1e3:.2f} ms"
                print(f"{program:32} {who:5} {said}", flush=True)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
