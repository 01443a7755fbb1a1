"""Products: ``dot_general``, ragged products, convolutions of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.ir.rule import Kind
from shardwise.rules.call import Place, RuleBuilder


def _product(
    b: RuleBuilder, numbers: Any, shift: int = 0, skipped: Sequence[int] = ()
) -> tuple[list[list[Place]], list[list[Place]]]:
    """Returns the places of each dimension of a product's result, batch first and starting at ``shift``, and of each contracted
    one, without ``skipped``."""
    (contract_l, contract_r), (batch_l, batch_r) = numbers
    used = {*contract_l, *batch_l}, {*contract_r, *batch_r, *skipped}
    kept = [[(0, left), (1, right)] for left, right in zip(batch_l, batch_r, strict=True)]
    kept += [[(t, d)] for t in (0, 1) for d in range(len(b.operands[t])) if d not in used[t]]
    contracted = [[(0, left), (1, right)] for left, right in zip(contract_l, contract_r, strict=True)]
    return [[*places, (b.out, shift + k)] for k, places in enumerate(kept)], contracted


def dot_general(b: RuleBuilder) -> None:
    """``(batch, m…, k…), (batch, n…, k…) -> (batch, m…, n…)``; sum over k."""
    kept, contracted = _product(b, b.params["dimension_numbers"])
    for places in kept:
        b.add(places)
    for places in contracted:
        b.reduce(places, "sum")


def scaled_dot(b: RuleBuilder) -> None:
    """A product of block-scaled operands. k is blocked, since the scales have one position per block of it."""
    kept, contracted = _product(b, b.params["dimension_numbers"])
    scaled = {t: t + 2 for t in (0, 1) if t + 2 < b.out and len(b.operands[t + 2]) == len(b.operands[t])}
    for places in kept:
        b.add([*places, *((scaled[t], d) for t, d in places if t in scaled)])
    reason = "the contracted dimension is scaled in blocks"
    for places in contracted:
        b.block(places, reason)
    b.block_rest(reason)


def ragged_dot_general(b: RuleBuilder) -> None:
    """Products by group: consecutive rows of the ragged dimension, which find their group by the running sum of
    ``group_sizes``. A device finds the groups of its rows by the sizes of all groups, which are whole. Groups are blocked, and
    so are rows that are a batch dimension; the rest is an ordinary product."""
    numbers = b.params["ragged_dot_dimension_numbers"]
    ragged, group_dims = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    (contract_l, _), (batch, _) = numbers.dot_dimension_numbers
    # The output is (groups, batch…, m…, n…) when the ragged dimension is contracted, else (batch…, m…, n…).
    shift = int(any(d in contract_l for d in ragged))
    kept, contracted = _product(b, numbers.dot_dimension_numbers, shift, group_dims)
    reason = "rows find their group by the running sum of the group sizes"
    last = len(b.operands[2]) - 1
    b.block([(2, last), *((1, d) for d in group_dims), *[(b.out, 0)] * shift], reason)
    sized = min(last, len(batch)) if shift else last
    for k, places in enumerate(kept):
        tensor, d = places[0]
        if k < sized and tensor == 0:
            places.append((2, k))
        if tensor == 0 and d in ragged and d in batch:
            b.block(places, reason)
        else:
            b.add(places)
    for places in contracted:
        b.reduce(places, "sum")


def conv_general_dilated(b: RuleBuilder) -> None:
    """Batch and features are those of a product, with feature or batch groups as the major factor.

    A spatial dimension relates ``input = output * stride + tap * dilation - padding``. Of output and tap the one that covers
    more of the input is one factor with it: the output in a forward convolution (a halo), the taps in a weight gradient (a
    reduction with a halo). The other is blocked.
    """
    p = b.params
    numbers = p["dimension_numbers"]
    lhs, rhs, result = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = p["feature_group_count"], p["batch_group_count"]
    # Major factors first: the groups, then what is inside them.
    for dim, count in zip((lhs[1], lhs[0]), groups, strict=True):
        b.add([(0, dim), (1, rhs[0]), (b.out, result[1])], count)
    b.add([(0, lhs[0]), (b.out, result[0])], b.operands[0][lhs[0]] // groups[1])
    b.reduce([(0, lhs[1]), (1, rhs[1])], "sum", b.operands[1][rhs[1]])
    b.add([(1, rhs[0]), (b.out, result[1])], b.operands[1][rhs[0]] // (groups[0] * groups[1]))
    for s, (i, k, o) in enumerate(zip(lhs[2:], rhs[2:], result[2:], strict=True)):
        taps, outputs = b.operands[1][k], b.results[0][o]
        stride, dilation = p["window_strides"][s], p["rhs_dilation"][s]
        window = dict(of=0, low=-p["padding"][s][0], dilation=p["lhs_dilation"][s])
        if taps * dilation > outputs * stride:
            window |= dict(by=1, stride=dilation, high=window["low"] + (outputs - 1) * stride)
            b.add([(0, i), (1, k)], kind=Kind.REDUCTION, reducer="sum", windows=[window])
            b.block([(b.out, o)], "every tap of the result needs all positions of the window")
        else:
            window |= dict(by=b.out, stride=stride, high=window["low"] + (taps - 1) * dilation)
            b.add([(0, i), (b.out, o)], kind=Kind.HALO, windows=[window])
            b.block([(1, k)], "the taps of a kernel slide over all positions of the input")
