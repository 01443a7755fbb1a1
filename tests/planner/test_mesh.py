"""Meshes that are found: which are looked at, how the budget is shared out, and what comes out of it."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.errors import DecisionError, InfeasibleError, MeshError
from shardwise.hardware.topology import topology
from shardwise.planner.mesh import OpenMesh, meshes
from shardwise.search.run import Ended, Improvement
from shardwise.tactics.strategies import DataParallel, Megatron, Shard
from tests.planner.test_plan_search import shapes, small_memory, step

P = jax.sharding.PartitionSpec


def sizes(text: str, mesh: Any = None, ordered: bool = False) -> list[tuple[int, ...]]:
    wanted = OpenMesh.of(mesh)
    assert wanted is not None
    return [p.mesh.sizes for p in meshes(wanted, topology(text), ordered)]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("v5e:1", [(1,)]),
        ("v5e:2x4", [(8,), (2, 4), (2, 2, 2)]),
        ("v5e:4x4", [(16,), (4, 4), (2, 8), (2, 2, 4)]),
        ("16 v5e", [(16,), (4, 4), (2, 8), (2, 2, 4)]),
        ("v5p:2x2x2", [(8,), (2, 4), (2, 2, 2)]),
        ("h100:8", [(8,), (2, 4), (2, 2, 2)]),
    ],
)
def test_the_meshes_that_lie_well(text: str, want: list[tuple[int, ...]]) -> None:
    assert sizes(text) == want


def test_a_torus_is_cut_once_at_most() -> None:
    found = sizes("v5e:8x8")
    assert found[:2] == [(64,), (8, 8)] and (2, 4, 8) in found and (4, 4, 4) not in found


def test_of_two_tiers_both_orders_count() -> None:
    found = sizes("h100:8x4")
    assert {(4, 8), (8, 4)} <= set(found) and all(math.prod(s) == 32 for s in found) and len(found) <= 16


def test_axes_with_names_and_sizes() -> None:
    assert sizes("v5e:4x4", {"data": None, "model": 4}, True) == [(4, 4)]
    assert sizes("v5e:2x2", {"data": -1, "model": None}, True) == [(1, 4), (4, 1), (2, 2)]
    assert sizes("v5e:4x4", {"data": 4, "model": None, "more": 1}, True) == [(4, 4, 1)]
    assert OpenMesh.of({"data": 4}) is None and str(OpenMesh.of({"data": None, "model": 2})) == "data ? × model 2"
    with pytest.raises(MeshError, match=r"16 devices: the mesh data \? × model 3 cannot have as many"):
        sizes("v5e:4x4", {"data": None, "model": 3})
    with pytest.raises(MeshError, match="axis 'model' has size 0"):
        OpenMesh.of({"data": None, "model": 0})


def planned(**asked: Any) -> shardwise.Plan:
    asked = {"topology": "v5e:2x4", "budget_evals": 300, "donate_argnums": (0, 1)} | asked
    args = asked.pop("args", None) or shapes(8192, 512)
    return shardwise.plan(step, *args, **asked)


def test_a_mesh_is_found_for_a_topology() -> None:
    plan = planned()
    assert plan.mesh.devices == 8 and sorted(plan.device_order) == list(range(8)) and plan.placement
    log = plan.search
    assert log is not None and {m.mesh.sizes for m in log.meshes} == {(8,), (2, 4), (2, 2, 2)}
    assert log.meshes[0].mesh == plan.mesh and log.improvements[-1].mesh == plan.mesh
    assert log.meshes[0].time_s == min(m.time_s for m in log.meshes if m.time_s is not None)
    for tried in log.meshes[1:]:
        given = dict(zip(tried.mesh.names, tried.mesh.sizes, strict=True))
        alone = planned(mesh=given, budget_evals=150)
        assert plan.predicted.time_s <= alone.predicted.time_s, "a longer search on another mesh finds nothing better"
    assert planned().to_json() == plan.to_json()


def test_the_budget_is_for_all_meshes_together() -> None:
    plan = planned(budget_evals=40, method="greedy")
    assert plan.search is not None and plan.search.evaluations <= 40 + len(plan.search.meshes)


def test_some_axes_are_given() -> None:
    plan = planned(mesh={"data": None, "model": 2})
    assert plan.mesh.names == ("data", "model") and plan.mesh.sizes == (4, 2)


def test_the_best_mesh_for_tactics_without_a_search() -> None:
    asked: dict[str, Any] = {
        "tactics": [DataParallel("data"), Megatron("model")],
        "roles": {"batch": "x", "params": "params"},
    }
    plan = planned(mesh={"data": None, "model": None}, **asked)
    log = plan.search
    assert log is not None and log.evaluations == 0 and log.ended is Ended.EXHAUSTED
    assert [m.mesh.sizes for m in log.meshes if m.time_s is None] == []
    for tried in log.meshes:
        given = dict(zip(tried.mesh.names, tried.mesh.sizes, strict=True))
        assert plan.predicted.time_s <= planned(mesh=given, **asked).predicted.time_s


def test_meshes_that_cannot_be_used_are_left_out_with_their_reasons() -> None:
    args = shapes(8192, 6)
    plan = planned(args=args, mesh={"data": None, "model": None}, pins={"x": P("data")})
    assert plan.mesh.sizes[0] in (1, 2) and plan.search is not None
    why = {m.mesh.sizes: m.why for m in plan.search.meshes if m.why}
    assert set(why) == {(4, 2), (8, 1)} and all("size 6 does not divide" in text for text in why.values())
    pins = {"x": P("data"), "params/up": P(None, "model")}
    with pytest.raises(MeshError) as caught:
        planned(args=shapes(12, 7), mesh={"data": None, "model": None}, pins=pins)
    text = str(caught.value)
    assert "no mesh of v5e:2x4 can be used" in text and "x[0]: size 7 does" in text and "up[1]: size 12 does" in text


def test_the_same_fault_everywhere_is_said_once() -> None:
    with pytest.raises(DecisionError, match="expert: the program has no parameter dimension"):
        planned(mesh={"data": None, "model": None}, tactics="expert:data")


def test_without_a_topology_the_devices_at_hand_are_used() -> None:
    assert planned(topology=None).predicted.hardware == "cpu:8"
    assert planned(topology=None, mesh={"data": None, "model": 2}).mesh.sizes == (4, 2)
    larger = planned(topology=None, mesh={"data": 16})
    assert larger.predicted.hardware == "16 cpu" and not larger.notes
    tpu = [SimpleNamespace(device_kind="NVIDIA L4", platform="gpu")] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda: tpu)
        plan = planned(topology=None)
    assert plan.predicted.hardware == "a100-40:4"
    assert plan.notes[0] == "there is no profile of NVIDIA L4: the plan is for a100-40:4; topology=... names others"


def test_what_devices_do_not_share_is_noted() -> None:
    def solve(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.linalg.inv(w) @ x

    shapes = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    where = {"mesh": {"data": 4, "model": 2}, "topology": "v5e:2x4"}
    notes = shardwise.plan(solve, *shapes, tactics=[Shard("x", 1, "data")], **where).notes
    assert notes[0] == "nothing is sharded over model: its 2 devices compute the same"
    assert any(
        re.fullmatch(r"lu at test_mesh.py:\d+ is computed whole on each device: \d+% of the step time", n)
        for n in notes
    )
    (note,) = shardwise.plan(solve, *shapes, tactics=[], **where).notes
    assert note == "nothing is sharded: each of the 8 devices computes the whole program"
    assert not shardwise.plan(solve, *shapes, mesh={"data": 1}, tactics=[]).notes


def test_nothing_fits_on_any_mesh() -> None:
    with pytest.raises(InfeasibleError, match=r"(?s)no plan can fit.*on other meshes:\n  .*a 2 × b 2 × c 2"):
        planned(topology=small_memory("v5e:2x4", 2**20), budget_evals=60)


def test_an_interrupt_gives_the_best_mesh_so_far() -> None:
    seen: list[Improvement] = []

    def stop(improvement: Improvement, share: float) -> None:
        seen.append(improvement)
        raise KeyboardInterrupt

    plan = planned(progress=stop)
    assert plan.search is not None and plan.search.ended is Ended.INTERRUPTED and "interrupted" in plan.notes[0]
    assert sum(not m.why for m in plan.search.meshes) == 1


def test_a_found_mesh_runs() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(64, 128), (256, 64)])
    planned = shardwise.jit(fn, topology="v5e:2x4", budget_evals=60)
    np.testing.assert_allclose(planned(w, x), fn(w, x), rtol=1e-4, atol=1e-5)
    plan = planned.plan(w, x)
    used = planned.planned(w, x).mesh.devices
    assert tuple(d.id for d in used.reshape(-1)) == plan.device_order


def test_axes_are_named_by_what_they_carry() -> None:
    plan = planned(args=shapes(65536, 512, 2048))
    assert set(plan.mesh.names) <= {"data", "fsdp", "model"} and plan.search is not None
    assert plan.search.meshes[0].mesh == plan.mesh and plan.search.improvements[-1].mesh == plan.mesh
    for name in plan.mesh.names:
        batch, params = any(name in axes for axes in plan.array("x").spec), name in str(plan.array("params/up").spec)
        assert {"data": batch and not params, "fsdp": batch and params, "model": params and not batch}[name]


def test_axes_that_somebody_names_keep_their_names() -> None:
    args = shapes(65536, 512, 2048)
    assert planned(args=args, pins={"x": P("a")}).mesh.names[0] == "a"
    assert planned(args=args, tactics="dp:a,auto").mesh.names[0] == "a"


def blocked_attention(params: dict[str, Any], x: Any) -> Any:
    """Attention to a position's block of 1,024 and the one before it, in scanned layers; the gradient step."""
    batch, length, width, heads, block = *x.shape, 32, 1024

    def layer(x: Any, p: dict[str, Any]) -> tuple[Any, None]:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, p[name]) for name in "qkv")
        q, k, v = (a.reshape(batch, length // block, block, heads, width // heads) for a in (q, k, v))
        before = [jnp.pad(a, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1] for a in (k, v)]
        keys, values = (jnp.concatenate([a, b], 2) for a, b in zip(before, (k, v), strict=True))
        scores = jax.nn.softmax(jnp.einsum("bnqhk,bnthk->bnhqt", q, keys))
        y = jnp.einsum("bnhqt,bnthk->bnqhk", scores, values).reshape(batch, length, heads, width // heads)
        x = x + jnp.einsum("bthk,hkd->btd", y, p["o"])
        return x + jax.nn.silu(x @ p["up"]) @ p["down"], None

    def loss(params: dict[str, Any]) -> Any:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def test_finer_meshes_start_from_what_was_found_on_coarser_ones() -> None:
    """No named strategy fits here, and alone the searches of the finer meshes find nothing that fits."""
    shapes = dict.fromkeys("qkv", (8, 4096, 32, 128)) | {"o": (8, 32, 128, 4096)}
    shapes |= {"up": (8, 4096, 8192), "down": (8, 8192, 4096)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((1, 65536, 4096), "float32")
    plan = shardwise.plan(blocked_attention, params, x, topology="v5e:4x4")
    assert plan.search is not None and len(plan.search.meshes) > 3
    assert all(tried.fits for tried in plan.search.meshes), plan.search.meshes
