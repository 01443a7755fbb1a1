"""Reductions, arg-reductions, windows, cumulative ops, sorting."""

from __future__ import annotations

from typing import Final

from shardwise.ir.rule import Kind
from shardwise.rules.call import RuleBuilder, pointwise

REDUCERS_BY_KIND: Final = {
    **{f"reduce_{reducer}": reducer for reducer in ("sum", "prod", "max", "min", "and", "or", "xor")},
    "argmax": "argmax",
    "argmin": "argmin",
    "reduce": "",  # no collective computes the user's combiner
}

CUMULATIVE: Final = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def reduce_axes(b: RuleBuilder) -> None:
    """``(i,k)->(i)``; k is blocked where there is no reducer. Operands beyond the results are initial values."""
    reducer = REDUCERS_BY_KIND[b.call.kind]
    axes = b.params["axes" if "axes" in b.params else "dimensions"]
    inputs = range(len(b.results))
    position = 0
    for d in range(len(b.operands[0])):
        places = [(t, d) for t in inputs]
        if d in axes and not reducer:
            b.block(places, "no collective computes the program's combiner")
        elif d in axes:
            b.reduce(places, reducer)
        else:
            b.add([*places, *((t, position) for t in b.outs)])
            position += 1


def cumulative(b: RuleBuilder) -> None:
    pointwise(b, {b.params["axis"]: "each position needs all positions before it"})


def sort(b: RuleBuilder) -> None:
    """The sorted dimension is not that of the operands: rows that are sorted by expert are no longer those of a batch."""
    reason = "an element may move anywhere in the sorted dimension"
    for d in range(len(b.operands[0])):
        if d != b.params["dimension"]:
            b.add([(t, d) for t in b.tensors])
    b.block([(t, b.params["dimension"]) for t in range(b.out)], reason)
    b.block([(t, b.params["dimension"]) for t in range(b.out, len(b.tensors))], reason)


def top_k(b: RuleBuilder) -> None:
    axis = b.params.get("axis", b.params.get("reduction_dimension", -1)) % len(b.operands[0])
    pointwise(b, {axis: "the largest elements may be anywhere in the dimension"})


def reduce_window(b: RuleBuilder) -> None:
    """Operands and results share a halo in every dimension with a window; initial values are scalars."""
    p = b.params
    rank = len(b.results[0])
    ones = (1,) * rank
    inputs = [t for t in range(b.out) if b.operands[t]]
    for d in range(rank):
        places = [(t, d) for t in [*inputs, *b.outs]]
        size, stride, (start, end) = p["window_dimensions"][d], p["window_strides"][d], p["padding"][d]
        base, dilation = p.get("base_dilation", ones)[d], p.get("window_dilation", ones)[d]
        if size == stride == base == 1 and start == end == 0:
            b.add(places)
            continue
        window = dict(stride=stride, low=-start, high=(size - 1) * dilation - start, dilation=base)
        b.add(places, kind=Kind.HALO, windows=[dict(of=i, by=o, **window) for i in inputs for o in b.outs])


def select_and_scatter(b: RuleBuilder) -> None:
    """The gradient of a max-pool. ``source`` has a position per window, ``operand`` and the result have the pooled size."""
    p = b.params
    source, operand = (0, 1) if b.call.kind == "select_and_scatter_add" else (1, 0)
    for d in range(len(b.results[0])):
        places = [(source, d), (operand, d), (b.out, d)]
        size, stride, (start, end) = p["window_dimensions"][d], p["window_strides"][d], p["padding"][d]
        if size == stride == 1 and start == end == 0:
            b.add(places)
            continue
        over = dict(by=source, stride=stride, low=-start, high=size - 1 - start)
        beside = dict(of=operand, by=b.out, low=1 - size, high=size - 1)
        b.add(places, kind=Kind.HALO, windows=[dict(of=operand, **over), dict(of=b.out, **over), beside])
