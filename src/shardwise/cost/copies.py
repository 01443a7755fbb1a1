"""Row-major copies: what gathers and scatters add to memory.

The problem. For most arrays the compiler chooses the order of dimensions that pads least (``shardwise.cost.layouts``). A gather
or a scatter reads and writes whole rows, in row-major order, where the two last dimensions are padded to tiles. An array of
vectors of three takes 43 times its size so.

The idea. Where row-major order pads much, the compiler is known (``tests/verification/test_tpu.py``) to copy

- the operand and the result of a gather of rows, and the updates of a scatter, if the rows fill at least half of their tiles;
- the operand and the result, and the target and the updates, if each example looks up rows of its own array;
- the indices of a gather or a scatter of single elements, if they have several dimensions.

Other copies are seen now and then, in no order that we know. They are in the upper end of the peak only
(``shardwise.cost.uncertainty``). Weak: a copy in a loop lives for the whole loop if its array is from outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from shardwise.cost.layouts import padded_elements, row_major_elements
from shardwise.cost.memory import BLOCK, Allocation, Lifetimes, may_be_on_chip
from shardwise.hardware.profile import Profile
from shardwise.ir.program import Op
from shardwise.ir.traits import SCATTERS
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Sharding

#: Row-major order is counted where it takes this many times the space of the order that pads least.
PADS: Final = 1.5
#: Rows that are padded to more than this many times their size are looked up in another order.
NARROW: Final = 2.0


def looks_up(op: Op) -> bool:
    """Is an op a gather or a scatter?"""
    return op.rule is not None and (op.kind == "gather" or op.kind in SCATTERS)


def row_major_copies(
    lowered: Lowered, life: Lifetimes, op: Op, profile: Profile
) -> Iterator[tuple[Allocation, bool]]:
    """The arrays of a gather or a scatter that row-major order pads, and whether the compiler is known to copy them."""
    rule, data, points = op.factor_rule, len(op.operands) if op.kind == "gather" else 2, life.runs[op.id]
    sets = [
        {f for dim in tensor for f in dim if rule.factors[f].size > 1} for tensor in (*rule.operands, *rule.results)
    ]
    target, indices, parts = sets[0], sets[1], sets[data]
    rows, batched = bool((target & parts) - indices), bool(target & indices & parts)
    for number in (0, 1, data):
        value = (*op.operands, *op.results)[number]
        if value < 0 or not points:
            continue
        sharding = lowered.need(op, number) if number < len(op.operands) else lowered.computed(op, 0)
        copied, padding = _row_major(lowered, value, sharding, profile, is_index=number == 1)
        on_chip = may_be_on_chip(copied, profile)
        allocation = Allocation("row-major copy", value, copied, min(points), max(points), on_chip)
        if padding < PADS:
            continue
        if number == 1:
            yield allocation, not rows
        else:
            wide = padding <= NARROW and (op.kind == "gather" or number == data)
            yield allocation, rows and (batched or wide)


def _row_major(
    lowered: Lowered, value: int, sharding: Sharding, profile: Profile, is_index: bool = False
) -> tuple[int, float]:
    """The blocks of an array in row-major order, and how many times those of the order that pads least."""
    v, tile = lowered.program.values[value], profile.vector_tile
    shape = sharding.local_shape(v.shape, lowered.mesh)
    padded = row_major_elements(shape[:-1] if is_index else shape, tile)
    least = padded_elements(shape[:-1] if is_index else shape, tile)
    return math.ceil(padded * v.itemsize / BLOCK), padded / max(1, least)
