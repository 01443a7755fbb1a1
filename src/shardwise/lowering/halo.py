"""What an op fetches from other devices where a mesh axis splits a windowed dimension.

A :class:`~shardwise.ir.rule.Window` says which positions ``i`` of tensor ``of`` position ``x`` of tensor ``by`` touches:
``x * stride + low <= i * dilation <= x * stride + high``. Cut into ``n`` even blocks, block ``k`` of the result needs a range
of the operand, and its device holds another. A :class:`Fetch` says which range each device needs and how it gets it: in
*rounds*, each a permute in which a device sends to at most one other and receives from at most one. Neighbors exchange in two
rounds; a reversed dimension takes one. All devices run the same program, so that the largest piece of a round counts.

Both the cost model and ``shardwise.spmd`` read this. Where the devices would need differently aligned programs (a dilated
window that does not start at a block's border), there is no fetch, and the dimension is not split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from shardwise.ir.program import Op, Program
from shardwise.ir.rule import Rule, Window

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Round:
    """A permute: (from, to) pairs of blocks, the number of positions that each sends, and by sender where they start."""

    pairs: tuple[tuple[int, int], ...]
    length: int
    starts: tuple[int, ...]

    @property
    def near(self) -> bool:
        """Do all go to a neighbor?"""
        return all(abs(a - b) == 1 for a, b in self.pairs)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Positions ``starts[k]`` to ``starts[k] + width`` of a dimension of an operand, for block ``k``; those outside of the
    array are padding. ``block``: how many positions a device holds; ``offset``: how many of a dilated window come before the
    first."""

    operand: int
    dim: int
    factor: int
    block: int
    starts: tuple[int, ...]
    width: int
    offset: int
    rounds: tuple[Round, ...]


def fetches(kind: str, rule: Rule, shapes: Shapes, pieces: Sequence[int]) -> tuple[Fetch, ...] | None:
    """What an op with operands and results of these global shapes fetches with its factors cut into ``pieces``, in the order of
    the windows; None where it cannot be computed so."""
    fetched: list[Fetch] = []
    for factor in dict.fromkeys(w.factor for w in rule.windows if pieces[w.factor] > 1):
        windows = tuple(w for w in rule.windows if w.factor == factor)
        sizes = tuple(_size(tensor, shape, factor) for tensor, shape in zip(rule.tensors, shapes, strict=True))
        ranges = (_pooled if kind.startswith("select_and_scatter") else _windowed)(
            windows, sizes, len(rule.operands), pieces[factor]
        )
        if ranges is None:
            return None
        for operand, starts, width, offset in dict.fromkeys(ranges):
            dim = next(d for d, dim in enumerate(rule.operands[operand]) if factor in dim)
            block = sizes[operand] // pieces[factor]
            rounds = _rounds(starts, width, block, pieces[factor])
            fetched.append(Fetch(operand, dim, factor, block, starts, width, offset, rounds))
    return tuple(fetched)


def _size(tensor: Sequence[Sequence[int]], shape: tuple[int, ...], factor: int) -> int:
    return next((size for dim, size in zip(tensor, shape, strict=True) if factor in dim), 0)


#: Operand, where each block starts, width, offset.
_Range = tuple[int, tuple[int, ...], int, int]


def _windowed(windows: tuple[Window, ...], sizes: tuple[int, ...], operands: int, pieces: int) -> list[_Range] | None:
    """Returns the ranges of an operand that the windows of another tensor read. Each of several results (a split) has its own
    range."""
    ranges: list[_Range] = []
    for w in windows:
        if w.of >= operands:
            return None
        part = sizes[w.by] // pieces
        ends = [(k * part * w.stride, ((k + 1) * part - 1) * w.stride) for k in range(pieces)]
        firsts = [min(pair) + w.low for pair in ends]
        starts = tuple(math.ceil(first / w.dilation) for first in firsts)
        stops = [math.floor((max(pair) + w.high) / w.dilation) for pair in ends]
        offsets = {start * w.dilation - first for start, first in zip(starts, firsts, strict=True)}
        width = max(stop - start + 1 for start, stop in zip(starts, stops, strict=True))
        if len(offsets) > 1 or width < 1:
            return None
        ranges.append((w.of, starts, width, offsets.pop()))
    return ranges


def _pooled(windows: tuple[Window, ...], sizes: tuple[int, ...], operands: int, pieces: int) -> list[_Range] | None:
    """Returns the ranges for the gradient of a pooling: all windows of the source that touch the block, and all positions of
    the operand that these windows cover."""
    over = next((w for w in windows if w.of < operands and w.by < operands), None)
    if over is None:  # one window covers the whole dimension
        return None
    operand, source, width = over.of, over.by, over.high - over.low + 1
    if over.stride > width:
        return None
    block = sizes[operand] // pieces
    first = [math.ceil((k * block - over.high) / over.stride) for k in range(pieces)]
    last = [math.floor(((k + 1) * block - 1 - over.low) / over.stride) for k in range(pieces)]
    count = max(b - a + 1 for a, b in zip(first, last, strict=True))
    covered = tuple(x * over.stride + over.low for x in first)
    span = max(max((count - 1) * over.stride + width, (k + 1) * block - covered[k]) for k in range(pieces))
    return [(source, tuple(first), count, 0), (operand, covered, span, 0)]


@cache
def _rounds(starts: tuple[int, ...], width: int, block: int, pieces: int) -> tuple[Round, ...]:
    """The permutes that bring each block its range: pairs at the same distance together, the nearest first."""
    wanted: list[tuple[int, int, int, int]] = []  # from, to, first position, count
    for to in range(pieces):
        for source in range(pieces):
            first = max(starts[to], source * block)
            stop = min(starts[to] + width, (source + 1) * block)
            if source != to and first < stop:
                wanted.append((source, to, first - source * block, stop - first))
    wanted.sort(key=lambda pair: (abs(pair[0] - pair[1]), pair[0] - pair[1], pair[0]))
    rounds: list[list[tuple[int, int, int, int]]] = []
    for pair in wanted:
        fitting = (r for r in rounds if all(pair[0] != other[0] and pair[1] != other[1] for other in r))
        joined = next(fitting, None)
        if joined is None:
            rounds.append([pair])
        else:
            joined.append(pair)
    permutes = []
    for pairs in rounds:
        length = max(count for *_, count in pairs)
        begins = [0] * pieces
        for source, _, first, _ in pairs:
            begins[source] = min(first, block - length)
        permutes.append(Round(tuple((a, b) for a, b, *_ in pairs), length, tuple(begins)))
    return tuple(permutes)


def cut_sizes(program: Program, op: Op, factor: int) -> list[int]:
    """The sizes that a mesh axis would have to divide: that of the factor, and of dimensions of windowed tensors."""
    rule = op.factor_rule
    sizes = [rule.factors[factor].size]
    if any(w.factor == factor for w in rule.windows):
        values = [*op.operands, *op.results]
        for t, tensor in enumerate(rule.tensors):
            sizes += [program.values[values[t]].shape[d] for d, dim in enumerate(tensor) if dim == (factor,)]
    return sizes
