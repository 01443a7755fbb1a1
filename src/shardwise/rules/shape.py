"""Primitives that move elements without computing: reshape, broadcast, transpose, slices, padding, concatenation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shardwise.ir.rule import Kind, Rule
from shardwise.rules.call import OpCall, RuleBuilder, Shape

#: A piece smaller than the dimension by more than this is not tied to it.
_PIECES: Final = 16
_PIECE: Final = "a small piece of a dimension is not tied to the whole"


def broadcast_in_dim(call: OpCall) -> Rule:
    b = RuleBuilder(call)
    out = call.out()
    source = {r: d for d, r in enumerate(call.params["broadcast_dimensions"])}
    for r in range(len(call.results[0])):
        b.add([*([(0, source[r])] if r in source else []), (out, r)])
    return b.build()


def broadcast_to(call: OpCall) -> Rule:
    """Dimensions counted from the right, as NumPy broadcasts."""
    b = RuleBuilder(call)
    out, missing = call.out(), len(call.results[0]) - len(call.operands[0])
    for r in range(len(call.results[0])):
        b.add([*([(0, r - missing)] if r >= missing else []), (out, r)])
    return b.build()


def tie(call: OpCall) -> Rule:
    """The second operand, once the first is there."""
    b = RuleBuilder(call)
    for d in range(len(call.results[0])):
        b.add([(1, d), (call.out(), d)])
    b.block_apart(((0, d) for d in range(len(call.operands[0]))), "only waited for")
    return b.build()


def transpose(call: OpCall) -> Rule:
    b = RuleBuilder(call)
    for r, d in enumerate(call.params["permutation"]):
        b.add([(0, d), (call.out(), r)])
    return b.build()


def squeeze(call: OpCall) -> Rule:
    b = RuleBuilder(call)
    dropped = {d % len(call.operands[0]) for d in call.params["dimensions"]}
    kept = [d for d in range(len(call.operands[0])) if d not in dropped]
    for r, d in enumerate(kept):
        b.add([(0, d), (call.out(), r)])
    return b.build()


def free_results(call: OpCall) -> Rule:
    """Every position of the result is made on its own: iota, random bits from one key, uninitialised memory."""
    b = RuleBuilder(call)
    for r in range(len(call.results)):
        for d in range(len(call.results[r])):
            b.add([(call.out(r), d)])
    for t in range(len(call.operands)):
        b.block_apart(((t, d) for d in range(len(call.operands[t]))), "every position reads all of it")
    return b.build()


def reshape(call: OpCall) -> Rule:
    """Splits, merges and mixtures, by one walk from the major end.

    ``[6,4] -> [8,3]`` share their major factor 2; what is left, 3*4 against 4*3, has no common boundary and is blocked.
    """
    b = RuleBuilder(call)
    out = call.out()
    if 0 in call.operands[0] or call.params.get("dimensions") is not None:
        reason = "nothing to split in an empty array" if 0 in call.operands[0] else "the order of dimensions changes"
        for t in (0, out):
            b.block_apart(((t, d) for d in range(len(call.shape(t)))), reason)
        return b.build()
    for size, source, target in _common_factors(call.operands[0], call.results[0]):
        if source is not None and target is not None:
            b.add([(0, source), (out, target)], size)
        else:
            place = (0, source) if source is not None else (out, target or 0)
            b.block([place], "the reshape cuts across this dimension", size)
    return b.build()


def _common_factors(a: Shape, b: Shape) -> list[tuple[int, int | None, int | None]]:
    """(size, dimension of a, dimension of b) from major to minor; one dimension is None where nothing corresponds."""
    pairs: list[tuple[int, int | None, int | None]] = []
    left = [[d, s] for d, s in enumerate(a) if s > 1]
    right = [[d, s] for d, s in enumerate(b) if s > 1]
    while left and right:
        common = math.gcd(left[0][1], right[0][1])
        if common > 1:
            pairs.append((common, left[0][0], right[0][0]))
            left[0][1] //= common
            right[0][1] //= common
        if left[0][1] > 1 and right[0][1] > 1:
            _skip_block(left, right, pairs)
        left = [x for x in left if x[1] > 1]
        right = [x for x in right if x[1] > 1]
    return pairs


def _skip_block(left: list[list[int]], right: list[list[int]], pairs: list[tuple[int, int | None, int | None]]) -> None:
    """Neither of the two leading sizes divides the other: consumes dimensions up to the next common boundary."""
    product_l, product_r = 1, 1
    i = j = 0
    while product_l != product_r or i == 0:
        if product_l <= product_r:
            product_l *= left[i][1]
            pairs.append((left[i][1], left[i][0], None))
            left[i][1] = 1
            i += 1
        else:
            product_r *= right[j][1]
            pairs.append((right[j][1], None, right[j][0]))
            right[j][1] = 1
            j += 1


def _shifted(
    call: OpCall, moved: Sequence[list[dict[str, int]]], operands: Sequence[int], results: Sequence[int]
) -> Rule:
    """Pointwise, but dimensions with windows in ``moved`` are shifted: a halo. Tensors that hold only a small piece of the
    dimension are not tied to the rest: a few rows put beside thousands mean something else, and lie on one device anyway."""
    b = RuleBuilder(call)
    for d, windows in enumerate(moved):
        places = [(t, d) for t in (*operands, *results)]
        if not windows:
            b.add(places)
            continue
        largest = max(call.shape(t)[d] for t, _ in places)
        near = [(t, d) for t, _ in places if call.shape(t)[d] * _PIECES >= largest]
        if any(t in operands for t, _ in near) and any(t in results for t, _ in near):
            b.add(near, kind=Kind.HALO, windows=windows)
        else:
            b.block_apart(near, _PIECE)
        b.block_apart([place for place in places if place not in near], _PIECE)
    return b.build()


def slice_(call: OpCall) -> Rule:
    p = call.params
    shape, out = call.operands[0], call.out()
    strides = p["strides"] or (1,) * len(shape)
    moved = [
        []
        if size == shape[d]
        else [dict(of=0, by=out, stride=strides[d], low=p["start_indices"][d], high=p["start_indices"][d])]
        for d, size in enumerate(call.results[0])
    ]
    return _shifted(call, moved, [0], [out])


def pad(call: OpCall) -> Rule:
    out = call.out()
    moved = [
        [] if (low, high, inner) == (0, 0, 0) else [dict(of=0, by=out, low=-low, high=-low, dilation=inner + 1)]
        for low, high, inner in call.params["padding_config"]
    ]
    return _shifted(call, moved, [0], [out])


def rev(call: OpCall) -> Rule:
    out = call.out()
    moved = [
        [dict(of=0, by=out, stride=-1, low=size - 1, high=size - 1)] if d in call.params["dimensions"] else []
        for d, size in enumerate(call.operands[0])
    ]
    return _shifted(call, moved, [0], [out])


def concatenate(call: OpCall) -> Rule:
    out, axis = call.out(), call.params["dimension"]
    start, windows = 0, []
    for t, shape in enumerate(call.operands):
        windows.append(dict(of=t, by=out, low=-start, high=-start))
        start += shape[axis]
    moved: list[list[dict[str, int]]] = [windows if d == axis else [] for d in range(len(call.results[0]))]
    return _shifted(call, moved, range(len(call.operands)), [out])


def split(call: OpCall) -> Rule:
    """A result that is only a small piece lies on one device, so that the dimension is whole where there is one."""
    axis = call.params["axis"]
    sizes = [shape[axis] for shape in call.results if shape[axis]]
    if any(size == 1 or size * _PIECES < call.operands[0][axis] for size in sizes):
        b = RuleBuilder(call)
        for d in range(len(call.operands[0])):
            places = [(t, d) for t in range(len(call.results) + 1)]
            if d == axis:
                b.block_apart(places, _PIECE)
            else:
                b.add(places)
        return b.build()
    start, windows = 0, []
    for r, shape in enumerate(call.results):
        windows.append(dict(of=0, by=call.out(r), low=start, high=start))
        start += shape[axis]
    moved: list[list[dict[str, int]]] = [windows if d == axis else [] for d in range(len(call.operands[0]))]
    return _shifted(call, moved, [0], [call.out(r) for r in range(len(call.results))])


def stack(call: OpCall) -> Rule:
    """The new dimension numbers the operands: no operand has it."""
    axis, out = call.params["axis"], call.out()
    b = RuleBuilder(call)
    for r in range(len(call.results[0])):
        if r == axis:
            b.block([(out, r)], "the new dimension numbers the operands")
        else:
            b.add([*((t, r - (r > axis)) for t in range(len(call.operands))), (out, r)])
    return b.build()


def unstack(call: OpCall) -> Rule:
    axis = call.params["axis"]
    b = RuleBuilder(call)
    for d in range(len(call.operands[0])):
        if d == axis:
            b.block([(0, d)], "the dimension becomes separate results")
        else:
            b.add([(0, d), *((call.out(r), d - (d > axis)) for r in range(len(call.results)))])
    return b.build()


def tile(call: OpCall) -> Rule:
    """``[n] -> [reps*n]``: the repetitions are the major factor, so that the tiled dimension is split by repetition."""
    reps = call.params["reps"]
    b = RuleBuilder(call)
    out = call.out()
    missing = len(call.results[0]) - len(call.operands[0])
    for r, times in enumerate(reps):
        b.add([(out, r)], times, Kind.FREE)
        if r >= missing:
            b.add([(0, r - missing), (out, r)], call.operands[0][r - missing])
    return b.build()


def bitcast_convert_type(call: OpCall) -> Rule:
    """A narrower or wider type adds or drops a last dimension: the parts of one element, kept together."""
    b = RuleBuilder(call)
    out = call.out()
    shared = min(len(call.operands[0]), len(call.results[0]))
    for d in range(shared):
        b.add([(0, d), (out, d)])
    for t in (0, out):
        b.block_apart(((t, d) for d in range(shared, len(call.shape(t)))), "the bytes of one element")
    return b.build()
