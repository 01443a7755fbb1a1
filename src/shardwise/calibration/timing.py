"""Times small programs on all devices at once.

Host devices share cores and memory, so every program runs on every device, and times are those of the slowest.

The time of one piece of work is ``(T(k + 1) − T(1)) / k`` with T(k) the fastest time of a program that does it k times, each
time with the previous result, so that the overhead of a call cancels. In a loop (``Bench.once``) k is an argument, so that
nothing is unrolled or fused; where the overhead of a loop would matter, two programs of different length are compared
(``Bench.slope``). The fastest of several calls counts, since other work on a machine only ever slows it.

Weak. A disturbance that lasts as long as all calls of a reading is part of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

#: Dtypes of products, by their names in profiles.
TYPES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "i8": "int8", "f64": "float64"}


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. Products are (rows, columns and depth); ``thin`` ones have few rows. Bytes and elements are per
    device, except that host devices share ``stream_bytes``, which must exceed their caches. Thin products and collectives use
    ``arrays`` different arrays, which together exceed the caches too. The first of ``collective_bytes`` is mostly latency; a
    slow machine may not reach the last."""

    types: tuple[str, ...]
    products: tuple[tuple[int, int], ...]
    thin: tuple[tuple[int, int], ...]
    stream_bytes: int
    arrays: int
    vector_elements: int
    collective_bytes: tuple[int, ...]
    target_s: float  # of one call
    limit_s: float  # of all calls for one reading
    repeats: int
    budget_s: float = 75.0  # after which only required readings are started


HOST: Final = Scale(
    tuple(TYPES), ((256, 256), (512, 512), (1024, 512), (1024, 1024), (2048, 1024)),
    ((64, 1024), (256, 1024)), 1 << 30, 12, 1 << 18, (1 << 10, 1 << 22), 0.05, 0.6, 7,
)  # fmt: skip
ACCELERATOR: Final = Scale(
    tuple(TYPES), ((4096, 4096), (8192, 4096), (8192, 8192), (16384, 8192)),
    (), 1 << 30, 4, 1 << 26, (1 << 10, 1 << 27, 1 << 24, 1 << 20), 0.05, 2.0, 7,
)  # fmt: skip


def _call(run: Callable[[], Any]) -> float:
    """Returns the seconds until the results of a call are ready."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


class Bench:
    """Runs and times programs on every device at once. The first dimension of arrays is the device."""

    def __init__(self, devices: Sequence[Any], scale: Scale):
        self.scale, self.count = scale, len(devices)
        self.platform = devices[0].platform
        self.notes: list[str] = []  # on what could not be measured
        self._started = time.perf_counter()
        self._mesh = jax.sharding.Mesh(np.array(devices), ("d",))
        self._spec = jax.sharding.PartitionSpec("d")
        host = self.platform == "cpu"
        limit = 0 if host else (devices[0].memory_stats() or {}).get("bytes_limit", 0)
        shared = max(scale.stream_bytes // self.count, 1 << 16)
        self.stream_bytes = shared if host else min(scale.stream_bytes, (limit or 1 << 34) // 16)

    def random(self, shape: tuple[int, ...], dtype: str, spread: float = 1.0) -> Any:
        """Returns values with a standard deviation (integers from -4 to 4), the same on every device: a hash of the position,
        since JAX's generators take longer to compile than anything else here."""

        def make() -> Any:
            bits = (jnp.arange(math.prod(shape), dtype="uint32") + 1) * jnp.uint32(2654435761)
            bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
            bits = (bits ^ (bits >> 13)).reshape(shape)
            if dtype == "int8":
                return (bits % 9).astype("int8") - 4
            return ((bits.astype("float32") * 2.0**-32 - 0.5) * (12**0.5 * spread)).astype(dtype)

        return self.program(make)()

    def program(self, fn: Callable[..., Any], replicated: int = 0) -> Callable[..., Any]:
        """Returns ``fn`` of local arrays, jitted; the first ``replicated`` arguments are the same on all devices."""

        def local(*args: Any) -> Any:
            sharded = jax.tree.map(lambda a: a[0], args[replicated:])
            return jax.tree.map(lambda y: y[None], fn(*args[:replicated], *sharded))

        def run(*args: Any) -> Any:
            specs = (jax.sharding.PartitionSpec(),) * replicated + (self._spec,) * (len(args) - replicated)
            mapped = jax.shard_map(local, mesh=self._mesh, in_specs=specs, out_specs=self._spec, check_vma=False)
            return mapped(*args)

        jitted: Callable[..., Any] = jax.jit(run)
        return jitted

    def seconds(self, run: Callable[[], Any]) -> float:
        """Returns the fastest of several calls after two others; fewer where they are slow."""
        for _ in range(2):
            last = _call(run)
        times: list[float] = []
        while len(times) < self.scale.repeats and (len(times) < 2 or sum(times) + last < self.scale.limit_s):
            times.append(_call(run))
        return min(times)

    def late(self, share: float = 1.0) -> bool:
        """Returns whether this share of the time budget is exhausted."""
        return time.perf_counter() - self._started > share * self.scale.budget_s

    def once(self, body: Callable[..., Any], x: Any, *rest: Any) -> float:
        """Returns the seconds of ``x = body(x, *rest)``, from a loop of few and of many rounds."""

        def looped(rounds: Any, x: Any, *rest: Any) -> Any:
            return jax.lax.fori_loop(0, rounds, lambda _, x: body(x, *rest), x)

        loop = self.program(looped, replicated=1)
        one, three = (self.seconds(lambda n=n: loop(n, x, *rest)) for n in (1, 3))  # type: ignore[misc]
        rough = max((three - one) / 2, three / 30, 1e-7)
        more = max(2, min(10_000, round(self.scale.target_s / rough)))
        many = self.seconds(lambda: loop(1 + more, x, *rest)) if more > 2 else three
        return (many - one) / more if many > one else many / (1 + more)

    def slope(self, chain: Callable[[int], Callable[..., Any]], few: int, many: int, *arrays: Any) -> float:
        """Returns the seconds of one link of a chain, from two programs with chains of different length."""
        short, long = (self.program(chain(n)) for n in (few, many))
        runs = [lambda: short(*arrays), lambda: long(*arrays)]
        for run in (*runs, *runs):
            _call(run)
        # Alternating, so that other work on the machine slows both.
        pairs: list[list[float]] = []
        while len(pairs) < 3 * self.scale.repeats and (len(pairs) < 3 or sum(map(sum, pairs)) < self.scale.limit_s):
            pairs.append([_call(run) for run in runs])
        a, b = (float(min(column)) for column in zip(*pairs, strict=True))
        return (b - a) / (many - few) if b > a else b / many
