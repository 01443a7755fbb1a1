"""Flax nnx as people write it: ``shardwise.jit`` in place of ``nnx.jit`` trains alike on eight devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwise as sw

WIDTH, VOCAB = 16, 32
MESH = {"data": 2, "model": 4}


def numbers(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class MLP(nnx.Module):
    """Blocks with batch statistics and dropout; the first block is used twice."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.tied = self.blocks[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.tied(x)

    @sw.jit(mesh=MESH, tactics="dp:data")
    def mean(self, x: jax.Array) -> jax.Array:
        return self(x).mean()


def mean_squares(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train_step(model: Any, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    loss, gradients = nnx.value_and_grad(mean_squares)(model, batch)
    optimizer.update(model, gradients)
    return loss


Program = tuple[Callable[..., Any], tuple[Any, ...]]


def pairs(width: int = WIDTH) -> dict[str, jax.Array]:
    return {"x": numbers(64, width), "y": numbers(64, width, seed=1)}


def optimizer_of(model: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def mlp() -> Program:
    model = MLP(nnx.Rngs(0))
    return train_step, (model, optimizer_of(model), pairs())


def transformer() -> Program:
    """Attention in remat blocks, an embedding that is also the head."""

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.attention = nnx.MultiHeadAttention(4, WIDTH, dropout_rate=0.1, decode=False, rngs=rngs)
            self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.mlp(self.attention(self.norm(x), deterministic=False))

    class Decoder(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])

        def __call__(self, text: jax.Array) -> jax.Array:
            x = self.embed(text)
            for layer in self.layers:
                x = nnx.remat(lambda layer, x: layer(x))(layer, x)
            return self.embed.attend(x)

    def step(model: Decoder, optimizer: nnx.Optimizer, text: jax.Array) -> dict[str, Any]:
        def loss(model: Decoder) -> tuple[jax.Array, jax.Array]:
            logits = model(text)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], text[:, 1:]).mean(), logits

        (value, logits), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return {"loss": value, "logits": logits}

    model = Decoder(nnx.Rngs(0))
    return step, (model, optimizer_of(model), jnp.arange(16 * 8).reshape(16, 8) % VOCAB)


def scanned() -> Program:
    """Stacked layers, made by nnx.vmap and run by nnx.scan."""

    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))(rngs.split(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.scan(lambda x, layer: x + nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, self.layers
            )

    model = Stack(nnx.Rngs(0))
    return train_step, (model, optimizer_of(model), pairs())


def measured() -> Program:
    """Metrics that are changed, an optimizer that has the model, and random numbers as an argument."""

    def step(both: nnx.ModelAndOptimizer, model: Any, metrics: nnx.MultiMetric, rngs: nnx.Rngs, batch: Any) -> Any:
        noisy = batch | {"x": batch["x"] + rngs.normal(batch["x"].shape)}
        loss, gradients = nnx.value_and_grad(mean_squares)(model, noisy)
        both.update(gradients)
        metrics.update(loss=loss, values=batch["x"].mean())
        return loss, metrics.compute()["loss"]

    model = MLP(nnx.Rngs(0))
    both = nnx.ModelAndOptimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), values=nnx.metrics.Average())
    return step, (both, model, metrics, nnx.Rngs(3), pairs())


def losses(fn: Callable[..., Any], args: tuple[Any, ...]) -> np.ndarray:
    return np.array([jax.tree.leaves(jax.tree.map(jnp.mean, fn(*args))) for _ in range(10)])


@cache
def plain_losses(program: Callable[[], Program]) -> np.ndarray:
    step, args = program()
    return losses(nnx.jit(step), args)


@pytest.mark.parametrize("program", [mlp, transformer, scanned, measured])
@pytest.mark.parametrize("options", [{"tactics": "fsdp:data+model"}, {"budget_evals": 30}])
def test_it_trains_as_under_nnx_jit(program: Callable[[], Program], options: dict[str, Any]) -> None:
    expected = plain_losses(program)
    step, args = program()
    found = losses(sw.jit(step, mesh=MESH, **options), args)
    assert expected[9, -1] < expected[0, -1]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)


def test_a_searched_plan_with_donation() -> None:
    expected = plain_losses(mlp)
    step, args = mlp()
    donated = dict(donate_argnames=("model", "optimizer"))
    found = losses(sw.jit(step, mesh={"data": 8}, budget_evals=50, **donated), args)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert all(not x.is_deleted() for x in jax.tree.leaves(nnx.state(args[:2])))  # the random keys are unchanged


def test_a_plan_has_the_changed_state_as_outputs_and_places_objects(tmp_path: Path) -> None:
    step, (model, optimizer, batch) = mlp()
    plan = sw.plan(step, model, optimizer, batch, mesh=MESH, tactics="fsdp:data")
    outputs = {a.path for a in plan.outputs}
    assert {"out", "updated/model/blocks/0/up/kernel", "updated/model/blocks/1/norm/mean"} <= outputs
    assert "updated/model/blocks/0/dropout/rngs/key" not in outputs
    assert not any("tied" in path for path in outputs)
    assert plan.roles["batch"] == ("batch",) and "optimizer" in plan.roles["optimizer"]
    assert "model/blocks/0/up" in plan.roles["params"]
    assert plan.notes == ("nothing is sharded over model: its 4 devices compute the same",)
    kernel = model.blocks[0].up.kernel
    assert plan.shard(model) is model and plan.shard(optimizer) is optimizer
    assert kernel.sharding.spec == plan["model/blocks/0/up/kernel"] == plan.in_specs[0].blocks[0].up.kernel.get_value()
    assert plan.out_specs == jax.sharding.PartitionSpec()
    made = plan.init(lambda: MLP(nnx.Rngs(0)), of="model")
    assert made.blocks[0].up.kernel.sharding == kernel.sharding and made.tied is made.blocks[0]
    assert plan.verify(model, optimizer, batch).agrees
    plan.save(tmp_path / "plan.json")
    loaded = sw.load_plan(tmp_path / "plan.json")
    found = losses(loaded.jit(step), (loaded.shard(model), optimizer, batch))
    np.testing.assert_allclose(found, plain_losses(mlp), rtol=2e-4)
    assert loaded.bind(step, model, optimizer, batch).in_specs[2] == plan.in_specs[2]


def test_shapes_are_enough() -> None:
    step, (model, optimizer, batch) = mlp()
    shapes = nnx.eval_shape(lambda: (m := MLP(nnx.Rngs(0)), optimizer_of(m)))
    plan = sw.plan(step, *shapes, batch, mesh=MESH, tactics="dp:data")
    assert float(plan.jit(step)(model, optimizer, batch)) == pytest.approx(plain_losses(mlp)[0, -1], rel=1e-4)


def test_methods_and_functions_that_are_jitted_already() -> None:
    model, x = MLP(nnx.Rngs(0)), numbers(64, WIDTH)
    expected = float(nnx.jit(lambda model, x: model(x).mean())(MLP(nnx.Rngs(0)), x))
    before = model.blocks[0].norm.mean[...]
    assert float(model.mean(x)) == pytest.approx(expected, rel=1e-4)
    assert not np.array_equal(before, model.blocks[0].norm.mean[...])
    forward = jax.jit(lambda scale, model, x: scale * model(x).mean(), static_argnums=0)
    plan = sw.plan(forward, 2, MLP(nnx.Rngs(0)), x, mesh=MESH, tactics="dp:data")
    assert [a.path for a in plan.outputs] == ["out"]
    step, args = mlp()
    plan = sw.plan(nnx.jit(step), *args, mesh=MESH, tactics="dp:data")
    assert "updated/model/blocks/0/up/kernel" in {a.path for a in plan.outputs}


@pytest.mark.parametrize("program", [mlp, transformer, scanned])
def test_inference_returns_no_parameters(program: Callable[[], Program]) -> None:
    (_, (model, _, batch)), (_, (same, *_)) = program(), program()
    x = batch["x"] if isinstance(batch, dict) else batch
    forward = nnx.jit(lambda model, x: model(x))
    plan = sw.plan(forward, model, x, mesh=MESH, tactics=[])
    counted = ("rngs/count", "norm/mean", "norm/var")
    assert [a.path for a in plan.outputs if not a.path.endswith(counted)] == ["out"]
    np.testing.assert_allclose(plan.jit(forward)(model, x), forward(same, x), rtol=1e-4, atol=1e-5)


def test_results_that_are_objects() -> None:
    def step(model: MLP, weights: dict[str, nnx.Param], x: jax.Array) -> Any:
        weights["w"][...] += x.sum(0)
        return model, model.blocks[1], {"new": nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(1))}, weights

    model, weights, x = MLP(nnx.Rngs(0)), {"w": nnx.Param(jnp.zeros(WIDTH))}, numbers(64, WIDTH)
    w = weights["w"]
    one, two, three, four = sw.jit(step, mesh={"data": 8}, tactics=[])(model, weights, x)
    assert one is model and two is model.blocks[1] and four["w"] is w
    assert three["new"].kernel.shape == (WIDTH, 4)
    np.testing.assert_allclose(w[...], x.sum(0), rtol=1e-5)


class Odd(nnx.Module, pytree=False):
    """A variable whose value is a tree, and an array that is no variable."""

    def __init__(self) -> None:
        self.tree = nnx.Variable({"sum": jnp.zeros(()), "same": (jnp.ones(2), 1.0)})
        self.seen = jnp.zeros(())

    def __call__(self, x: jax.Array) -> jax.Array:
        self.tree.set_value(self.tree.get_value() | {"sum": self.tree.get_value()["sum"] + x.sum()})
        self.seen = self.seen + 1
        return x * 2


def test_variables_of_trees_and_arrays_that_are_no_variables() -> None:
    model, x = Odd(), numbers(64, WIDTH)
    step = sw.jit(lambda model, x: model(x), mesh={"data": 8}, tactics=[sw.Shard("x", 0, "data")])
    for _ in range(2):
        step(model, x)
    value = model.tree.get_value()
    assert float(value["sum"]) == pytest.approx(2 * float(x.sum()), rel=1e-4)
    assert value["same"][0].tolist() == [1, 1] and value["same"][1] == 1.0 and float(model.seen) == 2
    outputs = [a.path for a in step.plan(model, x).outputs]
    assert outputs == ["updated/model/seen", "updated/model/tree/sum", "out"]


class Counting(nnx.Module):
    def __init__(self) -> None:
        self.calls, self.w = 0, nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        return x * self.w


class Mutable(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.Variable(jnp.zeros(()), ref=True)


def sowing(model: MLP, x: jax.Array) -> jax.Array:
    model.seen = nnx.Intermediate(x)
    return model(x).mean()


def untied(model: MLP, x: jax.Array) -> jax.Array:
    model.tied = Block(nnx.Rngs(1))
    return model(x).mean()


@pytest.mark.parametrize(
    ("fn", "model", "message"),
    [
        (lambda model, x: model(x).mean(), Counting(), r"changes Counting\.calls from 0 to 1.*nnx\.Variable"),
        (lambda model, x: x, Mutable(), r"Mutable\.calls is a mutable array.*ref=False"),
        (sowing, MLP(nnx.Rngs(0)), r"adds MLP\.seen.*nnx\.pop"),
        (untied, MLP(nnx.Rngs(0)), r"adds \w+\.\w+"),
        (lambda model, x: nnx.Sequential(model.blocks[0]), MLP(nnx.Rngs(0)), r"parts of an argument.*nnx\.clone"),
    ],
)
def test_what_cannot_be_followed_is_an_error(fn: Any, model: Any, message: str) -> None:
    with pytest.raises(sw.ShardwiseError, match=message) as error:
        sw.jit(fn, mesh={"data": 8}, tactics="dp")(model, numbers(64, WIDTH))
    assert len(str(error.value).splitlines()) == 1


def test_a_variable_that_is_closed_over_cannot_be_changed() -> None:
    model = MLP(nnx.Rngs(0))
    with pytest.raises(sw.ShardwiseError, match=r"Cannot mutate.* as an argument"):
        sw.plan(lambda x: model(x).mean(), numbers(64, WIDTH), mesh={"data": 8}, tactics="dp")


def test_most_inputs_without_effect_are_noted() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        params["a"], params["b"] = params["a"] + 1, params["b"] + 1  # lost, as under jax.jit
        return x.sum()

    params = {"a": numbers(4), "b": numbers(4)}
    plan = sw.plan(step, params, numbers(64, 4), mesh={"data": 8}, tactics=[])
    assert any("2 of 3 input arrays affect no output" in note and "return" in note for note in plan.notes)
    plan = sw.plan(lambda p, x: (p["a"] + x).sum(), params, numbers(64, 4), mesh={"data": 8}, tactics=[])
    assert not any("affect no output" in note for note in plan.notes)
