"""Primitives that move elements without computing: reshape, broadcast, transpose, slices, padding, concatenation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Final

from shardwise.ir.rule import Kind
from shardwise.rules.call import RuleBuilder, Shape

#: A piece smaller than the dimension by more than this is not tied to it.
_PIECES: Final = 16
_PIECE: Final = "a small slice of a dimension is not sharded with the rest"


def _placed(b: RuleBuilder, pairs: Iterable[tuple[int, int]], operand: int = 0) -> None:
    """Adds a factor for each dimension of the result; ``pairs``: (operand's, result's) dimensions with the same positions."""
    sources = {r: d for d, r in pairs}
    for r in range(len(b.results[0])):
        b.add([*([(operand, sources[r])] if r in sources else []), (b.out, r)])


def broadcast_in_dim(b: RuleBuilder) -> None:
    _placed(b, enumerate(b.params["broadcast_dimensions"]))


def broadcast_to(b: RuleBuilder) -> None:
    """Dimensions counted from the right, as NumPy broadcasts."""
    _placed(b, enumerate(range(len(b.results[0]) - len(b.operands[0]), len(b.results[0]))))


def tie(b: RuleBuilder) -> None:
    """The second operand, once the first is there."""
    _placed(b, ((d, d) for d in range(len(b.results[0]))), operand=1)
    b.block_rest("only waited for")


def transpose(b: RuleBuilder) -> None:
    _placed(b, ((d, r) for r, d in enumerate(b.params["permutation"])))


def squeeze(b: RuleBuilder) -> None:
    rank = len(b.operands[0])
    dropped = {d % rank for d in b.params["dimensions"]}
    _placed(b, ((d, r) for r, d in enumerate(d for d in range(rank) if d not in dropped)))


def parts_of_elements(b: RuleBuilder) -> None:
    """Another type adds or removes a last dimension: the parts of one element, which are kept together."""
    shared = min(len(b.operands[0]), len(b.results[0]))
    for d in range(shared):
        b.add([(0, d), (b.out, d)])
    b.block_rest("the bytes of one element" if b.call.kind == "bitcast_convert_type" else "the words of one key")


def reshape(b: RuleBuilder) -> None:
    """Splits, merges and mixtures, by one walk from the major end.

    ``[6,4] -> [8,3]`` share their major factor 2; what is left, 3*4 against 4*3, has no common boundary and is blocked.
    """
    if 0 in b.operands[0] or b.params.get("dimensions") is not None:
        b.block_rest("nothing to split in an empty array" if 0 in b.operands[0] else "the order of dimensions changes")
        return
    for size, source, target in _common_factors(b.operands[0], b.results[0]):
        if source is not None and target is not None:
            b.add([(0, source), (b.out, target)], size)
        else:
            place = (0, source) if source is not None else (b.out, target or 0)
            b.block([place], "the reshape cuts across this dimension", size)


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
    """Consumes dimensions up to the next common boundary, where neither of the two leading sizes divides the other."""
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


def _shifted(b: RuleBuilder, windows: Mapping[int, list[dict[str, int]]]) -> None:
    """Pointwise, except that the dimensions with windows are shifted: a halo. Tensors that have only a small piece of such a
    dimension are not tied to the rest."""
    tensors = [t for t in b.tensors if b.shapes[t]]
    for d in range(len(b.operands[0])):
        places = [(t, d) for t in tensors]
        if d not in windows:
            b.add(places)
            continue
        largest = max(b.shapes[t][d] for t in tensors)
        near = [(t, d) for t in tensors if b.shapes[t][d] * _PIECES >= largest]
        if near[0][0] < b.out <= near[-1][0]:
            b.add(near, kind=Kind.HALO, windows=windows[d])
        else:
            b.block_apart(near, _PIECE)
        b.block_apart([place for place in places if place not in near], _PIECE)


def slice_(b: RuleBuilder) -> None:
    starts = b.params["start_indices"]
    strides = b.params["strides"] or (1,) * len(starts)
    windows = [[dict(of=0, by=b.out, stride=s, low=i, high=i)] for s, i in zip(strides, starts, strict=True)]
    _shifted(b, {d: w for d, w in enumerate(windows) if b.operands[0][d] != b.results[0][d]})


def pad(b: RuleBuilder) -> None:
    sides = {d: sides for d, sides in enumerate(b.params["padding_config"]) if any(sides)}
    _shifted(b, {d: [dict(of=0, by=b.out, low=-i, high=-i, dilation=k + 1)] for d, (i, _, k) in sides.items()})


def rev(b: RuleBuilder) -> None:
    lasts = {d: b.operands[0][d] - 1 for d in b.params["dimensions"]}
    _shifted(b, {d: [dict(of=0, by=b.out, stride=-1, low=last, high=last)] for d, last in lasts.items()})


def concatenate(b: RuleBuilder) -> None:
    axis = b.params["dimension"]
    starts = accumulate((shape[axis] for shape in b.operands[:-1]), initial=0)
    _shifted(b, {axis: [dict(of=t, by=b.out, low=-start, high=-start) for t, start in enumerate(starts)]})


def split(b: RuleBuilder) -> None:
    """A result that is only a small piece is on one device, so that the dimension is blocked where there is one."""
    axis = b.params["axis"]
    sizes = [shape[axis] for shape in b.results]
    if not any(size == 1 or 0 < size * _PIECES < b.operands[0][axis] for size in sizes):
        starts = accumulate(sizes[:-1], initial=0)
        _shifted(b, {axis: [dict(of=0, by=t, low=start, high=start) for t, start in zip(b.outs, starts, strict=True)]})
        return
    for d in range(len(b.operands[0])):
        places = [(t, d) for t in b.tensors]
        if d == axis:
            b.block_apart(places, _PIECE)
        else:
            b.add(places)


def _stacked(b: RuleBuilder, stack: int, parts: range, reason: str) -> None:
    """One tensor has another one at each position of a dimension."""
    axis = b.params["axis"]
    for d in range(len(b.shapes[stack])):
        if d == axis:
            b.block([(stack, d)], reason)
        else:
            b.add([(stack, d), *((t, d - (d > axis)) for t in parts)])


def stack(b: RuleBuilder) -> None:
    _stacked(b, b.out, range(b.out), "the new dimension numbers the operands")


def unstack(b: RuleBuilder) -> None:
    _stacked(b, 0, b.outs, "the dimension becomes separate results")


def tile(b: RuleBuilder) -> None:
    """``[n] -> [reps*n]``: the repetitions are the major factor, so that the tiled dimension is split by repetition."""
    missing = len(b.results[0]) - len(b.operands[0])
    for r, times in enumerate(b.params["reps"]):
        b.add([(b.out, r)], times, Kind.FREE)
        if r >= missing:
            b.add([(0, r - missing), (b.out, r)], b.operands[0][r - missing])
