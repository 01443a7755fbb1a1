"""The only module that uses JAX's internals, and handles the differences between the supported versions of JAX."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, Final

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src import compiler, source_info_util
from jax._src.config import _check_vma
from jax._src.effects import ordered_effects, shardable_ordered_effects
from jax._src.interpreters import mlir
from jax._src.interpreters.pxla import _discharge_internal_refs
from jax._src.lax.lax import _convert_element_type
from jax._src.mesh import get_concrete_mesh
from jax._src.state.types import AbstractRef

Literal = jex_core.Literal
ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr


#: Primitives that only call another jaxpr, and the parameters that contain it in some version of JAX.
CALLS: Final = frozenset(
    """jit pjit closed_call core_closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr custom_vmap_call custom_transpose_call composite eval_jaxpr linear_call compute_on remat_opt
    xla_metadata_call""".split()
)
_CALLED: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee")

#: Primitives that only declare on which axes a value of a ``shard_map`` varies.
VARYING: Final = ("pvary", "pbroadcast", "vary_unreduced_cast", "reduced_vary_cast", "pcast")

REMAT: Final = ("remat", "remat2", "checkpoint")


def split_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns an open jaxpr and its constants, from a closed or an open one (since JAX 0.11 they are one class)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a ``scan`` are constants, and how many are carried. Since JAX 0.11 they are trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
    return consts, carry


def inner_jaxpr(equation: Any) -> Any | None:
    """Returns the jaxpr that a call primitive calls, or None where the equation is no call."""
    if equation.primitive.name not in CALLS:
        return None
    values = (equation.params.get(key) for key in _CALLED)
    return next((jaxpr for jaxpr in values if isinstance(jaxpr, Jaxpr | ClosedJaxpr)), None)


def without_references(jaxpr: Any) -> Any:
    """Returns a closed jaxpr with the mutable arrays that it creates (``jax.new_ref``) as values, as JAX lowers it."""
    if any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in jaxpr.effects):
        return _discharge_internal_refs(jaxpr)
    return jaxpr


def is_reference(aval: Any) -> bool:
    """Returns whether a value is a mutable array (``jax.new_ref``)."""
    return isinstance(aval, AbstractRef)


def runs_on_one_device(equation: Any) -> bool:
    """Returns whether an equation has an effect that JAX orders on one device only."""
    return any(ordered_effects.contains(e) and not shardable_ordered_effects.contains(e) for e in equation.effects)


def is_weak(aval: Any) -> bool:
    return bool(getattr(aval, "weak_type", False))


def as_weak(x: Any) -> Any:
    """Returns the array, weakly typed."""
    return _convert_element_type(x, weak_type=True)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def shape_of(aval: Any) -> tuple[int, ...]:
    """Returns the shape, ``()`` for tokens and other values without one."""
    return tuple(getattr(aval, "shape", ()))


def current_mesh() -> Any:
    """Returns the mesh of ``jax.set_mesh``, None where there is none."""
    mesh = get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def is_explicit(mesh: Any) -> bool:
    """Returns whether some axes of a mesh are explicit, so that shardings over them are part of types."""
    return jax.sharding.AxisType.Explicit in (getattr(mesh, "axis_types", None) or ())


def is_jitted(fn: Any) -> bool:
    """Returns whether a function is a ``jax.jit``. Wrappers of other libraries are plain functions."""
    return hasattr(fn, "_jit_info") and hasattr(fn, "trace")


def static_arguments(jitted: Any, args: Sequence[Any]) -> frozenset[int | str]:
    """Returns the positions and keywords of the static arguments of a ``jax.jit`` in this call."""
    info = jitted._jit_info
    positions = {n % len(args) for n in info.static_argnums if -len(args) <= n < len(args)}
    return frozenset(positions | set(info.static_argnames))


def jit_options(jitted: Any) -> dict[str, Any]:
    """Returns the static and donated arguments of a ``jax.jit``."""
    names = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"
    return {name: getattr(jitted._jit_info, name) or None for name in names}


def low_jaxpr(traced: Any) -> Any:
    """Returns the jaxpr of a traced function, with its composite ("hijax") primitives expanded where its arguments allow it."""
    high = split_jaxpr(traced.jaxpr)[0]
    if not getattr(high, "is_high", False):
        return traced.jaxpr
    low = split_jaxpr(traced.lojax.jaxpr)[0]
    same = len(high.invars) == len(low.invars) and len(high.outvars) == len(low.outvars)
    return traced.lojax.jaxpr if same else traced.jaxpr


def in_shardings(traced: Any) -> Sequence[Any]:
    """Returns the ``in_shardings`` of ``jax.jit`` for every array argument."""
    return tuple(traced._params["in_shardings"])


def bind(equation: Any, arrays: Sequence[Any], changed: Mapping[str, Any] | None = None) -> list[Any]:
    """Binds an equation to other arrays, with its source line and context."""
    params = {**equation.params, **(changed or {})}
    bound: Any = equation.primitive.get_bind_params(params)
    # Since JAX 0.10 the functions of a primitive are among its parameters.
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    mesh = jax.sharding.get_abstract_mesh()
    if not is_explicit(mesh):  # what a program states over explicit axes is part of the plan
        stated = ((key, params.get(key)) for key in ("sharding", "out_sharding"))
        params |= {key: None for key, sharding in stated if is_explicit(getattr(sharding, "mesh", None))}
    if "out_avals" in params:
        params["out_avals"] = tuple(_on_mesh(aval, mesh) for aval in params["out_avals"])
    # The mesh is the current one, not that of the trace.
    with standing_at(equation), equation.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        results = equation.primitive.bind(*functions, *arrays, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _on_mesh(aval: Any, mesh: Any) -> Any:
    """Returns the type of a kernel's result on the current mesh instead of that of the ``shard_map`` it was traced in."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh == mesh or sharding.mesh.empty:
        return aval
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, sharding.spec))


def branch(equation: Any, index: Any, runs: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Binds a ``cond`` with other branches, which stay platform-dependent if they were."""
    if equation.params.get("branches_platforms") is None:
        return list(jax.lax.switch(index, runs, *arrays))
    branches = tuple(jax.make_jaxpr(run)(*arrays) for run in runs)
    return bind(equation, [index, *arrays], {"branches": branches})


def bind_manual(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """Binds an equation of a ``shard_map`` to arrays without varying axes."""
    name, params = equation.primitive.name, equation.params
    if name in VARYING:
        return list(arrays)
    if name == "psum_invariant":
        return [jax.lax.psum(x, params["axes"]) for x in arrays]
    if name == "all_gather_invariant":
        options = dict(axis=params["all_gather_dimension"], tiled=params["tiled"])
        return [jax.lax.all_gather(x, params["axis_name"], **options) for x in arrays]
    return bind(equation, arrays)


def threefry(first: Any, second: Any, high: Any, low: Any) -> tuple[Any, ...]:
    """Returns the two words of the Threefry hash of a key's words and a counter's."""
    from jax.extend.random import threefry2x32_p

    return tuple(threefry2x32_p.bind(first, second, high, low))


#: Primitives that can be lowered for their devices only.
_DEVICE_SPECIFIC: Final = frozenset({"pallas_call", "pure_callback", "io_callback", "shardwise_kernel"})


def stand_in(equation: Any, arrays: Sequence[Any]) -> list[Any] | None:
    """Returns the results of a custom call in place of a device-specific primitive, to be lowered anywhere; else None."""
    if equation.primitive.name not in _DEVICE_SPECIFIC:
        return None
    shapes = [plain_shape(v.aval) for v in equation.outvars]
    return list(jax.ffi.ffi_call("shardwise.stand_in", shapes)(*arrays)) if shapes else []


def function_primitive(name: str, run: Any, batch: Any) -> Any:
    """Returns a primitive with several results, computed by ``run(*arrays, **params)`` and for a batch by ``batch``."""
    from jax.interpreters import batching, mlir

    def types(*avals: Any, **params: Any) -> list[Any]:
        results = jax.eval_shape(functools.partial(run, **params), *map(plain_shape, avals))
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in results]

    primitive: Any = jex_core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    batching.primitive_batchers[primitive] = batch
    return primitive


@functools.cache
def _placeholder_primitive() -> Any:
    primitive: Any = jex_core.Primitive("shardwise_placeholder")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, avals, content: list(avals))
    return primitive


def placeholder(arrays: Sequence[Any], avals: Sequence[Any], content: Any) -> list[Any]:
    """Returns results of these types of an equation that stands for something else, in a jaxpr that is being traced."""
    return list(_placeholder_primitive().bind(*arrays, avals=tuple(map(_plain, avals)), content=content))


def content(equation: Any) -> Any:
    """Returns what an equation stands for, None for others than placeholders."""
    return equation.params["content"] if equation.primitive is _placeholder_primitive() else None


def placed(equation: Any, atoms: Sequence[Any], variables: Sequence[Any], names: Sequence[Any]) -> Any:
    """Returns an equation with other variables, in name stacks, the outermost first."""
    stack = functools.reduce(operator.add, (*names, equation.source_info.name_stack))
    source = equation.source_info.replace(name_stack=stack)
    return equation.replace(invars=list(atoms), outvars=list(variables), source_info=source)


def variable(aval: Any) -> Any:
    return jex_core.Var(_plain(aval))


def _plain(aval: Any) -> Any:
    """Returns an abstract array without its sharding."""
    return aval if not hasattr(aval, "dtype") or is_reference(aval) else resized(aval, aval.shape)


def resized(aval: Any, shape: tuple[int, ...]) -> Any:
    """Returns an abstract array of another shape, in the same memory."""
    same = {"memory_space": aval.memory_space} if hasattr(aval, "memory_space") else {}
    return jax.core.ShapedArray(shape, aval.dtype, weak_type=is_weak(aval), **same)


def standing_at(equation: Any) -> Any:
    """Returns a context in which traced code has the source line and name stack of an equation."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    return source_info_util.user_context(equation.source_info.traceback, name_stack=names)


def result_shapes(
    equation: Any, shapes: Sequence[tuple[int, ...]], changed: Mapping[str, Any]
) -> list[tuple[int, ...]]:
    """Returns the shapes of an equation's results for other shapes of its operands and changed parameters."""
    types = [plain_shape(v.aval, shape) for v, shape in zip(equation.invars, shapes, strict=True)]
    return [tuple(x.shape) for x in jax.eval_shape(lambda *arrays: bind(equation, arrays, changed), *types)]


def retrace(fn: Any, like: Any) -> Any:
    """Returns a jaxpr of ``fn`` for the input types of another jaxpr."""
    return jax.make_jaxpr(fn)(*(plain_shape(v.aval) for v in split_jaxpr(like)[0].invars))


def evaluate(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a closed jaxpr. ``jax.core.eval_jaxpr`` rejects collectives of operands without varying axes."""
    inner, consts = split_jaxpr(closed)
    return interpret(inner, (*consts, *arrays), lambda number, operands: bind_manual(inner.eqns[number], operands))


def interpret(
    jaxpr: Any,
    inputs: Sequence[Any],
    run: Callable[[int, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any] = operator.attrgetter("val"),
) -> list[Any]:
    """Returns the outputs of an open jaxpr, from those of its constants and arguments. ``run`` returns the results of an
    equation, by number, on operands, and ``literal`` the value of a literal."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [literal(atom) if is_literal(atom) else env[atom] for atom in atoms]

    for number, equation in enumerate(jaxpr.eqns):
        env.update(zip(equation.outvars, run(number, read(equation.invars)), strict=True))
    return read(jaxpr.outvars)


def reshapes(atoms: Sequence[Any], like: Sequence[Any]) -> Any:
    """Returns an open jaxpr that reshapes each atom to the shape of another."""
    shapes = [v.aval.shape for v in like]
    traced = jax.make_jaxpr(lambda *xs: [jax.lax.reshape(x, s) for x, s in zip(xs, shapes, strict=True)])
    return split_jaxpr(traced(*(plain_shape(a.aval) for a in atoms)))[0]


def trace_in_place(equation: Any, fn: Any) -> Any:
    """Returns the jaxpr of ``fn`` for the operands of an equation. Inside of a ``shard_map`` its axes can be used by name."""
    mesh = equation.ctx.cur_abstract_mesh
    axes = [(name, size) for name, size in mesh.shape.items() if name in mesh.manual_axes]
    with _check_vma(False):
        return jax.make_jaxpr(fn, axis_env=axes)(*(plain_shape(v.aval) for v in equation.invars))


def plain_shape(aval: Any, shape: tuple[int, ...] | None = None) -> Any:
    """Returns shape, or another shape, dtype and weak type of an abstract value, without its sharding."""
    struct: Any = jax.ShapeDtypeStruct
    if getattr(aval, "memory_space", None) is jax.memory.Space.Host:
        return resized(aval, aval.shape if shape is None else shape)
    return struct(aval.shape if shape is None else shape, aval.dtype, weak_type=is_weak(aval))


def open_jaxpr(closed: Any) -> Any:
    """Returns the jaxpr in the form of ``remat``'s parameter, which has no constants."""
    inner, consts = split_jaxpr(closed)
    assert not consts, "a rewritten remat body must not close over arrays"
    return inner


#: An op of a lowered module: name, location, axes of each dimension of each result.
ReadOp = tuple[str, str, list[tuple[tuple[int, ...], ...]]]
_MARKED: Final = "shardwise.mark"
_BARRIER: Final = "stablehlo.optimization_barrier"


def mark(array: Any, number: int) -> Any:
    """Returns the array, behind an op that :class:`MarkedModule` finds by its number."""
    return _mark_primitive().bind(array, number=number)


@functools.cache
def _mark_primitive() -> Any:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    def lower(_: Any, array: Any, *, number: int) -> list[Any]:
        marked: Any = {_MARKED: ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)}
        return [ir.Operation.create(_BARRIER, [array.type], [array], marked).results[0]]

    primitive: Any = jex_core.Primitive("shardwise_mark")
    primitive.def_abstract_eval(lambda aval, *, number: aval)
    mlir.register_lowering(primitive, lower, cacheable=False)  # no two have the same number
    return primitive


class MarkedModule:
    """A function with marks, lowered to StableHLO once. Shardy's propagation runs on copies of it, in which some marks are
    replaced by constraints. MLIR shares equal attributes and locations, so that each is read once."""

    def __init__(self, lowered: Any, axes: Sequence[str]):
        self._module = lowered.compiler_ir("stablehlo")
        self._axes = {name: number for number, name in enumerate(axes)}
        self._text, self._shardings = functools.cache(str), functools.cache(self._per_result)

    def propagated(self, stated: Mapping[int, jax.sharding.NamedSharding]) -> list[ReadOp]:
        """Returns every op after propagation, with these constraints by the numbers of their marks."""
        from jaxlib.mlir import passmanager

        with self._module.context:
            operation = self._module.operation.clone()
            _replace_marks(operation, stated)
            manager = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
            manager.enable_verifier(False)  # it runs after each of forty passes, and takes longer than they do
            manager.run(operation)
            return [self._read(op) for op in _operations(operation) if len(op.results)]

    def _read(self, op: Any) -> ReadOp:
        location, attributes = self._text(op.location.attr), op.attributes
        if op.name == "sdy.sharding_constraint" or "sdy.sharding" not in attributes:
            return op.name, location, [((),) * getattr(r.type, "rank", 0) for r in op.results]
        return op.name, location, self._shardings(attributes["sdy.sharding"])

    def _per_result(self, attribute: Any) -> list[tuple[tuple[int, ...], ...]]:
        from jaxlib.mlir.dialects import sdy

        def axes(dimension: Any) -> tuple[int, ...]:
            return tuple(self._axes[sdy.AxisRefAttr(a).name] for a in sdy.DimensionShardingAttr(dimension).axes)

        shardings = sdy.TensorShardingPerValueAttr(attribute).shardings
        return [tuple(map(axes, sdy.TensorShardingAttr(s).dimension_shardings)) for s in shardings]


def _operations(operation: Any) -> Iterator[Any]:
    """Yields the operations inside another one, each before those inside it."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _operations(op.operation)


def _replace_marks(operation: Any, stated: Mapping[int, jax.sharding.NamedSharding]) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    for op in [op for op in _operations(operation) if op.name == _BARRIER and _MARKED in op.attributes]:
        (array,), (result,) = op.operands, op.results
        sharding: Any = stated.get(ir.IntegerAttr(op.attributes[_MARKED]).value)
        if sharding is not None:
            with ir.InsertionPoint(op), op.location:
                attribute = sharding._to_sdy_sharding(ir.RankedTensorType(array.type).rank)
                cache: list[Any] = [{}] if signature(attribute.build).parameters else []  # not in all versions of JAX
                array = sdy.ShardingConstraintOp(array, attribute.build(*cache)).result
        result.replace_all_uses_with(array)
        op.erase()


def module_bytes(lowered: Any) -> bytes:
    """A lowered program as bytes, for :func:`compile_bytes` in another process."""
    module: bytes = mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
    return module


def has_tuple_arguments(lowered: Any) -> bool:
    """Whether the compiled program takes its arguments as one tuple, since there are too many of them."""
    return bool(lowered._lowering.compile_args["tuple_args"])


def compile_bytes(module: bytes, devices: Sequence[Any], options: Mapping[str, str], tuple_arguments: bool) -> Any:
    """Compiles what :func:`module_bytes` returned for devices in the order of a mesh."""
    from jaxlib import xla_client
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
    client, assigned = devices[0].client, np.array(devices, dtype=object).reshape(1, -1)
    compile_options = compiler.get_compile_options(
        1, len(devices), device_assignment=assigned, env_options_overrides=dict(options), backend=client
    )
    compile_options.parameter_is_tupled_arguments = tuple_arguments
    return compiler.backend_compile_and_load(client, parsed, xla_client.DeviceList(tuple(devices)), compile_options, [])
