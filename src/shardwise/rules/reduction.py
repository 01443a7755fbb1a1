"""Reductions, arg-reductions, windows, cumulative ops, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from shardwise.ir.rule import Kind, Rule
from shardwise.rules.call import OpCall, RuleBuilder

REDUCERS_BY_KIND: Final = {
    "reduce_sum": "sum",
    "reduce_prod": "prod",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
    "argmax": "argmax",
    "argmin": "argmin",
}

CUMULATIVE: Final = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


def reduce_axes(call: OpCall, reducer: str) -> Rule:
    """``(i,k)->(i)``; k is the reduced axis, blocked where there is no ``reducer``. All operands of that rank are reduced
    together, the rest are initial values."""
    axes = tuple(call.params["axes" if "axes" in call.params else "dimensions"])
    b = RuleBuilder(call)
    rank = len(call.operands[0])
    inputs = [
        t for t in range(len(call.operands)) if len(call.operands[t]) == rank and (rank == 0 or t < len(call.results))
    ]
    position = 0
    for d in range(rank):
        places = [(t, d) for t in inputs]
        if d in axes and not reducer:
            b.block(places, "the combiner is the program's own")
        elif d in axes:
            b.reduce(places, reducer)
        else:
            b.add(places + [(call.out(r), position) for r in range(len(call.results))])
            position += 1
    return b.build()


def simple_reducer(reducer: str) -> Callable[[OpCall], Rule]:
    return lambda call: reduce_axes(call, reducer)


def generic_reduce(call: OpCall) -> Rule:
    """``lax.reduce`` with a combiner of the user's: no collective computes it, so that the reduced axes are whole."""
    return reduce_axes(call, "")


def cumulative(call: OpCall) -> Rule:
    return whole_axis(call, call.params["axis"], "each position needs all positions before it")


def whole_axis(call: OpCall, axis: int, reason: str) -> Rule:
    """Pointwise but for one dimension, which every position reads whole. In and out still belong together."""
    b = RuleBuilder(call)
    tensors = range(len(call.operands) + len(call.results))
    for d in range(len(call.operands[0])):
        places = [(t, d) for t in tensors]
        if d == axis:
            b.block(places, reason)
        else:
            b.add(places)
    return b.build()


def sort(call: OpCall) -> Rule:
    return whole_axis(call, call.params["dimension"], "an element may move anywhere in the sorted dimension")


def top_k(call: OpCall) -> Rule:
    """The axis is searched whole, and what comes out along it is something else."""
    axis = call.params.get("axis", call.params.get("reduction_dimension", -1)) % len(call.operands[0])
    b = RuleBuilder(call)
    outs = [call.out(r) for r in range(len(call.results))]
    for d in range(len(call.operands[0])):
        if d == axis:
            b.block([(0, d)], "the best are looked for in the whole dimension")
            b.block([(t, d) for t in outs], "the best are known only when all were seen")
        else:
            b.add([(0, d), *((t, d) for t in outs)])
    return b.build()


def reduce_window(call: OpCall) -> Rule:
    """Operands and results share a halo in every dimension with a window; initial values are scalars."""
    p = call.params
    rank = len(call.results[0])
    window = p["window_dimensions"]
    strides = p["window_strides"]
    padding = p["padding"]
    base = p.get("base_dilation", (1,) * rank)
    dilation = p.get("window_dilation", (1,) * rank)
    b = RuleBuilder(call)
    inputs = [t for t in range(len(call.operands)) if len(call.operands[t]) == rank and rank > 0]
    outs = [call.out(r) for r in range(len(call.results))]
    for d in range(rank):
        places = [(t, d) for t in [*inputs, *outs]]
        plain = window[d] == 1 and strides[d] == 1 and base[d] == 1 and tuple(padding[d]) == (0, 0)
        if plain:
            b.add(places)
            continue
        low = -padding[d][0]
        high = low + (window[d] - 1) * dilation[d]
        windows = [
            dict(of=i, by=o, stride=strides[d], low=low, high=high, dilation=base[d]) for i in inputs for o in outs
        ]
        b.add(places, kind=Kind.HALO, windows=windows)
    return b.build()


def select_and_scatter(call: OpCall) -> Rule:
    """The gradient of a max-pool. ``source`` has a position per window, ``operand`` and the result the pooled size."""
    p = call.params
    b = RuleBuilder(call)
    out = call.out()
    source, operand = (0, 1) if call.kind == "select_and_scatter_add" else (1, 0)
    for d in range(len(call.results[0])):
        places = [(source, d), (operand, d), (out, d)]
        width, stride, low = p["window_dimensions"][d], p["window_strides"][d], -p["padding"][d][0]
        if width == 1 and stride == 1 and tuple(p["padding"][d]) == (0, 0):
            b.add(places)
            continue
        over = dict(by=source, stride=stride, low=low, high=low + width - 1)
        beside = dict(of=operand, by=out, low=1 - width, high=width - 1)
        b.add(places, kind=Kind.HALO, windows=[dict(of=operand, **over), dict(of=out, **over), beside])
    return b.build()
