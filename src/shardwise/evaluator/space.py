"""The space of states that an evaluator is built for: what can be decided, on top of what is decided already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, Keep, Shard


@dataclass(frozen=True)
class Space:
    """``units`` are sets of colors that are sharded together, ``bits`` the conflicts that each unit resolves, ``keeps`` sets of
    values that can be kept replicated on an axis, ``base`` the decisions that every state starts with; ``padded`` the units and
    axes (by number) that a state can pad."""

    mesh: MeshAxes
    units: tuple[tuple[int, ...], ...]
    bits: tuple[tuple[int, ...], ...]
    keeps: tuple[tuple[int, ...], ...] = ()
    base: tuple[Decision, ...] = ()
    padded: frozenset[tuple[int, int]] = frozenset()

    def shard(self, unit: int, axis: str, sides: Sequence[int] = (), padded: bool = False) -> Shard:
        """The decision that shards a unit on an axis; conflicts without a side take side 0."""
        all_sides = (*sides, *(0,) * (len(self.bits[unit]) - len(sides)))
        return Shard(self.units[unit], axis, tuple(zip(self.bits[unit], all_sides, strict=True)), padded=padded)


#: The part of an action that concerns a node, which reads only some units, bits and keeps: unit, keep, axis, the bits whose
#: second side it takes, and whether it pads the unit.
Seen = tuple[int, int, int, tuple[int, ...], bool]


@dataclass(frozen=True, slots=True)
class Action:
    """A decision with the numbers of its unit (or of its set of kept values) and axis. ``slot`` numbers the pairs of a unit and
    an axis; it is -1 for a :class:`Keep`."""

    decision: Shard | Keep
    unit: int
    axis: int
    slot: int
    keep: int = -1

    def seen(self, units: frozenset[int], bits: frozenset[int], keeps: frozenset[int]) -> Seen | None:
        """Returns the part of the decision that concerns some units, bits (of conflicts) and sets of kept values, or None."""
        sides = self.decision.sides if isinstance(self.decision, Shard) else ()
        taken = tuple(bit for bit, side in sides if side and bit in bits)
        unit, keep = (self.unit if self.unit in units else -1), (self.keep if self.keep in keeps else -1)
        padded = unit >= 0 and isinstance(self.decision, Shard) and self.decision.padded
        return (unit, keep, self.axis, taken, padded) if unit >= 0 or keep >= 0 or taken else None

    @staticmethod
    def of(decision: Decision, space: Space) -> Action:
        if isinstance(decision, Shard):
            unit, axis = space.units.index(decision.colors), space.mesh.index(decision.axis)
            return Action(decision, unit, axis, unit * len(space.mesh.sizes) + axis)
        assert isinstance(decision, Keep), "pins are part of the base"
        return Action(decision, -1, space.mesh.index(decision.axis), -1, space.keeps.index(decision.values))
