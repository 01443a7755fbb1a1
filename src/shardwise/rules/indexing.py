"""Gather, scatter and dynamic slices, in all their modes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardwise.ir.rule import Kind, Rule
from shardwise.ir.traits import SCATTERS
from shardwise.rules.call import OpCall, RuleBuilder

_PART_WINDOW: Final = "a window narrower than the dimension may lie anywhere in it"
_VECTOR: Final = "an index vector is read as one"


def gather(call: OpCall) -> Rule:
    """``operand[v…, d…], indices[s…, n] -> [s…, d…]``: v is looked into, d is copied, s are positions of lookups."""
    numbers = call.params["dimension_numbers"]
    sizes = call.params["slice_sizes"]
    operand, indices, result = call.operands[0], call.operands[1], call.results[0]
    offset = tuple(numbers.offset_dims)
    batching = tuple(numbers.operand_batching_dims)
    dropped = {*numbers.collapsed_slice_dims, *batching}
    out = call.out()
    b = RuleBuilder(call)
    batch_places = [r for r in range(len(result)) if r not in offset]
    for position, r in enumerate(batch_places):
        places = [(1, position), (out, r)]
        if position in numbers.start_indices_batching_dims:
            places.append((0, batching[tuple(numbers.start_indices_batching_dims).index(position)]))
        b.add(places)
    kept = [d for d in range(len(operand)) if d not in dropped]
    for d, r in zip(kept, offset, strict=True):
        if sizes[d] == operand[d]:
            b.add([(0, d), (out, r)])
        elif sizes[d] == 1:
            b.add([(0, d)], kind=Kind.INDEXED, reducer="sum")
        else:
            b.block_apart([(0, d), (out, r)], _PART_WINDOW)
    for d in numbers.collapsed_slice_dims:
        if operand[d] > 1:
            b.add([(0, d)], kind=Kind.INDEXED, reducer="sum")
    b.block([(1, len(indices) - 1)], _VECTOR)
    return b.build()


def scatter(call: OpCall) -> Rule:
    """``operand[v…, d…], indices[s…, n], updates[s…, d…] -> operand's shape``: v is written into, d is copied, s are
    positions of updates. Where updates are combined (add, mul, min, max) s is a reduction; a plain scatter keeps the last
    writer, which no reduction can tell, so s is blocked there."""
    n = len(call.results)
    numbers = call.params["dimension_numbers"]
    operand, indices, updates = call.operands[0], call.operands[n], call.operands[n + 1]
    combiner = SCATTERS.get(call.kind, "")
    window = tuple(numbers.update_window_dims)
    batching = tuple(numbers.operand_batching_dims)
    index_batching = tuple(numbers.scatter_indices_batching_dims)
    written = {*numbers.inserted_window_dims, *batching}
    b = RuleBuilder(call)

    def stored(d: int) -> list[tuple[int, int]]:
        return [*((t, d) for t in range(n)), *((call.out(r), d) for r in range(n))]

    def updated(d: int) -> list[tuple[int, int]]:
        return [(n + 1 + t, d) for t in range(n)]

    batch_places = [u for u in range(len(updates)) if u not in window]
    for position, u in enumerate(batch_places):
        if position in index_batching:
            b.add([(n, position), *updated(u), *stored(batching[index_batching.index(position)])])
        elif combiner:
            b.reduce([(n, position), *updated(u)], combiner)
        else:
            b.block([(n, position), *updated(u)], "the last of several writers wins")
    kept = [d for d in range(len(operand)) if d not in written]
    for d, u in zip(kept, window, strict=True):
        if updates[u] == operand[d]:
            b.add([*updated(u), *stored(d)])
        elif updates[u] == 1:
            b.add(stored(d), kind=Kind.INDEXED)
        else:
            b.block(stored(d), _PART_WINDOW)
            b.block(updated(u), _PART_WINDOW)
    for d in numbers.inserted_window_dims:
        b.add(stored(d), kind=Kind.INDEXED)
    b.block([(n, len(indices) - 1)], _VECTOR)
    return b.build()


def dynamic_slice(call: OpCall) -> Rule:
    """Whole dimensions pass; a sliced one is blocked, and its result is something else."""
    b = RuleBuilder(call)
    out = call.out()
    for d, size in enumerate(call.params["slice_sizes"]):
        if size == call.operands[0][d]:
            b.add([(0, d), (out, d)])
        else:
            b.block_apart([(0, d), (out, d)], "the slice may start anywhere")
    _index_scalars(b, call, range(1, len(call.operands)))
    return b.build()


def dynamic_update_slice(call: OpCall) -> Rule:
    """The updated dimension is written into: each part takes what falls into it. The update itself must be whole."""
    b = RuleBuilder(call)
    out = call.out()
    for d, size in enumerate(call.operands[1]):
        if size == call.operands[0][d]:
            b.add([(0, d), (1, d), (out, d)])
        else:
            b.add([(0, d), (out, d)], kind=Kind.INDEXED)
            b.block([(1, d)], "the update may fall on any part")
    _index_scalars(b, call, range(2, len(call.operands)))
    return b.build()


def _index_scalars(b: RuleBuilder, call: OpCall, tensors: Sequence[int]) -> None:
    for t in tensors:
        b.block_apart(((t, d) for d in range(len(call.operands[t]))), _VECTOR)
