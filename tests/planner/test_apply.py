"""The truth is what the devices compute: sharded runs equal the plain run, for random decisions on several meshes."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import shardwise as sw
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, Traced, trace
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Decision, Keep, Shard
from tests.planner.decisions import plan_decisions
from tests.planner.programs import CASES

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2})


def random_decisions(analysis: Analysis, mesh: MeshAxes, seed: int) -> list[Decision]:
    """A few groups on random axes, with random sides; sometimes an argument is kept whole."""
    rng = random.Random(seed)
    groups = [g for g in analysis.groups if g.matters]
    made: list[Decision] = []
    for axis in mesh.names:
        for group in rng.sample(groups, min(len(groups), rng.randint(1, 3))):
            made.append(Shard(group.colors, axis, tuple((bit, rng.randint(0, 1)) for bit in group.bits)))
    rng.shuffle(made)
    if rng.random() < 0.3:
        argument = rng.choice(analysis.program.arguments)
        made.append(Keep((argument.value,), rng.choice(mesh.names)))
    return made


@cache
def plain(name: str) -> tuple[Any, tuple[Any, ...], Traced, Analysis, list[np.ndarray]]:
    """A program, its arguments, its trace and analysis, and the results of the plain run."""
    fn, args = CASES[name]()
    traced = trace(fn, args, {}, JitOptions())
    return fn, args, traced, analyze_program(lower(traced)), jax.tree.leaves(jax.device_get(jax.jit(fn)(*args)))


def check(name: str, mesh: dict[str, int], seed: int, partitioner: str = "shardwise") -> None:
    fn, args, traced, analysis, expected = plain(name)
    axes = MeshAxes.of(mesh)
    plan = plan_decisions(traced, analysis, axes, random_decisions(analysis, axes, seed))
    found = jax.tree.leaves(plan.jit(fn, partitioner=partitioner)(*args))
    for array, want, have in zip(plan.outputs, expected, found, strict=True):
        want, have = np.asarray(want), np.asarray(have)
        scale = float(np.max(np.abs(want), initial=1e-3))
        np.testing.assert_allclose(
            have, want, rtol=0, atol=2e-5 * scale, err_msg=f"{array.path} under {plan.decisions}"
        )


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.values())))
@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_plain(name: str, mesh: dict[str, int], seed: int) -> None:
    check(name, mesh, seed)


@pytest.mark.slow  # fourteen times as many seeds as the test above
@pytest.mark.parametrize("seed", range(2, 30))
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m.values())))
@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_plain_at_length(name: str, mesh: dict[str, int], seed: int) -> None:
    check(name, mesh, seed)


def test_uneven_scatters_are_stated() -> None:
    """XLA aborts the process where a scatter's batch is cut unevenly (7 rows over 8 devices)."""
    import jax.numpy as jnp

    import shardwise
    from shardwise.tactics.strategies import Shard as ShardTactic

    weights = jnp.arange(56.0).reshape(7, 8)
    fn = jax.grad(lambda x: (jnp.sort(x[1:], 1) * weights).sum())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    plan = shardwise.plan(fn, x, mesh={"x": 8}, tactics=[ShardTactic("x", 0, "x")])
    np.testing.assert_array_equal(plan.jit(fn)(x), fn(x))


@pytest.mark.parametrize("new", [np.asarray, jax.numpy.asarray], ids=["numpy", "uncommitted"])
def test_new_arrays_and_results_share_a_compilation(new: Any, caplog: pytest.LogCaptureFixture) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    w, x = np.ones((16, 16), np.float32), np.ones((32, 16), np.float32)
    planned = sw.plan(step, w, x, mesh={"data": 8}, tactics="fsdp").jit(step)
    w, expected = new(w), jax.jit(step)(step(w, x), x)
    with jax.log_compiles():
        found = planned(planned(w, new(x)), new(x))
    compiled = [r for r in caplog.records if r.getMessage().startswith("Compiling jit(run)")]
    assert len(compiled) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_inside_of_other_transformations() -> None:
    """A planned step in a jitted function, in a loop over steps, and mapped."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)

    w, x = jax.numpy.ones((16, 16)), jax.numpy.ones((32, 16))
    planned = sw.plan(step, w, x, mesh={"data": 8}, tactics="fsdp").jit(step)

    def loop(fn: Any) -> Any:
        return jax.lax.scan(lambda w, x: (fn(w, x), None), w, jax.numpy.stack([x, 2 * x]))[0]

    np.testing.assert_allclose(jax.jit(lambda w: planned(w, x))(w), step(w, x), rtol=1e-5)
    np.testing.assert_allclose(loop(planned), loop(step), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(planned, (None, 0))(w, x[None])[0], step(w, x), rtol=1e-5)


@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
def test_the_mesh_of_sharded_arguments_is_used(kind: Any) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    w, x = (
        jax.device_put(np.ones((16, 16), np.float32), jax.NamedSharding(mesh, P)) for P in map(jax.P, ("data", None))
    )
    plan = sw.plan(lambda w, x: w @ x, w, x, budget_evals=10)
    assert (plan.mesh.names, plan["w"]) == (("data", "model"), jax.P("data"))
    np.testing.assert_allclose(plan.jit(lambda w, x: w @ x)(w, x), np.full((16, 16), 16.0))


def test_a_state_that_is_sharded_already_is_planned_for_another_batch() -> None:
    """The last batch of an epoch: the state has the shardings of the plan before, on a mesh that was searched for."""
    step = sw.jit(
        lambda w, x: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), objective="memory", budget_evals=20
    )
    w = step(np.ones((64, 64), np.float32), np.ones((32, 64), np.float32))
    assert any(w.sharding.spec)
    assert step(w, np.ones((24, 64), np.float32)).shape == (64, 64)
