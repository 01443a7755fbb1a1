"""Products: ``dot_general``, ragged products, convolutions of every kind."""

from __future__ import annotations

from shardwise.ir.rule import Kind, Rule
from shardwise.rules.call import OpCall, RuleBuilder


def dot_general(call: OpCall) -> Rule:
    """``(batch, m…, k…), (batch, n…, k…) -> (batch, m…, n…)``; sum over k."""
    (contract_l, contract_r), (batch_l, batch_r) = call.params["dimension_numbers"]
    b = RuleBuilder(call)
    out = call.out()
    for position, (left, right) in enumerate(zip(batch_l, batch_r, strict=True)):
        b.add([(0, left), (1, right), (out, position)])
    position = len(batch_l)
    for tensor, used in ((0, {*contract_l, *batch_l}), (1, {*contract_r, *batch_r})):
        for d in range(len(call.operands[tensor])):
            if d not in used:
                b.add([(tensor, d), (out, position)])
                position += 1
    for left, right in zip(contract_l, contract_r, strict=True):
        b.reduce([(0, left), (1, right)], "sum")
    return b.build()


def scaled_dot(call: OpCall) -> Rule:
    """A product of block-scaled operands. The scales have fewer positions along k, one per block: a part of k takes its
    part of the scales only if cut at a block border, which the partitioner does not promise, so k is blocked."""
    (contract_l, contract_r), (batch_l, batch_r) = call.params["dimension_numbers"]
    b = RuleBuilder(call)
    out = call.out()
    scales = {0: 2, 1: 3} if len(call.operands) == 4 else {}

    def with_scale(tensor: int, d: int) -> list[tuple[int, int]]:
        scale = scales.get(tensor)
        same = scale is not None and len(call.operands[scale]) == len(call.operands[tensor])
        return [(tensor, d), (scale, d)] if same and scale is not None else [(tensor, d)]

    for position, (left, right) in enumerate(zip(batch_l, batch_r, strict=True)):
        b.add([*with_scale(0, left), *with_scale(1, right), (out, position)])
    position = len(batch_l)
    for tensor, used in ((0, {*contract_l, *batch_l}), (1, {*contract_r, *batch_r})):
        for d in range(len(call.operands[tensor])):
            if d not in used:
                b.add([*with_scale(tensor, d), (out, position)])
                position += 1
    reason = "the contracted dimension is scaled in blocks"
    for left, right in zip(contract_l, contract_r, strict=True):
        b.block([(0, left), (1, right)], reason)
    for scale, dims in ((2, contract_l), (3, contract_r)):
        if scale < len(call.operands):
            b.block_apart([(scale, d) for d in dims if d < len(call.operands[scale])], reason)
    return b.build()


def ragged_dot_general(call: OpCall) -> Rule:
    """Products by group, the groups being consecutive rows of the ragged dimension.

    Where the ragged dimension is not contracted, rows belong to groups by the running sum of ``group_sizes``; a part of
    the rows, or of the groups, no longer starts at the first group. Both are blocked. The rest is an ordinary product.
    """
    numbers = call.params["ragged_dot_dimension_numbers"]
    (contract_l, contract_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions)
    group_dims = tuple(numbers.rhs_group_dimensions)
    b = RuleBuilder(call)
    out = call.out()
    rows = "rows find their group by the running sum of the group sizes"
    sizes_rank = len(call.operands[2])
    # The output is (groups, batch…, m…, n…) when the ragged dimension is contracted, else (batch…, m…, n…).
    contracted = any(d in contract_l for d in ragged)
    shift = 1 if contracted else 0
    groups = [(2, sizes_rank - 1), *((1, d) for d in group_dims)] + ([(out, 0)] if contracted else [])
    b.block(groups, rows)
    for position, (left, right) in enumerate(zip(batch_l, batch_r, strict=True)):
        sizes = [(2, position)] if position < sizes_rank - 1 else []
        places = [(0, left), (1, right), (out, position + shift), *sizes]
        if left in ragged:
            b.block(places, rows)
        else:
            b.add(places)
    position = len(batch_l) + shift
    used_l, used_r = {*contract_l, *batch_l}, {*contract_r, *batch_r, *group_dims}
    extra = sizes_rank - 1 - len(batch_l)
    for d in range(len(call.operands[0])):
        if d not in used_l:
            if d in ragged:
                b.block([(0, d), (out, position)], rows)
            else:
                sizes = [(2, position)] if extra > 0 else []
                b.add([(0, d), (out, position), *sizes])
            position += 1
    for d in range(len(call.operands[1])):
        if d not in used_r:
            b.add([(1, d), (out, position)])
            position += 1
    for left, right in zip(contract_l, contract_r, strict=True):
        if left in ragged:
            b.block([(0, left), (1, right)], rows)
        else:
            b.reduce([(0, left), (1, right)], "sum")
    return b.build()


def conv_general_dilated(call: OpCall) -> Rule:
    """Batch and features are those of a product, with feature or batch groups as the major factor.

    A spatial dimension relates three indices, ``input = output * stride + tap * dilation - padding``. Of output and tap the
    one that spans more of the input goes along with it: the output in a forward convolution (a halo), the taps in a weight
    gradient, where the "kernel" is an image and the result a few taps wide (a reduction with a halo). The other stays whole.
    """
    p = call.params
    numbers = p["dimension_numbers"]
    lhs, rhs, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    feature_groups, batch_groups = p["feature_group_count"], p["batch_group_count"]
    b = RuleBuilder(call)
    out = call.out()
    out_channels = call.operands[1][rhs[0]]
    # Major factors first: the groups, then what is inside them.
    if feature_groups > 1:
        b.add([(0, lhs[1]), (1, rhs[0]), (out, out_spec[1])], feature_groups)
    if batch_groups > 1:
        b.add([(0, lhs[0]), (1, rhs[0]), (out, out_spec[1])], batch_groups)
    b.add([(0, lhs[0]), (out, out_spec[0])], call.operands[0][lhs[0]] // batch_groups)
    b.reduce([(0, lhs[1]), (1, rhs[1])], "sum", call.operands[1][rhs[1]])
    b.add([(1, rhs[0]), (out, out_spec[1])], out_channels // (feature_groups * batch_groups))
    for s, (i, k, o) in enumerate(zip(lhs[2:], rhs[2:], out_spec[2:], strict=True)):
        taps, outputs = call.operands[1][k], call.results[0][o]
        low = -p["padding"][s][0]
        stride, dilation = p["window_strides"][s], p["rhs_dilation"][s]
        if taps * dilation > outputs * stride:
            window = dict(
                of=0, by=1, stride=dilation, low=low, high=low + (outputs - 1) * stride, dilation=p["lhs_dilation"][s]
            )
            b.add([(0, i), (1, k)], kind=Kind.REDUCTION, reducer="sum", windows=[window])
            b.block([(out, o)], "every tap of the result needs the whole window")
        else:
            window = dict(
                of=0, by=out, stride=stride, low=low, high=low + (taps - 1) * dilation, dilation=p["lhs_dilation"][s]
            )
            b.add([(0, i), (out, o)], kind=Kind.HALO, windows=[window])
            b.block([(1, k)], "the taps of a kernel slide over the whole input")
    return b.build()
