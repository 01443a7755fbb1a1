"""Arrays and shapes that are given as arguments: which can be traced, how JAX types them, and on which mesh they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np

from shardwise.capture import jax_internals as internals

#: JAX's name of the host's memory from which devices read.
HOST_MEMORY: Final = "pinned_host"


def unknown_argument(leaf: Any) -> str | None:
    """Returns why a leaf of the arguments cannot be an array, or None where it can."""
    if isinstance(leaf, bool | int | float | complex | np.generic):
        return None
    if isinstance(leaf, jax.core.Tracer):
        return "is a tracer of another transformation: call this outside of jit, grad and vmap"
    if isinstance(leaf, jax.Ref):
        return "is a mutable array, which cannot be planned: take an array and return the new one"
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        dtype = leaf.dtype
        if isinstance(dtype, np.dtype) and dtype.kind in "OUSMm":
            return f"has dtype {dtype}, which JAX cannot hold"
        if not all(isinstance(size, int | np.integer) for size in leaf.shape):
            return "has a symbolic shape: give its sizes as numbers"
        return None
    if callable(leaf):
        return "is a function, not an array"
    return f"is of type {type(leaf).__name__}, not an array"


def in_host_memory(leaf: Any) -> bool:
    """Returns whether an array, or its type, is in the memory of the host, from where programs move it to the device."""
    if getattr(leaf, "memory_space", None) is jax.memory.Space.Host:
        return True
    return getattr(getattr(leaf, "sharding", None), "memory_kind", None) == HOST_MEMORY


def as_host(leaf: Any) -> Any:
    """Returns the type of an array in the memory of the host."""
    return internals.resized(leaf, leaf.shape).update(memory_space=jax.memory.Space.Host)


def explicit_mesh(leaves: Sequence[Any]) -> Any:
    """Returns the abstract mesh of explicit axes that some arrays are sharded over, or None."""
    meshes = (getattr(getattr(leaf, "sharding", None), "mesh", None) for leaf in leaves)
    mesh = next(filter(internals.is_explicit, meshes), None)
    return None if mesh is None else getattr(mesh, "abstract_mesh", mesh)


def abstract(leaf: Any) -> Any:
    """Returns the leaf as a ``ShapeDtypeStruct``, with a sharding on explicit axes, or as a type in the memory of the host;
    Python scalars as they are."""
    if isinstance(leaf, bool | int | float | complex):
        return leaf
    if in_host_memory(leaf):
        return as_host(leaf)
    struct: Any = jax.ShapeDtypeStruct
    sharding, current = getattr(leaf, "sharding", None), jax.sharding.get_abstract_mesh()
    if not internals.is_explicit(getattr(sharding, "mesh", None)):
        explicit, spec = internals.is_explicit(current), jax.P(*[None] * len(leaf.shape))
        sharding = jax.sharding.NamedSharding(current, spec) if explicit else None
    # A NumPy array of a disabled dtype (float64) is converted as in jax.jit.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if isinstance(leaf.dtype, np.dtype) else leaf.dtype
    return struct(leaf.shape, dtype, weak_type=internals.is_weak(leaf), sharding=sharding)


def type_keys(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the keys by which ``jax.jit`` distinguishes calls: shape, dtype, weak type and mesh of each array."""
    try:
        return tuple([x.aval for x in leaves])
    except AttributeError:  # there are NumPy arrays or Python numbers
        return tuple(
            x.aval if hasattr(x, "aval") else (x.shape, x.dtype) if hasattr(x, "shape") else type(x) for x in leaves
        )


def dtype_of(aval: Any) -> tuple[str, float]:
    """Returns name and size in bytes of an element. Sub-byte integers are packed; PRNG keys count their words."""
    return _sized(aval.dtype) if hasattr(aval, "dtype") else (type(aval).__name__, 0.0)


@functools.cache
def _sized(dtype: Any) -> tuple[str, float]:
    name = str(dtype)
    bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}.get(name)
    return name, bits / 8 if bits else float(getattr(dtype, "itemsize", 0))
