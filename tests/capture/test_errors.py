"""Bad input gets one clear error that says what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from tests.dims.programs import shape


def loop_on_value(x, n):
    for _ in range(n):
        x = x + 1
    return x


def branch_on_value(x):
    return x if x.sum() > 0 else -x


def wrong_shapes(x, w):
    return x @ w


def test_numbers_inside_of_modules_are_named() -> None:
    def step(model: dict, x: jax.Array) -> jax.Array:
        return x if model["drop"]["p"] > 0 else model["w"] @ x

    with pytest.raises(
        shardwise.ShardwiseError, match=r"numbers inside of arguments are traced.*: model/drop/p\. If they"
    ):
        shardwise.analyze(step, {"w": shape(3), "drop": {"p": 0.5}}, shape(3))


class Module:
    """As PyTorch's: it can be called."""

    __module__ = "torch.nn.modules.linear"

    def __call__(self, x: object) -> object:
        return x


CASES = {
    "not a function": (42, (), {}, r"expected a function to analyze, got int: 42"),
    "a PyTorch module": (Module(), (shape(3),), {}, r"Module is a PyTorch module, .* torchax makes"),
    "too many arguments": (
        wrong_shapes,
        (shape(3),) * 3,
        {},
        r"wrong_shapes\(x, w\) cannot be called with 3 positional",
    ),
    "missing argument": (wrong_shapes, (shape(3),), {}, r"missing a required argument: 'w'"),
    "unknown keyword": (wrong_shapes, (shape(3), shape(3)), {"z": 1}, r"unexpected keyword argument 'z'"),
    "a string": (lambda x, name: x, (shape(3), "relu"), {}, r"name is of type str, not an array \('relu'\)(.|\n)*"),
    "an object inside a tree": (
        lambda p: p,
        ({"a": shape(3), "f": object()},),
        {},
        r"p/f is of type object, not an array",
    ),
    "strings in an array": (lambda x: x, (np.array(["a"]),), {}, r"has dtype <U1, which JAX cannot hold"),
    "fails under trace": (
        wrong_shapes,
        (shape(3, 4), shape(5, 6)),
        {},
        r"cannot be traced: TypeError at test_errors.py:\d+",
    ),
    "value needed": (branch_on_value, (shape(3),), {}, r"Mark that argument static"),
    "loop count needed": (loop_on_value, (shape(3), 4), {}, r"mark that argument static"),
    "raises": (lambda x: 1 / 0, (shape(3),), {}, r"ZeroDivisionError at test_errors.py:\d+: division by zero"),
    "output is no array": (lambda x: "no", (shape(3),), {}, r"cannot be traced: TypeError"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str) -> None:
    fn, args, kwargs, message = CASES[case]
    with pytest.raises(shardwise.ShardwiseError, match=message):
        shardwise.analyze(fn, *args, kwargs=kwargs)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(shardwise.ShardwiseError) as caught:
        shardwise.analyze(lambda a, b, c: a, "x", shape(3), "z")
    assert "a is of type str" in str(caught.value) and "c is of type str" in str(caught.value)


def test_unknown_static_argument() -> None:
    with pytest.raises(shardwise.ShardwiseError, match="nope"):
        shardwise.analyze(lambda x: x, shape(3), static_argnames="nope")


def test_tracers_are_refused() -> None:
    def outer(x):
        shardwise.analyze(lambda y: y, x)
        return x

    with pytest.raises(shardwise.ShardwiseError, match="is a tracer"):
        jax.jit(outer)(jnp.ones(3))


def test_static_cures_what_the_error_says() -> None:
    analysis = shardwise.analyze(loop_on_value, shape(3), 4, static_argnames="n")
    assert [op.kind for op in analysis.program.ops].count("add") == 4


def test_a_value_that_another_trace_left_behind_is_refused() -> None:
    left: list[jax.Array] = []

    def leaks(x: jax.Array) -> jax.Array:
        left.append(2 * x)
        return x

    jax.eval_shape(leaks, jax.ShapeDtypeStruct((4,), "float32"))
    with pytest.raises(shardwise.CaptureError, match="traced value of another function"):
        shardwise.analyze(lambda x: x + left[0], jax.ShapeDtypeStruct((4,), "float32"))
