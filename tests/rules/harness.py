"""Is a rule right? Cut the operation along each factor, run the parts, put them together as the factor's kind says.

The parts run the *same primitive* on smaller operands. Parameters that hold sizes are adapted to the part by one small
table; everything else is the equation's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardwise.ir.rule import Factor, Kind, check_rule
from tests.rules import lookups, windows
from tests.rules.cases import Array, Case, Shape, is_key

#: Results that are made in one piece and then cut: a part alone cannot know which piece it is.
WHOLE_THEN_CUT = {
    "iota_2x32_shape": "counts over the whole shape; the partitioner adds each part's offset",
    "random_bits": "hashes the positions of the whole shape; the partitioner adds each part's offset",
    "random_gamma": "derives a key from the position in the whole shape; the partitioner adds each part's offset",
    "random_split": "hashes the positions of the whole shape; the partitioner adds each part's offset",
    "rng_bit_generator": "numbers the whole shape; every device makes all bits and keeps its part",
    "rng_uniform": "draws from a hidden state: any bits are right",
    "empty": "uninitialised memory: any values are right",
    "empty2": "uninitialised memory: any values are right",
}


def check_case(case: Case) -> None:
    """Every factor of the case's rule, by computation."""
    check_rule(case.rule, case.call.operands, case.call.results)
    for index, factor in enumerate(case.rule.factors):
        try:
            check_factor(case, index)
        except AssertionError as error:
            raise AssertionError(f"factor {index} ({factor}) of {case}: {error}") from error


def check_factor(case: Case, index: int) -> None:
    factor = case.rule.factors[index]
    _CHECKS[factor.kind](case, index, factor)


# Cutting and joining.


def cut(case: Case, tensor: int, x: Array, factor: int, low: int, high: int) -> Array:
    """The part [low, high) along a factor, wherever the factor stands among the dimensions' factors."""
    dims = case.rule.tensors[tensor]
    at = _axis(case, tensor, factor)
    if at is None:
        return x
    axis, view = at
    piece = x.reshape(view)[(slice(None),) * axis + (slice(low, high),)]
    sizes = iter(piece.shape)
    return piece.reshape([_product(next(sizes) for _ in dim or (0,)) for dim in dims])


def join(case: Case, tensor: int, parts: Sequence[Array], factor: int, widths: Sequence[int]) -> Array:
    """The inverse of :func:`cut`. A result without the factor must be the same in every part."""
    at = _axis(case, tensor, factor)
    if at is None:
        for part in parts[1:]:
            assert_same(part, parts[0])
        return parts[0]
    axis, view = at
    pieces = [
        _data(p).reshape([*view[:axis], w, *view[axis + 1 :], *_data(p).shape[p.ndim :]])
        for p, w in zip(parts, widths, strict=True)
    ]
    return np.concatenate(pieces, axis).reshape([*case.call.shape(tensor), *_data(parts[0]).shape[parts[0].ndim :]])


def _axis(case: Case, tensor: int, factor: int) -> tuple[int, list[int]] | None:
    """Where the factor is when the tensor is seen with one axis a factor, and that shape."""
    view, at = [], None
    for dim, size in zip(case.rule.tensors[tensor], case.call.shape(tensor), strict=True):
        if factor in dim:
            at = len(view) + dim.index(factor)
        view += [case.rule.factors[f].size for f in dim] if len(dim) > 1 else [size]
    return None if at is None else (at, view)


def halves(n: int) -> list[tuple[int, int]]:
    return [(0, n // 2), (n // 2, n)]


def assert_same(got: Array, wanted: Array) -> None:
    got, wanted = _data(got), _data(wanted)
    assert got.dtype == wanted.dtype, f"dtype {got.dtype}, not {wanted.dtype}"
    assert got.shape == wanted.shape, f"shape {got.shape}, not {wanted.shape}"
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, wanted)
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    tolerance = 2e-5 if got.dtype.itemsize >= 4 else 2e-2
    np.testing.assert_allclose(got.astype(wide), wanted.astype(wide), rtol=tolerance, atol=tolerance)


def _data(x: Array) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(x)) if is_key(x) else x


def _product(sizes: Iterator[int]) -> int:
    return int(np.prod(list(sizes), dtype=int))


# Kinds.


def _parts(case: Case, index: int) -> tuple[list[list[Array]], list[tuple[int, int]]]:
    """The results of the primitive on each half of the factor."""
    cuts = halves(case.rule.factors[index].size)
    runs = []
    for low, high in cuts:
        operands = [cut(case, t, x, index, low, high) for t, x in enumerate(case.operands)]
        operands = _own_rows(case, index, operands, low, high)
        runs.append(case.run(operands, adapt(case, index, [x.shape for x in operands], low, high)))
    return runs, cuts


def _own_rows(case: Case, index: int, operands: list[Array], low: int, high: int) -> list[Array]:
    """Operands of which the sizes of groups count the rows of the part only, where rows are cut."""
    if case.name != "ragged_dot_general":
        return operands
    (ragged,) = case.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    if index not in case.rule.operands[0][ragged]:
        return operands
    ends = np.clip(np.cumsum(operands[2], -1) - low, 0, high - low)
    return [*operands[:2], np.diff(ends, prepend=0).astype(operands[2].dtype)]


def _check_parallel(case: Case, index: int, factor: Factor) -> None:
    if case.name in WHOLE_THEN_CUT and not any(index in dim for dim in (case.rule.operands or [()])[0]):
        _check_independent(case, index)
        return
    runs, cuts = _parts(case, index)
    for r, wanted in enumerate(case.whole):
        parts = [run[r] for run in runs]
        if case.name == "iota" and index in case.rule.results[0][case.params["dimension"]]:
            parts = [p + np.asarray(low, p.dtype) for p, (low, _) in zip(parts, cuts, strict=True)]
        assert_same(join(case, case.call.out(r), parts, index, [high - low for low, high in cuts]), wanted)


def _check_independent(case: Case, index: int) -> None:
    """What cannot run in parts because it numbers the whole: a part of the result still reads its own part only."""
    (low, high), (_, n) = halves(case.rule.factors[index].size)
    for t, x in enumerate(case.operands):
        if _axis(case, t, index) is None:
            continue
        other = cut(case, t, x, index, high, n)
        changed = join(
            case, t, [cut(case, t, x, index, low, high), other + other.dtype.type(1)], index, [high, n - high]
        )
        got = case.run([changed if k == t else y for k, y in enumerate(case.operands)])
        for r, (a, b) in enumerate(zip(got, case.whole, strict=True)):
            assert_same(*(cut(case, case.call.out(r), y, index, low, high) for y in (a, b)))


def _check_reduction(case: Case, index: int, factor: Factor) -> None:
    if any(w.factor == index for w in case.rule.windows):
        windows.check_windowed_reduction(case, index)
        return
    if case.name.startswith("scatter"):
        runs = _scatter_parts(case, index)
    else:
        runs, _ = _parts(case, index)
    for got, wanted in zip(combine(case, index, factor.reducer, runs), case.whole, strict=True):
        assert_same(got, wanted)


def _check_blocked(case: Case, index: int, factor: Factor) -> None:
    assert factor.reason, "a blocked factor says why"


_CHECKS: dict[Kind, Callable[[Case, int, Factor], None]] = {
    Kind.PARALLEL: _check_parallel,
    Kind.FREE: _check_parallel,
    Kind.REDUCTION: _check_reduction,
    Kind.BLOCKED: _check_blocked,
    Kind.HALO: lambda case, index, _: windows.check_halo(case, index),
    Kind.INDEXED: lambda case, index, _: lookups.check_indexed(case, index),
}


# Reductions.

_COMBINERS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def combine(case: Case, index: int, reducer: str, runs: Sequence[Sequence[Array]]) -> list[Array]:
    """Two partial results made one."""
    first, second = runs
    if reducer in ("argmax", "argmin"):
        return [_combine_arg(case, index, reducer, first[0], second[0])]
    return [_COMBINERS[reducer](a, b).astype(a.dtype) for a, b in zip(first, second, strict=True)]


def _combine_arg(case: Case, index: int, reducer: str, first: Array, second: Array) -> Array:
    """Indices are compared by the values they stand for; of equal ones the first wins, as in the whole."""
    (axis,) = case.params["axes"]
    operand = case.operands[0]
    second = second + np.asarray(case.rule.factors[index].size // 2, second.dtype)
    values = [np.take_along_axis(operand, np.expand_dims(i, axis), axis).squeeze(axis) for i in (first, second)]
    better = values[1] > values[0] if reducer == "argmax" else values[1] < values[0]
    return np.where(better, second, first)


def _scatter_parts(case: Case, index: int) -> list[list[Array]]:
    """The operand of a scatter enters once: the other part starts from the combiner's identity."""
    runs, n = [], len(case.call.results)
    for k, (low, high) in enumerate(halves(case.rule.factors[index].size)):
        operands = [cut(case, t, x, index, low, high) for t, x in enumerate(case.operands)]
        if k:
            operands[:n] = [np.full_like(x, _identity(case.name, x.dtype)) for x in operands[:n]]
        runs.append(case.run(operands))
    return runs


def _identity(name: str, dtype: Any) -> Any:
    if name in ("scatter-add", "scatter-sub"):
        return 0
    if name == "scatter-mul":
        return 1
    lowest = jax.numpy.iinfo(dtype).min if dtype.kind == "i" else -np.inf
    highest = jax.numpy.iinfo(dtype).max if dtype.kind == "i" else np.inf
    return lowest if name == "scatter-max" else highest


# Parameters that hold sizes.


def adapt(case: Case, index: int, operands: Sequence[Shape], low: int, high: int) -> Mapping[str, Any]:
    """The parameters of the primitive on the part [low, high) of a factor."""
    change = _ADAPT.get(case.name)
    if change is None:
        return case.params
    results = [_part_shape(case, case.call.out(r), index, high - low) for r in range(len(case.call.results))]
    return {**case.params, **change(case, index, operands, results)}


def _part_shape(case: Case, tensor: int, index: int, width: int) -> Shape:
    size = case.rule.factors[index].size
    dims = zip(case.rule.tensors[tensor], case.call.shape(tensor), strict=True)
    return tuple(n // size * width if index in dim else n for dim, n in dims)


def _slice(case: Case, index: int, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    limits = zip(case.params["limit_indices"], case.rule.operands[0], operands[0], strict=True)
    return {"limit_indices": tuple(n if index in dim else limit for limit, dim, n in limits)}


def _gather(case: Case, index: int, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    batching = case.params["dimension_numbers"].operand_batching_dims
    sizes = enumerate(zip(case.params["slice_sizes"], case.rule.operands[0], operands[0], strict=True))
    return {"slice_sizes": tuple(n if index in dim and d not in batching else s for d, (s, dim, n) in sizes)}


def _convolution(case: Case, index: int, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """A factor of the kernel's output channels and of the image's features or batch numbers the groups."""
    numbers = case.params["dimension_numbers"]
    image, kernel = case.rule.operands
    changed = {}
    for key, dim in (("feature_group_count", numbers.lhs_spec[1]), ("batch_group_count", numbers.lhs_spec[0])):
        if index in image[dim] and index in kernel[numbers.rhs_spec[0]]:
            width = operands[0][dim] * case.rule.factors[index].size // case.call.operands[0][dim]
            changed[key] = case.params[key] * width // case.rule.factors[index].size
    return changed


def _tile(case: Case, index: int, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    padded = (1,) * (len(results[0]) - len(operands[0])) + tuple(operands[0])
    return {"reps": tuple(n // max(one, 1) for n, one in zip(results[0], padded, strict=True))}


_ADAPT: dict[str, Callable[[Case, int, Sequence[Shape], Sequence[Shape]], dict[str, Any]]] = {
    "broadcast_in_dim": lambda case, index, operands, results: {"shape": results[0]},
    "broadcast_to": lambda case, index, operands, results: {"shape": results[0]},
    "conv_general_dilated": _convolution,
    "dynamic_slice": lambda case, index, operands, results: {"slice_sizes": results[0]},
    "gather": _gather,
    "iota": lambda case, index, operands, results: {"shape": results[0]},
    "reshape": lambda case, index, operands, results: {"new_sizes": results[0]},
    "slice": _slice,
    "tile": _tile,
}
