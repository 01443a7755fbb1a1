"""Meshes of explicit axes, which ``jax.make_mesh`` makes: programs that state shardings are planned and run as they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding, reshard

import shardwise as sw

SIZES = (2, 4), ("data", "model")


def explicit() -> Any:
    return jax.make_mesh(*SIZES, axis_types=(AxisType.Explicit,) * 2)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype("float32")


def mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jnp.einsum("bd,df->bf", x, params["up"], out_sharding=P("data", "model")))
    return jnp.einsum("bf,fd->bd", hidden, params["down"], out_sharding=P("data", None))


def train(params: dict[str, jax.Array], x: jax.Array) -> Any:
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - 1) ** 2))(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), loss


def resharded(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(reshard(x @ w, P(None, "model"))) * 2


def created(x: jax.Array) -> jax.Array:
    return jnp.zeros((16, 32), out_sharding=P("data", "model")) + x


def looked_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table.at[tokens].get(out_sharding=P("data", None, "model"))


def automatic_inside(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.sharding.auto_axes(lambda w, x: jnp.sin(x @ w), out_sharding=P("data", None))(w, x)


def random(key: jax.Array, x: jax.Array) -> jax.Array:
    return x + jax.random.normal(key, x.shape, out_sharding=P("data", None))


def looped(ws: jax.Array, x: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> Any:
        return jnp.einsum("bd,de->be", jnp.tanh(x), w, out_sharding=P("data", None)), None

    return jax.lax.scan(body, reshard(x, P("data", None)), ws)[0]


PARAMS = {"up": numbers(32, 64) / 6, "down": numbers(64, 32) / 8}
X = numbers(16, 32)
DATA, BOTH = (("data",), ()), (("data",), ("model",))
PROGRAMS: dict[Callable[..., Any], tuple[tuple[Any, ...], Any]] = {
    mlp: ((PARAMS, X), DATA),
    resharded: ((numbers(32, 64), X), ((), ("model",))),
    created: ((X,), BOTH),
    looked_up: ((numbers(40, 32), np.arange(48).reshape(16, 3) % 40), (("data",), (), ("model",))),
    automatic_inside: ((numbers(32, 64), X), DATA),
    random: ((jax.random.key(0), X), DATA),
    looped: ((numbers(3, 32, 32) / 6, X), DATA),
}


@pytest.mark.parametrize("fn", PROGRAMS)
def test_stated_shardings_are_pins(fn: Callable[..., Any]) -> None:
    args, spec = PROGRAMS[fn]
    mesh = explicit()
    with jax.set_mesh(mesh):
        expected = np.asarray(jax.jit(fn)(*args))
        plan = sw.plan(fn, *args, tactics=[])
        found = plan.jit(fn)(*args)
        assert plan.outputs[0].spec == spec
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, plan["out"]), found.ndim)
        np.testing.assert_allclose(found + 1, expected + 1, rtol=1e-4, atol=1e-4)  # it can be used on this mesh
        for run in (jax.jit(plan.apply(fn)), plan.jit(fn, partitioner="xla")):
            np.testing.assert_allclose(run(*args), expected, rtol=1e-4, atol=1e-4)
    given = sw.plan(fn, *args, mesh=mesh, tactics=[])
    assert given == plan
    np.testing.assert_allclose(given.jit(fn)(*args), expected, rtol=1e-4, atol=1e-4)
    assert given.verify(*args).agrees


def test_training_where_results_are_arguments_again(tmp_path: Path) -> None:
    with jax.set_mesh(explicit()):
        step, planned = jax.jit(train), sw.jit(train, budget_evals=50)
        params = expected = jax.device_put(PARAMS)
        x = jax.device_put(X, P("data", None))
        for _ in range(3):
            expected, loss = step(expected, x)
            params, found = planned(params, x)
            np.testing.assert_allclose(found, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, expected)
        plan = planned.plan(params, x)
        plan.save(tmp_path / "plan.json")
        _, again = sw.load_plan(tmp_path / "plan.json").jit(train)(params, x)
        np.testing.assert_allclose(again, step(expected, x)[1], rtol=1e-5)


def test_shardings_of_arguments_are_pins_and_types() -> None:
    mesh = explicit()

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        assert jax.typeof(x).sharding.spec == P("data", None)
        return x @ w

    args = jnp.ones((32, 64)), jax.device_put(X, NamedSharding(mesh, P("data")))
    plan = sw.plan(fn, *args, mesh=mesh, tactics=[])
    assert plan["x"] == P("data") and plan["out"] == P("data")
    np.testing.assert_allclose(plan.jit(fn)(*args), X @ np.ones((32, 64)), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(plan.jit(fn)(args[0], X), X @ np.ones((32, 64)), rtol=1e-4, atol=1e-4)


def test_replicated_arrays_are_no_pins() -> None:
    with jax.set_mesh(explicit()):
        args = jnp.ones((32, 64)), jnp.asarray(X)
        plan = sw.plan(lambda w, x: x @ w, *args, tactics=[sw.Shard("x", 0, "data")])
    assert plan["x"] == P("data")


def test_a_gradient_alone_states_nothing() -> None:
    """JAX reshards the scalar that a gradient starts from."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    with jax.set_mesh(explicit()):
        plan = sw.plan(jax.grad(loss), numbers(32, 64), X, tactics=[])
    assert plan.decisions == ()


def test_without_a_mesh_the_error_says_what_to_do() -> None:
    with pytest.raises(sw.ShardwiseError, match=r"Plan under jax\.set_mesh"):
        sw.plan(mlp, PARAMS, X, mesh={"data": 2, "model": 4}, tactics=[])
    with pytest.raises(sw.ShardwiseError, match=r"model of .* is not found in mesh"):
        sw.plan(mlp, PARAMS, X, mesh=jax.make_mesh((8,), ("data",)), tactics=[])
