"""Cases of elementwise primitives, with operands that broadcast, and of those that only pass an array on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardwise.rules.tables import ELEMENTWISE, PASSING
from tests.rules.cases import Case, array, normal, primitive_named, shape, size, trace

#: Number of operands and their dtype, where that is not one or two floats.
_BINARY = """add add_any atan2 complex div eq eq_to ge gt igamma igammac igamma_grad_a le le_to lt lt_to max min mul ne
nextafter polygamma pow rem sub zeta""".split()
_INTEGER_UNARY = ["not", "clz", "population_count"]
_INTEGER_BINARY = "and or xor shift_left shift_right_arithmetic shift_right_logical mulhi".split()
_COMPLEX_UNARY = ["real", "imag", "conj"]
_NAMES = {
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "not": "bitwise_not",
    "regularized_incomplete_beta": "betainc",
}
_MORE: dict[str, Callable[..., Any]] = {
    "convert_element_type": lambda x: lax.convert_element_type(x, "int32"),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 3),
    "polynomial": lambda x: getattr(lax, "polynomial")(x, (np.float32(1), np.float32(2), np.float32(3))),  # noqa: B009
}
#: Rotations and rounds are the algorithms' own; all operands have one shape.
_HASHES = {"threefry2x32": 4, "threefry4x32": 8, "philox2x32": 3, "philox4x32": 6}


def _fn(name: str) -> Callable[..., Any]:
    if name in _MORE:
        return _MORE[name]
    public = getattr(lax, _NAMES.get(name, name), None)
    if public is not None:
        return public  # type: ignore[no-any-return]
    return lambda *xs: primitive_named(name).bind(*xs)


def _broadcast(r: Random, dims: tuple[int, ...], operands: int) -> list[tuple[int, ...]]:
    """Shapes that broadcast to ``dims``: some dimensions of some operands are one."""
    shapes = [tuple(n if r.random() < 0.7 else 1 for n in dims) for _ in range(operands)]
    shapes[r.randrange(operands)] = dims
    return shapes


def _elementwise(name: str) -> Callable[[Random], Case]:
    operands = 2 if name in (*_BINARY, *_INTEGER_BINARY) else 3 if name == "regularized_incomplete_beta" else 1

    def case(r: Random) -> Case:
        dims = shape(r, 1, 3, least=2)
        same = name in ("add_any", "complex")
        shapes = [dims] * operands if same else _broadcast(r, dims, operands)
        if name in (*_INTEGER_UNARY, *_INTEGER_BINARY):
            values = [array(r, s, "int32", 0, 20) for s in shapes]
        elif name in _COMPLEX_UNARY:
            values = [array(r, s, "complex64") for s in shapes]
        elif name == "polygamma":
            values = [array(r, shapes[0], low=0, high=3), np.abs(normal(r, shapes[1])) + 1]
        elif name.startswith(("igamma", "regularized", "zeta")):
            values = [np.abs(normal(r, s)) % 1 + (1.5 if name == "zeta" else 0.1) for s in shapes]
        else:
            values = [normal(r, s) for s in shapes]
        return trace(name, _fn(name), *values)

    return case


def _hash(name: str) -> Callable[[Random], Case]:
    def case(r: Random) -> Case:
        dims = shape(r)
        words = [array(r, dims, "uint32", 0, 99) for _ in range(_HASHES[name])]
        return trace(name, lambda *xs: primitive_named(name).bind(*xs), *words)

    return case


def _pair(name: str, fn: Callable[..., Any]) -> Callable[[Random], Case]:
    """Two arrays of different shapes in one equation."""
    return lambda r: trace(name, lambda x, y: fn((x, y)), array(r, shape(r)), array(r, shape(r)))


def _one(name: str, fn: Callable[..., Any]) -> Callable[[Random], Case]:
    return lambda r: trace(name, fn, array(r, shape(r)))


def tie(r: Random) -> Case:
    return trace("tie", primitive_named("tie").bind, array(r, shape(r)), array(r, (size(r), 3)))


def _everywhere(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


_PASSED: dict[str, Callable[[Random], Case]] = {
    "copy": _one("copy", lambda x: jax.numpy.array(x, copy=True)),
    "device_put": _pair("device_put", jax.device_put),
    "name": _one("name", lambda x: checkpoint_name(x, "here")),
    "optimization_barrier": _pair("optimization_barrier", lax.optimization_barrier),
    "sharding_constraint": _one("sharding_constraint", _everywhere),
    "stop_gradient": _one("stop_gradient", lax.stop_gradient),
}

#: Names with an elementwise rule that this JAX does not know, or that have cases of their own elsewhere.
_ELSEWHERE = {"select_n", "clamp", *PASSING, *_HASHES}
CASES: dict[str, Callable[[Random], Case]] = {
    **{n: _elementwise(n) for n in ELEMENTWISE if n not in _ELSEWHERE and primitive_named(n) is not None},
    **{n: _hash(n) for n in _HASHES if primitive_named(n) is not None},
    **{n: case for n, case in _PASSED.items() if primitive_named(n) is not None},
}
if primitive_named("tie") is not None:
    CASES["tie"] = tie
