"""``XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m benchmarks.fidelity.parallel --measure --out FILE.jsonl``:
how long planned steps take on eight host devices.

Host devices are slow but real: their collectives, their waiting for each other and their memory traffic take time, and a plan
that is better on paper must be better there, under a profile of these devices (``shardwise hardware calibrate --devices 8``).
Each program is planned under each strategy and run as ``plan.jit`` runs it, donated arguments fed back; a JSON line holds
program, strategy, mesh and all times. Cases come in an order of breadth, so that a run that is cut short has some of every
program.

Programs compute in float32 (``computing``): XLA's CPU backend has no bfloat16 for much of what they do and converts to and fro,
at a price that depends on shapes and that no profile has. Lines without ``compute`` are of bfloat16.

Two more things that host devices have and accelerators have not are kept out of the way, as no profile has them either:

- XLA's CPU backend asks the C library for the memory of every step and gives it back; the kernel then clears it page by page
  (gigabytes a step: a quarter of the time of some). Under ``TUNABLES`` it does so with large pages.
- It keeps every array in one layout and transposes gradients inside of loops. At a stride of a power of two all reads of a
  column fall into the same few lines of the cache, and an element takes six times as long. So sizes are not powers of two.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pkgutil
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.fidelity.cases import STRATEGIES, Case, Program
from benchmarks.fidelity.single import LIMIT_S, Record, costs, fed, make_args, memory, named, record_all, timed

#: The calibrated profile of the machine that the committed figures are from.
PROFILE: Final = Path(__file__).parent / "measured" / "host8.toml"
DEVICES: Final = 8
COMPUTE: Final = "float32"
#: Read by the C library when a process starts, so that ``python -m`` starts itself again with them.
TUNABLES: Final = "glibc.malloc.hugetlb=1"
MESHES: Final[dict[int, tuple[tuple[int, ...], ...]]] = {1: ((8,),), 2: ((2, 4), (4, 2))}
_LM: Final = (
    "dp", "fsdp", "megatron", "dp+megatron", "zero2", "fsdp+megatron", "replicated", "dp+context", "dp+megatron+sequence",
    "dp+fsdp", "dp+vocabulary",
)  # fmt: skip
_MOE: Final = (
    "dp",
    "fsdp",
    "expert",
    "expert+megatron",
    "dp+megatron",
    "megatron",
    "fsdp+megatron",
    "replicated",
    "zero2",
)
_PLAIN: Final = ("dp", "fsdp", "megatron", "dp+megatron", "zero2", "fsdp+megatron", "replicated", "dp+fsdp")
_GRAPH: Final = ("edges", "dp", "fsdp", "megatron", "edges+megatron", "replicated", "fsdp+megatron", "zero2")


def _program(name: str, strategies: tuple[str, ...], **options: Any) -> Program:
    config = options.pop("config", None)
    return Program(name, config, tuple(options.items()), strategies)


#: About 30 to 70 GFLOP a step: a tenth of a second or more on 16 cores, and eight times that where all is replicated.
FULL: Final = (
    _program("gpt", _LM, layers=2, batch=16, seq=64, d=448, heads=8, head=56, ffn=1984, vocab=4032),
    _program("mlp", _PLAIN, layers=3, batch=512, features=960, width=1984, classes=960),
    _program("t2b", _LM, layers=2, batch=16, seq=64, d=448, heads=8, head=56, ffn=992, vocab=8128),
    _program("mixtral", _MOE, layers=2, batch=16, seq=128, d=240, heads=8, kv_heads=8, head=40, ffn=496, group=128, vocab=2016),
    _program("gns", _GRAPH, layers=3, mlp_layers=3, hidden=240, latent=120, nodes=960, edges=8000, node_features=32),
    _program("vit", _PLAIN, layers=3, batch=32, image=64, patch=8, d=384, heads=8, ffn=1440, classes=1000),
)  # fmt: skip
TINY: Final = tuple(Program(p.name, "tiny", (), p.strategies) for p in FULL)


def cases(scale: str) -> Iterator[Case]:
    """Strategies by rank, each of every program, on the first mesh that has its axes; then the other meshes."""
    chosen = TINY if scale == "tiny" else FULL
    for place in range(max(map(len, MESHES.values()))):
        for rank in range(max(len(p.strategies) for p in chosen)):
            for program in chosen:
                if rank < len(program.strategies):
                    strategy = program.strategies[rank]
                    axes = STRATEGIES[strategy][0]
                    shapes = MESHES[len(axes)]
                    if place < len(shapes):
                        yield Case(program, strategy, "host", tuple(zip(axes, shapes[place], strict=True)))


@contextlib.contextmanager
def computing(dtype: str) -> Iterator[None]:
    """The zoo's programs, loaded and traced inside, compute in this type; their parameters are float32 in any case."""
    import jax.numpy as jnp

    from shardwise import zoo

    for module in pkgutil.iter_modules(zoo.__path__):  # one that came later would keep the type of that moment
        importlib.import_module(f"{zoo.__name__}.{module.name}")
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("shardwise.zoo.") and hasattr(module, "COMPUTE"):
                stack.enter_context(mock.patch.object(module, "COMPUTE", getattr(jnp, dtype)))
        yield


def measure(case: Case) -> Record:
    """A planned step on host devices."""
    with computing(COMPUTE):
        return _measure(case) | {"compute": COMPUTE}


def _measure(case: Case) -> Record:
    import jax

    import shardwise
    from shardwise.rewrite.apply import make_mesh

    loaded = case.program.load()
    start = time.perf_counter()
    plan = shardwise.plan(
        loaded.fn,
        *loaded.args,
        mesh=dict(case.mesh),
        topology=f"{PROFILE}:8",
        tactics=case.tactics(),
        roles={"batch": "batch", "params": "params"},
        donate_argnums=loaded.donate_argnums,
    )
    told: Record = {"plan_s": time.perf_counter() - start, "donated": list(loaded.donate_argnums)}
    mesh = make_mesh(plan.mesh, jax.devices("cpu"))
    shardings, _ = plan.in_shardings(mesh)
    start = time.perf_counter()
    compiled = plan.jit(loaded.fn, mesh).lower(*loaded.args).compile()
    told |= {"compile_s": time.perf_counter() - start, "memory": memory(compiled), "cost": costs(compiled)}

    def placed(args: Any) -> Any:
        return tuple(jax.device_put(a, s) for a, s in zip(args, shardings, strict=True))

    args = placed(make_args(loaded))

    def run(args: Any) -> Any:
        # What ``plan.jit(fn)`` runs: calling that would compile once more.
        return plan.trees[1].unflatten(compiled(*jax.tree.leaves(args)))

    times = timed(run, lambda a, r: placed(fed(a, r, loaded.donate_argnums)), args)
    moved = [[kind, list(axes), count, nbytes] for (kind, axes), (count, nbytes) in plan.moved().items()]
    machine = {"cores": os.cpu_count(), "tunables": os.environ.get("GLIBC_TUNABLES", "")}
    return told | {"times_s": times, "median_s": statistics.median(times), "moved": moved} | machine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.parallel", description=__doc__)
    parser.add_argument("--measure", action="store_true", required=True, help="run planned steps")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="lines are appended")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="start no case after so many seconds")
    parser.add_argument("--only", default="", help="only cases whose key has this in it")
    parser.add_argument("--first", type=int, default=None, help="only so many cases, in the order of breadth")
    given = parser.parse_args(arguments)
    # Both are read when JAX first looks for devices.
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={DEVICES}".strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    chosen = [c for c in cases(given.scale) if given.only in c.key][: given.first]
    lines = (
        (named(c.program) | {"scale": given.scale, "strategy": c.strategy, "mesh": dict(c.mesh)}, partial(measure, c))
        for c in chosen
    )
    record_all(given.out, given.limit_s, lines)
    return 0


if __name__ == "__main__":
    if TUNABLES not in os.environ.get("GLIBC_TUNABLES", ""):
        os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), TUNABLES)))
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.fidelity.parallel", *sys.argv[1:]])
    sys.exit(main())
