"""What the devices at hand do, measured through JAX: readings for ``shardwise.hardware.calibrate``.

Problem: a cost model is as good as its figures, and data sheets give peaks. Idea: time small programs whose work is known, on
all devices at once (``shardwise.verification.timing``).

| reading | work |
|---|---|
| ``matrix.*`` | chains of large square and tall products, by type |
| ``memory`` | passes over arrays much larger than caches: one to three inputs, f32 and bf16, and fewer elements |
| ``vector`` | long chains of multiply-adds in one fusion; each counts once, as everywhere in profiles |
| ``transcendentals`` | chains of exp and tanh in one fusion |
| ``launch`` | programs of few and many dependent 32×32 products: the slope is one tiny kernel |
| ``all-reduce``, … | programs of few and many dependent collectives, by kind and size |

Passes vary in bytes and in elements: so what an element costs can be told from what a byte costs, and both from what a round
of the loop costs. Chains of collectives have at least ``_FEW`` links: with fewer a program needs less memory, and a host, which
takes it afresh for every call, would pay for its first use in the longer chain alone.

Weak: collectives of all devices only, on one tier of links, of one dimension (XLA's CPU backend copies an array before and
after one along any dimension but the first), and of devices that arrive together; a host without units for bf16 widens it,
which reads as a cost of elements; tiles, windows and the shares that hide behind compute are not measured.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.errors import HardwareError
from shardwise.hardware.calibrate import KINDS, Machine, Measured, Reading
from shardwise.verification.timing import TYPES, Bench, Scale, scale_for

#: Products in one round of the loop: with two or more the loop needs no copy of what it carries.
_ROUND: Final = 4
_CHAINS, _LINKS = 4, 64
_FEW, _MANY = 3, 7
#: Passes: how many arrays are read, and what is computed.
_PASSES: Final[Mapping[int, Callable[..., Any]]] = {
    1: lambda x: x * 0.5 + 0.25,
    2: lambda x, c: x * 0.5 + c,
    3: lambda x, c, d: x * c + d,
}


def measure(
    devices: int | None = None,
    quick: bool = False,
    scale: Scale | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measures the devices of this process.

    Args:
      devices: how many to use; by default all.
      quick: coarse readings within seconds.
      scale: sizes, instead of those for the platform.
      say: is told what is measured next.
    """
    started = time.perf_counter()
    there = jax.local_devices()
    if devices is not None and not 1 <= devices <= len(there):
        raise HardwareError(f"{devices} devices were asked for and JAX has {len(there)} here ({there[0].device_kind})")
    used = there[:devices]
    bench = Bench(used, scale or scale_for(str(used[0].platform), quick))
    readings: list[Reading] = []
    notes: list[str] = []
    for what, read in _MEASUREMENTS.items():
        say(what)
        readings += read(bench, notes)
    if len(used) > 1:
        say("collectives")
        rate = statistics.median(r.rate for r in readings if r.what == "memory")
        launch_s = next(r.time_s for r in readings if r.what == "launch")
        readings += _collectives(bench, rate, launch_s)
    return Measured(_machine(used), tuple(readings), tuple(notes), time.perf_counter() - started)


# What the machine says of itself.


def _machine(devices: Sequence[Any]) -> Machine:
    first, count = devices[0], len(devices)
    host = first.platform == "cpu"
    limit = _host_bytes() // count if host else int((first.memory_stats() or {}).get("bytes_limit", 0))
    return Machine(
        device_kind=str(first.device_kind),
        platform=str(first.platform),
        devices=count,
        jax=jax.__version__,
        memory_bytes=limit,
        memory_fraction=_memory_fraction() if first.platform == "gpu" else None,
        clock_hz=_host_clock_hz() if host else None,
        scatters=_scatters(devices) if count > 1 else None,
    )


def _scatters(devices: Sequence[Any]) -> bool:
    """Does the compiler make a reduce-scatter of a sum of which each device keeps a piece?"""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    spec: Any = jax.sharding.PartitionSpec
    rows, columns = (jax.sharding.NamedSharding(mesh, spec(*axes)) for axes in (("d",), (None, "d")))
    x = jax.ShapeDtypeStruct((16 * len(devices),) * 2, jnp.float32)  # type: ignore[no-untyped-call]
    product = jax.jit(jnp.dot, in_shardings=(columns, rows), out_shardings=rows)
    return "reduce-scatter" in (product.lower(x, x).compile().as_text() or "")


def _memory_fraction() -> float | None:
    """The share of a GPU's memory that JAX was told to take."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        with contextlib.suppress(ValueError):
            return float(os.environ.get(name, ""))
    return None


def _host_bytes() -> int:
    """The memory of the machine, or of the container."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes)


def _host_clock_hz() -> float | None:
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        clocks = [float(line.split(":")[1]) * 1e6 for line in lines if line.startswith("cpu MHz")]
        return max(clocks, default=0.0) or None
    return None


# What is timed.


def _products(bench: Bench, notes: list[str]) -> list[Reading]:
    found: list[Reading] = []
    for short in bench.scale.types:
        if short == "f64" and bench.platform == "tpu":
            continue
        if short not in ("f32", "bf16") and bench.late(0.4):
            notes.append(f"matrix.{short} was not measured: the machine is too slow")
            continue
        try:
            with _wide(short == "f64"):
                found += _products_of(bench, short)
        except Exception as error:
            if short == "f32":
                raise
            notes.append(f"matrix.{short} was not measured: {str(error).splitlines()[0][:100]}")
    return found


def _products_of(bench: Bench, short: str) -> list[Reading]:
    dtype = TYPES[short]
    found: list[Reading] = []

    def body(x: Any, w: Any) -> Any:
        for _ in range(_ROUND):
            x = jax.lax.dot(x, w, preferred_element_type="int32").astype("int8") if short == "i8" else x @ w
        return x

    for rows, depth in bench.scale.products:
        flops = 2.0 * rows * depth * depth
        # A type that the device has no unit for may be a hundred times slower.
        if found and _ROUND * 12 * flops / found[-1].rate > bench.scale.limit_s * 4:
            break
        x = bench.random((rows, depth), dtype)
        w = bench.random((depth, depth), dtype, depth**-0.5)
        time_s = bench.once(body, x, w) / _ROUND
        found.append(Reading(f"matrix.{short}", f"{rows}x{depth}x{depth}", flops, time_s))
    return found


def _wide(wanted: bool) -> Any:
    return jax.enable_x64(True) if wanted else contextlib.nullcontext()


def _streams(bench: Bench, notes: list[str]) -> list[Reading]:
    many = bench.stream_bytes // 4
    # Fewer elements of two bytes might stay in a cache.
    wanted = [(kind, many) for kind in ("float32", "bfloat16")] + [("float32", many // 2)]
    found: list[Reading] = []
    for dtype, count in wanted:
        if found and bench.late(0.6):
            break
        arrays = [bench.random((count,), dtype, 0.5) for _ in _PASSES]
        for inputs, body in _PASSES.items():
            time_s = bench.once(body, *arrays[:inputs])
            nbytes = (inputs + 1) * count * arrays[0].dtype.itemsize
            size = f"{inputs + 1} arrays of {count} {dtype}"
            found.append(Reading("memory", size, float(nbytes), time_s, float(count)))
    return found


def _vectors(bench: Bench, notes: list[str]) -> list[Reading]:
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

    def curved(x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(jnp.exp(x * -0.5))
        return x

    return [
        Reading("vector", f"{count} elements", float(count * _CHAINS * (_LINKS + 1)), bench.once(fused, x)),
        Reading("transcendentals", f"{count} elements", 8.0 * count, bench.once(curved, x)),
    ]


def _launches(bench: Bench, notes: list[str]) -> list[Reading]:
    x = bench.random((32, 32), "float32", 32**-0.5)

    def chain(length: int) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            y = x
            for _ in range(length):
                y = y @ x
            return y

        return run

    few, many = 16, 80 if len(bench.scale.types) < 3 else 272
    return [Reading("launch", f"{many - few} products of 32x32x32", 1.0, bench.slope(chain, few, many, x))]


_MEASUREMENTS: Final[Mapping[str, Callable[[Bench, list[str]], list[Reading]]]] = {
    # Before the products: on a host those of five types take most of the budget.
    "memory": _streams,
    "matrix products": _products,
    "elementwise work": _vectors,
    "tiny kernels": _launches,
}


def _collectives(bench: Bench, stream_bytes_per_s: float, launch_s: float) -> list[Reading]:
    """Every kind at every size; what the chains do between collectives is taken off."""
    found: list[Reading] = []
    own = bench.random((1,), "float32")
    for nbytes in bench.scale.collective_bytes:
        if len({r.work for r in found}) > 1 and bench.late():
            break
        for kind in KINDS:
            count = max(1, nbytes // 4 // bench.count) * bench.count
            held = count // bench.count if kind == "all-gather" else count
            x = bench.random((held,), "float32")
            chain, streams = _collective_chain(kind, bench.count)
            time_s = bench.slope(chain, _FEW, _MANY, x, own)
            beside = streams * count * 4 / stream_bytes_per_s + (launch_s if streams else 0.0)
            found.append(Reading(kind, f"{count * 4} bytes", count * 4.0, max(time_s - beside, time_s / 4)))
    return found


def _collective_chain(kind: str, n: int) -> tuple[Callable[[int], Callable[..., Any]], float]:
    """A chain of dependent collectives that cannot be simplified, and how often the work between two of them goes through the
    larger side: a value that is the same on all devices needs no second all-reduce, so each device scales it by its own."""

    lax: Any = jax.lax  # its collectives have no types

    def step(x: Any, own: Any) -> Any:
        match kind:
            case "all-reduce":
                return lax.psum(x, "d") * own
            case "all-gather":
                return lax.all_gather(x, "d", tiled=True)[::n] * own
            case "reduce-scatter":
                return jnp.tile(lax.psum_scatter(x, "d", tiled=True) * own, n)
            case "all-to-all":
                return lax.all_to_all(x.reshape(n, -1), "d", 0, 0).reshape(-1)
        return lax.ppermute(x, "d", [(k, (k + 1) % n) for k in range(n)])

    def chain(length: int) -> Callable[..., Any]:
        def run(x: Any, own: Any) -> Any:
            for _ in range(length):
                x = step(x, own)
            return x

        return run

    return chain, {"all-reduce": 2.0, "all-gather": 2.0 / n, "reduce-scatter": 1.0}.get(kind, 0.0)
