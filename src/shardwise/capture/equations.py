"""Reads equations and their source information: parameters, stated shardings, kernels and user lines."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture.jax_internals import VARYING, is_explicit, plain_shape, shape_of, split_jaxpr
from shardwise.ir.program import Spec
from shardwise.ir.traits import MANUAL
from shardwise.rules.kernels import fused_attention_flops, jaxpr_flops, pallas_flops

JAX_FOLDER: Final = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_JAXLIB: Final = os.sep + "jaxlib" + os.sep
_STDLIB: Final = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES: Final = os.sep + "site-packages" + os.sep
_NUMPY_FOLDER: Final = os.path.dirname(os.path.abspath(np.__file__)) + os.sep
CAPTURE_FOLDER: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: Where the function is traced: frames outside of it are not the function's.
_BOUNDARY: Final = CAPTURE_FOLDER + "trace.py"
#: Precisions with which a device may compute a product as fast as it can.
_DEFAULT_PRECISIONS: Final = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT)
#: Products of bfloat16 parts that a product of float32 arrays takes, by the end of a precision's name.
_PASSES: Final = {"HIGH": 3, "X3": 3, "HIGHEST": 6, "X6": 6, "F32_F32_F32": 6, "X9": 9}

#: Parameters with the sharding of the result.
_STATING: Final = ("sharding", "out_sharding", "dst_sharding")
_MAY_REPLICATE: Final = ("sharding_constraint", "reshard", "dot_general")


def is_identity(equation: Any) -> bool:
    """Returns whether an equation computes nothing, as where it changes a weak type or declares where a value varies."""
    name, params = equation.primitive.name, equation.params
    if name == "convert_element_type" and params.get("sharding") is None:
        return bool(equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype)
    if name == "rev":
        return all(equation.invars[0].aval.shape[d] == 1 for d in params["dimensions"])
    return name in VARYING


def has_barrier(equation: Any) -> bool:
    """Returns whether a ``remat`` is lowered behind an optimization barrier."""
    return all(equation.params.get(key, True) for key in ("differentiated", "prevent_cse"))


def only_reshapes(equation: Any) -> bool:
    """Returns whether an equation changes the shape of its operand and not the order of the elements."""
    name = equation.primitive.name
    return name == "squeeze" or (name == "reshape" and equation.params["dimensions"] is None)


def fills_alike(gather: Any, dtype: str) -> bool:
    """Returns whether another dtype can represent the value that a gather returns for indices out of range."""
    fill = gather.params.get("fill_value")
    if fill is None or fill != fill:
        return True
    with np.errstate(over="ignore"):
        return bool(np.asarray(fill, np.float64).astype(dtype).astype(np.float64) == fill)


def spec_of(sharding: Any) -> Spec | None:
    """Returns the axes of a NamedSharding by dimension, or None where there is none."""
    spec = getattr(sharding, "spec", None)
    return None if spec is None else axes_by_dimension(spec)


def axes_by_dimension(spec: Sequence[Any]) -> Spec:
    def axes(entry: Any) -> tuple[str, ...] | None:
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            return None
        return (entry,) if isinstance(entry, str) else tuple(str(a) for a in entry or ())

    return tuple(map(axes, spec))


def partition_spec(spec: Spec) -> jax.sharding.PartitionSpec:
    """Returns the axes by dimension as a PartitionSpec."""
    entries = [axes[0] if axes and len(axes) == 1 else axes or None for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return jax.sharding.PartitionSpec(*entries)


def kernel_name(equation: Any) -> str:
    """Returns the user's name of an opaque kernel, as :func:`shardwise.register_rule` expects it after the colon."""
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
    """Returns the FLOPs that a kernel states (Pallas' ``cost_estimate``), else those of its products, else 0."""
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        return pallas_flops(params)
    if name == "shardwise_kernel":
        return jaxpr_flops(jax.make_jaxpr(params["fn"])(*(plain_shape(v.aval) for v in equation.invars)))
    if name.startswith("dot_product_attention_") and "layout" in params:
        return fused_attention_flops([shape_of(v.aval) for v in equation.invars], params)
    return float(getattr(params.get("cost_estimate"), "flops", 0) or 0)


def equation_attributes(equation: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the parameters that later stages need: stated shardings, the user's names, precision and padding."""
    params: Mapping[str, Any] = equation.params
    name = equation.primitive.name
    if name in MANUAL:
        axes = params.get("axes", params.get("axis_name", ()))
        names = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
        return (("axes", names),)
    if name == "name":
        return (("name", params["name"]),)
    if name in ("dot_general", "conv_general_dilated"):
        precision = params["precision"] if isinstance(params["precision"], tuple) else (params["precision"],)
        default = all(p in _DEFAULT_PRECISIONS for p in precision)
        single = all(v.aval.dtype == np.float32 for v in equation.invars)
        passes = max(n if str(p).endswith(name) else 1 for p in precision for name, n in _PASSES.items())
        more = {"rounds": True} if default and single else {"passes": passes} if passes > 1 and single else {}
        return (*more.items(), *_stated(equation))
    if name == "pad":
        return (("padding", tuple(tuple(map(int, d)) for d in params["padding_config"])),)
    return _stated(equation)


def _stated(equation: Any) -> tuple[tuple[str, Any], ...]:
    """Returns the spec that an equation states for its result. On automatic axes only a constraint states one; a result that is
    replicated on explicit axes may be JAX's default, except for a product's and a reshard's."""
    name, params = equation.primitive.name, equation.params
    sharding = next((s for key in _STATING if (s := params.get(key)) is not None), None)
    spec = spec_of(sharding)
    if spec is None or (name != "sharding_constraint" and not is_explicit(getattr(sharding, "mesh", None))):
        return ()
    replicated = name in _MAY_REPLICATE and bool(shape_of(equation.outvars[0].aval))  # JAX reshards scalars by itself
    return (("spec", spec),) if any(spec) or replicated else ()


def stated_meshes(jaxpr: Any) -> Iterator[Any]:
    """Yields the meshes of the ``shard_map``s and of the stated shardings in a jaxpr."""
    for equation in split_jaxpr(jaxpr)[0].eqns:
        params = equation.params
        if equation.primitive.name == "shard_map":
            yield params["mesh"]
        yield from (s.mesh for key in _STATING if any(spec_of(s := params.get(key)) or ()))
        for value in params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "eqns"):
                    yield from stated_meshes(inner)


def stated_rule(equation: Any) -> str | None:
    """Returns the Shardy rule of a ``custom_partitioning`` in our notation, None where it has none that can be read."""
    rule = equation.params.get("sharding_rule")
    if rule is None or equation.primitive.name != "custom_partitioning":
        return None
    try:
        return _shardy_text(rule)
    except (AttributeError, TypeError, ValueError):
        return None


def _shardy_text(rule: Any) -> str:
    """Returns the text of an ``SdyShardingRule``; a function of MLIR types in its place cannot be read.

    Shardy calls a factor that only operands have pass-through too; its meaning depends on the kernel, so it is blocked.
    """
    sides = rule.operand_mappings, rule.result_mappings
    batches = {dim for side in sides for mapping in side for dim in mapping if dim[0][0] == "…"}
    if len(batches) > 1:
        raise ValueError("several groups of batch dimensions")

    def factors(dim: Any) -> tuple[str, ...]:
        return (dim,) if isinstance(dim, str) else tuple(dim)

    def dims(mapping: Any) -> str:
        return "(" + ",".join("..." if dim in batches else "*".join(factors(dim)) for dim in mapping) + ")"

    def names(mappings: Any) -> list[str]:
        return [name for mapping in mappings for dim in mapping if dim not in batches for name in factors(dim)]

    special = {"sum": rule.reduction_factors, "halo": rule.permutation_factors}
    placed = {*rule.reduction_factors, *rule.permutation_factors, *names(rule.result_mappings)}
    operand_only = [name for name in names(rule.operand_mappings) if name not in placed]
    special["blocked"] = tuple(dict.fromkeys((*rule.need_replication_factors, *operand_only)))
    special["sizes"] = tuple(f"{name}={size}" for name, size in rule.factor_sizes.items())
    text = "->".join(",".join(map(dims, side)) for side in sides)
    return "; ".join([text] + [f"{word} {' '.join(items)}" for word, items in special.items() if items])


def user_frame(source_info: Any) -> tuple[Any, list[str]]:
    """Returns the innermost frame of the user's code in an equation's traceback, or None, and the names of the functions of JAX
    inside of it. Installed packages are not the user's code; if there is no other, the user called the outermost package."""
    library: list[str] = []
    installed: list[tuple[str, Any, int]] = []  # package, frame, and the functions of JAX inside of it
    for frame in getattr(getattr(source_info, "traceback", None), "frames", ()):
        file = frame.file_name
        if file == _BOUNDARY:
            break
        inside = _PACKAGES in file
        jax_own = file.startswith((JAX_FOLDER, _NUMPY_FOLDER, CAPTURE_FOLDER, "<frozen")) or _JAXLIB in file
        if jax_own or (file.startswith(_STDLIB) and not inside):
            library.append(frame.function_name.split(".")[-1])
        elif not inside:
            return frame, library
        else:
            installed.append((file.partition(_PACKAGES)[2].split(os.sep)[0], frame, len(library)))
    for package, frame, count in installed:
        if package == installed[-1][0]:
            return frame, library[:count]
    return None, library


def user_line(source_info: Any) -> str:
    """Returns the innermost line of the user's code in an equation's traceback, such as ``model.py:12``, else ``?``."""
    frame, _ = user_frame(source_info)
    return "?" if frame is None else f"{os.path.basename(frame.file_name)}:{frame.line_num}"


def name_stack(source_info: Any) -> str:
    return str(getattr(source_info, "name_stack", ""))


def is_transposed(equation: Any) -> bool:
    """Returns whether an equation comes from a transposition, as those of a backward pass do."""
    return "transpose(" in name_stack(equation.source_info)
