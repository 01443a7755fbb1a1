"""Arguments so small that gathering them costs more than keeping them.

A floating-point argument that is a thousandth of all arguments or less, and whose gather is mostly latency, stays replicated on
that axis: sharding it saves next to nothing. So does every value with the same colors that is no larger (its gradient, its
moments, the output that replaces it), or the gather would only move to another place. Only colors that can be decided count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Program
from shardwise.lowering.decisions import Decision, Keep, Pin
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.sharding import Collective, Kind
from shardwise.lowering.structure import Structure

#: An argument is small if it is at most this share of the bytes of all arguments.
SHARE: Final = 1e-3


def keep_small(
    structure: Structure, cost: LocalCost, mesh: MeshAxes, base: Sequence[Decision] = ()
) -> tuple[Keep, ...]:
    """For each axis the decision that keeps small values replicated, other than those that the base pins."""
    program, same = structure.program, structure.decided_alike
    pinned = {d.value for d in base if isinstance(d, Pin)}
    arguments = {a.value for a in program.arguments}
    share = SHARE * sum(program.values[v].nbytes for v in arguments)
    able = {v for v in arguments if program.values[v].nbytes <= share and "float" in program.values[v].dtype}
    candidates = [(colors, v, nbytes) for colors, values in same.items() for v, nbytes in values if v in able]
    gathered = _gathered_bytes(program)
    kept = []
    for axis, name in enumerate(mesh.names):
        most: dict[frozenset[int], int] = {}
        sizes = {gathered[v] for _, v, _ in candidates}
        quick = {n for n in sizes if _is_quick(cost, Collective(Kind.ALL_GATHER, (axis,), 0.0, n))}
        for colors, v, nbytes in candidates:
            if gathered[v] in quick:
                most[colors] = max(most.get(colors, 0), nbytes)
        values = {v for colors, limit in most.items() for v, nbytes in same[colors] if nbytes <= limit} - pinned
        if values and mesh.sizes[axis] > 1:
            kept.append(Keep(tuple(sorted(values)), name))
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
