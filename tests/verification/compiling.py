"""Compiles a function with shardings under XLA's partitioner, and returns what the readers of compiled text say about it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.verification import hlo
from shardwise.verification.collectives import totals
from shardwise.verification.compiled import compile_lowered, make_mesh


def compile_step(fn: Any, args: Any, mesh: Any, backend: str = "host", **options: Any) -> dict[str, Any]:
    """Returns plain data; ``options`` are those of ``jax.jit``, with ``PartitionSpec``s for shardings."""
    devices = make_mesh(mesh, backend)

    def place(leaf: Any) -> Any:
        return NamedSharding(devices, leaf) if isinstance(leaf, PartitionSpec) else leaf

    options = jax.tree.map(place, options, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    with jax.set_mesh(devices):
        compiled, executable = compile_lowered(jax.jit(fn, **options).lower(*args), devices, backend)
    trips = hlo.read(executable.as_text()).trips if executable is not None else {}
    return {
        "fits": compiled.fits,
        "out_of_memory": compiled.out_of_memory,
        "memory": compiled.memory and asdict(compiled.memory),
        "estimated_cycles": compiled.estimated_cycles,
        "trips": list(trips.values()),
        "totals": [(kind, *axes, *total) for (kind, axes), total in sorted(totals(compiled.collectives).items())],
        "collectives": [asdict(c) for c in compiled.collectives],
    }
