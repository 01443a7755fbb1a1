"""A planned function under ordinary ``jax.jit``: the device-local program of its plan, or the original program with the plan's
constraints for XLA's partitioner."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import as_host, explicit_mesh, in_host_memory
from shardwise.capture.lower import lower
from shardwise.capture.objects import Objects, apart
from shardwise.capture.trace import JitOptions, Traced
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Program, Value
from shardwise.partitioner.constraints import choose_constraints
from shardwise.partitioner.propagation import Constrained
from shardwise.partitioner.quirks import failing_convolutions
from shardwise.planner.bind import check_parts, check_version, relowered, static_options
from shardwise.planner.devices import automatic, check_processes, in_host_form, named_sharding, under_mesh
from shardwise.plans.plan import Plan
from shardwise.spmd.program import LocalProgram
from shardwise.transforms.variants import trace_variant

#: What executes a plan: our device-local program, or XLA's partitioner, which is asked by constraints.
PARTITIONERS: Final = ("shardwise", "xla")
#: Platforms by the first words of compiler options that only they have.
_PLATFORMS: Final = {"xla_tpu_": "tpu", "xla_jf_": "tpu", "xla_gpu_": "gpu", "xla_cpu_": "cpu"}


class Applied:
    """A function under a plan on a mesh, as a function of flat arrays. ``rounds``: reshard operands of float32 products in
    bfloat16 if the plan was made for devices that read them so; by default on TPUs only, where the results are the same."""

    def __init__(
        self,
        plan: Plan,
        traced: Traced,
        program: Program,
        mesh: Any,
        partitioner: str = "shardwise",
        rounds: bool | None = None,
    ):
        check_version(plan, program)
        if plan.asked is None:
            check_parts(plan, program)
        self.program, self.mesh = program, mesh
        self.in_shardings = [named_sharding(a, mesh) for a in plan.arguments]
        self.out_shardings = [named_sharding(a, mesh) for a in plan.outputs]
        # XLA updates a donated array in the memory of the host by a copy there: on an H200 that takes four times the transfers.
        self.donated = tuple(k for k, a in enumerate(plan.arguments) if a.donated and not a.host)
        self._plan, self._traced = plan, traced
        self._weak = [internals.is_weak(v.aval) for v in internals.split_jaxpr(traced.jaxpr)[0].outvars]
        self._rounds = mesh.devices.flat[0].platform == "tpu" if rounds is None else rounds
        self.partitioner = partitioner
        self._run = self._explicit() if partitioner == "shardwise" else self._constrained()

    def __call__(self, *arrays: Any) -> list[Any]:
        results = zip(self._run(*arrays), self._weak, strict=True)
        return [internals.as_weak(x) if is_weak else x for x, is_weak in results]

    def _explicit(self) -> Callable[..., list[Any]]:
        """The device-local program on every device. Empty arrays stay outside of it: XLA replaces them by constants, refuses a
        ``shard_map`` without other operands, where the program is run as it is, and crashes on some others."""
        values, arguments = self.program.values, [a.value for a in self.program.arguments]
        read = [values[v] for v in arguments if self.program.uses[v]]
        if read and not any(v.elements for v in read):
            return lambda *arrays: internals.evaluate(self._traced.jaxpr, arrays)
        local = LocalProgram(self.program, self._plan.sharded, self._rounds)
        given = [k for k, v in enumerate(arguments) if not _is_blank(values[v])]
        left = [k for k, v in enumerate(self.program.outputs) if not _is_blank(values[v])]

        def on_device(*blocks: Any) -> tuple[Any, ...]:
            inputs = dict(zip(given, blocks, strict=True))
            for k in range(len(arguments)):
                if k not in inputs:
                    shape = self._plan.sharded.shardings[arguments[k]].local_shape(
                        values[arguments[k]].shape, self._plan.mesh
                    )
                    inputs[k] = jnp.zeros(shape, values[arguments[k]].dtype)
            results = local(*(inputs[k] for k in range(len(arguments))))
            return tuple(results[k] for k in left)

        sharded: Callable[..., tuple[Any, ...]] = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(self.in_shardings[k].spec for k in given),
            out_specs=tuple(self.out_shardings[k].spec for k in left),
            check_vma=False,
        )

        def run(*arrays: Any) -> list[Any]:
            results = dict(zip(left, sharded(*(arrays[k] for k in given)), strict=True))
            return [
                results[k] if k in results else jnp.zeros(a.shape, a.dtype) for k, a in enumerate(self._plan.outputs)
            ]

        return run

    def _constrained(self) -> Callable[..., list[Any]]:
        """The original program with constraints, which XLA's partitioner reads."""
        plan, jaxpr = self._plan, self._traced.jaxpr
        lowered = relowered(plan, self.program)
        for op in failing_convolutions(lowered):
            raise PlanError(
                f"XLA's partitioner computes wrong numbers for the convolution at {self.program.source_of(op)} as this plan "
                "shards it: use plan.jit(fn) without partitioner='xla'"
            )
        return Constrained(self.program, choose_constraints(lowered, jaxpr), self.mesh)

    def jitted(self, donate: bool = True, run: Callable[..., Any] | None = None) -> Any:
        """``jax.jit`` of this function, or of another one of the same arrays, with the plan's shardings."""
        return jax.jit(
            run or self.__call__,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donated if donate else (),
            keep_unused=True,
            compiler_options=compiler_options(self._plan, self.mesh) or None,
        )


def compiler_options(plan: Plan, mesh: Any) -> dict[str, str]:
    """The plan's compiler options for the devices of a mesh, without those of other platforms."""
    platform = mesh.devices.flat[0].platform
    others = tuple(prefix for prefix, of in _PLATFORMS.items() if of != platform)
    return {name: value for name, value in plan.compiler_options.items() if not name.startswith(others)}


def _is_new(x: Any) -> bool:
    """Is an array in host memory, or on a device only because it was made there?"""
    return isinstance(x, np.ndarray) or (
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not x.committed
    )


def _is_blank(value: Value) -> bool:
    """Is an array empty, and of numbers, so that anybody can make it?"""
    return not value.elements and not value.dtype.startswith("key")


class PlannedFunction:
    """``plan.jit(fn)``: called like ``fn``, computed as planned. Arguments of other shapes than the plan's are an error.

    As under ``jax.jit``, the function is traced again where a Python number replaces an array or the reverse (weak types); the
    plan is for both if they lead to the same program.
    """

    def __init__(self, plan: Plan, fn: Callable[..., Any], mesh: Any, partitioner: str = "shardwise"):
        if partitioner not in PARTITIONERS:
            raise PlanError(f"partitioner is one of {', '.join(map(repr, PARTITIONERS))}, not {partitioner!r}")
        self.plan, self.mesh, self.partitioner = plan, automatic(mesh), partitioner
        self._fn, self._options = fn, static_options(plan, fn)
        self._static = static_split(fn, self._options)
        self._calls: dict[Any, _Call] = {}
        self._compared = False
        self._names: list[str] = []
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            self._names = list(inspect.signature(fn).parameters)
        self._types = [] if plan.call is None else Flat.of(plan.call.args, plan.call.kwargs, self._static).leaves
        self._current = jax.sharding.get_abstract_mesh()
        self._roots = list(dict.fromkeys(a.path.partition("/")[0] for a in plan.arguments))
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self._flat(args, kwargs))

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
        """Passes keyword arguments by position where the plan was made so."""
        if kwargs:
            positional, named = list(args), dict(kwargs)
            for name in itertools.takewhile(named.__contains__, self._names[len(args) :]):
                positional.append(named.pop(name))
            if self._ordered(args, kwargs) != self._roots == self._ordered(positional, named):
                args, kwargs = tuple(positional), named
        return Flat.of(args, kwargs, self._static)

    def _ordered(self, args: Sequence[Any], kwargs: Collection[str]) -> list[str]:
        """The plan's arguments in the order in which a call has them."""
        return [name for name in (*self._names[: len(args)], *sorted(kwargs)) if name in self._roots]

    def call(self, flat: Flat) -> Any:
        """Calls the function with arguments that are flat already."""
        if not self._compared:
            check_processes(self.plan, self.mesh)
            self._compared = True
        with under_mesh(self.mesh):
            call = self._find(flat)
            leaves = self._committed(list(flat.leaves))
            try:
                outputs = call.jitted(*leaves)
            except ValueError:
                placed = self._placed(leaves)
                if placed is None:
                    raise
                outputs = call.jitted(*placed)
        if internals.is_explicit(mesh := internals.current_mesh()) and MeshAxes.of(mesh) == self.plan.mesh:
            # With explicit axes, arrays on a mesh of automatic ones cannot be used.
            outputs = jax.device_put(outputs, [named_sharding(a, mesh) for a in self.plan.outputs])
        return flat.objects.finish(call.outputs.unflatten(outputs))

    def _committed(self, leaves: list[Any]) -> list[Any]:
        """The arrays, with new ones placed: ``jax.jit`` would compile once for them and again for its own results."""
        if self.mesh.is_multi_process:
            return leaves
        shardings = {}
        for k, x in enumerate(leaves):
            if not isinstance(x, jax.core.Tracer) and not getattr(x, "committed", False):
                planned = self.plan.arguments[k]
                if _is_new(x) and x.shape == tuple(planned.shape):
                    shardings[k] = named_sharding(planned, self.mesh)
        if shardings:
            placed = jax.device_put([in_host_form(leaves[k]) for k in shardings], list(shardings.values()))
            for k, x in zip(shardings, placed, strict=True):
                leaves[k] = x
        return leaves

    def _placed(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The arrays with the plan's shardings (``jax.set_mesh`` replicates new ones); None if they have them already. Used
        when ``jax.jit`` refuses a call: a check before each would take longer than the call."""
        shardings = [named_sharding(a, self.mesh) for a in self.plan.arguments]
        wrong = [
            isinstance(x, jax.Array)
            and not isinstance(x, jax.core.Tracer)
            and not x.sharding.is_equivalent_to(s, x.ndim)
            for x, s in zip(leaves, shardings, strict=True)
        ]
        if not any(wrong):
            return None
        return [jax.device_put(x, s) if w else x for x, s, w in zip(leaves, shardings, wrong, strict=True)]

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function without ``jax.jit``, inside another jitted function (``plan.apply``)."""
        flat = self._flat(args, kwargs)
        with under_mesh(self.mesh):
            call = self._find(flat)
            return flat.objects.finish(call.outputs.unflatten(call.run(*flat.leaves)))

    def lower(self, *args: Any, **kwargs: Any) -> Stage:
        """Lowers the function for some arguments, as ``jax.jit(fn).lower`` does."""
        flat = self._flat(args, kwargs)
        with under_mesh(self.mesh):
            call = self._find(flat)
            return Stage(call.jitted.lower(*flat.leaves), self, call.outputs)

    def shape(self, number: int, leaf: Any) -> Any:
        """A leaf of the arguments for tracing. On explicit axes the sharding with which it was planned is part of its type."""
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        like = self._types[number] if number < len(self._types) else leaf
        aval = internals.plain_shape(leaf.aval if hasattr(leaf, "aval") else leaf)
        host = any(a.host for a in self.plan.arguments[number : number + 1]) and not self._is_offloaded(number)
        if host != in_host_memory(aval):
            struct: Any = jax.ShapeDtypeStruct
            aval = as_host(aval) if host else struct(aval.shape, aval.dtype, weak_type=internals.is_weak(aval))
        if host:
            return aval
        sharding = getattr(like, "sharding", None) if explicit_mesh([like]) else None
        if sharding is None and internals.is_explicit(self._current):
            sharding = jax.sharding.NamedSharding(self._current, jax.P(*[None] * len(aval.shape)))
        return aval.update(sharding=sharding)

    def _is_offloaded(self, number: int) -> bool:
        """Is an argument in the memory of the host because the plan's variant moves it there?"""
        path = f"{self.plan.arguments[number].path}/"
        return any(path.startswith(f"{state}/") for state in self.plan.variant.offload)

    def _find(self, flat: Flat) -> _Call:
        call = self._calls.get((flat.tree, flat.static))
        if call is None:
            call = _Call(self, flat.tree, dict(flat.static))
            call.applied(flat.leaves)
            self._calls[flat.tree, flat.static] = call
        return call


class Stage:
    """A ``jax.stages.Lowered`` or ``Compiled`` of a planned function. Compiled, it is called with the function's arguments."""

    def __init__(self, stage: Any, planned: PlannedFunction, outputs: Any):
        self._stage, self._planned, self._outputs = stage, planned, outputs

    def compile(self, *args: Any, **kwargs: Any) -> Stage:
        return Stage(self._stage.compile(*args, **kwargs), self._planned, self._outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat = self._planned._flat(args, kwargs)
        return flat.objects.finish(self._outputs.unflatten(self._stage(*flat.leaves)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


class Flat(NamedTuple):
    """A call's arguments: arrays, the tree they make, nnx objects, and static arguments by position or name."""

    leaves: list[Any]
    tree: Any
    objects: Objects
    static: tuple[tuple[int | str, Any], ...] = ()

    @staticmethod
    def of(args: Sequence[Any], kwargs: dict[str, Any], static: frozenset[int | str]) -> Flat:
        if not static:  # half the time of the general case, in every call
            tree, objects = apart((list(args), kwargs))
            return Flat(*jax.tree.flatten(tree), objects)
        rest = [a for k, a in enumerate(args) if k not in static], {k: v for k, v in kwargs.items() if k not in static}
        tree, objects = apart(rest)
        pairs: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(kwargs.items())]
        return Flat(*jax.tree.flatten(tree), objects, tuple((k, a) for k, a in pairs if k in static))


class _Call:
    """A planned function for one structure of arguments: one jitted function, and a program for each combination of types."""

    def __init__(self, planned: PlannedFunction, tree: Any, static: dict[int | str, Any]):
        self._planned, self._tree, self._static = planned, tree, static
        self._applied: dict[Any, Applied] = {}
        self.outputs: Any = None
        self.jitted: Any = None

    def applied(self, leaves: Sequence[Any]) -> Applied:
        """The program for leaves of these types, which may be tracers of another trace."""
        types = tuple(map(array_type, leaves))
        if types not in self._applied:
            planned = self._planned
            args, kwargs = self._tree.unflatten([planned.shape(k, leaf) for k, leaf in enumerate(leaves)])
            for k in sorted(k for k in self._static if isinstance(k, int)):
                args.insert(k, self._static[k])
            kwargs |= {k: v for k, v in self._static.items() if isinstance(k, str)}
            traced = trace_variant(planned._fn, tuple(args), kwargs, planned._options, planned.plan.variant)
            applied = Applied(planned.plan, traced, lower(traced), planned.mesh, planned.partitioner)
            self._applied[types] = applied
            self.outputs = traced.outputs
            self.jitted = self.jitted or applied.jitted(run=self.run)
        return self._applied[types]

    def run(self, *arrays: Any) -> list[Any]:
        """Traced by ``jax.jit`` once for each combination of types; raises if a shape is not the plan's."""
        outputs: list[Any] = _not_differentiated(self.applied(arrays), self._planned.plan.function)(*arrays)
        return outputs


def _not_differentiated(run: Callable[..., Any], name: str) -> Any:
    """A function that cannot be differentiated. Its custom derivatives were dropped when it was traced and inlined."""

    @jax.custom_jvp
    def planned(*arrays: Any) -> Any:
        return run(*arrays)

    @planned.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise PlanError(
            f"{name} was planned as it is, and its gradient is another program: plan the step that takes the gradient, as in "
            f"shardwise.plan(jax.grad({name}), ...), or the whole training step"
        )

    return planned


def array_type(leaf: Any) -> Any:
    """Shape, dtype and weak type, without the sharding."""
    try:
        aval: Any = jax.typeof(leaf)
    except TypeError:  # no array: tracing says so, with its path
        return type(leaf)
    return aval.shape, aval.dtype, aval.weak_type


def static_split(fn: Callable[..., Any], options: JitOptions) -> frozenset[int | str]:
    """Positions and names of static arguments, both for each argument in the function's signature."""
    if not options.static:
        return frozenset()
    names = list(inspect.signature(fn).parameters)
    static = {k + len(names) if isinstance(k, int) and k < 0 else k for k in options.static}
    for k, name in enumerate(names):
        if k in static or name in static:
            static |= {k, name}
    return frozenset(static)
