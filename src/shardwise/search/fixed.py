"""What was decided beforehand, for the integer program (``shardwise.search.ilp``): what no state on top of a base does.

- On axes that are not open values are stored as the base says: it comes first, and nothing after it takes an axis away.
- Pinned dimensions lie as they are pinned, and values that are kept whole do not lie on the axis.
- An op's factor has a shut axis only if the base gave it to its color.

The integer program has one order for axes that share a dimension, which is harmless as long as nothing calls for another one.
So what was decided beforehand comes first in it, and an axis on which something is kept whole last; pins and keeps of several
axes may call for several orders, and do not count: the bound is then the one without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.cost.model import CostModel
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Axes, Sharding
from shardwise.lowering.storage import kept_axes


class Fixed:
    """Which shardings and which ways to compute are left on top of a base."""

    def __init__(self, model: CostModel, mesh: MeshAxes, base: Sequence[Decision], axes: Sequence[str] | None):
        open_ = set(map(mesh.index, mesh.names if axes is None else axes))
        self._shut = [a for a in range(len(mesh.sizes)) if a not in open_]
        self._structure = model.structure
        self._state = State(mesh, tuple(base))
        self._given = frozenset(self._state.order)
        self._stored = Lowered(model.structure, self._state, model.cost).storage
        self._idle = frozenset(self._shut) - {axis for _, axis in self._given}
        kept = kept_axes(model.structure.program, self._state)
        whole = {a for own in kept.values() for a in own if a in open_}
        specs = self._state.pinned.values()
        pinned = sorted({a for spec in specs for axes in spec for a in axes or () if a in open_})
        one_order = len(pinned) <= 1 and len(whole) <= 1 and not whole & {*pinned}
        self._pins, self._kept = (self._state.pinned, kept) if one_order else ({}, {})
        rest = sorted(range(len(mesh.sizes)), key=lambda a: a in whole)
        self.order: Axes = tuple(dict.fromkeys((*self._shut, *pinned, *rest)))

    def may(self, op: Op, factor: int, axis: int) -> bool:
        """May a factor of an op have an axis?"""
        return axis not in self._shut or (self._structure.factor_colors[op.id][factor], axis) in self._given

    def left(self, value: int, lies: list[Sharding]) -> list[Sharding]:
        """The shardings that a value may lie in. Values that wait, or stay as they are computed, do not lie as stored."""
        lies = [s for s in lies if not self._idle & {*s.axes(), *s.partial}]
        if self._structure.waits[value] or self._structure.stays[value]:
            return lies
        pinned, stored = self._pins.get(value), self._stored[value]
        if pinned is not None:
            fixed = (*pinned, *((),) * (len(stored.dims) - len(pinned)))
            lies = [
                s for s in lies if all(f is None or {*f} == {*own} for f, own in zip(fixed, s.dims, strict=True))
            ] or [stored]
        kept = self._kept.get(value, frozenset())
        if value not in self._state.pinned and kept:
            lies = [s for s in lies if not s.axes() & kept]
        return [s for s in lies if all(s.place(a) == stored.place(a) for a in self._shut)] or [stored]
