"""What an op exchanges with its neighbours where a mesh axis splits a windowed dimension.

A :class:`~shardwise.ir.rule.Window` says which positions ``i`` of tensor ``of`` position ``x`` of tensor ``by`` touches:
``x * stride + low <= i * dilation <= x * stride + high``. Cut into ``n`` even shards, shard ``k`` of the result needs a range
of the operand, and owns another; what it needs beyond its own comes from the neighbours. All devices send at once, so that
the widest of the shards counts, to the left and to the right each. Dimensions that stay whole exchange nothing.

XLA pads and moves somewhat more or less for strided and dilated windows; the widths here are what the op needs.
"""

from __future__ import annotations

import math
from functools import cache

from shardwise.ir.program import Op, Program
from shardwise.ir.rule import Window


@cache
def halo_widths(
    window: Window, pieces: int, operand_size: int, result_size: int, operand_is_of: bool
) -> tuple[int, int]:
    """Positions of the operand that a shard needs from its left and from its right."""
    own = operand_size // pieces
    part = result_size // pieces
    left = right = 0
    for k in range(pieces):
        first, last = k * part, (k + 1) * part - 1
        if operand_is_of:
            start = math.ceil((first * window.stride + window.low) / window.dilation)
            end = math.floor((last * window.stride + window.high) / window.dilation)
        else:
            start = math.ceil((first * window.dilation - window.high) / window.stride)
            end = math.floor((last * window.dilation - window.low) / window.stride)
        start, end = max(start, 0), min(end, operand_size - 1)
        if start > end:
            continue
        left = max(left, k * own - start)
        right = max(right, end - ((k + 1) * own - 1))
    return left, right


def cut_sizes(program: Program, op: Op, factor: int) -> list[int]:
    """The sizes a factor has where a mesh axis would cut it: the factor's own, and whole dimensions of windowed tensors."""
    rule = op.rule
    assert rule is not None
    sizes = [rule.factors[factor].size]
    if any(w.factor == factor for w in rule.windows):
        values = [*op.operands, *op.results]
        for t, tensor in enumerate(rule.tensors):
            sizes += [program.values[values[t]].shape[d] for d, dim in enumerate(tensor) if dim == (factor,)]
    return sizes
