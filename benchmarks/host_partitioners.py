"""``python -m benchmarks.host_partitioners``: found plans on eight host devices, device-local program against constraints.

Host devices are slow but real. Each program is planned by the default search, compiled both ways, and run in rounds of a few
steps that take turns, since a disturbance only ever slows; the fastest step of each counts. Wants a machine with as many cores
as devices or more. ``--within S`` is how long all rounds may take; ``--record benchmarks/host_partitioners.json`` keeps the
figures for the page of ``benchmarks.partitioners``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

DEVICES: Final = 8
PROFILE: Final = Path(__file__).parent / "fidelity" / "measured" / "host8.toml"
PROGRAMS: Final = {
    "long context": "llama3:layers=2,batch=1,seq=2048,d=256,heads=8,kv_heads=8,head=32,ffn=1024,vocab=1024",
    "grouped queries": "llama3:layers=2,batch=8,seq=512,d=512,heads=16,kv_heads=4,head=32,ffn=1024,vocab=2048",
    "decode": "itx:step,layers=4,batch=64,seq=512,d=512,heads=8,head=64,ffn=2048,vocab=2048",
    "mixture of experts": "mixtral:layers=1,batch=8,seq=512,d=256,heads=8,kv_heads=8,head=32,ffn=512,group=256,vocab=1024",
    "gpt": "gpt:layers=2,batch=8,seq=512,d=512,heads=8,vocab=2048",
    "mlp": "mlp:layers=4,width=1024,batch=2048",
    "graph network": "gns:tiny,nodes=2048,edges=16384,latent=128,hidden=256",
    "t2b": "t2b:layers=2,batch=8,seq=512,d=512,heads=8,head=64,ffn=2048,vocab=2048",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_partitioners", description=__doc__)
    parser.add_argument("--within", type=float, default=240.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--record", type=Path, help="a file for the figures, as JSON")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    import shardwise
    from benchmarks.fidelity.parallel import COMPUTE, computing
    from shardwise import zoo

    runs: dict[tuple[str, str], tuple[Any, Any]] = {}
    with computing(COMPUTE):
        for name, target in PROGRAMS.items():
            if given.only not in name:
                continue
            try:
                program = zoo.parse(target)
            except Exception as error:
                print(f"{name}: {error}", flush=True)
                continue
            args = program.make_args(0)
            plan = shardwise.plan(
                program.fn,
                *program.args,
                mesh={"data": 2, "model": 4},
                topology=f"{PROFILE}:{DEVICES}",
                roles={"batch": "batch", "params": "params"},
                budget_evals=300,
            )
            for how in ("shardwise", "xla"):
                start = time.perf_counter()
                planned = plan.jit(program.fn, partitioner=how)
                compiled = planned.lower(*args).compile()
                placed = plan.shard(args)
                jax.block_until_ready(compiled(*placed))
                print(f"{name} {how}: compiled in {time.perf_counter() - start:.1f} s", flush=True)
                runs[name, how] = compiled, placed
    best = dict.fromkeys(runs, math.inf)
    end = time.perf_counter() + given.within
    while time.perf_counter() < end:
        for key, (compiled, placed) in runs.items():
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(compiled(*placed))
                best[key] = min(best[key], time.perf_counter() - start)
    print("| program | by constraints ms | explicit ms | speed-up |\n|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in runs):
        explicit, constrained = best[name, "shardwise"], best[name, "xla"]
        print(f"| {name} | {constrained * 1e3:.2f} | {explicit * 1e3:.2f} | {constrained / explicit:.3f} |")
    if given.record:
        versions = {"jax": jax.__version__, "cores": os.cpu_count()}
        figures = [{"program": name, "how": how, "seconds": seconds} for (name, how), seconds in best.items()]
        given.record.write_text(json.dumps(versions | {"fastest": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
