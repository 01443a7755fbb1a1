"""Measures collectives under the conditions of a training step.

Problem. In a loop of collectives, arrays are in the caches and all devices arrive at once. In a step an array was last used
long ago, and devices arrive from a product, some later than others.

Idea. Two kinds of readings of every kind of collective, in groups of several sizes:

- *large* collectives have different operands and results, which together exceed the caches;
- *small* ones (the first of ``Scale.collective_bytes``) are between products of ``_BETWEEN`` rows and columns, so that the time
  that devices wait for each other counts. The same loop without collectives is the reading ``between``.

Weak. One size of products; groups of neighbors only; f32 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp

from shardwise.calibration.readings import KINDS, Reading
from shardwise.calibration.timing import Bench

#: Rows and columns of the products between small collectives.
_BETWEEN: Final = 256


def measure_collectives(bench: Bench) -> list[Reading]:
    """Returns readings of every kind, small and large, for all devices and smaller groups, as far as time permits."""
    small, *large = bench.scale.collective_bytes
    readings = list(_small(bench, small))
    groups = _groups(bench.count)
    # One size is enough for groups; all devices and the smallest groups differ most.
    wanted = [(large[0], size) for size in dict.fromkeys((groups[0], groups[-1]))] + [(n, groups[0]) for n in large[1:]]
    for nbytes, size in wanted:
        if (nbytes, size) == wanted[0] or not bench.late():
            readings += [_large(bench, kind, nbytes, size) for kind in KINDS]
    return readings


def _groups(count: int) -> list[int]:
    """Returns the group sizes: all devices, half of them, a quarter."""
    return [size for size in (count, count // 2, count // 4) if size > 1 and count % size == 0]


def _small(bench: Bench, nbytes: int) -> Iterator[Reading]:
    count = max(1, nbytes // 4 // bench.count) * bench.count
    z, w = (bench.random((_BETWEEN, _BETWEEN), "float32", _BETWEEN**-0.5) for _ in range(2))
    scale = bench.random((1,), "float32")

    def link(act: Callable[[Any], Any]) -> Callable[..., Any]:
        def body(z: Any, w: Any, scale: Any) -> Any:
            z = z @ w
            row = act(z.reshape(-1)[:count]) * scale
            return z.reshape(-1).at[:count].set(row).reshape(z.shape)

        return body

    without = bench.once(link(lambda x: x), z, w, scale)
    yield Reading("between", f"{_BETWEEN}x{_BETWEEN}x{_BETWEEN}", 2.0 * _BETWEEN**3, without)
    for size in _groups(bench.count):
        for kind in KINDS:
            act = _collective(kind, bench.count, size)

            def run(x: Any, kind: str = kind, size: int = size, act: Callable[[Any], Any] = act) -> Any:
                operand = x[: count // size] if kind == "all-gather" else x
                return jnp.resize(act(operand), (count,)) if kind == "reduce-scatter" else act(operand)

            time_s = bench.once(link(run), z, w, scale)
            yield Reading(kind, f"{count * 4} bytes and a product", count * 4.0, time_s, 0.0, size, between=True)


def _large(bench: Bench, kind: str, nbytes: int, size: int) -> Reading:
    count = max(1, nbytes // 4 // bench.count**2) * bench.count**2
    operand = count // size if kind == "all-gather" else count
    result = {"all-gather": count, "reduce-scatter": count // size}.get(kind, operand)
    arrays = [tuple(bench.random((n,), "float32") for _ in range(bench.scale.arrays)) for n in (operand, result)]
    act = _collective(kind, bench.count, size)

    def body(state: Any) -> Any:
        # Each uses a number of the previous result, so that they run in sequence and none are combined.
        number, operands, results = state[1][-1][0] * 0.5, [], []
        for x in state[0]:
            # An all-to-all slices its operand anyway.
            changed = x + number if kind == "all-to-all" else x.at[0].set(number)
            operands.append(x if kind == "all-to-all" else changed)
            results.append(act(changed))
            number = results[-1][0] * 0.5
        return tuple(operands), tuple(results)

    time_s = bench.once(body, tuple(arrays)) / bench.scale.arrays
    return Reading(kind, f"{count * 4} bytes", count * 4.0, time_s, 0.0, size)


def _collective(kind: str, count: int, size: int) -> Callable[[Any], Any]:
    """Returns a collective in groups of ``size`` neighbors along the first dimension."""
    lax: Any = jax.lax  # its collectives have no types
    groups = [list(range(first, first + size)) for first in range(0, count, size)]
    among: dict[str, Any] = {} if size == count else {"axis_index_groups": groups}
    ring = [(g[k], g[(k + 1) % size]) for g in groups for k in range(size)]
    acts: dict[str, Callable[[Any], Any]] = {
        "all-reduce": lambda x: lax.psum(x, "d", **among),
        "all-gather": lambda x: lax.all_gather(x, "d", tiled=True, **among),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "d", tiled=True, **among),
        "all-to-all": lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True, **among),
        "collective-permute": lambda x: lax.ppermute(x, "d", ring),
    }
    return acts[kind]
