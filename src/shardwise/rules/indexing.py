"""Gather, scatter and dynamic slices, in all their modes."""

from __future__ import annotations

from typing import Final

from shardwise.ir.rule import Kind
from shardwise.ir.traits import SCATTERS
from shardwise.rules.call import Place, RuleBuilder

_PART_WINDOW: Final = "a window narrower than the dimension may start anywhere in it"
_VECTOR: Final = "an index vector is read as one"


def gather(b: RuleBuilder) -> None:
    """``operand[v…, d…], indices[s…, n] -> [s…, d…]``: v is indexed, d is copied, s are positions of lookups."""
    numbers, sizes = b.params["dimension_numbers"], b.params["slice_sizes"]
    operand = b.operands[0]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    lookups = [r for r in range(len(b.results[0])) if r not in numbers.offset_dims]
    for position, r in enumerate(lookups):
        b.add([(1, position), (b.out, r), *([(0, batching[position])] if position in batching else [])])
    dropped = {*numbers.collapsed_slice_dims, *batching.values()}
    kept = [d for d in range(len(operand)) if d not in dropped]
    for d, r in zip(kept, numbers.offset_dims, strict=True):
        if sizes[d] == operand[d]:
            b.add([(0, d), (b.out, r)])
        elif sizes[d] == 1:
            b.add([(0, d)], kind=Kind.INDEXED, reducer="sum")
        else:
            b.block_apart([(0, d), (b.out, r)], _PART_WINDOW)
    for d in numbers.collapsed_slice_dims:
        b.add([(0, d)], kind=Kind.INDEXED, reducer="sum")
    b.block_rest(_VECTOR)


def scatter(b: RuleBuilder) -> None:
    """``operand[v…, d…], indices[s…, n], updates[s…, d…] -> operand's shape``: v is indexed, d is copied, s are positions of
    updates: a reduction where updates are combined, else blocked."""
    numbers = b.params["dimension_numbers"]
    operand, _, updates = b.operands
    combiner = SCATTERS[b.call.kind]
    batching = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))

    def stored(d: int) -> list[Place]:
        return [(0, d), (b.out, d)]

    positions = [u for u in range(len(updates)) if u not in numbers.update_window_dims]
    for position, u in enumerate(positions):
        if position in batching:
            b.add([(1, position), (2, u), *stored(batching[position])])
        elif combiner:
            b.reduce([(1, position), (2, u)], combiner)
        else:
            b.block([(1, position), (2, u)], "the last of several writers wins")
    written = {*numbers.inserted_window_dims, *batching.values()}
    kept = [d for d in range(len(operand)) if d not in written]
    for d, u in zip(kept, numbers.update_window_dims, strict=True):
        if updates[u] == operand[d]:
            b.add([(2, u), *stored(d)])
        elif updates[u] == 1:
            b.add(stored(d), kind=Kind.INDEXED)
        else:
            b.block(stored(d), _PART_WINDOW)
            b.block([(2, u)], _PART_WINDOW)
    for d in numbers.inserted_window_dims:
        b.add(stored(d), kind=Kind.INDEXED)
    b.block_rest(_VECTOR)


def dynamic_slice(b: RuleBuilder) -> None:
    """Dimensions of the full size are parallel; a sliced one is blocked, and unrelated to that of the result."""
    for d, size in enumerate(b.params["slice_sizes"]):
        if size == b.operands[0][d]:
            b.add([(0, d), (b.out, d)])
        else:
            b.block_apart([(0, d), (b.out, d)], "the slice may start anywhere")
    b.block_rest(_VECTOR)


def dynamic_update_slice(b: RuleBuilder) -> None:
    """Each part of the updated dimension takes the elements that fall into it, so that the update itself is blocked."""
    for d, size in enumerate(b.operands[1]):
        if size == b.operands[0][d]:
            b.add([(0, d), (1, d), (b.out, d)])
        else:
            b.add([(0, d), (b.out, d)], kind=Kind.INDEXED)
            b.block([(1, d)], "the update may fall on any part")
    b.block_rest(_VECTOR)
