"""Arguments so small that gathering them costs more than keeping them.

A floating-point argument that is a thousandth of all arguments or less, and whose gather is mostly latency, stays replicated on
that axis, with every value of the same sharded colors that is no larger (its gradient, its moments). A search has no state yet:
there all small arguments are one action (``small_together``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.lowering.decisions import Keep
from shardwise.lowering.local_cost import LocalCost
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Collective, Kind

#: An argument is small if it is at most this share of the bytes of all arguments.
SHARE: Final = 1e-3


def small_together(analysis: Analysis, cost: LocalCost, axis: int) -> tuple[int, ...]:
    """The arguments that are small on an axis, and the values of the same colors that are no larger."""
    program = analysis.program
    colors = [frozenset(c for c in by_dim if c >= 0) for by_dim in analysis.value_colors]
    arguments = [program.values[a.value] for a in program.arguments]
    share = SHARE * sum(v.nbytes for v in arguments)
    most: dict[frozenset[int], int] = {}
    for v in arguments:
        gather = Collective(Kind.ALL_GATHER, (axis,), 0.0, v.nbytes)
        if colors[v.id] and v.nbytes <= share and "float" in v.dtype and _is_quick(cost, [gather]):
            most[colors[v.id]] = max(most.get(colors[v.id], 0), v.nbytes)
    return tuple(v.id for v in program.values if v.nbytes <= most.get(colors[v.id], -1))


def _is_quick(cost: LocalCost, gathers: list[Collective]) -> bool:
    """Is most of the time latency?"""
    empty = [replace(s, bytes_in=0.0, bytes_out=0.0) for s in gathers]
    return cost.communication_s(gathers, False) < 2 * cost.communication_s(empty, False)


def keep_small(lowered: Lowered, cost: LocalCost) -> tuple[Keep, ...]:
    """The Keep decisions for small arguments, one for each axis."""
    program, state = lowered.program, lowered.state
    sizes = {a.value: program.values[a.value].nbytes for a in program.arguments}
    most = SHARE * sum(sizes.values())
    root = {
        v: v
        for v, nbytes in sizes.items()
        if v not in state.pinned and nbytes <= most and "float" in program.values[v].dtype
    }
    for op in program.schedule:
        # What is computed from one small argument alone, and no larger, counts as the argument.
        sources = {root.get(v, -1) for v in op.operands if v >= 0 and program.values[v].shape}
        if len(sources) == 1 and (argument := sources.pop()) >= 0:
            root.update((v, argument) for v in op.results if program.values[v].nbytes <= sizes[argument])
    given = {color for color, _ in state.order}
    colors = [frozenset(c for c in by_dim if c in given) for by_dim in lowered.analysis.value_colors]
    small: dict[int, dict[frozenset[int], int]] = {}  # by axis: the sharded colors of an argument, and the most bytes
    for reshard in lowered.reshards:
        gathers = [s for s in reshard.steps if s.kind is Kind.ALL_GATHER]
        if reshard.operand < 0 or reshard.value not in root or not gathers:
            continue
        if _is_quick(cost, gathers):
            argument = root[reshard.value]
            for axis in (a for s in gathers for a in s.axes):
                kinds = small.setdefault(axis, {})
                kinds[colors[argument]] = max(kinds.get(colors[argument], 0), sizes[argument])
    kept = []
    for axis, kinds in sorted(small.items()):
        free = (v for v in program.values if v.id not in state.pinned)
        values = tuple(v.id for v in free if v.nbytes <= kinds.get(colors[v.id], -1))
        kept.append(Keep(values, state.mesh.names[axis]))
    return tuple(kept)
