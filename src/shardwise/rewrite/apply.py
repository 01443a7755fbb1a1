"""A planned function: the original one, its jaxpr run again with the plan's constraints, under ordinary ``jax.jit``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.capture import jax_internals as internals
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, Traced
from shardwise.cost.sharding import Sharding
from shardwise.cost.stated import Place
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Program
from shardwise.plans.plan import ArrayPlan, Plan, Spec
from shardwise.rewrite.fingerprint import check_version
from shardwise.rewrite.interpret import Interpreter
from shardwise.rewrite.shardy import Constrain
from shardwise.rewrite.variants import trace_variant


def to_partition_spec(spec: Spec) -> PartitionSpec:
    entries = [axes[0] if len(axes) == 1 else axes or None for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    make: Any = PartitionSpec
    made: PartitionSpec = make(*entries)
    return made


def named_sharding(array: ArrayPlan, mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, to_partition_spec(array.spec))


def placed_shape(array: ArrayPlan, mesh: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(array.shape, _dtype(array.dtype), sharding=named_sharding(array, mesh))


def _dtype(name: str) -> Any:
    """A dtype by name; that of random keys too, which NumPy does not know."""
    if name.startswith("key<"):
        for kind in ("threefry2x32", "rbg", "unsafe_rbg"):
            made = jax.eval_shape(functools.partial(jax.random.key, 0, impl=kind)).dtype
            if str(made) == name:
                return made
    return jax.numpy.dtype(name)


def init_sharded(plan: Plan, fn: Callable[..., Any], args: tuple[Any, ...], of: str, mesh: Any) -> Any:
    """Runs an initialiser with the shardings of the arguments under a path."""
    check_mesh(plan, mesh)
    arrays = [a for a in plan.arguments if a.path == of or a.path.startswith(of + "/")]
    made, tree = jax.tree.flatten(jax.eval_shape(fn, *args))
    if [tuple(m.shape) for m in made] != [a.shape for a in arrays]:
        raise PlanError(
            f"the function makes {len(made)} arrays that are not those under {of!r} "
            f"({len(arrays)} arrays): their shapes must agree one by one"
        )
    shardings = jax.tree.unflatten(tree, [named_sharding(a, mesh) for a in arrays])
    return jax.jit(fn, out_shardings=shardings)(*args)


def check_mesh(plan: Plan, mesh: Any) -> None:
    """A real mesh must have the plan's axes, automatic, and its devices must be there."""
    own = MeshAxes.of(mesh)
    if own != plan.mesh:
        raise PlanError(f"the plan is for a mesh of {plan.mesh}; this one is {own}")
    kinds = getattr(mesh, "axis_types", None) or ()
    if any(kind != jax.sharding.AxisType.Auto for kind in kinds):
        raise PlanError(
            "the mesh has Explicit or Manual axes; plans need Auto ones: jax.make_mesh(sizes, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        )


def make_mesh(axes: MeshAxes, devices: Sequence[Any] | None = None, order: Sequence[int] = ()) -> Any:
    """A mesh of automatic axes over the first of some devices; by default of those that are there.

    With ``order``, numbers of devices in the mesh's shape, the devices lie so (``Plan.device_order``); else as JAX sees fit.
    """
    there = jax.devices() if devices is None else devices
    if len(there) < axes.devices:
        raise PlanError(f"a mesh of {axes} needs {axes.devices} devices; there are {len(there)}")
    kinds = (jax.sharding.AxisType.Auto,) * len(axes.names)
    if len(order) == axes.devices == len(there):
        placed = np.array(sorted(there, key=lambda device: device.id), dtype=object)[list(order)]
        return jax.sharding.Mesh(placed.reshape(axes.sizes), axes.names, axis_types=kinds)
    return jax.make_mesh(axes.sizes, axes.names, axis_types=kinds, devices=there[: axes.devices])


class Applied:
    """One function under a plan on a mesh, as a function of flat arrays."""

    def __init__(self, plan: Plan, traced: Traced, program: Program, mesh: Any):
        check_version(plan, program)
        stated = {
            Place(c.place, c.number, c.index): Sharding(
                tuple(tuple(plan.mesh.index(a) for a in axes) for axes in c.spec)
            )
            for c in plan.constraints
        }
        self._visitor = Constrain(stated, mesh, plan.mesh)
        self.program, self._jaxpr = program, traced.jaxpr
        self.in_shardings = [named_sharding(a, mesh) for a in plan.arguments]
        self.out_shardings = [named_sharding(a, mesh) for a in plan.outputs]
        self.donated = tuple(k for k, a in enumerate(plan.arguments) if a.donated)

    def __call__(self, *arrays: Any) -> list[Any]:
        return Interpreter(self.program, self._visitor).run(self._jaxpr, arrays)

    def jitted(self, donate: bool = True, run: Callable[..., Any] | None = None) -> Any:
        """``jax.jit`` of this function, or of another one of the same arrays, with the plan's shardings."""
        return jax.jit(
            run or self.__call__,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donated if donate else (),
            keep_unused=True,
        )


class PlannedFunction:
    """``plan.jit(fn)``: called like ``fn``, computed as planned. Arguments of other shapes than the plan's are an error.

    As under ``jax.jit``, the function is traced again where a Python number stands for an array or the reverse (a weak type is
    part of a type); the plan holds for both if they lead to the same program.
    """

    def __init__(self, plan: Plan, fn: Callable[..., Any], mesh: Any, options: JitOptions):
        self.plan, self.mesh = plan, mesh
        self._fn, self._options = fn, options
        self._static = static_split(fn, options)
        self._known: dict[Any, _Call] = {}
        self._names = _parameters(fn)
        self._roots = list(dict.fromkeys(a.path.partition("/")[0] for a in plan.arguments))
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self._flat(args, kwargs))

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
        """Keyword arguments stand where the plan has them: by position, if it was made so."""
        if kwargs:
            names, count = self._names, len(args)
            while count < len(names) and names[count] in kwargs:
                count += 1
            moved = {name: kwargs[name] for name in names[len(args) : count]}
            if moved and self._ordered(names[: len(args)], kwargs) != self._roots:
                rest = {name: value for name, value in kwargs.items() if name not in moved}
                if self._ordered(names[:count], rest) == self._roots:
                    args, kwargs = (*args, *moved.values()), rest
        return Flat.of(args, kwargs, self._static)

    def _ordered(self, positional: Sequence[str], named: Collection[str]) -> list[str]:
        """The plan's arguments in the order in which a call has them."""
        return [name for name in (*positional, *sorted(named)) if name in self._roots]

    def call(self, flat: Flat) -> Any:
        """The same for arguments that are flat already."""
        known = self._find(flat)
        return known.outputs.unflatten(known.jitted(*flat.leaves))

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """The same without ``jax.jit``: constraints only, for use inside another jitted function."""
        flat = self._flat(args, kwargs)
        known = self._find(flat)
        return known.outputs.unflatten(known.run(*flat.leaves))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``lower``, on the flat function."""
        flat = self._flat(args, kwargs)
        return self._find(flat).jitted.lower(*flat.leaves)

    def _find(self, flat: Flat) -> _Call:
        known = self._known.get((flat.tree, flat.static))
        if known is None:
            known = _Call(self, flat.tree, dict(flat.static))
            known.applied(flat.leaves)
            self._known[flat.tree, flat.static] = known
        return known


def _parameters(fn: Callable[..., Any]) -> list[str]:
    """The names of a function's parameters; none of one that does not tell."""
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return []


class Flat(NamedTuple):
    """A call's arguments: arrays, the tree they make, and static arguments by position or name."""

    leaves: list[Any]
    tree: Any
    static: tuple[tuple[int | str, Any], ...]

    @staticmethod
    def of(args: Sequence[Any], kwargs: dict[str, Any], static: frozenset[int | str]) -> Flat:
        if not static:
            return Flat(*jax.tree.flatten((list(args), kwargs)), ())
        rest = [a for k, a in enumerate(args) if k not in static], {k: v for k, v in kwargs.items() if k not in static}
        pairs: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(kwargs.items())]
        return Flat(*jax.tree.flatten(rest), tuple((k, a) for k, a in pairs if k in static))


class _Call:
    """A planned function for one structure of arguments: what ``jax.jit`` holds, and a rewritten program for each combination
    of types that it was traced for."""

    def __init__(self, planned: PlannedFunction, tree: Any, static: dict[int | str, Any]):
        self._planned, self._tree, self._static = planned, tree, static
        self._known: dict[Any, Applied] = {}
        self.outputs: Any = None
        self.jitted: Any = None

    def applied(self, leaves: Sequence[Any]) -> Applied:
        """The rewritten function for leaves of these types, which may be tracers of another trace."""
        types = tuple(map(array_type, leaves))
        if types not in self._known:
            args, kwargs = self._tree.unflatten(map(_shape, leaves))
            for k in sorted(k for k in self._static if isinstance(k, int)):
                args.insert(k, self._static[k])
            kwargs |= {k: v for k, v in self._static.items() if isinstance(k, str)}
            planned = self._planned
            traced = trace_variant(planned._fn, tuple(args), kwargs, planned._options, planned.plan.variant)
            made = self._known[types] = Applied(planned.plan, traced, lower(traced), planned.mesh)
            self.outputs = traced.outputs
            self.jitted = self.jitted or made.jitted(run=self.run)
        return self._known[types]

    def run(self, *arrays: Any) -> list[Any]:
        """Called by ``jax.jit`` once for each combination of types: a shape that is not the plan's is found here."""
        return self.applied(arrays)(*arrays)


def array_type(leaf: Any) -> Any:
    """Shape, dtype, and whether the dtype gives way to others; not where it lies."""
    try:
        found: Any = jax.typeof(leaf)
    except TypeError:  # no array: tracing says so, with its path
        return type(leaf)
    return found.shape, found.dtype, found.weak_type


def _shape(leaf: Any) -> Any:
    return internals.plain_shape(leaf.aval) if isinstance(leaf, jax.core.Tracer) else leaf


def static_split(fn: Callable[..., Any], options: JitOptions) -> frozenset[int | str]:
    """Positions and names of static arguments, as far as they can be told without a call."""
    if not options.static_argnums and not options.static_argnames:
        return frozenset()
    names = list(inspect.signature(fn).parameters)
    numbers = options.static_argnums
    given_numbers = [numbers] if isinstance(numbers, int) else numbers or ()
    found: set[int | str] = {k + len(names) if k < 0 else k for k in given_numbers}
    given = options.static_argnames
    found |= set([given] if isinstance(given, str) else given or ())
    for k, name in enumerate(names):
        if k in found or name in found:
            found |= {k, name}
    return frozenset(found)
