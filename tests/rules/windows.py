"""Halo factors: a chunk of the result reads what the rule's windows say, no more, and not absurdly less.

Operand positions outside the windows of a chunk are disturbed, and the chunk must stay; positions at the windows' edges are
disturbed, and it must change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from shardwise.ir.rule import Window
from tests.rules.cases import Array, Case

#: A window's edge need not matter to these: they choose one position of a window by its value.
CHOOSING = {
    "select_and_scatter_add": "only the largest of a window receives",
    "select_and_scatter": "only the chosen one of a window receives",
    "select_and_gather_add": "only the chosen one of a window is read",
}


def touched(case: Case, factor: int, operand: int, result: int, positions: Iterable[int]) -> set[int]:
    """The positions of an operand that these positions of a result read, by the rule's windows."""
    n = case.call.shape(operand)[_dim(case, operand, factor)]
    found: set[int] = set()
    related = False
    for w in case.rule.windows:
        if w.factor != factor:
            continue
        if (w.of, w.by) == (operand, result):
            found |= {i for x in positions for i in range(n) if _inside(w, x, i)}
            related = True
        if (w.of, w.by) == (result, operand):
            found |= {x for x in range(n) for i in positions if _inside(w, x, i)}
            related = True
    assert related, f"no window relates operand {operand} and result {result - len(case.operands)}"
    return found


def _inside(w: Window, x: int, i: int) -> bool:
    return x * w.stride + w.low <= i * w.dilation <= x * w.stride + w.high


def _dim(case: Case, tensor: int, factor: int) -> int:
    return next(d for d, dim in enumerate(case.rule.tensors[tensor]) if factor in dim)


def _holds(case: Case, tensor: int, factor: int) -> bool:
    return any(factor in dim for dim in case.rule.tensors[tensor])


def check_halo(case: Case, factor: int) -> None:
    verdicts = []
    for result in (case.call.out(r) for r in range(len(case.call.results))):
        for operand in range(len(case.operands)):
            if _holds(case, result, factor) and _holds(case, operand, factor):
                verdicts.append(_check_pair(case, factor, operand, result))
    assert any(v is not False for v in verdicts), "no position inside the windows matters"


def _check_pair(case: Case, factor: int, operand: int, result: int) -> bool | None:
    """Both halves of the result against what they read of one operand. Did any position matter? None where dilation lets
    every edge of a window fall between two positions."""
    number = result - len(case.operands)
    axis, along = _dim(case, operand, factor), _dim(case, result, factor)
    n, m = case.call.shape(operand)[axis], case.call.shape(result)[along]
    mattered = None
    for chunk in (range(m // 2), range(m // 2, m)):
        wanted = np.take(case.whole[number], chunk, along)
        inside = touched(case, factor, operand, result, chunk)
        outside = [i for i in range(n) if i not in inside]
        everything = [np.take(run[number], chunk, along) for run in _disturbed(case, operand, axis, list(range(n)))]
        if all(_equal(run, wanted) for run in everything):
            continue  # an empty result, or one that only ever falls between two positions of another dimension
        if outside:
            for changed in _disturbed(case, operand, axis, outside):
                got = np.take(changed[number], chunk, along)
                assert _equal(got, wanted), (
                    f"result {chunk} reads operand {operand} outside of its windows {sorted(inside)}"
                )
        for edge in sorted(inside) if case.name in CHOOSING else _edges(case, factor, operand, result, chunk):
            runs = [np.take(run[number], chunk, along) for run in _disturbed(case, operand, axis, [edge])]
            changes = any(not _equal(run, wanted) for run in runs)
            assert changes or case.name in CHOOSING, (
                f"result {chunk} does not read position {edge} of operand {operand}"
            )
            mattered = changes or bool(mattered)
    return mattered


def _edges(case: Case, factor: int, operand: int, result: int, chunk: range) -> list[int]:
    """Positions that stand exactly at the first or last place of the windows at the chunk's ends."""
    n = case.call.shape(operand)[_dim(case, operand, factor)]
    found = set()
    for w in case.rule.windows:
        if w.factor == factor and (w.of, w.by) == (operand, result):
            for x in (chunk[0], chunk[-1]):
                for place in (x * w.stride + w.low, x * w.stride + w.high):
                    if place % w.dilation == 0 and 0 <= place // w.dilation < n:
                        found.add(place // w.dilation)
    return sorted(found)


def _disturbed(case: Case, operand: int, axis: int, positions: list[int]) -> list[list[Array]]:
    """The results when these positions of an operand are made much larger, and much smaller."""
    x = case.operands[operand]
    at = (slice(None),) * axis + (positions,)
    runs = []
    for change in (1000, -1000):
        y = x.copy()
        y[at] = ~y[at] if x.dtype == bool else y[at] + np.asarray(change, x.dtype)
        runs.append(case.run([y if t == operand else z for t, z in enumerate(case.operands)]))
    return runs


def _equal(a: Array, b: Array) -> bool:
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return bool(np.allclose(a.astype(wide), b.astype(wide), rtol=1e-4, atol=1e-4, equal_nan=True))


def check_windowed_reduction(case: Case, factor: int) -> None:
    """The weight gradient of a convolution: the "kernel" is an image, cut in two, each part with its stretch of the input.

    ``input * lhs_dilation = output * stride + tap * rhs_dilation - padding``: the stretch that the taps from ``low`` to
    ``high`` see is cut out of the dilated and padded input. Input outside of the part's windows is disturbed first, which
    must not matter.
    """
    (window,) = [w for w in case.rule.windows if w.factor == factor]
    numbers = case.params["dimension_numbers"]
    taps_dim, input_dim = _dim(case, window.by, factor), _dim(case, window.of, factor)
    space = numbers.rhs_spec[2:].index(taps_dim)
    image, kernel = case.operands
    taps, n = kernel.shape[taps_dim], image.shape[input_dim]
    dilation, stride = case.params["rhs_dilation"][space], case.params["window_strides"][space]
    outputs = case.call.results[0][numbers.out_spec[2 + space]]
    plain = {
        "padding": _replaced(case.params["padding"], space, (0, 0)),
        "lhs_dilation": _replaced(case.params["lhs_dilation"], space, 1),
    }
    total = np.zeros((), image.dtype)
    for low, high in ((0, taps // 2), (taps // 2, taps)):
        outside = [i for i in range(n) if not any(_inside(window, x, i) for x in range(low, high))]
        seen = image.copy()
        seen[(slice(None),) * input_dim + (outside,)] += np.asarray(1000, image.dtype)
        padded = _spaced(seen, input_dim, case.params["lhs_dilation"][space], *case.params["padding"][space])
        stretch = range(low * dilation, (outputs - 1) * stride + (high - 1) * dilation + 1)
        part = np.take(kernel, range(low, high), taps_dim)
        total = total + case.run([np.take(padded, stretch, input_dim), part], {**case.params, **plain})[0]
    assert _equal(np.asarray(total), case.whole[0]), "the parts with their windows do not add up"


def _replaced(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _spaced(x: Array, axis: int, dilation: int, before: int, after: int) -> Array:
    """Zeros between positions and at the ends; negative padding cuts positions off."""
    n = (x.shape[axis] - 1) * dilation + 1
    spaced = np.zeros((*x.shape[:axis], n, *x.shape[axis + 1 :]), x.dtype)
    spaced[(slice(None),) * axis + (slice(None, None, dilation),)] = x
    spaced = np.take(spaced, range(max(-before, 0), n - max(-after, 0)), axis)
    return np.pad(spaced, [(max(before, 0), max(after, 0)) if d == axis else (0, 0) for d in range(x.ndim)])
