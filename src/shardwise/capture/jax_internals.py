"""The one module that touches what JAX does not promise to keep: jaxprs, source information, Shardy's passes.

Everything else sees our own IR. The supported JAX range is tested at both ends; what differs between versions is settled
here. The file is long since it is the only one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import jax
import jax.extend.core as jex_core
import numpy as np
from jax._src.config import _check_vma
from jax._src.interpreters.pxla import _discharge_internal_refs
from jax._src.lax.lax import _convert_element_type
from jax._src.state.types import AbstractRef

from shardwise.ir.program import MANUAL, Spec
from shardwise.rules.attention import fused_attention_flops
from shardwise.rules.kernels import jaxpr_flops, pallas_flops

Literal = jex_core.Literal
ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr

_JAX_FOLDER: Final = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_JAXLIB: Final = os.sep + "jaxlib" + os.sep
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES: Final = os.sep + "site-packages" + os.sep
_NUMPY_FOLDER: Final = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
_OWN_FOLDER: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep

#: Primitives that only call another jaxpr, and the parameters that hold it in one version of JAX or another.
CALLS: Final = frozenset(
    """jit pjit closed_call core_closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr custom_vmap_call custom_transpose_call composite eval_jaxpr linear_call compute_on remat_opt
    xla_metadata_call""".split()
)
_CALLED: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee")

#: Primitives that only say on which axes a value of a ``shard_map`` varies.
VARYING: Final = ("pvary", "pbroadcast", "vary_unreduced_cast", "reduced_vary_cast", "pcast")

REMAT: Final = ("remat", "remat2", "checkpoint")
JIT: Final = ("jit", "pjit")
#: In the names that an op stands under: what is computed again for a backward pass.
AGAIN: Final = "rematted_computation"


def split_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr and its constants, from a closed or an open one (since JAX 0.11 they are one class)."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a ``scan`` are constants, and how many are carried. Since JAX 0.11 they are kept as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(part) for part in params["ft_in"].unpack())
    return consts, carry


def inner_jaxpr(equation: Any) -> Any | None:
    """The jaxpr that a call primitive calls, or None where the equation is no call."""
    if equation.primitive.name not in CALLS:
        return None
    held = (equation.params.get(key) for key in _CALLED)
    return next((jaxpr for jaxpr in held if isinstance(jaxpr, Jaxpr | ClosedJaxpr)), None)


def is_identity(equation: Any) -> bool:
    """Does an equation compute nothing? It makes a weak type strong (or the reverse), reverses dimensions of size one, or says
    where in a ``shard_map`` a value varies."""
    name, params = equation.primitive.name, equation.params
    if name == "convert_element_type" and params.get("sharding") is None:
        return bool(equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype)
    if name == "rev":
        return all(equation.invars[0].aval.shape[d] == 1 for d in params["dimensions"])
    return name in VARYING


def only_reshapes(equation: Any) -> bool:
    """Does an equation change the shape of its operand only, and not the order of the elements?"""
    name = equation.primitive.name
    return name == "squeeze" or (name == "reshape" and equation.params["dimensions"] is None)


def fills_alike(gather: Any, dtype: str) -> bool:
    """Does another type hold the value that a gather returns for indices out of range?"""
    fill = gather.params.get("fill_value")
    if fill is None or fill != fill:
        return True
    with np.errstate(over="ignore"):
        return bool(np.asarray(fill, np.float64).astype(dtype).astype(np.float64) == fill)


def without_references(jaxpr: Any) -> Any:
    """A closed jaxpr in which mutable arrays that it makes itself (``jax.new_ref``) are values, as JAX itself lowers it."""
    if any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in jaxpr.effects):
        return _discharge_internal_refs(jaxpr)
    return jaxpr


def is_reference(atom: Any) -> bool:
    """Is a variable a mutable array (``jax.new_ref``)?"""
    return isinstance(atom.aval, AbstractRef)


def is_weak(aval: Any) -> bool:
    """Does the dtype of a value give way to that of others?"""
    return bool(getattr(aval, "weak_type", False))


def as_weak(x: Any) -> Any:
    """An array whose dtype gives way to that of others."""
    return _convert_element_type(x, weak_type=True)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape; of what has none (tokens, references to nothing) the empty one."""
    shape = getattr(aval, "shape", ())
    return tuple(int(s) for s in shape)


def dtype_of(aval: Any) -> tuple[str, float]:
    """Name and size in bytes of an element. Sub-byte integers are packed; PRNG keys count their words."""
    return _sized(aval.dtype) if hasattr(aval, "dtype") else (type(aval).__name__, 0.0)


@functools.cache
def _sized(dtype: Any) -> tuple[str, float]:
    name = str(dtype)
    bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}.get(name)
    return name, bits / 8 if bits else float(getattr(dtype, "itemsize", 0))


def spec_of(sharding: Any) -> Spec | None:
    """The axes of a NamedSharding by dimension, or None where there is none."""
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return None
    return _axes_by_dimension(spec)


def _axes_by_dimension(spec: Sequence[Any]) -> Spec:
    def axes(entry: Any) -> tuple[str, ...] | None:
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            return None
        if isinstance(entry, str):
            return (entry,)
        return tuple(str(a) for a in entry) if isinstance(entry, tuple) else ()

    return tuple(axes(entry) for entry in spec)


def kernel_name(equation: Any) -> str:
    """The name a person gave to an opaque kernel, as :func:`shardwise.register_rule` expects it after the colon."""
    params = equation.params
    for key in ("name", "target_name"):
        if isinstance(params.get(key), str):
            return str(params[key])
    for key in ("jaxpr", "call"):
        info = getattr(split_jaxpr(params.get(key))[0], "debug_info", None)
        if info is not None:
            return str(info.func_name or "")
    return ""


def kernel_flops(equation: Any) -> float:
    """The FLOPs that a kernel states (Pallas' ``cost_estimate``), or else those of its products; 0 where nothing is known."""
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        return pallas_flops(params)
    if name == "shardwise_kernel":
        return jaxpr_flops(jax.make_jaxpr(params["fn"])(*(plain_shape(v.aval) for v in equation.invars)))
    if name.startswith("dot_product_attention_") and "layout" in params:
        return fused_attention_flops([shape_of(v.aval) for v in equation.invars], params)
    return float(getattr(params.get("cost_estimate"), "flops", 0) or 0)


def equation_attributes(equation: Any) -> tuple[tuple[str, Any], ...]:
    """What later stages need of an equation's parameters: stated shardings, the user's names, and how arrays are padded."""
    params: Mapping[str, Any] = equation.params
    name = equation.primitive.name
    if name in ("sharding_constraint", "reshard", "mesh_cast"):
        spec = spec_of(params.get("sharding") or params.get("dst_sharding"))
        return (("spec", spec),) if spec is not None else ()
    if name in MANUAL:
        axes = params.get("axes", params.get("axis_name", ()))
        names = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
        return (("axes", names),)
    if name == "name":
        return (("name", params["name"]),)
    if name in ("dot_general", "conv_general_dilated"):
        rounds = is_default_precision(params["precision"]) and all(v.aval.dtype == np.float32 for v in equation.invars)
        return (("rounds", True),) if rounds else ()
    if name == "pad":
        return (("padding", tuple(tuple(map(int, d)) for d in params["padding_config"])),)
    return ()


def is_default_precision(precision: Any) -> bool:
    """May a device compute a product with the precision that is fastest?"""
    both = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT) for p in both)


def specs_of(equation: Any, key: str) -> tuple[Spec, ...]:
    """The ``in_specs`` or ``out_specs`` of a ``shard_map``, axes by dimension."""
    return tuple(_axes_by_dimension(tuple(spec)) for spec in equation.params[key])


def manual_mesh(equation: Any) -> tuple[tuple[str, int], ...]:
    """The mesh of a ``shard_map``: axes and sizes."""
    return tuple((str(name), int(size)) for name, size in dict(equation.params["mesh"].shape).items())


def stated_rule(equation: Any) -> str | None:
    """The Shardy rule that a ``custom_partitioning`` states, as text of our notation, else None."""
    rule = equation.params.get("sharding_rule")
    if rule is None or equation.primitive.name != "custom_partitioning":
        return None
    try:
        return _shardy_text(rule)
    except (AttributeError, TypeError, ValueError):
        return None


def _shardy_text(rule: Any) -> str:
    """JAX keeps the rule as an ``SdyShardingRule``; where it keeps a function of MLIR types instead, nothing can be read.

    Shardy calls a factor that only operands have pass-through too; what that means is the kernel's affair, so it is blocked.
    """
    batches = {
        dim for mapping in (*rule.operand_mappings, *rule.result_mappings) for dim in mapping if dim[0][0] == "…"
    }
    if len(batches) > 1:
        raise ValueError("several groups of batch dimensions")

    def dims(mapping: Any) -> str:
        named = ["..." if dim in batches else dim if isinstance(dim, str) else "*".join(dim) for dim in mapping]
        return "(" + ",".join(named) + ")"

    def names(mappings: Any) -> list[str]:
        dims = [
            (dim,) if isinstance(dim, str) else dim for mapping in mappings for dim in mapping if dim not in batches
        ]
        return list(dict.fromkeys(name for dim in dims for name in dim))

    special = {"sum": rule.reduction_factors, "halo": rule.permutation_factors}
    known = {name for factors in special.values() for name in factors} | set(names(rule.result_mappings))
    lonely = [name for name in names(rule.operand_mappings) if name not in known]
    special["blocked"] = tuple(dict.fromkeys((*rule.need_replication_factors, *lonely)))
    special["sizes"] = tuple(f"{name}={size}" for name, size in rule.factor_sizes.items())
    text = "->".join(",".join(map(dims, side)) for side in (rule.operand_mappings, rule.result_mappings))
    return "; ".join([text] + [f"{word} {' '.join(items)}" for word, items in special.items() if items])


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    function: str
    line: int


def frames(source_info: Any) -> Iterator[tuple[Frame, bool]]:
    """The frames of an equation's traceback, innermost first, each with whether it is of JAX, NumPy or Python."""
    traceback = getattr(source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        file = frame.file_name
        own = file.startswith((_JAX_FOLDER, _NUMPY_FOLDER, _OWN_FOLDER, "<frozen")) or _JAXLIB in file
        own = own or (file.startswith(_STDLIB) and _PACKAGES not in file)
        yield Frame(file, frame.function_name, frame.line_num), own


def user_line(source_info: Any) -> str:
    """``model.py:12``: the innermost line of an equation's traceback that is the user's own."""
    found = next((frame for frame, own in frames(source_info) if not own), None)
    return "?" if found is None else f"{os.path.basename(found.file)}:{found.line}"


def name_stack(source_info: Any) -> str:
    return str(getattr(source_info, "name_stack", ""))


def is_transposed(equation: Any) -> bool:
    """Does JAX say that an equation came of a transposition, as those of a backward pass do?"""
    return "transpose(" in name_stack(equation.source_info)


def unknown_argument(leaf: Any) -> str | None:
    """Why a leaf of the arguments cannot be an array, or None where it can."""
    if isinstance(leaf, bool | int | float | complex | np.generic):
        return None
    if isinstance(leaf, jax.core.Tracer):
        return "is a tracer of another transformation: call this outside of jit, grad and vmap"
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        dtype = leaf.dtype
        if isinstance(dtype, np.dtype) and dtype.kind in "OUSMm":
            return f"has dtype {dtype}, which JAX cannot hold"
        if not all(isinstance(size, int | np.integer) for size in leaf.shape):
            return "has a symbolic shape: give its sizes as numbers"
        return None
    return f"is {_a(type(leaf).__name__)}, not an array"


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def current_mesh() -> Any:
    """The mesh of ``jax.set_mesh``, None where there is none."""
    from jax._src import mesh

    found = mesh.get_concrete_mesh()
    return None if found is None or found.empty else found


def abstract(leaf: Any) -> Any:
    """The leaf as a shape: nothing is run, nothing is kept alive. Python scalars stay, for their weak type, and so do
    shardings on explicit axes, which are part of an array's type."""
    if isinstance(leaf, bool | int | float | complex):
        return leaf
    struct: Any = jax.ShapeDtypeStruct
    sharding = getattr(leaf, "sharding", None)
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", None) or ()
    kept = {"sharding": sharding} if jax.sharding.AxisType.Explicit in kinds else {}
    # A NumPy array of a type that is switched off (float64) is taken as jax.jit takes it.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf.dtype, np.dtype) else leaf.dtype
    return struct(leaf.shape, dtype, weak_type=getattr(leaf, "weak_type", False), **kept)


def type_key(leaf: Any) -> Any:
    """What ``jax.jit`` tells calls apart by: shape, dtype, whether the dtype gives way to others, and the mesh it lies on.
    Asked at every call: JAX keeps one abstract value for all arrays of a type, with its hash."""
    try:
        return leaf.aval
    except AttributeError:  # NumPy's arrays, Python's numbers
        return (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else type(leaf)


def is_jitted(fn: Any) -> bool:
    """Is it a ``jax.jit`` of something? Wrappers of other libraries are plain functions to us."""
    return hasattr(fn, "_jit_info") and hasattr(fn, "trace")


def static_arguments(jitted: Any, args: Sequence[Any]) -> frozenset[int | str]:
    """The positions and the keywords of the static arguments of a ``jax.jit`` in this call."""
    info = jitted._jit_info
    positions = {n % len(args) for n in info.static_argnums if -len(args) <= n < len(args)}
    return frozenset(positions | set(info.static_argnames))


def low_jaxpr(traced: Any) -> Any:
    """The jaxpr of a traced function, its composite ("hijax") primitives taken apart where its arguments allow it."""
    jaxpr = traced.jaxpr
    if not getattr(split_jaxpr(jaxpr)[0], "is_high", False):
        return jaxpr
    high, low = split_jaxpr(jaxpr)[0], split_jaxpr(traced.lojax.jaxpr)[0]
    same = len(high.invars) == len(low.invars) and len(high.outvars) == len(low.outvars)
    return traced.lojax.jaxpr if same else jaxpr


def stated_specs(traced: Any) -> list[Spec | None]:
    """For every array argument the ``in_shardings`` that ``jax.jit`` was given."""
    return [spec_of(sharding) for sharding in traced._params["in_shardings"]]


def all_primitives() -> frozenset[str]:
    """Every primitive that this JAX can lower."""
    from jax._src.interpreters import mlir

    found = {p.name for p in mlir._lowerings}
    for table in mlir._platform_specific_lowerings.values():
        found |= {p.name for p in table}
    return frozenset(found)


def run_shardy(lowered: Any, pipeline: str) -> str:
    """Runs Shardy passes over the StableHLO of a ``jax.jit(f).lower(...)`` and returns the module's text."""
    from jaxlib.mlir import passmanager

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        operation = module.operation.clone()
        passmanager.PassManager.parse(pipeline).run(operation)
        return str(operation.get_asm(enable_debug_info=False, large_elements_limit=8))


def bind(equation: Any, arrays: Sequence[Any], changed: Mapping[str, Any] | None = None) -> list[Any]:
    """Executes (under a trace: records) an equation on other arrays, keeping its source line and context."""
    from jax._src import source_info_util

    params = {**equation.params, **(changed or {})}
    found: Any = equation.primitive.get_bind_params(params)
    # Since JAX 0.10 the functions of a primitive are among its parameters.
    functions, params = found if isinstance(found, tuple) else ((), found)
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    mesh = jax.sharding.get_abstract_mesh()
    if "out_avals" in params:
        params["out_avals"] = tuple(_on_mesh(aval, mesh) for aval in params["out_avals"])
    with (
        source_info_util.user_context(equation.source_info.traceback, name_stack=names),
        equation.ctx.manager,
        jax.sharding.use_abstract_mesh(mesh),  # that of where it is bound, not of where it was traced
    ):
        results = equation.primitive.bind(*functions, *arrays, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _on_mesh(aval: Any, mesh: Any) -> Any:
    """The type of a kernel's result where it is bound: the mesh of a ``shard_map`` that it was traced in is not there."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh == mesh or sharding.mesh.empty:
        return aval
    return aval.update(sharding=jax.sharding.NamedSharding(mesh, sharding.spec))


def branch(equation: Any, index: Any, runs: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """A ``cond`` with other branches. Those that are for one platform each stay so."""
    if equation.params.get("branches_platforms") is None:
        return list(jax.lax.switch(index, runs, *arrays))
    made = [jax.make_jaxpr(run)(*arrays) for run in runs]
    return bind(equation, [index, *arrays], {"branches": tuple(made)})


def bind_manual(equation: Any, arrays: Sequence[Any]) -> list[Any]:
    """An equation of a ``shard_map`` on other arrays, where nothing is said of the axes on which they vary."""
    name, params = equation.primitive.name, equation.params
    if name in VARYING:
        return list(arrays)
    if name == "psum_invariant":
        return [jax.lax.psum(x, params["axes"]) for x in arrays]
    if name == "all_gather_invariant":
        return [
            jax.lax.all_gather(x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"])
            for x in arrays
        ]
    return bind(equation, arrays)


def barrier(arrays: Sequence[Any]) -> list[Any]:
    """The same arrays, which come when all of them are there; XLA merges nothing across."""
    untyped: Any = jax.lax.optimization_barrier
    return list(untyped(list(arrays)))


def threefry(first: Any, second: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """The two words that the Threefry hash makes of a key's words and a counter's."""
    from jax.extend.random import threefry2x32_p

    made: tuple[Any, Any] = threefry2x32_p.bind(first, second, high, low)
    return made


#: Primitives that are lowered only where their devices are.
_OF_DEVICES: Final = frozenset({"pallas_call", "pure_callback", "io_callback", "shardwise_kernel"})


def stand_in(equation: Any, arrays: Sequence[Any]) -> list[Any] | None:
    """Results of the types of a kernel's, of a call that can be lowered anywhere and run nowhere; None for what needs none."""
    if equation.primitive.name not in _OF_DEVICES:
        return None
    shapes = [plain_shape(v.aval) for v in equation.outvars]
    return list(jax.ffi.ffi_call("shardwise.stand_in", shapes)(*arrays)) if shapes else []


def function_primitive(name: str, run: Any, batch: Any) -> Any:
    """A primitive that stands for calls of functions: ``run(*arrays, **params)`` computes its results, which are several, and
    ``batch(arrays, dims, **params)`` those of a batch with their batch dimensions."""
    from jax.interpreters import batching, mlir

    def types(*avals: Any, **params: Any) -> list[Any]:
        made = jax.eval_shape(functools.partial(run, **params), *map(plain_shape, avals))
        return [jax.core.ShapedArray(x.shape, x.dtype) for x in made]

    primitive: Any = jex_core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    batching.primitive_batchers[primitive] = batch
    return primitive


@contextlib.contextmanager
def standing_at(equation: Any) -> Iterator[None]:
    """What is traced here has the source line of an equation, and stands under its names."""
    from jax._src import source_info_util

    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    with source_info_util.user_context(equation.source_info.traceback, name_stack=names):
        yield


def retrace(fn: Any, like: Any) -> Any:
    """A jaxpr of ``fn`` for the input types of another jaxpr, in the class (closed or open) loops hold."""
    inner, _ = split_jaxpr(like)
    return jax.make_jaxpr(fn)(*(plain_shape(v.aval) for v in inner.invars))


def evaluate(closed: Any, arrays: Sequence[Any]) -> list[Any]:
    """The outputs of a closed jaxpr. ``jax.core.eval_jaxpr`` refuses collectives of operands without varying axes."""
    inner, consts = split_jaxpr(closed)
    known = dict(zip((*inner.constvars, *inner.invars), (*consts, *arrays), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else known[atom]

    for equation in inner.eqns:
        known.update(zip(equation.outvars, bind_manual(equation, list(map(read, equation.invars))), strict=True))
    return list(map(read, inner.outvars))


def reshapes(atoms: Sequence[Any], like: Sequence[Any]) -> Any:
    """An open jaxpr with one reshape for each atom, to the shapes of others."""
    shapes = [v.aval.shape for v in like]
    made = jax.make_jaxpr(lambda *xs: [jax.lax.reshape(x, s) for x, s in zip(xs, shapes, strict=True)])
    return split_jaxpr(made(*(plain_shape(a.aval) for a in atoms)))[0]


def trace_in_place(equation: Any, fn: Any) -> Any:
    """The jaxpr of ``fn`` for the operands of an equation. Inside of a ``shard_map`` its mesh axes can be used by name."""
    mesh = equation.ctx.cur_abstract_mesh
    axes = [(name, size) for name, size in mesh.shape.items() if name in mesh.manual_axes]
    with _check_vma(False):
        return jax.make_jaxpr(fn, axis_env=axes)(*(plain_shape(v.aval) for v in equation.invars))


def plain_shape(aval: Any) -> Any:
    """Shape, dtype and weak type of an abstract value, without its sharding."""
    struct: Any = jax.ShapeDtypeStruct
    return struct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def open_jaxpr(closed: Any) -> Any:
    """The jaxpr as ``remat`` holds it; constants would have no place there."""
    inner, consts = split_jaxpr(closed)
    assert not consts, "a rewritten remat body must not close over arrays"
    return inner


#: An op of a lowered module: name, location, axes of each dimension of each result.
ReadOp = tuple[str, str, list[tuple[tuple[int, ...], ...]]]
_MARKED: Final = "shardwise.mark"
_BARRIER: Final = "stablehlo.optimization_barrier"


def mark(array: Any, number: int) -> Any:
    """The array itself. Lowered, it is an op that :class:`MarkedModule` finds by its number."""
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
    """A function with marks, lowered to StableHLO once. Shardy's propagation is run on copies of it, in each of which some
    marks are constraints, and the others are gone: what lowering the function with these constraints would give.

    MLIR keeps one of equal attributes and locations, so that each is read once, whatever the number of copies.
    """

    def __init__(self, lowered: Any, axes: Sequence[str]):
        self._module = lowered.compiler_ir("stablehlo")
        self._axes = {name: number for number, name in enumerate(axes)}
        self._locations: dict[Any, str] = {}
        self._shardings: dict[Any, list[tuple[tuple[int, ...], ...]]] = {}

    def propagated(self, stated: Mapping[int, jax.sharding.NamedSharding]) -> list[ReadOp]:
        """Every op after propagation, with these constraints by the numbers of their marks."""
        from jaxlib.mlir import passmanager

        with self._module.context:
            operation = self._module.operation.clone()
            _settle_marks(operation, stated)
            manager = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
            manager.enable_verifier(False)  # after each of forty passes; it takes longer than they do
            manager.run(operation)
            return [self._read(op) for op in _operations(operation) if len(op.results)]

    def _read(self, op: Any) -> ReadOp:
        where, attributes = op.location.attr, op.attributes
        if where not in self._locations:
            self._locations[where] = str(op.location)
        if op.name == "sdy.sharding_constraint" or "sdy.sharding" not in attributes:
            return op.name, self._locations[where], [((),) * getattr(r.type, "rank", 0) for r in op.results]
        held = attributes["sdy.sharding"]
        if held not in self._shardings:
            self._shardings[held] = self._per_result(held)
        return op.name, self._locations[where], self._shardings[held]

    def _per_result(self, held: Any) -> list[tuple[tuple[int, ...], ...]]:
        from jaxlib.mlir.dialects import sdy

        def axes(dimension: Any) -> tuple[int, ...]:
            return tuple(self._axes[sdy.AxisRefAttr(a).name] for a in sdy.DimensionShardingAttr(dimension).axes)

        shardings = sdy.TensorShardingPerValueAttr(held).shardings
        return [tuple(map(axes, sdy.TensorShardingAttr(s).dimension_shardings)) for s in shardings]


def _operations(operation: Any) -> Iterator[Any]:
    """The operations inside another one, each before those inside it."""
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from _operations(op.operation)


def _settle_marks(operation: Any, stated: Mapping[int, jax.sharding.NamedSharding]) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    for op in [op for op in _operations(operation) if op.name == _BARRIER and _MARKED in op.attributes]:
        (array,), (result,) = op.operands, op.results
        sharding: Any = stated.get(ir.IntegerAttr(op.attributes[_MARKED]).value)
        if sharding is not None:
            with ir.InsertionPoint(op), op.location:
                made = sharding._to_sdy_sharding(ir.RankedTensorType(array.type).rank)
                cache: list[Any] = [{}] if signature(made.build).parameters else []  # not in all versions of JAX
                array = sdy.ShardingConstraintOp(array, made.build(*cache)).result
        result.replace_all_uses_with(array)
        op.erase()
