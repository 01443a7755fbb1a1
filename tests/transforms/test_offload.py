"""State of the optimizer in the memory of the host: the numbers are the same, and less memory of the device is taken."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwise
from shardwise.capture.trace import JitOptions, trace
from shardwise.errors import InfeasibleError, VariantError
from shardwise.transforms.offload import offload

LAYERS, WIDTH = 4, 64


def parameters(scale: float = 0.1) -> Any:
    rng = np.random.default_rng(0)
    draw = [jnp.asarray(rng.normal(size=size) * scale, "float32") for size in ((300, WIDTH), (LAYERS, WIDTH, WIDTH))]
    return {"embed": draw[0], "layers": {"w": draw[1], "scale": jnp.ones((LAYERS, 1))}}


def loss(params: Any, x: Any) -> Any:
    def layer(y: Any, one: Any) -> tuple[Any, None]:
        return jnp.tanh(y @ one["w"]) * one["scale"], None

    return jnp.mean(jax.lax.scan(layer, x @ params["embed"], params["layers"])[0] ** 2)


def training(optimizer: Any, reports_norm: bool = False) -> Any:
    def step(params: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        gradients = optax.tree.scale(1 / jnp.maximum(optax.tree.norm(gradients), 1.0), gradients)
        updates, state = optimizer.update(gradients, state, params)
        norm = optax.tree.norm(updates) if reports_norm else None
        return optax.apply_updates(params, updates), state, value, norm

    return step


def in_host(traced: Any) -> tuple[set[str], set[str]]:
    jaxpr = traced.jaxpr.jaxpr
    inputs = {a.path for a, v in zip(traced.arguments, jaxpr.invars, strict=True) if "<host>" in str(v.aval)}
    outputs = {p for p, v in zip(traced.output_paths, jaxpr.outvars, strict=True) if "<host>" in str(v.aval)}
    return inputs, outputs


ADAM = optax.adamw(1e-2)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [(ADAM, "0/{}u/layers/w"), (optax.sgd(1e-2, momentum=0.9), "0/trace/layers/w")],
)
def test_the_state_of_stacks_and_the_outputs_that_replace_it_are_in_the_host(optimizer: Any, state: str) -> None:
    params = parameters()
    traced = trace(training(optimizer), (params, optimizer.init(params), jnp.ones((8, 300))), {}, JitOptions())
    moved = offload(traced, {a.path for a in traced.arguments if a.path.startswith("state")})
    paths = {state.format(name) for name in "mn"}
    assert in_host(moved) == ({f"state/{p}" for p in paths}, {f"out/1/{p}" for p in paths})


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA of JAX 0.9 cannot partition transfers")
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": True}], ids=str)
@pytest.mark.parametrize("reports_norm", [False, True])
def test_a_planned_step_trains_as_plain_jax(options: dict[str, Any], reports_norm: bool) -> None:
    step, params, x = training(ADAM, reports_norm), parameters(), jnp.asarray(np.eye(32, 300), "float32")
    state = ADAM.init(params)
    plan = shardwise.plan(step, params, state, x, mesh={"data": 2, "model": 4}, tactics="fsdp", offload=True, **options)
    assert [a.path for a in plan.arguments if a.host] == ["state/0/mu/layers/w", "state/0/nu/layers/w"]
    planned, plain = plan.jit(step), jax.jit(step)
    ours = theirs = (params, state)
    for _ in range(3):
        *ours, value, norm = planned(*ours, x)
        *theirs, expected, same_norm = plain(*theirs, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert ours[1][0].mu["layers"]["w"].sharding.memory_kind == "pinned_host"
    for mine, other in zip(jax.tree.leaves((ours, norm)), jax.tree.leaves((theirs, same_norm)), strict=True):
        np.testing.assert_allclose(mine, np.asarray(other), rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA of JAX 0.9 cannot partition transfers")
def test_with_a_pipeline() -> None:
    """The moments of each stage's layers are in the memory of the hosts of its devices."""

    def step(w: Any, mean: Any, x: Any) -> Any:
        def value(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)[0] ** 2)

        mean = 0.9 * mean + jax.grad(value)(w)
        return w - 0.1 * mean, mean

    w, x = parameters()["layers"]["w"], jnp.asarray(np.eye(16, WIDTH), "float32")
    roles = {"params": "w", "optimizer": "mean", "batch": "x"}
    asked: dict[str, Any] = {"mesh": {"stage": 4, "data": 2}, "tactics": "pipeline:stage", "microbatches": 4}
    plan = shardwise.plan(step, w, w, x, offload=True, roles=roles, **asked)
    assert plan.array("mean").host and plan.array("mean").spec == plan.array("w").spec == (("stage",), (), ())
    for result, same in zip(plan.jit(step)(w, w, x), jax.jit(step)(w, w, x), strict=True):
        np.testing.assert_allclose(result, np.asarray(same), rtol=1e-5, atol=1e-7)


def test_what_cannot_be_offloaded_is_refused() -> None:
    def unstacked(w: Any, mean: Any, x: Any) -> Any:
        mean = 0.9 * mean + jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.1 * mean, mean

    def mixed(w: Any, mean: Any, x: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sum((x @ w[0] @ w[1]) ** 2))(w)
        mean = 0.9 * mean / jnp.linalg.norm(mean) + gradient
        return w - 0.1 * mean, mean

    shapes = [jax.ShapeDtypeStruct(size, "float32") for size in [(512, 512), (64, 512), (2, 512, 512)]]
    for fn, w in ((unstacked, shapes[0]), (mixed, shapes[2])):
        with pytest.raises(VariantError, match="whose first one counts layers, updated element by element"):
            shardwise.plan(fn, w, w, shapes[1], mesh={"data": 2}, tactics=[], offload=True)
    with pytest.raises(VariantError, match="which arguments are the optimizer's state"):
        shardwise.plan(lambda x: x.sum(), shapes[0], mesh={"data": 2}, tactics=[], offload=True)
    with pytest.raises(VariantError, match="offload is True, False or 'auto', not 'yes'"):
        shardwise.plan(lambda x: x * 2, shapes[0], mesh={"data": 2}, offload="yes")


def large() -> tuple[Any, ...]:
    w = jax.ShapeDtypeStruct((16, 2048, 2048), "float32")
    params = {
        "embed": jax.ShapeDtypeStruct((300, 2048), "float32"),
        "layers": {"w": w, "scale": w.update(shape=(16, 1))},
    }
    return params, jax.eval_shape(ADAM.init, params), jax.ShapeDtypeStruct((64, 300), "float32")


def test_it_rescues_what_fits_no_other_way() -> None:
    options: dict[str, Any] = {"mesh": {"data": 4}, "topology": "v5e:2x2", "donate_argnums": (0, 1)}
    options["memory_limit"] = "260MiB"  # parameters, both moments and gradients take 64 MiB each
    step = training(ADAM)
    with pytest.raises(InfeasibleError, match=r"would do \(checked\):\n(.*\n)*  offload=True: \d+"):
        shardwise.plan(step, *large(), **options)
    plan = shardwise.plan(step, *large(), offload="auto", **options)
    assert plan.predicted.fits and plan.variant.offload == ("state",)
    assert "The optimizer's stacked state is in the memory of the host" in str(plan)
    del options["memory_limit"]
    assert not shardwise.plan(step, *large(), offload="auto", **options).variant.offload
