"""Measures the devices of this process through JAX, for ``shardwise.calibration.calibrate``.

Problem. A cost model is as good as its figures, and data sheets have peaks. Idea. Time small programs whose work is known, on
all devices at once (``shardwise.calibration.timing``).

| reading | work |
|---|---|
| ``matrix.*`` | chains of large square and tall products, by dtype |
| ``thin`` | chains of f32 products of few rows, each with another second operand |
| ``memory`` | kernels over arrays much larger than caches, of one to three inputs |
| ``straight``, ``transposed`` | a kernel over two arrays, and the same with a transposed read of one of them |
| ``vector`` | long chains of multiply-adds in one fusion; each counts once, as everywhere in profiles |
| ``launch`` | programs of few and many dependent 32×32 products: the slope is one tiny kernel |
| ``all-reduce``, … | collectives of all devices by kind and size |
| ``between`` | the product between small collectives |

A step rarely uses the same array twice in a row, so thin products and large collectives have many arrays, which together
exceed the caches. In a step devices arrive at a collective from a product, some later than others; so small collectives are
between products, and the same loop without collectives is read, too.

Weak. One tier of links; one size of products between collectives; f32 only; tiles, windows and overlap are not measured.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.calibration.calibrate import KINDS, Machine, Measured, Reading
from shardwise.calibration.timing import ACCELERATOR, HOST, TYPES, Bench, Scale
from shardwise.errors import HardwareError

#: Products in one round of the loop: with two or more the loop does not copy its carry.
_ROUND: Final = 4
_CHAINS, _LINKS = 4, 64
#: Rows and columns of the products between small collectives.
_BETWEEN: Final = 256
#: Kernels over arrays, by number of inputs.
_KERNELS: Final[Mapping[int, Callable[..., Any]]] = {
    1: lambda x: x * 0.5 + 0.25,
    2: lambda x, a: x * 0.5 + a,
    3: lambda x, a, b: x * a + b,
}


def measure(
    devices: int | None = None,
    scale: Scale | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measures some or all devices of this process.

    Args:
      devices: how many to use; by default all.
      scale: sizes, instead of those for the platform.
      say: called with what is measured next.
    """
    started = time.perf_counter()
    local = jax.local_devices()
    if devices is not None and not 1 <= devices <= len(local):
        raise HardwareError(f"{devices} devices were requested and JAX has {len(local)} here ({local[0].device_kind})")
    used = local[:devices]
    bench = Bench(used, scale or (HOST if used[0].platform == "cpu" else ACCELERATOR))
    readings: list[Reading] = []
    for what, read in _MEASUREMENTS.items():
        say(what)
        readings += read(bench)
    if len(used) > 1:
        say("collectives")
        readings += _collectives(bench)
    return Measured(_machine(used), tuple(readings), tuple(bench.notes), time.perf_counter() - started)


def _machine(devices: Sequence[Any]) -> Machine:
    first, count = devices[0], len(devices)
    host, several = first.platform == "cpu", count > 1
    limit = _host_bytes() // count if host else int((first.memory_stats() or {}).get("bytes_limit", 0))
    return Machine(
        device_kind=str(first.device_kind),
        platform=str(first.platform),
        devices=count,
        jax=jax.__version__,
        memory_bytes=limit,
        # A sum of which each device keeps a piece; a gather along the second dimension.
        scatters="reduce-scatter" in _compiled(devices, jnp.dot, ((None, "d"), ("d",)), ("d",)) if several else None,
        minor_copies=" copy(" in _compiled(devices, lambda x: x, ((None, "d"),), ()) if several else None,
    )


def _compiled(devices: Sequence[Any], fn: Callable[..., Any], operands: Any, result: Any) -> str:
    """Returns the compiled text of a function of small square arrays, given the mesh axes of their dimensions."""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))

    def sharding(axes: Any) -> Any:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    x = jax.ShapeDtypeStruct((16 * len(devices),) * 2, jnp.float32)
    jitted = jax.jit(fn, in_shardings=tuple(map(sharding, operands)), out_shardings=sharding(result))
    return jitted.lower(*(x for _ in operands)).compile().as_text() or ""


def _host_bytes() -> int:
    """Returns the memory of the machine or container."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


def _products(bench: Bench) -> Iterator[Reading]:
    for dtype in bench.scale.types:
        if dtype == "f64" and bench.platform == "tpu":
            continue
        if dtype not in ("f32", "bf16") and bench.late(0.4):
            bench.notes.append(f"matrix.{dtype} was not measured: the machine is too slow")
            continue
        try:
            with jax.enable_x64(True) if dtype == "f64" else contextlib.nullcontext():
                yield from _products_of(bench, dtype)
        except Exception as error:
            if dtype == "f32":
                raise
            bench.notes.append(f"matrix.{dtype} was not measured: {str(error).splitlines()[0][:100]}")


def _products_of(bench: Bench, dtype: str) -> Iterator[Reading]:
    def body(x: Any, w: Any) -> Any:
        for _ in range(_ROUND):
            x = jax.lax.dot(x, w, preferred_element_type="int32").astype("int8") if dtype == "i8" else x @ w
        return x

    rate = math.inf
    for rows, depth in bench.scale.products:
        flops = 2.0 * rows * depth * depth
        # A dtype without a hardware unit may be a hundred times slower.
        if _ROUND * 12 * flops / rate > bench.scale.limit_s * 4:
            break
        x, w = bench.random((rows, depth), TYPES[dtype]), bench.random((depth, depth), TYPES[dtype], depth**-0.5)
        reading = Reading(f"matrix.{dtype}", f"{rows}x{depth}x{depth}", flops, bench.once(body, x, w) / _ROUND)
        rate = reading.rate
        yield reading


def _thin(bench: Bench) -> Iterator[Reading]:
    def body(x: Any, squares: Any) -> Any:
        for w in squares:
            x = x @ w
        return x

    for rows, depth in bench.scale.thin:
        x = bench.random((rows, depth), "float32")
        squares = tuple(bench.random((depth, depth), "float32", depth**-0.5) for _ in range(bench.scale.arrays))
        flops, elements = 2.0 * rows * depth * depth, float(depth * (rows + depth))
        yield Reading("thin", f"{rows}x{depth}x{depth}", flops, bench.once(body, x, squares) / len(squares), elements)


def _streams(bench: Bench) -> Iterator[Reading]:
    count = bench.stream_bytes // 4
    arrays = [bench.random((count,), "float32", 0.5) for _ in _KERNELS]
    for inputs, body in _KERNELS.items():
        nbytes, time_s = 4.0 * (inputs + 1) * count, bench.once(body, *arrays[:inputs])
        yield Reading("memory", f"{inputs + 1} arrays of {count} float32", nbytes, time_s, float(count))


def _transposed_reads(bench: Bench) -> Iterator[Reading]:
    """Times a kernel with and without a transposed read."""
    # No power of two: at such a stride all reads of a column fall into the same few cache lines.
    side = round(bench.scale.vector_elements**0.5) * 31 // 8
    x, y = (bench.random((side, side), "float32") for _ in range(2))
    for what in ("straight", "transposed"):

        def body(state: Any, transpose: bool = what == "transposed") -> Any:
            x, y = state
            x = x * 0.5 + (y.T if transpose else y)
            return x, y.at[0, 0].set(x[0, 0])

        yield Reading(what, f"{side}x{side}", 12.0 * side * side, bench.once(body, (x, y)), float(side * side))


def _vectors(bench: Bench) -> Iterator[Reading]:
    count = bench.scale.vector_elements
    x = bench.random((count,), "float32", 0.1)

    def fused(x: Any) -> Any:
        total = x
        for chain in range(_CHAINS):
            y = x
            for _ in range(_LINKS):
                y = y * (0.99 - 0.01 * chain) + 0.001
            total = total + y
        return total * 0.2

    yield Reading("vector", f"{count} elements", float(count * _CHAINS * (_LINKS + 1)), bench.once(fused, x))


def _launches(bench: Bench) -> Iterator[Reading]:
    x = bench.random((32, 32), "float32", 32**-0.5)

    def chain(length: int) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            y = x
            for _ in range(length):
                y = y @ x
            return y

        return run

    few, many = 16, 272
    yield Reading("launch", f"{many - few} products of 32x32x32", 1.0, bench.slope(chain, few, many, x))


def _collectives(bench: Bench) -> Iterator[Reading]:
    """Yields readings of every kind: small ones, one large size, and others as far as time permits."""
    small, *large = bench.scale.collective_bytes
    yield from _small(bench, small)
    for nbytes in large:
        if nbytes == large[0] or not bench.late():
            yield from (_large(bench, kind, nbytes) for kind in KINDS)


def _small(bench: Bench, nbytes: int) -> Iterator[Reading]:
    count = max(1, nbytes // 4 // bench.count) * bench.count
    z, w = (bench.random((_BETWEEN, _BETWEEN), "float32", _BETWEEN**-0.5) for _ in range(2))
    scale = bench.random((1,), "float32")

    def time_s(act: Callable[[Any], Any]) -> float:
        def body(z: Any, w: Any, scale: Any) -> Any:
            z = z @ w
            row = jnp.resize(act(z.reshape(-1)[:count]), (count,)) * scale
            return z.reshape(-1).at[:count].set(row).reshape(z.shape)

        return bench.once(body, z, w, scale)

    yield Reading("between", f"{_BETWEEN}x{_BETWEEN}x{_BETWEEN}", 2.0 * _BETWEEN**3, time_s(lambda x: x))
    for kind in KINDS:
        taken, act = count // bench.count if kind == "all-gather" else count, _collective(kind, bench.count)
        taken_s = time_s(lambda x, taken=taken, act=act: act(x[:taken]))  # type: ignore[misc]
        yield Reading(kind, f"{count * 4} bytes and a product", count * 4.0, taken_s, between=True)


def _large(bench: Bench, kind: str, nbytes: int) -> Reading:
    count = max(1, nbytes // 4 // bench.count**2) * bench.count**2
    operand = count // bench.count if kind == "all-gather" else count
    result = {"all-gather": count, "reduce-scatter": count // bench.count}.get(kind, operand)
    arrays = [tuple(bench.random((n,), "float32") for _ in range(bench.scale.arrays)) for n in (operand, result)]
    act = _collective(kind, bench.count)

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

    return Reading(kind, f"{count * 4} bytes", count * 4.0, bench.once(body, tuple(arrays)) / bench.scale.arrays)


def _collective(kind: str, count: int) -> Callable[[Any], Any]:
    """Returns a collective of all devices along the first dimension."""
    lax: Any = jax.lax  # its collectives have no types
    acts: dict[str, Callable[[Any], Any]] = {
        "all-reduce": lambda x: lax.psum(x, "d"),
        "all-gather": lambda x: lax.all_gather(x, "d", tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "d", tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True),
        "collective-permute": lambda x: lax.ppermute(x, "d", [(k, (k + 1) % count) for k in range(count)]),
    }
    return acts[kind]


_MEASUREMENTS: Final[Mapping[str, Callable[[Bench], Iterator[Reading]]]] = {
    # Before the products: on a host those of five dtypes take most of the budget.
    "memory": _streams,
    "matrix products": _products,
    "thin products": _thin,
    "elementwise work": _vectors,
    "tiny kernels": _launches,
    "transposed arrays": _transposed_reads,
}
