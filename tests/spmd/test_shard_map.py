"""``shard_map`` in the user's program: its specs are decisions, its body is inlined, its collectives are counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import shardwise
from shardwise.errors import MeshError
from tests.spmd.emitted import emitted, predicted

P: Any = PartitionSpec
SIZES = {"data": 2, "seq": 4}


def mesh() -> Any:
    return jax.make_mesh((2, 4), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)


def ring_attention(q: Any, k: Any, v: Any) -> Any:
    """Keys and values go round while the queries stay."""
    ring = [(i, (i + 1) % SIZES["seq"]) for i in range(SIZES["seq"])]

    def local(q: Any, k: Any, v: Any) -> Any:
        b, s, h, _ = q.shape

        def turn(carry: Any, _: Any) -> Any:
            k, v, most, total, out = carry
            scores = jnp.einsum("bshk,bthk->bhst", q, k) / np.float32(np.sqrt(q.shape[-1]))
            new = jnp.maximum(most, scores.max(-1))
            share, shrink = jnp.exp(scores - new[..., None]), jnp.exp(most - new)
            out = out * shrink.transpose(0, 2, 1)[..., None] + jnp.einsum("bhst,bthk->bshk", share, v)
            k, v = (jax.lax.ppermute(x, "seq", ring) for x in (k, v))
            return (k, v, new, total * shrink + share.sum(-1), out), None

        start = (k, v, jnp.full((b, h, s), -1e9), jnp.zeros((b, h, s)), jnp.zeros_like(q))
        (_, _, _, total, out), _ = jax.lax.scan(turn, start, None, length=SIZES["seq"])
        return out / total.transpose(0, 2, 1)[..., None]

    spec = P("data", "seq", None, None)
    return jax.shard_map(local, mesh=mesh(), in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)


def plain_attention(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / np.float32(np.sqrt(q.shape[-1]))
    return jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores), v)


def step_with(attention: Any) -> Any:
    def loss(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
        return (jnp.einsum("bshk,hkd->bsd", attention(q, k, v), w["o"]) ** 2).mean()

    return lambda w, x: (loss(w, x), jax.grad(loss)(w, x))


def arguments(batch: int = 4, length: int = 32, heads: int = 4, head: int = 8, d: int = 16) -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    w = {name: draw.normal(size=(d, heads, head)).astype(np.float32) / 4 for name in "qkv"}
    w["o"] = draw.normal(size=(heads, head, d)).astype(np.float32) / 6
    return w, draw.normal(size=(batch, length, d)).astype(np.float32)


def test_a_ring_attention_step_is_planned_and_computed() -> None:
    step, args = step_with(ring_attention), arguments()
    plan = shardwise.plan(step, *args, mesh=SIZES, budget_evals=50)
    assert plan.array("x").spec == (("data",), ("seq",), ())
    kinds = {kind for kind, _ in plan.moved()}
    assert kinds == {"all-reduce", "collective-permute"}, "batch and sequence stay sharded outside of the ring"
    planned = plan.jit(step)
    assert emitted(jax.make_jaxpr(planned.inline)(*args)) == predicted(plan)
    for want, found in zip(jax.tree.leaves(jax.jit(step)(*args)), jax.tree.leaves(planned(*args)), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-5)
    for want, found in zip(
        jax.tree.leaves(jax.jit(step_with(plain_attention))(*args)), jax.tree.leaves(planned(*args)), strict=True
    ):
        np.testing.assert_allclose(found, want, atol=1e-4)


def test_its_memory_and_permutes_are_as_compiled() -> None:
    """On host devices: permutes exactly; memory within a tenth, as XLA's host compiler reports it."""
    step, args = step_with(ring_attention), arguments(batch=4, length=1024, heads=4, head=32, d=128)
    plan = shardwise.plan(step, *args, mesh=SIZES, budget_evals=50)
    found = shardwise.verify(plan, step, *args, run=False)
    permutes = next(r for r in found.rows if r.kind == "collective-permute")
    assert permutes.compiled_bytes == pytest.approx(permutes.predicted_bytes, rel=0.05)


def test_collectives_of_every_kind_are_counted() -> None:
    def local(x: Any) -> Any:
        total = jax.lax.psum(x.sum(), "seq") + jax.lax.pmax(x.max(), "data")
        gathered = jax.lax.all_gather(x, "seq", axis=0, tiled=True)
        scattered = jax.lax.psum_scatter(gathered, "seq", scatter_dimension=0, tiled=True)
        turned = jax.lax.all_to_all(scattered, "seq", split_axis=1, concat_axis=0, tiled=True)
        return turned + total

    def fn(x: Any) -> Any:
        mapped = jax.shard_map(
            local, mesh=mesh(), in_specs=P(("data", "seq")), out_specs=P("data", "seq"), check_vma=False
        )
        return mapped(jnp.tanh(x)) * 2

    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    plan = shardwise.plan(fn, x, mesh=SIZES, tactics=[])
    planned = plan.jit(fn)
    np.testing.assert_allclose(planned(x), jax.jit(fn)(x), atol=1e-4)
    assert emitted(jax.make_jaxpr(planned.inline)(x)) == predicted(plan)
    assert {kind for kind, _ in plan.moved()} >= {"all-gather", "reduce-scatter", "all-to-all", "all-reduce"}


def test_a_mesh_of_another_size_is_refused() -> None:
    step, args = step_with(ring_attention), arguments()
    with pytest.raises(MeshError, match="has the axes data 2 × seq 4, and the plan's mesh has other sizes"):
        shardwise.plan(step, *args, mesh={"data": 4, "seq": 4}, tactics=[])


def _sum_once(x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c + jax.lax.psum(x, "data"), None), x, None, length=1)[0]


def _grow(x: Any) -> Any:
    return jax.vmap(lambda row: jax.lax.while_loop(lambda c: c.sum() < 4, lambda c: c + jnp.abs(c) + 0.1, row))(x)


@pytest.mark.parametrize("local", [_sum_once, _grow])
@pytest.mark.parametrize("checked", [False, True])
def test_loops_that_are_written_out_know_its_axes(local: Any, checked: bool) -> None:
    fn = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), check_vma=checked)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    plan = shardwise.plan(fn, x, mesh=SIZES, tactics=[])
    planned = plan.jit(fn)
    assert emitted(jax.make_jaxpr(planned.inline)(x)) == predicted(plan)
    np.testing.assert_allclose(planned(x), jax.jit(fn)(x), atol=1e-5)


def _doubled(x: Any) -> Any:
    """No array of this ``shard_map`` is sharded over ``seq``, and its numbers depend on the size of that axis."""
    local = lambda x: jax.lax.psum(x, "seq") * jax.lax.axis_size("seq")  # noqa: E731
    sharded = jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return sharded(x) * np.float32(2)


def test_without_a_mesh_that_of_the_program_is_used() -> None:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    constrain = lambda x: jax.lax.with_sharding_constraint(x * 2, jax.NamedSharding(mesh(), P("data", "seq")))  # noqa: E731
    for fn in (_doubled, constrain):
        plan = shardwise.plan(fn, x, budget_evals=20)
        assert str(plan.mesh) == "data 2 × seq 4"
        np.testing.assert_array_equal(plan.jit(fn)(x), jax.jit(fn)(x))
    assert str(shardwise.plan(constrain, x, topology="v5e:4x4", budget_evals=20).mesh).startswith("data ")


@pytest.mark.parametrize("sizes", [{"data": None, "seq": None}, {"data": 2, "seq": None}])
def test_open_sizes_are_those_of_the_program(sizes: Any) -> None:
    plan = shardwise.plan(_doubled, np.ones((8, 4), np.float32), mesh=sizes, topology="cpu:8", budget_evals=20)
    assert str(plan.mesh) == "data 2 × seq 4"


@pytest.mark.parametrize(
    ("sizes", "problem"), [({"data": 2, "seq": 2}, "other sizes"), ({"data": 2, "b": 4}, "name them alike")]
)
def test_other_axes_are_refused(sizes: Any, problem: str) -> None:
    with pytest.raises(MeshError, match=problem):
        shardwise.plan(_doubled, np.ones((8, 4), np.float32), mesh=sizes, tactics=[])
