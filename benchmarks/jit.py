"""``make bench-jit``: what a call of ``shardwise.jit`` costs beside one of ``jax.jit``, once it is planned and compiled.

The function adds one to every leaf of a dict, each a small array, on two host devices. Both are called with arrays that lie
as planned; ``jax.jit`` is given the same shardings. Time is that of the call alone (dispatch is asynchronous). The two take
turns, and what is added is the median of the differences of neighbours, so that a busy machine slows both. The table is
printed and written to docs/benchmarks/jit.md.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import shardwise
from shardwise.tactics.strategies import DataParallel

TABLE = Path(__file__).parent.parent / "docs" / "benchmarks" / "jit.md"
DEVICES = 2
LEAVES = (1, 10, 101, 1000)
#: Seconds that a call may take longer than one of ``jax.jit``, at this many leaves.
BAR = {101: 100e-6}


@dataclass(frozen=True)
class Row:
    leaves: int
    plain_s: float
    added_s: float


def measure(leaves: int, calls: int = 500) -> Row:
    """Seconds a call takes, of a function of a dict of this many arrays."""

    def step(state: dict[str, Any]) -> dict[str, Any]:
        return {name: x + 1 for name, x in state.items()}

    planned = shardwise.jit(step, mesh={"data": DEVICES}, tactics=[DataParallel("data")], roles={"batch": "state"})
    state = {f"leaf{k}": jnp.ones(DEVICES) for k in range(leaves)}
    (shardings,) = planned.plan(state).in_shardings
    plain = jax.jit(step, in_shardings=(shardings,), out_shardings=shardings)
    state = jax.device_put(state, shardings)
    for fn in (plain, planned):
        jax.block_until_ready(fn(state))
    plain_s, added_s = [], []
    for k in range(calls):
        # Who comes second finds the caches in another state: each does so as often.
        times = {fn: _seconds(fn, state) for fn in ((plain, planned) if k % 2 else (planned, plain))}
        plain_s.append(times[plain])
        added_s.append(times[planned] - times[plain])
    return Row(leaves, statistics.median(plain_s), statistics.median(added_s))


def _seconds(fn: Callable[..., Any], state: Any) -> float:
    start = time.perf_counter()
    result = fn(state)
    taken = time.perf_counter() - start
    jax.block_until_ready(result)
    return taken


def main() -> int:
    # Read when JAX first looks for devices, which is below.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    jax.config.update("jax_platforms", "cpu")
    lines = ["| leaves | jax.jit µs | added by shardwise.jit µs | bar µs |", "|---:|---:|---:|---:|"]
    missed = []
    for leaves in LEAVES:
        row = measure(leaves, calls=100 if leaves > 200 else 500)
        bar_s = BAR.get(leaves)
        bar = f"< {bar_s * 1e6:.0f}" if bar_s else ""
        lines.append(f"| {leaves} | {row.plain_s * 1e6:.0f} | {row.added_s * 1e6:.0f} | {bar} |")
        print(lines[-1], flush=True)
        if bar_s and row.added_s >= bar_s:
            missed.append(f"{leaves} leaves: {row.added_s * 1e6:.0f} µs added, the bar is {bar_s * 1e6:.0f} µs")
    versions = f"shardwise {shardwise.__version__}, JAX {jax.__version__}, Python {platform.python_version()}"
    head = [
        "# `shardwise.jit`: the cost of a call",
        "",
        f"Written by `make bench-jit` with {versions}, {DEVICES} host devices, {os.cpu_count()} cores. A call of a",
        "planned and compiled function, beside `jax.jit` with the same shardings: dispatch only, the arrays lie as planned.",
        "",
    ]
    TABLE.write_text("\n".join([*head, *lines, ""]))
    for problem in missed:
        print("missed:", problem, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
