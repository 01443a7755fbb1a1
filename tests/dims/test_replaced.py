"""Which output replaces an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import shardwise
from shardwise.search.problem import kept_alone

W = jax.ShapeDtypeStruct((16, 16), "float32")
X = jax.ShapeDtypeStruct((64, 16), "float32")
SCALAR = jax.ShapeDtypeStruct((), "float32")


def replaced(fn: Callable[..., Any], *args: Any) -> dict[str, str]:
    """The path of the output that replaces an argument, by its path."""
    analysis = shardwise.analyze(fn, *args)
    label = analysis.program.label
    return {label(argument): label(output) for argument, output in analysis.replaced_by.items()}


def adam(w: Any, mean: Any, var: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    loss, g = jax.value_and_grad(lambda w: ((x @ w) ** 2).sum())(w)
    g = g / jnp.sqrt(jnp.sum(g * g))
    mean, var = 0.9 * mean + g, 0.9 * var + g * g
    return w - mean / jnp.sqrt(var), mean, var, loss


def test_a_moment_is_told_from_its_parameter_in_any_order() -> None:
    def step(mean: Any, w: Any, var: Any, x: Any) -> Any:
        w, mean, var, loss = adam(w, mean, var, x)
        return {"a": var, "b": w, "c": mean, "loss": loss}

    assert replaced(step, W, W, W, X) == {"mean": "out/c", "w": "out/b", "var": "out/a"}


def test_an_average_of_parameters_is_told_from_them() -> None:
    def step(average: Any, w: Any, mean: Any, var: Any, x: Any) -> Any:
        w, mean, var, _ = adam(w, mean, var, x)
        return w, 0.99 * average + 0.01 * w, mean, var

    assert replaced(step, W, W, W, W, X) == {"average": "out/1", "w": "out/0", "mean": "out/2", "var": "out/3"}


def test_what_a_loop_updates_row_by_row_is_replaced_in_order() -> None:
    rows = jax.ShapeDtypeStruct((4, 16, 16), "float32")

    def step(w: Any, mean: Any, x: Any) -> Any:
        def layer(carry: Any, row: Any) -> Any:
            w, mean = row
            mean = 0.9 * mean + carry.T @ carry
            return carry @ w, (w - mean, mean)

        return jax.lax.scan(layer, x, (w, mean))[1]

    assert replaced(step, rows, rows, X) == {"w": "out/0", "mean": "out/1"}


def test_one_scalar_is_left_over_for_a_loss() -> None:
    def step(w: Any, x: Any, rate: Any) -> Any:
        return w - rate * jnp.ones_like(w), jnp.sum(jnp.tanh(x @ w))

    assert replaced(step, W, X, SCALAR) == {"w": "out/0"}
    both = replaced(lambda w, x, rate: (*step(w, x, rate), 0.9 * rate), W, X, SCALAR)
    assert both == {"w": "out/0", "rate": "out/2"}


def test_outputs_of_other_types_or_colors_replace_nothing() -> None:
    assert replaced(lambda w: w.astype("bfloat16"), W) == {}
    assert replaced(lambda x: x.T, X) == {}


def test_the_search_keeps_a_parameter_with_its_own_output() -> None:
    def step(mean: Any, w: Any, var: Any, x: Any) -> Any:
        w, mean, var, loss = adam(w, mean, var, x)
        return mean, w, var, loss

    analysis = shardwise.analyze(step, W, W, W, X)
    paths = analysis.program.paths
    assert (paths["w"], paths["out/1"]) in kept_alone(analysis)[0]
