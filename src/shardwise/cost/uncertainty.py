"""The upper end of a plan's peak memory: what it can be if the compiler chooses layouts that pad.

The problem. The compiler copies some operands and results of gathers and scatters to row-major order, in no order that we know
(``shardwise.cost.copies``). A slice of the last dimension is stored in that order too, or the whole array is copied into
another one. Decompositions of matrices read and write them in row-major order, except where the compiler writes them out as
loops. Sorts carry the positions of their elements along, to be stable, and a cumulative sum has a buffer of its size.

The idea. The peak is predicted with the copies that the compiler is known to make. Its upper end has the others too, at each
gather, scatter, sharded slice, decomposition, sort and cumulative sum, and a share for everything else. A plan of which only
the lower end fits is called tight.

``tests/verification/test_tpu.py`` compares both ends with libtpu. Weak: the upper end is not in the cost that is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from shardwise.cost.copies import PADS, looks_up, lookup_copies
from shardwise.cost.layouts import padded_elements, row_major_elements
from shardwise.cost.memory import BLOCK, Allocation
from shardwise.cost.model import CostModel, memory_curve
from shardwise.ir.program import Op
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.sharding import Kind
from shardwise.rules.flops import SORTS
from shardwise.rules.reduction import CUMULATIVE
from shardwise.rules.tables import LINEAR_ALGEBRA

#: Compiled peaks are up to this share above the predicted one. Of programs of the corpus and the zoo that take a gigabyte or
#: more, 46 of 53 of the fit set and 33 of 38 of the test set take no more than the upper end (with 0.1: 40 and 30; with 0.2: 48
#: and 34).
ABOVE: Final = 0.15
#: Bytes of the position of an element.
_POSITION: Final = 4
_MATRICES: Final = frozenset({*LINEAR_ALGEBRA, "triangular_solve"})
_BUFFERED: Final = frozenset({*_MATRICES, *SORTS, *CUMULATIVE})


def is_tight(peak_bytes: int, usable_bytes: int) -> bool:
    """Does a peak fit by its lower end only? For plans of which no more than the peak is known."""
    return peak_bytes <= usable_bytes < peak_bytes * (1 + ABOVE)


def upper_bytes(model: CostModel, lowered: Lowered, curve: tuple[int, ...]) -> int:
    """The upper end of the peak of a lowered state; ``curve``: the predicted bytes at each point."""
    copies = memory_curve(model.life.points, list(_possible_copies(model, lowered))) * BLOCK
    return int((np.array(curve) + copies).max(initial=0) * (1 + ABOVE))


def _possible_copies(model: CostModel, lowered: Lowered) -> Iterator[Allocation]:
    """Copies that are not in the peak. Those of a loop may all be there as long as it runs."""
    in_loops: dict[tuple[int, int], Allocation] = {}
    for op in lowered.program.ops:
        for copy, known in lookup_copies(lowered, model.life, op, model.cost.profile) if looks_up(op) else ():
            if op.region > 0:
                first, last = model.life.span[op.region]
                in_loops[op.region, copy.value] = replace(copy, first=first, last=last)
            elif not known:
                yield copy
        for r in lowered.operand_reshards(op) if op.rule is not None else ():
            if {s.purpose for s in r.steps} == {Kind.SLICE}:
                yield from _slice_copies(model, lowered, op, r)
        if op.kind in _BUFFERED:
            yield from _buffers(model, lowered, op)
    yield from in_loops.values()


def _slice_copies(model: CostModel, lowered: Lowered, op: Op, r: Reshard) -> Iterator[Allocation]:
    """A row-major copy of a slice where that order pads, or a copy of the array that it is from, if that is smaller."""
    v, tile, points = lowered.program.values[r.value], model.cost.profile.vector_tile, model.life.runs[op.id]
    part, whole = (s.local_shape(v.shape, lowered.mesh) for s in (r.target, r.source))
    padded = row_major_elements(part, tile)
    if points and padded >= PADS * padded_elements(part, tile):
        padded = min(padded, padded_elements(whole, tile))
        yield Allocation("copy", r.value, math.ceil(padded * v.itemsize / BLOCK), min(points), max(points))


def _buffers(model: CostModel, lowered: Lowered, op: Op) -> Iterator[Allocation]:
    """Row-major copies of a decomposition's operands and results; an array as large as each that is sorted or added up."""
    values, tile, points = lowered.program.values, model.cost.profile.vector_tile, model.life.runs[op.id]
    ends = [(v, lowered.need(op, k)) for k, v in enumerate(op.operands) if v >= 0]
    if op.kind in _MATRICES:
        ends += [(v, lowered.computed(op, k)) for k, v in enumerate(op.results) if v >= 0]
    for v, sharding in ends if points else ():
        shape, itemsize = sharding.local_shape(values[v].shape, lowered.mesh), values[v].itemsize
        if op.kind in _MATRICES:
            nbytes = row_major_elements(shape, tile) * itemsize
        else:
            nbytes = math.prod(shape) * (_POSITION if op.kind in SORTS else itemsize)
        yield Allocation("copy", v, math.ceil(nbytes / BLOCK), min(points), max(points))
