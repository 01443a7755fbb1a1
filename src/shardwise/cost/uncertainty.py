"""The upper end of a plan's peak memory: what it can be if the compiler chooses layouts that pad.

The problem. For most arrays the compiler chooses the order of dimensions that pads least (``shardwise.cost.layouts``). Around
gathers and scatters it often does not, in no order that we know: it copies their operands, their indices and what they return
to row-major order, where the two last dimensions are padded to tiles. An array of vectors of three takes 43 times its size so.
A slice of the last dimension is stored in that order too, or the whole array is copied into another one.

The idea. The peak is predicted with the order that pads least. Its upper end has, at each gather, scatter and sharded slice,
the arrays that would be padded once more, in row-major order, and a tenth for everything else. A plan of which only the lower
end fits is called tight.

``tests/verification/test_tpu.py`` compares both ends with libtpu. Weak: these copies are not in the cost that is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from shardwise.cost.layouts import padded_elements, row_major_elements
from shardwise.cost.memory import BLOCK, Allocation
from shardwise.cost.model import CostModel, memory_curve
from shardwise.ir.program import Op
from shardwise.ir.traits import SCATTERS
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Kind, Sharding

#: Compiled peaks are up to this share above the predicted one (docs/benchmarks/limits.md) where layouts are as predicted.
ABOVE: Final = 0.1
#: Row-major order is counted where it takes this many times the space of the order that pads least.
PADS: Final = 1.5


def upper_bytes(model: CostModel, lowered: Lowered, curve: tuple[int, ...]) -> int:
    """The upper end of the peak of a lowered state; ``curve``: the predicted bytes at each point."""
    copies = memory_curve(model.life.points, list(_row_major_copies(model, lowered))) * BLOCK
    return int((np.array(curve) + copies).max(initial=0) * (1 + ABOVE))


def _row_major_copies(model: CostModel, lowered: Lowered) -> Iterator[Allocation]:
    program, life = lowered.program, model.life

    def copy(
        op: Op, value: int, sharding: Sharding, last: int | None = None, source: Sharding | None = None
    ) -> Iterator[Allocation]:
        """A row-major copy of an array, up to its ``last`` dimension, where that order pads; of a slice rather a copy of its
        ``source``, if that is smaller."""
        v, tile = program.values[value], model.cost.profile.vector_tile
        shape = sharding.local_shape(v.shape, lowered.mesh)[:last]
        padded, points = row_major_elements(shape, tile), life.runs[op.id]
        if points and padded >= PADS * padded_elements(shape, tile):
            if source is not None:
                padded = min(padded, padded_elements(source.local_shape(v.shape, lowered.mesh), tile))
            yield Allocation("copy", value, math.ceil(padded * v.itemsize / BLOCK), min(points), max(points))

    for op in program.ops:
        if op.kind == "gather" or op.kind in SCATTERS:
            for k, v in enumerate(op.operands):
                if v >= 0:
                    yield from copy(op, v, lowered.need(op, k), -1 if k == 1 else None)
            if op.kind == "gather":
                yield from copy(op, op.results[0], lowered.computed(op, 0))
        for r in lowered.operand_reshards(op) if op.rule is not None else ():
            if {s.purpose for s in r.steps} == {Kind.SLICE}:
                yield from copy(op, r.value, r.target, source=r.source)
