"""The storage rule: for each mesh axis a value is stored with the axis on the dimension whose color was given that axis first.
Conflicts inside a color are decided by the bits; where a size does not divide, and is not padded, the next color in order gets
the axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Program
from shardwise.ir.traits import VIEWS
from shardwise.lowering.decisions import State
from shardwise.lowering.sharding import Sharding


def views(program: Program, sources: Iterable[int]) -> set[int]:
    """Values that are one of the sources, or a view of one."""
    seen = set(sources)
    for op in program.schedule:
        if op.kind in VIEWS and op.operands[0] in seen:
            seen.update(op.results)
    return seen


def sets_of_views(program: Program, sets: Iterable[Iterable[int]]) -> dict[int, tuple[int, ...]]:
    """Returns, by value, the numbers of the sets of values that have it, or that have what it is a view of."""
    numbers: dict[int, tuple[int, ...]] = {}
    for number, values in enumerate(sets):
        for v in views(program, values) if values else ():
            numbers[v] = (*numbers.get(v, ()), number)
    return numbers


@dataclass(frozen=True)
class Clashes:
    """Conflicts by op: (node of side 0, node of side 1, bit). Bit -1 is an inconsistent family: neither may have the axis."""

    by_op: dict[int, tuple[tuple[int, int, int], ...]]

    @staticmethod
    def of(analysis: Analysis) -> Clashes:
        t, g = analysis.conflict_table, analysis.group_table
        by_op: dict[int, list[tuple[int, int, int]]] = {}
        if len(t.set):
            against = g.flipped[t.set]
            first, second = np.where(against, t.second, t.first), np.where(against, t.first, t.second)
            bits = np.where(t.consistent[t.set], g.bit[t.set], -1)
            rows = zip(
                analysis.names.node_op[first].tolist(), first.tolist(), second.tolist(), bits.tolist(), strict=True
            )
            for op, a, b, bit in rows:
                by_op.setdefault(op, []).append((a, b, bit))
        return Clashes({op: tuple(pairs) for op, pairs in by_op.items()})

    def losers(
        self, op: int, color_of: Sequence[int], state: State, among: Iterable[int] | None = None
    ) -> frozenset[tuple[int, int]]:
        """(node, axis) pairs of an op that lost their conflict; with ``among`` only of conflicts between these nodes."""
        lost: set[tuple[int, int]] = set()
        chosen = None if among is None else set(among)
        for first, second, bit in self.by_op.get(op, ()):
            if chosen is not None and not (first in chosen and second in chosen):
                continue
            for axis in state.axes_of(color_of[first]):
                if bit < 0:
                    lost |= {(first, axis), (second, axis)}
                else:
                    lost.add((second if state.sides.get((bit, axis), 0) == 0 else first, axis))
        return frozenset(lost)


def kept_axes(program: Program, state: State, value: int) -> frozenset[int]:
    """The axes on which a value stays replicated, as a kept value or a view of one."""
    axes = state.kept_on(value)
    op = program.ops[program.definitions[value][0]]
    return axes | kept_axes(program, state, op.operands[0]) if op.kind in VIEWS and op.operands[0] >= 0 else axes


def store(
    shape: tuple[int, ...],
    colors: tuple[int, ...],
    beaten: frozenset[tuple[int, int]],
    kept: frozenset[int],
    pinned: tuple[tuple[int, ...] | None, ...] | None,
    inner: bool,
    state: State,
) -> tuple[Sharding, tuple[tuple[int, int, int], ...]]:
    """The storage of a value, and which shardings failed for divisibility: (dimension, pieces, axis). ``beaten``: the
    (dimension, axis) pairs that lost a conflict; ``kept``: axes on which the value stays replicated; ``inner``: whether the
    value can be padded."""
    mesh = state.mesh
    dims: list[list[int]] = [[] for _ in shape]
    used: set[int] = set(kept)
    closed: set[int] = set()
    refused: list[tuple[int, int, int]] = []
    if pinned is not None:
        for d, axes in enumerate((*pinned, *((),) * (len(shape) - len(pinned)))):
            if axes is not None:
                dims[d] = list(axes)
                used.update(axes)
                closed.add(d)
    for _, color, axis in sorted((rank, c, a) for c in set(colors) for rank, a in state.given.get(c, ())):
        if axis in used:
            continue
        places = [d for d, c in enumerate(colors) if c == color and (d, axis) not in beaten and d not in closed]
        if len(places) != 1:
            continue
        (d,) = places
        pieces = mesh.sizes[axis]
        for a in dims[d]:
            pieces *= mesh.sizes[a]
        if shape[d] % pieces and not (inner and not dims[d] and (color, axis) in state.padded):
            refused.append((d, pieces, axis))
            continue
        dims[d].append(axis)
        used.add(axis)
    return Sharding(tuple(tuple(axes) for axes in dims)), tuple(refused)
