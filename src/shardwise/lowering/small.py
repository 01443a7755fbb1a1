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
    program, names = analysis.program, analysis.names
    colors: list[set[int]] = [set() for _ in program.values]
    for value, node in zip(names.member_value.tolist(), names.member_node.tolist(), strict=True):
        colors[value].add(int(names.color[node]))
    arguments = [program.values[a.value] for a in program.arguments]
    share = SHARE * sum(v.nbytes for v in arguments)
    most: dict[frozenset[int], int] = {}
    for v in arguments:
        gather = Collective(Kind.ALL_GATHER, (axis,), 0.0, v.nbytes)
        if colors[v.id] and v.nbytes <= share and "float" in v.dtype and _is_quick(cost, [gather]):
            kind = frozenset(colors[v.id])
            most[kind] = max(most.get(kind, 0), v.nbytes)
    return tuple(v.id for v in program.values if v.nbytes <= most.get(frozenset(colors[v.id]), -1))


def _is_quick(cost: LocalCost, gathers: list[Collective]) -> bool:
    """Is most of the time latency?"""
    empty = [replace(s, bytes_in=0.0, bytes_out=0.0) for s in gathers]
    return cost.communication_s(gathers, False) < 2 * cost.communication_s(empty, False)


def keep_small(lowered: Lowered, cost: LocalCost) -> tuple[Keep, ...]:
    """The Keep decisions for small arguments, one for each axis."""
    program, state, names = lowered.program, lowered.state, lowered.analysis.names
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
    colors: dict[int, set[int]] = {}
    for value, node in zip(names.member_value.tolist(), names.member_node.tolist(), strict=True):
        color = int(names.color[node])
        if color in given:
            colors.setdefault(value, set()).add(color)
    small: dict[int, dict[frozenset[int], int]] = {}  # by axis: the sharded colors of an argument, and the most bytes
    for reshard in lowered.reshards:
        gathers = [s for s in reshard.steps if s.kind is Kind.ALL_GATHER]
        if reshard.operand < 0 or reshard.value not in root or not gathers:
            continue
        if _is_quick(cost, gathers):
            argument = root[reshard.value]
            kind, nbytes = frozenset(colors.get(argument, ())), sizes[argument]
            for axis in (a for s in gathers for a in s.axes):
                kinds = small.setdefault(axis, {})
                kinds[kind] = max(kinds.get(kind, 0), nbytes)
    kept = []
    for axis, kinds in sorted(small.items()):
        values = [
            v.id
            for v in program.values
            if v.id not in state.pinned and v.nbytes <= kinds.get(frozenset(colors.get(v.id, ())), -1)
        ]
        kept.append(Keep(tuple(values), state.mesh.names[axis]))
    return tuple(kept)
