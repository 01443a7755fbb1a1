"""What others read of how an op computes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from shardwise.cost.compute import Sizes
from shardwise.cost.lowering import Known
from shardwise.cost.sharding import Sharding, is_moved
from shardwise.cost.structure import Structure
from shardwise.cost.ways import Way
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op

if TYPE_CHECKING:
    from shardwise.cost.told import Told


class Facet(NamedTuple):
    """What may be read of an outcome, and of which operand or result."""

    name: str
    number: int = 0


class Sight:
    """As much of a lowering as facets look at."""

    def __init__(
        self,
        structure: Structure,
        mesh: MeshAxes,
        known: Known,
        computes: dict[int, Way],
        actual: dict[int, Sharding],
        storage: dict[int, Sharding],
    ):
        self.program, self.structure, self.mesh, self.known = structure.program, structure, mesh, known
        self.computes, self.actual, self.storage = computes, actual, storage
        self.sizes = Sizes(self)


def facet_of(lowered: Sight | Told, op: Op, facet: Facet) -> Hashable:
    """What is read of how an op computes."""
    name, k = facet
    way, actual = lowered.computes[op.id], lowered.actual
    if name == "need":
        return way.need(k, actual[op.operands[k]])
    if name == "made":
        return way.made[k]
    if name == "actual":
        return actual[op.results[k]]
    if name == "local":
        return lowered.sizes.local(op.id)
    if name == "brought":
        lies = actual[op.operands[k]]
        return is_moved(lies, way.need(k, lies), lowered.mesh)
    if name == "taken":
        return is_moved(way.made[k], actual[op.results[k]], lowered.mesh)
    if name == "product":
        sizes = lowered.sizes
        pieces = [sizes.gathered(op.id, frozenset({(op.id, n)})) for n in (0, 1) if op.operands[n] >= 0]
        return sizes.local(op.id), *pieces, sizes.scattered(op.id)
    assert name == "way"
    return way
