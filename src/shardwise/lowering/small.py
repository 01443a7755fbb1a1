"""Arguments so small that gathering them costs more than keeping them.

A floating-point argument that is a thousandth of all arguments or less, and whose gather is mostly latency, stays replicated on
that axis: sharding it saves next to nothing. So does every value with the same colors that is no larger (its gradient, its
moments, the output that replaces it), or the gather would only move to another place. Only colors that can be decided count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Program
from shardwise.lowering.decisions import Decision, Keep, Pin
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.sharding import Collective, Kind

#: An argument is small if it is at most this share of the bytes of all arguments.
SHARE: Final = 1e-3


def keep_small(analysis: Analysis, cost: LocalCost, mesh: MeshAxes, base: Sequence[Decision] = ()) -> tuple[Keep, ...]:
    """For each axis the decision that keeps small values replicated, other than those that the base pins."""
    program = analysis.program
    pinned = {d.value for d in base if isinstance(d, Pin)}
    matters = {c for group in analysis.groups if group.matters for c in group.colors}
    kinds = [frozenset(matters.intersection(colors)) for colors in analysis.value_colors]
    arguments = [program.values[a.value] for a in program.arguments]
    share = SHARE * sum(v.nbytes for v in arguments)
    candidates = [v for v in arguments if kinds[v.id] and v.nbytes <= share and "float" in v.dtype]
    gathered = _gathered_bytes(program)
    kept = []
    for axis, name in enumerate(mesh.names):
        most: dict[frozenset[int], int] = {}
        for v in candidates:
            if _is_quick(cost, Collective(Kind.ALL_GATHER, (axis,), 0.0, gathered[v.id])):
                most[kinds[v.id]] = max(most.get(kinds[v.id], 0), v.nbytes)
        values = [v.id for v in program.values if v.nbytes <= most.get(kinds[v.id], -1) and v.id not in pinned]
        if values and mesh.sizes[axis] > 1:
            kept.append(Keep(tuple(values), name))
    return tuple(kept)


def _gathered_bytes(program: Program) -> dict[int, int]:
    """By argument: the bytes that are gathered at a time. A stack of layers is gathered layer by layer."""
    gathered: dict[int, int] = {}
    for v, argument in program.argument_of.items():
        nbytes = program.values[v].nbytes
        gathered[argument] = min(gathered.get(argument, nbytes), nbytes)
    return gathered


def _is_quick(cost: LocalCost, gather: Collective) -> bool:
    """Is most of the time latency?"""
    empty = replace(gather, bytes_in=0.0, bytes_out=0.0)
    return cost.communication_s([gather], False) < 2 * cost.communication_s([empty], False)
