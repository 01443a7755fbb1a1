"""Row-major copies: what gathers, scatters and outputs add to memory.

The problem. For most arrays the compiler chooses the order of dimensions that pads least (``shardwise.cost.layouts``). A gather
or a scatter reads and writes whole rows, in row-major order, where the two last dimensions are padded to tiles. An array of
vectors of three takes 43 times its size so. Outputs are in row-major order too.

The idea. Where row-major order pads much, the compiler is known (``tests/verification/test_tpu.py``) to copy

- the operand and the result of a gather of rows, and the updates of a scatter, if the rows fill at least half of their tiles;
- the operand and the result, and the target and the updates, if each example looks up rows of its own array;
- the indices of a gather or a scatter of single elements, if they have several dimensions;
- the operand of a gather of windows that slide over one dimension, not the last one. Other gathers and scatters of windows are
  loops, with a few kernels for each window (``is_looped``), and copy nothing;
- an output that a product computes, if it has two dimensions of the product's first operand and the first of them is longer:
  the product makes the longer one minor. An output that takes the place of an argument is not copied.

A copy takes the time to read and write it. Other copies are seen now and then, in no order that we know. They are in the upper
end of the peak only (``shardwise.cost.uncertainty``). A copy for a lookup in a loop is made before the loop if the array is
from outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from shardwise.cost.clusters import Role
from shardwise.cost.layouts import padded_elements, row_major_elements
from shardwise.cost.memory import BLOCK, Allocation, Lifetimes, blocks, on_chip_blocks
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


def windows(op: Op) -> frozenset[int]:
    """The factors of a gather's result, or of a scatter's updates, of which a window is a part of the array.

    A window of rows, as in ``jax.vmap`` of a ``dynamic_slice``, is neither one element nor all of a dimension."""
    rule, data = op.factor_rule, len(op.operands) if op.kind == "gather" else 2
    of_array, of_indices, of_data = (
        {f for dim in rule.tensors[n] for f in dim if rule.factors[f].size > 1} for n in (0, 1, data)
    )
    return frozenset(of_data - of_array - of_indices)


def is_looped(op: Op) -> bool:
    """Does the compiler run a lookup as a loop over its windows?"""
    slides = windows(op) if looks_up(op) else frozenset()
    data = len(op.operands) if op.kind == "gather" else 2
    return len(slides) > 1 or (bool(slides) and not slides.isdisjoint(op.factor_rule.tensors[data][-1]))


def lookup_copies(lowered: Lowered, life: Lifetimes, op: Op, profile: Profile) -> Iterator[tuple[Allocation, bool]]:
    """The arrays of a gather or a scatter that row-major order pads, and whether the compiler is known to copy them."""
    if is_looped(op):
        return
    rule, data = op.factor_rule, len(op.operands) if op.kind == "gather" else 2
    sets = [
        {f for dim in tensor for f in dim if rule.factors[f].size > 1} for tensor in (*rule.operands, *rule.results)
    ]
    target, indices, parts = sets[0], sets[1], sets[data]
    rows, batched = bool((target & parts) - indices), bool(target & indices & parts)
    for number in (0, 1, data):
        value = (*op.operands, *op.results)[number]
        if value < 0 or not life.runs[op.id]:
            continue
        sharding = lowered.need(op, number) if number < len(op.operands) else lowered.computed(op, 0)
        copied, padding = _row_major(lowered, value, sharding, profile, is_index=number == 1)
        on_chip = copied <= on_chip_blocks(profile)
        allocation = Allocation("row-major copy", value, copied, *copy_span(life, op, value), on_chip)
        if padding < PADS:
            continue
        if number == 1:
            yield allocation, not rows
        else:
            wide = padding <= NARROW and (op.kind == "gather" or number == data)
            yield allocation, rows and (batched or wide or (number == 0 and bool(windows(op))))


def copy_span(life: Lifetimes, op: Op, value: int) -> tuple[int, int]:
    """The first and the last point of a copy of a value that an op reads or computes."""
    span, region = (min(life.runs[op.id]), max(life.runs[op.id])), op.region
    while region > 0 and region != life.program.home[life.clusters.base[value]]:
        span, region = life.span[region], life.program.regions[region].parent
    return span


def _row_major(
    lowered: Lowered, value: int, sharding: Sharding, profile: Profile, is_index: bool = False
) -> tuple[int, float]:
    """The blocks of an array in row-major order, and how many times those of the order that pads least."""
    v, tile = lowered.program.values[value], profile.vector_tile
    shape = sharding.local_shape(v.shape, lowered.mesh)
    padded = row_major_elements(shape[:-1] if is_index else shape, tile)
    least = padded_elements(shape[:-1] if is_index else shape, tile)
    return math.ceil(padded * v.itemsize / BLOCK), padded / max(1, least)


def reordered_outputs(life: Lifetimes) -> dict[int, tuple[int, int]]:
    """Outputs that a product computes, by op: the two dimensions that are those of the product's first operand."""
    c, program, reordered = life.clusters, life.program, dict[int, tuple[int, int]]()
    for op in (op for op in program.ops if op.kind == "output" and op.operands[0] >= 0):
        value = base = c.base[op.operands[0]]
        while c.roles[program.definitions[value][0]] is Role.ELEMENTWISE and c.heavy[value]:
            sources = program.ops[program.definitions[value][0]].operands
            value = next(c.base[v] for v in sources if v >= 0 and c.heavy[c.base[v]])
        maker = program.ops[program.definitions[value][0]]
        if c.roles[maker.id] is not Role.PRODUCT or base in life.returned or maker.factor_rule.windows:
            continue
        first, second, result = (*maker.factor_rule.operands[:2], maker.factor_rule.results[0])
        free = {f for dim in first for f in dim} - {f for dim in second for f in dim}
        rows = [d for d, dim in enumerate(result) if free.intersection(dim)]
        if len(rows) == 2 and program.values[value].shape == program.values[op.operands[0]].shape:
            reordered[op.id] = (rows[0], rows[1])
    return reordered


def output_copies(
    lowered: Lowered, life: Lifetimes, op: Op, rows: tuple[int, int], profile: Profile
) -> Iterator[Allocation]:
    """The copy of an output of which a product makes the longer one of two dimensions minor."""
    value, sharding = lowered.program.values[op.operands[0]], lowered.actual[op.operands[0]]
    first, second = (sharding.local_shape(value.shape, lowered.mesh)[d] for d in rows)
    if first > second > 1:
        size = blocks(value, sharding, lowered.mesh, profile)
        yield Allocation("row-major copy", value.id, size, *computed_span(life, op))


def computed_span(life: Lifetimes, op: Op) -> tuple[int, int]:
    """From when an output is computed to the end: as long as it is there beside its copy."""
    maker = life.program.definitions[life.clusters.base[op.operands[0]]][0]
    return min(life.runs[maker], default=0), max(life.runs[op.id])
