"""Compares a plan with its compiled program and, on host devices, the results of the planned and the plain function.

Collectives are compared by kind and axes, in bytes that one device communicates in one step, after rewrites of XLA are undone
(``collectives.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import explicit_mesh
from shardwise.capture.lower import lower
from shardwise.capture.objects import pure_call
from shardwise.errors import PlanError
from shardwise.interruption import in_background
from shardwise.ir.program import Program
from shardwise.planner.apply import Applied, Flat, static_split
from shardwise.planner.bind import static_options
from shardwise.planner.devices import placed_shape, under_explicit, under_mesh
from shardwise.plans.plan import Plan
from shardwise.transforms.variants import trace_variant
from shardwise.verification.collectives import totals
from shardwise.verification.compiled import HOST, Compiled, compile_lowered, make_mesh

#: The rounding error of 1.0, by dtype.
_ROUNDING: Final = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
#: Differences that need no explanation, relative to an output's largest value: sixteen rounding errors of a 16-bit dtype;
#: for others, sums of thousands of terms in another order.
_TOLERANCES: Final = {"float32": 1e-4, "float16": 2.0**-7, "bfloat16": 2.0**-4, "float64": 1e-9}
#: The most perturbations of the inputs: the update of an entry with a tiny gradient changes sign in every other one, so that
#: sixteen show its sensitivity almost surely.
_PERTURBATIONS: Final = 16


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes of the collectives of one kind over the same axes, predicted and compiled."""

    kind: str
    axes: tuple[str, ...]
    predicted_bytes: float
    compiled_bytes: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one output between the planned and the plain run, relative to its largest magnitude.

    ``sensitivity`` is the same between plain runs whose floating-point inputs are perturbed by up to four rounding errors of
    the program's coarsest dtype. A planned run sums in another order, which is a perturbation of that size; programs may
    magnify it (Adam's first step turns the sign of a tiny gradient into a full step). A difference is explained if it is
    within the dtype's tolerance or within twice the sensitivity, which is the largest of a few samples. If it is not, one more
    sample is the plain function on inputs that are sharded as planned.
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
    """A plan beside its compiled program. ``differences`` is ``None`` where the programs were not run."""

    plan: Plan
    compiled: Compiled
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...] | None

    @property
    def matched(self) -> float:
        """The fraction of bytes that was both predicted and compiled."""
        total = max(sum(r.predicted_bytes for r in self.rows), sum(r.compiled_bytes for r in self.rows))
        return sum(min(r.predicted_bytes, r.compiled_bytes) for r in self.rows) / total if total else 1.0

    @property
    def agrees(self) -> bool:
        """Whether both programs were run and every difference is explained by rounding."""
        return self.differences is not None and all(d.explained for d in self.differences)

    def __str__(self) -> str:
        from shardwise.report.difference import verification_text

        return verification_text(self)


def verify(
    plan: Plan,
    fn: Callable[..., Any],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    backend: str = HOST,
    run: bool | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Verification:
    """Compiles a function under a plan and compares the compiled program with the plan.

    Args:
      plan: a plan of this function for arguments of these shapes.
      fn, args: the function and its arguments; ``ShapeDtypeStruct``s if it is only compiled.
      kwargs: its keyword arguments.
      backend: ``"host"``, or a TPU topology such as ``"v5e:4x4"`` or ``"2*v5e:4x4"`` (needs the extra ``shardwise[tpu]``).
      run: also run both programs and compare every output. By default on the host, where all arguments are arrays.
      progress: called a few times in each second with what is done, such as ``"compiling"``, and for how many seconds. An
        interrupt (Ctrl-C) is heard at once while a program is compiled.

    >>> import jax.numpy as jnp, shardwise
    >>> step, args = lambda w, x: x @ w, (jnp.ones((8, 8)), jnp.ones((16, 8)))
    >>> plan = shardwise.plan(step, *args, mesh={"data": 1}, tactics=[])
    >>> shardwise.verify(plan, step, *args).agrees
    True
    """
    mesh = make_mesh(plan.mesh, backend, plan.device_order if "*" in backend else ())
    donated = [a.donated for a in plan.arguments]
    options, named = static_options(plan, fn), dict(kwargs or {})
    explicit = None if plan.call is None else explicit_mesh(jax.tree.leaves((plan.call.args, plan.call.kwargs)))
    with under_explicit(explicit):
        traced = trace_variant(fn, args, named, options, plan.variant)
    program = lower(traced)
    leaves = Flat.of(args, named, static_split(fn, options)).leaves
    arrays = all(hasattr(leaf, "__array__") or isinstance(leaf, int | float | complex) for leaf in leaves)
    if run and (backend != HOST or not arrays):
        raise PlanError("only host devices can run the program, and all arguments must be arrays")
    with under_mesh(mesh):
        applied = Applied(plan, traced, program, mesh, rounds=True)
        shapes = [  # arrays may be on another mesh
            placed_shape(a, mesh) if a.host or getattr(leaf, "committed", False) else leaf
            for a, leaf in zip(plan.arguments, leaves, strict=True)
        ]
        lowered = applied.jitted(donate=any(donated) and not arrays).lower(*shapes)
    compiling = progress and functools.partial(progress, "compiling")
    compiled, executable = in_background(lambda: compile_lowered(lowered, mesh, backend), compiling)
    differences = None
    if executable is not None and backend == HOST and (run if run is not None else arrays):
        # From host arrays: JAX compiles a program for each shape to slice arrays that are on a device.
        placed = [jax.device_put(_on_host(x), s) for x, s in zip(leaves, applied.in_shardings, strict=True)]
        if progress is not None:
            progress("running", 0.0)
        with under_mesh(mesh):
            if plan.sharded.rounds:  # the host computes products of float32 in float32
                executable = Applied(plan, traced, program, mesh, rounds=False).jitted(donate=False)
            outputs = executable(*placed)
        sharded = applied.jitted(donate=False, run=lambda *xs: internals.evaluate(traced.jaxpr, xs))
        plain, args, named = pure_call(fn, args, named)
        with _plain_mesh(explicit, mesh):
            jitted = jax.jit(plain, **options.keywords())
            differences = _compare(
                plan,
                lambda *a, **k: jax.tree.leaves(jitted(*a, **k)),
                lambda: sharded(*placed),
                (args, named),
                outputs,
                _coarsest(program),
            )
    return Verification(plan, compiled, _rows(plan, compiled), differences)


def _plain_mesh(explicit: Any, mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which the plain function runs: a program that states shardings over explicit axes needs a mesh of them."""
    if explicit is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.set_mesh(jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=explicit.axis_types))


def _coarsest(program: Program) -> str:
    """Returns the coarsest floating-point dtype in a program."""
    return max((v.dtype for v in program.values if v.dtype in _ROUNDING), key=_ROUNDING.__getitem__, default="float32")


def _compare(
    plan: Plan,
    plain: Callable[..., list[Any]],
    sharded: Callable[[], list[Any]],
    inputs: tuple[Any, Any],
    outputs: Sequence[Any],
    dtype: str,
) -> tuple[Difference, ...]:
    """Compares the outputs of a plan with those of the plain function. Where rounding of inputs does not explain a difference,
    the plain function on sharded inputs may: XLA's partitioner adds up in another order too, and a number is rounded to the
    next integer."""
    generator = np.random.default_rng(0)

    def perturb(x: Any) -> Any:
        if not hasattr(x, "dtype") or _is_key(x) or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            return x
        noise = 4 * _ROUNDING[dtype] * generator.uniform(-1, 1, np.shape(x))
        return jax.device_put((np.asarray(x, np.float64) * (1 + noise)).astype(x.dtype))

    args, kwargs = inputs
    expected = plain(*args, **kwargs)
    relative = [_relative(x, y) for x, y in zip(expected, outputs, strict=True)]
    sensitivity = [0.0] * len(relative)
    for _ in range(_PERTURBATIONS):
        perturbed_args, perturbed_kwargs = jax.tree.map(perturb, (args, kwargs))
        perturbed = plain(*perturbed_args, **perturbed_kwargs)
        sensitivity = [max(s, _relative(x, y)) for s, x, y in zip(sensitivity, expected, perturbed, strict=True)]
        rows = zip(plan.outputs, relative, sensitivity, strict=True)
        differences = tuple(Difference(a.path, r, s, _TOLERANCES[dtype]) for a, r, s in rows)
        if all(d.explained for d in differences):
            return differences
    changes = [_relative(x, y) for x, y in zip(expected, sharded(), strict=True)]
    return tuple(replace(d, sensitivity=max(d.sensitivity, c)) for d, c in zip(differences, changes, strict=True))


def _on_host(x: Any) -> Any:
    return x if not isinstance(x, jax.Array) or _is_key(x) or not x.is_fully_addressable else np.asarray(x)


def _is_key(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))


def _relative(expected: Any, output: Any) -> float:
    """Returns the largest difference, relative to the largest finite number; infinities and NaNs are equal to their like."""
    a, b = (np.asarray(jax.random.key_data(x) if _is_key(x) else x).astype(np.complex128) for x in (expected, output))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        difference = np.max(np.where(same, 0.0, np.abs(a - b)), initial=0.0)
    return float(difference) / max(float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a))), 1e-30)


def _rows(plan: Plan, compiled: Compiled) -> tuple[Row, ...]:
    # Along axes of size 1 nothing is communicated.
    names = [name for name, size in plan.mesh.shape.items() if size > 1]
    predicted, read = Counter[tuple[str, tuple[str, ...]]](), Counter[tuple[str, tuple[str, ...]]]()
    for (kind, axes), (_, nbytes) in plan.moved().items():
        if in_order := tuple(name for name in names if name in axes):
            predicted[kind, in_order] += int(nbytes)
    for (kind, group_axes), total in totals(compiled.collectives).items():
        read[kind, group_axes or ()] += total.nbytes
    keys = sorted(predicted.keys() | read.keys())
    return tuple(Row(*key, float(predicted[key]), float(read[key])) for key in keys)
