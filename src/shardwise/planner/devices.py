"""Plans and real devices: the mesh that a plan runs on, and arrays on it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from shardwise.capture import equations
from shardwise.capture import jax_internals as internals
from shardwise.capture.leaves import HOST_MEMORY
from shardwise.capture.objects import Result, apart, pure
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.paths import find_paths
from shardwise.plans.parts import ArrayPlan
from shardwise.plans.plan import Plan


def named_sharding(array: ArrayPlan, mesh: Any) -> NamedSharding:
    """The sharding of an argument or output. Empty arrays of numbers are replicated: where ``jax.jit`` is asked for a sharded
    one, XLA returns it whole on every device, and JAX cannot read it."""
    blank = 0 in array.shape and not array.dtype.startswith("key")
    spec = equations.partition_spec(() if blank else array.spec)
    return NamedSharding(mesh, spec, memory_kind=HOST_MEMORY) if array.host else NamedSharding(mesh, spec)


def placed_shape(array: ArrayPlan, mesh: Any) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(array.shape, _dtype(array.dtype), sharding=named_sharding(array, mesh))


def _dtype(name: str) -> Any:
    """A dtype by name; also that of random keys, which NumPy does not have."""
    if name.startswith("key<"):
        for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
            dtype = jax.eval_shape(functools.partial(jax.random.key, 0, impl=impl)).dtype
            if str(dtype) == name:
                return dtype
    return jax.numpy.dtype(name)


def host_devices(count: int) -> str:
    """Returns the setting that gives a process this number of host devices."""
    return (
        f"start Python with XLA_FLAGS=--xla_force_host_platform_device_count={count}, or call "
        f"jax.config.update('jax_num_cpu_devices', {count}) before anything uses JAX"
    )


def make_mesh(axes: MeshAxes, devices: Sequence[Any] | None = None, order: Sequence[int] = ()) -> Any:
    """A mesh of automatic axes over the first devices, by default of ``jax.devices()``. ``order`` has the numbers of all
    devices in the mesh's order (``Plan.device_order``); without it JAX chooses the order."""
    devices = jax.devices() if devices is None else devices
    if len(devices) < axes.devices:
        hint = f"; to try it here, {host_devices(axes.devices)}" if devices and devices[0].platform == "cpu" else ""
        raise PlanError(f"a mesh of {axes} needs {axes.devices} devices; there are {len(devices)}{hint}")
    kinds = (jax.sharding.AxisType.Auto,) * len(axes.names)
    if len(order) == axes.devices == len(devices):
        ordered = np.array(sorted(devices, key=lambda device: device.id), dtype=object)[list(order)]
        return jax.sharding.Mesh(ordered.reshape(axes.sizes), axes.names, axis_types=kinds)
    return jax.make_mesh(axes.sizes, axes.names, axis_types=kinds, devices=devices[: axes.devices])


def checked_mesh(plan: Plan, mesh: Any) -> Any:
    """The mesh, if it is a real one with the plan's axes; with axes split where the plan splits them."""
    if not isinstance(mesh, jax.sharding.Mesh):
        raise PlanError(f"a plan runs on a jax.sharding.Mesh of real devices, not on {type(mesh).__name__}")
    if MeshAxes.of(mesh) != plan.mesh and not plan.mesh.splits(MeshAxes.of(mesh)):
        raise PlanError(f"the plan is for a mesh of {plan.mesh}; this one is {MeshAxes.of(mesh)}")
    if jax.sharding.AxisType.Manual in (getattr(mesh, "axis_types", None) or ()):
        raise PlanError("the mesh has Manual axes, which belong to a shard_map; a plan runs outside of it")
    if MeshAxes.of(mesh) == plan.mesh:
        return mesh
    kinds = (jax.sharding.AxisType.Auto,) * len(plan.mesh.names)
    return jax.sharding.Mesh(mesh.devices.reshape(plan.mesh.sizes), plan.mesh.names, axis_types=kinds)


def automatic(mesh: Any) -> Any:
    """The mesh with automatic axes, under which programs are traced without shardings in their types."""
    kinds = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return mesh if mesh.axis_types == kinds else jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def mesh_of_arguments(leaves: Sequence[Any]) -> Any:
    """The mesh over which arguments are sharded; None if there is none, or several."""
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves if not isinstance(leaf, jax.core.Tracer))
    meshes = {s.mesh for s in shardings if isinstance(s, NamedSharding) and any(s.spec)}
    return meshes.pop() if len(meshes) == 1 else None


def real_mesh(plan: Plan) -> Any:
    """The mesh that a plan is tied to, or that of ``jax.set_mesh``, or one of ``jax.devices()``."""
    if plan.tied is not None:
        return plan.tied
    current = internals.current_mesh()
    if current is not None:
        return checked_mesh(plan, current)
    return make_mesh(plan.mesh, order=plan.device_order)


def check_processes(plan: Plan, mesh: Any) -> None:
    """Raises if the processes of a mesh have different plans, which would wait for each other's collectives. Processes that are
    not all in the mesh are not compared."""
    count = jax.process_count()
    if count == 1 or len({device.process_index for device in mesh.devices.flat}) < count:
        return
    from jax.experimental.multihost_utils import process_allgather

    words = np.frombuffer(bytes.fromhex(plan.digest), np.uint32)
    digests = [row.tobytes().hex() for row in np.asarray(process_allgather(words))]
    if len(set(digests)) > 1:
        each = ", ".join(f"process {k}: {digest[:8]}" for k, digest in enumerate(digests))
        raise PlanError(
            f"the plans of {plan.function} differ between processes ({each}): plan in each with the same options and "
            "without budget_s, or save the plan in one process and load it in all"
        )


def under_mesh(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``mesh`` replaces another mesh of ``jax.set_mesh``."""
    current = jax.sharding.get_abstract_mesh()
    if current.empty or current == mesh.abstract_mesh:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def under_explicit(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which a program can state shardings over the explicit axes of a mesh, unless another mesh is set."""
    if not internals.is_explicit(mesh) or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh))


def arrays_under(plan: Plan, of: str) -> list[ArrayPlan]:
    """The arguments under a path; all of them if it is empty."""
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
    """Puts arguments on the devices with the plan's shardings; nnx objects are changed in place."""
    states, objects = apart(tree)
    leaves, structure = jax.tree.flatten(states)
    mesh, arrays = real_mesh(plan), arrays_under(plan, of or _argument(plan, states))
    _check_shapes(leaves, arrays, of)
    shardings = [named_sharding(a, mesh) for a in arrays]
    placed = jax.device_put(leaves if mesh.is_multi_process else [in_host_form(x) for x in leaves], shardings)
    return objects.write(jax.tree.unflatten(structure, placed))


def in_host_form(x: Any) -> Any:
    """Returns an array of one CPU device as a NumPy array, without a copy. Its shards are then copies; of a JAX array, JAX
    compiles a program for each shape that cuts it."""
    plain = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and isinstance(x.dtype, np.dtype)
    plain = plain and not internals.is_weak(x.aval) and [d.platform for d in x.devices()] == ["cpu"]
    return np.asarray(x) if plain else x


def _argument(plan: Plan, tree: Any) -> str:
    """The name of the one argument that has the paths and shapes of a tree, or nothing."""
    inner = [(keystr(path, simple=True, separator="/"), np.shape(x)) for path, x in tree_flatten_with_path(tree)[0]]
    roots: dict[str, list[ArrayPlan]] = {}
    for array in plan.arguments:
        roots.setdefault(array.path.partition("/")[0], []).append(array)
    like = [root for root, arrays in roots.items() if [(a.path[len(root) + 1 :], a.shape) for a in arrays] == inner]
    return like[0] if len(like) == 1 else ""


def init_sharded(plan: Plan, fn: Callable[..., Any], args: tuple[Any, ...], of: str) -> Any:
    """Runs an initializer with the shardings of the arguments under a path."""
    mesh, arrays = automatic(real_mesh(plan)), arrays_under(plan, of)
    states, objects = apart(args)
    shapes, structure = jax.tree.flatten(jax.eval_shape(pure(fn), *states).own)
    _check_shapes(shapes, arrays, of)
    shardings: Any = Result(None, jax.tree.unflatten(structure, [named_sharding(a, mesh) for a in arrays]))
    with under_mesh(mesh):
        return objects.finish(jax.jit(pure(fn), out_shardings=shardings)(*states))
