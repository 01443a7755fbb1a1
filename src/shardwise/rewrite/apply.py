"""A planned function: the original one, its jaxpr run again with the plan's constraints, under ordinary ``jax.jit``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.capture import jax_internals as internals
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.cost.sharding import Sharding
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Program
from shardwise.plans.plan import ArrayPlan, Plan, Spec
from shardwise.rewrite.fingerprint import fingerprint
from shardwise.rewrite.interpret import Interpreter
from shardwise.rewrite.shardy import Constrain, Constraints


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


def make_mesh(plan: Plan) -> Any:
    """A mesh of the devices that are there."""
    there = len(jax.devices())
    if there < plan.mesh.devices:
        raise PlanError(f"the plan needs {plan.mesh.devices} devices ({plan.mesh}); there are {there}")
    axis_types = (jax.sharding.AxisType.Auto,) * len(plan.mesh.names)
    devices = jax.devices()[: plan.mesh.devices]
    return jax.make_mesh(plan.mesh.sizes, plan.mesh.names, axis_types=axis_types, devices=devices)


class Applied:
    """One function under a plan on a mesh, as a function of flat arrays."""

    def __init__(self, plan: Plan, traced: Traced, program: Program, mesh: Any):
        found = fingerprint(program)
        if found != plan.fingerprint:
            raise PlanError(
                f"the plan was made for another version of {plan.function} (other shapes, code or JAX version): plan again"
            )
        stated = [
            (c, Sharding(tuple(tuple(plan.mesh.index(a) for a in axes) for axes in c.spec))) for c in plan.constraints
        ]
        values = {c.value: sharding for c, sharding in stated if c.operand < 0}
        uses = {(c.value, c.operand): sharding for c, sharding in stated if c.operand >= 0}
        self._visitor = Constrain(Constraints(values, uses, {}), mesh, plan.mesh)
        self.program, self._jaxpr = program, traced.jaxpr
        self.in_shardings = [named_sharding(a, mesh) for a in plan.arguments]
        self.out_shardings = [named_sharding(a, mesh) for a in plan.outputs]
        self.donated = tuple(k for k, a in enumerate(plan.arguments) if a.donated)

    def __call__(self, *arrays: Any) -> list[Any]:
        return Interpreter(self.program, self._visitor).run(self._jaxpr, arrays)

    def jitted(self, donate: bool = True) -> Any:
        return jax.jit(
            self.__call__,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.donated if donate else (),
            keep_unused=True,
        )


class PlannedFunction:
    """``plan.jit(fn)``: called like ``fn``, computed as planned. Arguments of other shapes than the plan's are an error."""

    def __init__(self, plan: Plan, fn: Callable[..., Any], mesh: Any, options: JitOptions):
        self.plan, self.mesh = plan, mesh
        self._fn, self._options = fn, options
        self._static = static_split(fn, options)
        self._flat: Any = None
        self._outputs: Any = None
        self._applied: Applied | None = None
        functools.update_wrapper(self, fn)

    def applied(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Applied:
        """The rewritten function, made at the first call (which may be inside another trace)."""
        if self._applied is None:
            shapes = [a if k in self._static else jax.tree.map(_shape, a) for k, a in enumerate(args)]
            named = {k: a if k in self._static else jax.tree.map(_shape, a) for k, a in kwargs.items()}
            traced = trace(self._fn, tuple(shapes), named, self._options)
            self._applied = Applied(self.plan, traced, lower(traced), self.mesh)
            self._flat = self._applied.jitted()
            self._outputs = traced.outputs
        return self._applied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._flat is None:
            self.applied(args, kwargs)
        return jax.tree.unflatten(self._outputs, self._flat(*self._leaves(args, kwargs)))

    def inline(self, *args: Any, **kwargs: Any) -> Any:
        """The same without ``jax.jit``: constraints only, for use inside another jitted function."""
        applied = self.applied(args, kwargs)
        return jax.tree.unflatten(self._outputs, applied(*self._leaves(args, kwargs)))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit``'s ``lower``, on the flat function."""
        self.applied(args, kwargs)
        return self._flat.lower(*self._leaves(args, kwargs))

    def _leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        if self._static:
            args = [a for k, a in enumerate(args) if k not in self._static]
            kwargs = {k: v for k, v in kwargs.items() if k not in self._static}
        return jax.tree.leaves((list(args), kwargs))


def _shape(leaf: Any) -> Any:
    return internals.plain_shape(leaf.aval) if isinstance(leaf, jax.core.Tracer) else leaf


def static_split(fn: Callable[..., Any], options: JitOptions) -> frozenset[int | str]:
    """Positions and names of static arguments, as far as they can be told without a call."""
    import inspect

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
