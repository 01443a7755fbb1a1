"""Predicted against compiled, side by side; and, on host devices, numbers against numbers.

A plan's collectives are compared with those of the compiled program by kind and axes, in bytes moved by one device in one
step. Rewrites that XLA documents are taken off first (``Collective.transfers``): combining, an all-reduce that is only sliced,
all-reduces that are only added up, 16-bit values that a CPU widens, windowed products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture.lower import lower
from shardwise.errors import PlanError
from shardwise.ir.program import Program
from shardwise.planner.apply import Applied, Flat, static_options, static_split
from shardwise.plans.plan import Plan
from shardwise.transforms.variants import trace_variant
from shardwise.verification.compiled import HOST, Compiled, make_mesh, read_or_refuse
from shardwise.verification.summary import logical_totals

#: Half a unit in the last place of one, by type.
_STEPS: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
#: Differences up to here, of an output's largest value, need no explanation: sixteen steps of a short type; sums of thousands
#: of terms in another order, for the long ones.
_TOLERANCES: Final = {"float32": 1e-4, "float16": 2.0**-7, "bfloat16": 2.0**-4, "float64": 1e-9}
#: How often at most the inputs are moved to see a program's sensitivity: one entry with a tiny gradient turns over every other
#: time, so that a difference of rounding is shown almost surely.
NUDGES: Final = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Collectives of one kind over the same axes: bytes predicted and compiled."""

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: float
    compiled_bytes: float

    @property
    def matched_bytes(self) -> float:
        return min(self.predicted_bytes, self.compiled_bytes)


@dataclass(frozen=True, slots=True)
class Difference:
    """An output of the planned run beside the plain run's: the largest difference over the largest magnitude.

    ``sensitivity`` is the same figure between plain runs, some with their floating-point inputs moved by up to four rounding
    steps of the program's coarsest type. A planned run adds in another order, which is a rounding-sized change too; where the
    program magnifies such changes (Adam's first step turns the sign of a tiny gradient into a whole step) the plain runs show
    it. A difference is explained if it is within the type's tolerance or within twice the sensitivity, which is the largest
    of a few samples.
    """

    path: str
    relative: float
    sensitivity: float
    tolerance: float

    @property
    def explained(self) -> bool:
        return self.relative <= max(self.tolerance, 2 * self.sensitivity)


@dataclass(frozen=True)
class Verification:
    """What the compiler made of a plan. ``differences`` is None where the programs were not run."""

    plan: Plan
    compiled: Compiled
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...] | None

    @property
    def matched(self) -> float:
        """The share of bytes that was predicted and compiled alike."""
        total = max(sum(r.predicted_bytes for r in self.rows), sum(r.compiled_bytes for r in self.rows))
        return sum(r.matched_bytes for r in self.rows) / total if total else 1.0

    @property
    def agrees(self) -> bool:
        """Were both programs run, and is every difference explained by rounding?"""
        return self.differences is not None and all(d.explained for d in self.differences)

    def unexpected(self) -> tuple[Row, ...]:
        """Kinds and axes of which more was compiled than predicted."""
        return tuple(r for r in self.rows if r.compiled_bytes > 1.01 * r.predicted_bytes)

    def __str__(self) -> str:
        from shardwise.report.verification_text import verification_text

        return verification_text(self)


def verify(
    plan: Plan,
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    backend: str = HOST,
    run: bool | None = None,
) -> Verification:
    """Compiles a function under a plan and compares.

    Args:
      plan: a plan of this function for arguments of these shapes.
      fn, args: the function and its arguments; ``ShapeDtypeStruct``s if it is only compiled.
      kwargs: its keyword arguments.
      backend: ``"host"``, or a TPU topology such as ``"v5e:4x4"`` (needs the extra ``shardwise[tpu]``).
      run: also run both programs and compare every output. By default on the host, where all arguments are arrays.

    >>> import jax.numpy as jnp, shardwise
    >>> step, args = lambda w, x: x @ w, (jnp.ones((8, 8)), jnp.ones((16, 8)))
    >>> plan = shardwise.plan(step, *args, mesh={"data": 1}, tactics=[])
    >>> shardwise.verify(plan, step, *args).agrees
    True
    """
    mesh = make_mesh(dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)), backend)
    donated = [a.donated for a in plan.arguments]
    options, named = static_options(plan, fn), dict(kwargs or {})
    traced = trace_variant(fn, args, named, options, plan.variant)
    program = lower(traced)
    applied = Applied(plan, traced, program, mesh, rounds=True)
    leaves = Flat.of(args, named, static_split(fn, options)).leaves
    arrays = all(hasattr(leaf, "__array__") or isinstance(leaf, int | float | complex) for leaf in leaves)
    if run and (backend != HOST or not arrays):
        raise PlanError("only host devices can run the program, and all arguments must be arrays")
    lowered = applied.jitted(donate=any(donated) and not arrays).lower(*leaves)
    compiled, executable = read_or_refuse(lowered, mesh, backend)
    differences = None
    if executable is not None and backend == HOST and (run if run is not None else arrays):
        if plan.sharded.rounds:  # the host computes products of float32 in float32
            executable = Applied(plan, traced, program, mesh, rounds=False).jitted(donate=False)
        placed = [jax.device_put(x, s) for x, s in zip(leaves, applied.in_shardings, strict=True)]
        differences = _compare(
            plan, jax.jit(fn, **options.given()), args, named, executable(*placed), _coarsest(program)
        )
    return Verification(plan, compiled, _rows(plan, compiled), differences)


def _coarsest(program: Program) -> str:
    """The coarsest floating-point type in a program."""
    return max((v.dtype for v in program.values if v.dtype in _STEPS), key=_STEPS.__getitem__, default="float32")


def _compare(
    plan: Plan, plain: Callable[..., Any], args: Any, kwargs: Any, found: Any, dtype: str
) -> tuple[Difference, ...]:
    generator = np.random.default_rng(0)

    def nudge(x: Any) -> Any:
        if not hasattr(x, "dtype") or _is_key(x) or not np.issubdtype(x.dtype, np.floating):
            return x
        moved = np.asarray(x, np.float64) * (1 + 4 * _STEPS[dtype] * generator.uniform(-1, 1, np.shape(x)))
        return jax.numpy.asarray(moved, x.dtype)

    want = jax.tree.leaves(plain(*args, **kwargs))
    off = [_relative(x, z) for x, z in zip(want, found, strict=True)]
    sensitivity = [0.0] * len(off)
    for _ in range(NUDGES):
        nudged_args, nudged_kwargs = jax.tree.map(nudge, (args, kwargs))
        nudged = jax.tree.leaves(plain(*nudged_args, **nudged_kwargs))
        sensitivity = [max(s, _relative(x, y)) for s, x, y in zip(sensitivity, want, nudged, strict=True)]
        rows = zip(plan.outputs, off, sensitivity, strict=True)
        differences = tuple(Difference(a.path, o, s, _TOLERANCES[dtype]) for a, o, s in rows)
        if all(d.explained for d in differences):
            break
    return differences


def _is_key(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))


def _relative(want: Any, have: Any) -> float:
    a, b = (np.asarray(jax.random.key_data(x) if _is_key(x) else x).astype(np.float64) for x in (want, have))
    if not a.size:
        return 0.0
    return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(a))), 1e-30))


def _rows(plan: Plan, compiled: Compiled) -> tuple[Row, ...]:
    order = plan.mesh.names

    def sort(axes: tuple[str, ...] | None) -> tuple[str, ...]:
        return tuple(sorted(axes or (), key=lambda a: order.index(a) if a in order else len(order)))

    predicted: dict[tuple[str, tuple[str, ...]], float] = {}
    for (kind, axes), (_, nbytes) in plan.moved().items():
        predicted[kind, sort(axes)] = predicted.get((kind, sort(axes)), 0.0) + nbytes
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for total in logical_totals(compiled.collectives):
        key = total.kind, sort(total.axes)
        found[key] = found.get(key, 0.0) + total.run_bytes
    return tuple(Row(*key, predicted.get(key, 0.0), found.get(key, 0.0)) for key in sorted({*predicted, *found}))
