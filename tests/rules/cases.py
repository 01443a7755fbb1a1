"""What the rule tests run on: one equation of a primitive with concrete operands, and the rule that Shardwise gives it.

Cases are drawn by functions of a ``random.Random``. Hypothesis hands them one whose draws it can shrink, the comparison with
Shardy an ordinary seeded one, so that both read the same generators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from shardwise.capture import jax_internals as internals
from shardwise.ir.rule import Rule
from shardwise.rules.call import OpCall
from shardwise.rules.registry import find_rule

Array = Any
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[Array, ...]
    call: OpCall
    rule: Rule
    #: Ops that were compiled together with those of other cases, by :meth:`signature`.
    compiled: Mapping[Any, Callable[[Sequence[Any]], list[Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.call.kind

    def run(self, operands: Sequence[Array] | None = None, params: Mapping[str, Any] | None = None) -> list[Array]:
        """The primitive's results, of these operands and parameters or of its own."""
        values = [_device(x) for x in (self.operands if operands is None else operands)]
        params = self.params if params is None else params
        compiled = self.compiled.get(self.signature(values, params)) if self.compiled else None
        if compiled is not None:
            return [host(x) for x in compiled(values)]
        results = self.primitive.bind(*values, **params)
        return [host(x) for x in (results if self.primitive.multiple_results else [results])]

    def signature(self, operands: Sequence[Array], params: Mapping[str, Any]) -> Any:
        """Equal for runs that one compiled op can do."""
        return self.name, str(params), tuple((x.shape, str(x.dtype)) for x in operands)

    @functools.cached_property
    def whole(self) -> list[Array]:
        return self.run()

    def __str__(self) -> str:
        params = {k: v for k, v in self.params.items() if v is not None}
        return f"{self.name} {self.call.operands} -> {self.call.results} {params}\n  {self.rule}"


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def host(x: Any) -> Array:
    return x if is_key(x) else np.asarray(x)


def _device(x: Any) -> Any:
    return x if is_key(x) else jax.device_put(x)  # jnp.asarray compiles a program for each shape


def trace(name: str, fn: Callable[..., Any], *args: Array) -> Case:
    """The first equation of the primitive ``name`` in ``fn(*args)``, with the operands that reach it."""
    closed = jax.make_jaxpr(fn)(*args)
    case = _search(closed.jaxpr, closed.consts, jax.tree.leaves(args), name)
    assert case is not None, f"{name} is not in\n{closed}"
    return case


def _search(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], name: str) -> Case | None:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if internals.is_literal(atom) else env[atom]

    for equation in jaxpr.eqns:
        values = [read(a) for a in equation.invars]
        if equation.primitive.name == name:
            return case_of(equation, values)
        inner = internals.inner_jaxpr(equation)
        if inner is not None:
            opened, inner_consts = internals.split_jaxpr(inner)
            found = _search(opened, inner_consts, values, name)
            if found is not None:
                return found
            results = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(opened, inner_consts))(*values)
        else:
            results = equation.primitive.bind(*values, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        env.update(zip(equation.outvars, results, strict=True))
    return None


def case_of(equation: Any, values: Sequence[Any]) -> Case:
    operands = tuple(
        host(v) if hasattr(v, "dtype") else np.asarray(v, a.aval.dtype)
        for v, a in zip(values, equation.invars, strict=True)
    )
    call = OpCall(
        equation.primitive.name,
        equation.params,
        tuple(internals.shape_of(a.aval) for a in equation.invars),
        tuple(internals.shape_of(a.aval) for a in equation.outvars),
        tuple(str(a.aval.dtype) for a in equation.invars),
    )
    return Case(equation.primitive, equation.params, operands, call, find_rule(call)[0])


# Draws.

SIZES = (1, 2, 2, 3, 4, 4, 6)
REAL = ("float32", "float32", "int32", "bfloat16")


def size(r: Random, least: int = 1, most: int = 6) -> int:
    return r.choice([s for s in SIZES if least <= s <= most])


def shape(r: Random, low: int = 1, high: int = 3, least: int = 1) -> Shape:
    return tuple(size(r, least) for _ in range(r.randint(low, high)))


def dtype(r: Random, choices: Sequence[str] = REAL) -> str:
    return r.choice(choices)


def array(r: Random, dims: Sequence[int], kind: str = "float32", low: int = -4, high: int = 5) -> np.ndarray[Any, Any]:
    """Small whole numbers: sums and products of a few are exact in every dtype, so that their order does not matter."""
    rng = np.random.default_rng(r.randrange(1 << 16))
    if kind == "bool":
        return rng.integers(0, 2, tuple(dims)).astype(bool)
    values = rng.integers(max(low, 0) if kind.startswith("uint") else low, high, tuple(dims))
    if kind.startswith("complex"):
        return (values + 1j * rng.integers(low, high, tuple(dims))).astype(kind)
    return values.astype(jnp.dtype(kind))


def normal(r: Random, dims: Sequence[int], kind: str = "float32") -> np.ndarray[Any, Any]:
    return np.random.default_rng(r.randrange(1 << 16)).standard_normal(tuple(dims)).astype(jnp.dtype(kind))


def distinct(r: Random, dims: Sequence[int], kind: str = "float32") -> np.ndarray[Any, Any]:
    """No two elements alike, so that a choice among them is never a tie."""
    n = int(np.prod(dims))
    return np.random.default_rng(r.randrange(1 << 16)).permutation(n).reshape(tuple(dims)).astype(jnp.dtype(kind))


def permutation(r: Random, n: int) -> tuple[int, ...]:
    return tuple(r.sample(range(n), n))


@functools.cache
def _primitives() -> dict[str, Any]:
    from jax._src.interpreters import mlir

    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    return {p.name: p for table in tables for p in table}


def primitive_named(name: str) -> Any | None:
    """A primitive of this JAX that no public function leads to, or None where this JAX has none of that name."""
    return _primitives().get(name)
