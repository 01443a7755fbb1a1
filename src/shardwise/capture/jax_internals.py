"""The one module that touches what JAX does not promise to keep: jaxprs, source information, Shardy's passes.

Everything else sees our own IR. The supported JAX range is tested at both ends; what differs between versions is settled
here.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.extend.core as jex_core
import numpy as np

from shardwise.ir.program import Spec

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
    custom_vjp_call_jaxpr custom_vmap_call custom_transpose_call composite eval_jaxpr linear_call compute_on""".split()
)
_CALLED: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee")

REMAT: Final = ("remat", "remat2", "checkpoint")
LOOPS: Final = ("scan", "while", "cond", "custom_linear_solve")


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


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape; of what has none (tokens, references to nothing) the empty one."""
    shape = getattr(aval, "shape", ())
    return tuple(int(s) for s in shape)


def dtype_of(aval: Any) -> tuple[str, float]:
    """Name and size in bytes of an element. Sub-byte integers are packed; PRNG keys count their words."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return type(aval).__name__, 0.0
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
    """What a kernel says it costs (Pallas' ``cost_estimate``), else nothing."""
    estimate = equation.params.get("cost_estimate")
    return float(getattr(estimate, "flops", 0) or 0)


def equation_attributes(equation: Any) -> tuple[tuple[str, Any], ...]:
    """What later stages need of an equation's parameters: stated shardings and the user's names."""
    params: Mapping[str, Any] = equation.params
    name = equation.primitive.name
    if name in ("sharding_constraint", "reshard", "mesh_cast"):
        spec = spec_of(params.get("sharding") or params.get("dst_sharding"))
        return (("spec", spec),) if spec is not None else ()
    if name == "shard_map":
        specs = [tuple(_axes_by_dimension(tuple(s)) for s in params[key]) for key in ("in_specs", "out_specs")]
        return ("in_specs", specs[0]), ("out_specs", specs[1])
    if name == "name":
        return (("name", params["name"]),)
    return ()


def stated_rule(equation: Any) -> str | None:
    """The Shardy rule that a ``custom_partitioning`` states, as text of our notation, else None."""
    rule = equation.params.get("sharding_rule")
    if rule is None or equation.primitive.name != "custom_partitioning":
        return None
    try:
        return _shardy_text(rule)
    except (AttributeError, TypeError, ValueError):
        return None


def _shardy_text(rule: Any) -> str | None:
    """``custom_partitioning`` keeps its rule as text ``"i j, j k -> i k"`` or as a parsed object with the same parts."""

    def dims(mapping: Any) -> str:
        parts = []
        for dim in mapping:
            text = "*".join(dim) if not isinstance(dim, str) else dim
            parts.append("..." if text.startswith("…") else text)
        return "(" + ",".join(parts) + ")"

    if isinstance(rule, str):
        sides = [[t.split() for t in side.split(",")] for side in rule.split("->")]
        special: Mapping[str, Sequence[str]] = {}
    else:
        sides = [list(rule.operand_mappings), list(rule.result_mappings)]
        special = {
            "sum": rule.reduction_factors,
            "blocked": rule.need_replication_factors,
            "halo": rule.permutation_factors,
        }
    text = "->".join(",".join(dims(t) for t in side) for side in sides)
    return "; ".join([text] + [f"{word} {' '.join(names)}" for word, names in special.items() if names])


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


def name_stack(source_info: Any) -> str:
    return str(getattr(source_info, "name_stack", ""))


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
        return None
    return f"is {_a(type(leaf).__name__)}, not an array"


def _a(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def abstract(leaf: Any) -> Any:
    """The leaf as a shape: nothing is run, nothing is kept alive. Python scalars stay, for their weak type."""
    if isinstance(leaf, bool | int | float | complex):
        return leaf
    struct: Any = jax.ShapeDtypeStruct
    return struct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


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
