"""Plans and real devices: the mesh that a plan runs on, and arrays that are put on it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.capture import jax_internals as internals
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.paths import find_paths
from shardwise.plans.plan import ArrayPlan, Plan, Spec


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


def checked_mesh(plan: Plan, mesh: Any) -> Any:
    """A real mesh with the plan's axes."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise PlanError(f"a plan runs on a jax.sharding.Mesh of real devices, not on {type(mesh).__name__}")
    own = MeshAxes.of(mesh)
    if own != plan.mesh:
        raise PlanError(f"the plan is for a mesh of {plan.mesh}; this one is {own}")
    if jax.sharding.AxisType.Manual in (getattr(mesh, "axis_types", None) or ()):
        raise PlanError("the mesh has Manual axes, which belong to a shard_map; a plan runs outside of it")
    return mesh


def automatic(mesh: Any) -> Any:
    """The same mesh with automatic axes, under which programs are traced without shardings in their types."""
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return mesh if mesh.axis_types == kinds else jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def real_mesh(plan: Plan) -> Any:
    """The mesh that a plan was tied to, or that of ``jax.set_mesh``, or one of the devices that are there."""
    if plan.tied is not None:
        return plan.tied
    current = internals.current_mesh()
    if current is not None:
        return checked_mesh(plan, current)
    return make_mesh(plan.mesh, order=plan.device_order)


def under_mesh(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which another mesh of ``jax.set_mesh`` is not in the way."""
    current = jax.sharding.get_abstract_mesh()
    if current.empty or current == mesh.abstract_mesh:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def arrays_under(plan: Plan, of: str) -> list[ArrayPlan]:
    """The arguments under a path; all of them where it is empty."""
    if not of:
        return list(plan.arguments)
    paths = set(find_paths(of, [a.path for a in plan.arguments], what="argument"))
    return [a for a in plan.arguments if a.path in paths]


def _check_shapes(leaves: Sequence[Any], arrays: Sequence[ArrayPlan], of: str) -> None:
    shapes = [tuple(np.shape(leaf)) for leaf in leaves]
    if shapes != [a.shape for a in arrays]:
        where = f"those under {of!r}" if of else "the plan's arguments"
        wrong = (
            f": {a.path} is {list(a.shape)} there and {list(s)} here"
            for a, s in zip(arrays, shapes, strict=False)
            if a.shape != s
        )
        raise PlanError(
            f"these {len(leaves)} arrays are not {where} ({len(arrays)} arrays); their shapes must agree one by one"
            + next(wrong, "")
        )


def put_arrays(plan: Plan, tree: Any, of: str) -> Any:
    """Arguments on the devices, as planned."""
    mesh, arrays = real_mesh(plan), arrays_under(plan, of)
    structure: Any
    leaves, structure = jax.tree.flatten(tree)
    _check_shapes(leaves, arrays, of)
    placed = [jax.device_put(leaf, named_sharding(a, mesh)) for leaf, a in zip(leaves, arrays, strict=True)]
    return structure.unflatten(placed)


def init_sharded(plan: Plan, fn: Callable[..., Any], args: tuple[Any, ...], of: str) -> Any:
    """Runs an initializer with the shardings of the arguments under a path."""
    mesh, arrays = automatic(real_mesh(plan)), arrays_under(plan, of)
    made, tree = jax.tree.flatten(jax.eval_shape(fn, *args))
    _check_shapes(made, arrays, of)
    shardings = jax.tree.unflatten(tree, [named_sharding(a, mesh) for a in arrays])
    with under_mesh(mesh):
        return jax.jit(fn, out_shardings=shardings)(*args)
