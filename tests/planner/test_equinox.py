"""Equinox modules as people write them: ``shardwise.jit`` in place of ``eqx.filter_jit`` trains alike on eight devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwise as sw

OPTIMIZER = optax.adam(1e-2)


class Network(eqx.Module):
    """Settings of all kinds are leaves: an activation, a rate, a flag, a number, the name of an axis."""

    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    down: eqx.nn.Linear
    activation: Callable[..., Any]
    scale: Any

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(16, 32, key=first), eqx.nn.Linear(32, 8, key=second)
        self.norm, self.dropout = eqx.nn.BatchNorm(32, "batch", mode="batch"), eqx.nn.Dropout(0.2)
        self.activation, self.scale = jax.nn.relu, 2

    def __call__(self, x: jax.Array, state: Any, key: jax.Array | None = None) -> Any:
        x, state = self.norm(self.up(x), state)
        return self.down(self.dropout(self.activation(x), key=key)) * self.scale, state


def step(model: Network, state: Any, moments: Any, batch: Any, key: jax.Array) -> Any:
    def loss(model: Network, state: Any) -> Any:
        keys = jax.random.split(key, len(batch["x"]))
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        out, state = run(batch["x"], state, keys)
        return jnp.mean((out - batch["y"]) ** 2), state

    (value, state), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
    updates, moments = OPTIMIZER.update(gradients, moments, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, moments, value


def create() -> Network:
    return eqx.nn.make_with_state(Network)(jax.random.key(0))[0]


def arguments() -> tuple[Any, ...]:
    model, state = eqx.nn.make_with_state(Network)(jax.random.key(0))
    numbers = np.random.default_rng(0).normal(size=(64, 24)).astype("float32")
    batch = {"x": jnp.asarray(numbers[:, :16]), "y": jnp.asarray(numbers[:, 16:])}
    return model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_array)), batch, jax.random.key(1)


def losses(jitted: Any) -> list[float]:
    model, state, moments, batch, key = arguments()
    values = []
    for k in range(3):
        model, state, moments, value = jitted(model, state, moments, batch, jax.random.fold_in(key, k))
        values.append(float(value))
    assert model.activation is jax.nn.relu and type(model.scale) is int and model.dropout.p == 0.2
    return values


@pytest.mark.parametrize("fn", [step, eqx.filter_jit(step)], ids=["step", "filter_jit"])
def test_trains_as_under_filter_jit(fn: Any) -> None:
    planned = sw.jit(fn, mesh={"data": 8}, tactics="dp:data")
    np.testing.assert_allclose(losses(planned), losses(eqx.filter_jit(step)), rtol=1e-5)


def test_a_plan_of_a_module(tmp_path: Path) -> None:
    plan = sw.plan(step, *arguments(), mesh={"data": 2, "model": 4}, tactics="fsdp:data+model")
    assert "model/up/weight" in {a.path for a in plan.arguments} and not any("scale" in a.path for a in plan.arguments)
    for placed in (plan.shard(create(), of="model"), plan.init(create, of="model")):
        assert placed.up.weight.sharding == plan.in_shardings[0].up.weight
        assert placed.activation is plan.out_shardings[0].activation is jax.nn.relu
    plan.save(tmp_path / "plan.json")
    loaded = sw.load_plan(tmp_path / "plan.json").jit(step)
    np.testing.assert_allclose(losses(loaded), losses(eqx.filter_jit(step)), rtol=1e-5)
    on_another_mesh = sw.jit(step, mesh={"data": 8}, tactics="dp:data")(*arguments())[:3]
    assert sw.verify(plan, step, *on_another_mesh, *arguments()[3:]).agrees


def infer(model: Network, state: Any, x: jax.Array) -> jax.Array:
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return run(x, state)[0]  # type: ignore[no-any-return]


def test_other_settings_are_another_program() -> None:
    model, state, _, batch, _ = arguments()
    inference = eqx.nn.inference_mode(model)
    planned = sw.jit(infer, mesh={"data": 8}, tactics="dp:data")
    for factor in (1, 3, 3.0):
        scaled = eqx.tree_at(lambda m: m.scale, inference, factor)
        np.testing.assert_allclose(planned(scaled, state, batch["x"]), infer(scaled, state, batch["x"]), atol=1e-5)
    plan = sw.plan(infer, inference, state, batch["x"], mesh={"data": 8}, tactics="dp:data")
    with pytest.raises(sw.PlanError, match="made for another version of infer"):
        plan.jit(infer)(eqx.tree_at(lambda m: m.activation, inference, jnp.tanh), state, batch["x"])
    with pytest.raises(sw.CaptureError, match="model/scale is of type bytearray, not an array"):
        sw.plan(infer, eqx.tree_at(lambda m: m.scale, inference, bytearray(b"no hash")), state, batch["x"])
