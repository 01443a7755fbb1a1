"""What a plan is predicted to take, taken apart, and written and read again."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise.errors import PlanError
from shardwise.tactics.strategies import FSDP, DataParallel
from tests.plans.files import signed

ROLES = {"batch": "x", "params": "params"}


def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    def loss(p: dict[str, jax.Array]) -> jax.Array:
        def layer(y: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(y @ w), None

        return jnp.mean(jax.lax.scan(layer, x, p["layers"])[0] @ p["head"])

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


SHAPES = (
    {
        "layers": jax.ShapeDtypeStruct((6, 512, 512), "float32"),
        "head": jax.ShapeDtypeStruct((512, 4096), "float32"),
    },
    jax.ShapeDtypeStruct((256, 512), "float32"),
)


@pytest.fixture(scope="module")
def plan() -> shardwise.Plan:
    return shardwise.plan(
        step,
        *SHAPES,
        mesh={"data": 4, "model": 4},
        topology="v5e:4x4",
        tactics=[DataParallel("data"), FSDP("model")],
        roles=ROLES,
        donate_argnums=0,
    )


def test_the_parts_add_up(plan: shardwise.Plan) -> None:
    p = plan.predicted
    assert p.serial_s == pytest.approx(p.compute_s + p.comm_s)
    assert p.overlapped_s == max(p.compute_s, p.comm_s) <= p.time_s <= p.serial_s
    for by in ("op", "source", "kind", "region"):
        assert sum(p.breakdown(by).values()) == pytest.approx(p.serial_s)
    assert p.breakdown("kind")["compute"] == pytest.approx(p.compute_s)
    assert any(name.startswith("scan") for name in p.breakdown("region"))
    assert sum(c.time_s for c in p.collectives) == pytest.approx(p.comm_s)
    assert 0 < p.utilization < 1


def test_the_collectives_are_those_of_the_plan(plan: shardwise.Plan) -> None:
    moved = {(c.kind, c.axes): (c.count, c.nbytes) for c in plan.predicted.collectives}
    assert {key: (n, pytest.approx(b, rel=1e-6)) for key, (n, b) in plan.moved().items()} == moved


def test_what_is_alive_at_the_peak(plan: shardwise.Plan) -> None:
    p = plan.predicted
    assert p.fits and sum(a.nbytes for a in p.alive) == p.peak_bytes == max(p.curve)
    assert {"params/head", "params/layers"} <= {a.label for a in p.alive}


def test_the_trace_is_as_long_as_the_step(plan: shardwise.Plan, tmp_path: Path) -> None:
    plan.timeline(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    compute = sum(e["dur"] for e in spans if e["cat"] == "compute")
    assert compute == pytest.approx(plan.predicted.compute_s * 1e6)
    last = spans[-1]
    hidden = last["dur"] - (plan.predicted.time_s * 1e6 - last["ts"])
    assert -1e-6 <= hidden <= last["dur"]
    assert max(e["args"]["bytes"] for e in events if e["ph"] == "C") <= plan.predicted.peak_bytes


def test_predictions_are_saved_with_their_plan(plan: shardwise.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = shardwise.load_plan(tmp_path / "plan.json")
    assert loaded.predicted == plan.predicted and loaded.placement == plan.placement
    with pytest.raises(PlanError, match="plan again to take them apart"):
        loaded.predicted.breakdown()
    with pytest.raises(PlanError, match="broken down by op, source, kind, region"):
        plan.predicted.breakdown("colour")


def test_where_axes_lie_and_in_which_order_devices_stand(plan: shardwise.Plan) -> None:
    assert plan.placement == ("data 4: ICI x 4", "model 4: ICI y 4")
    order = np.array(plan.device_order).reshape(4, 4)
    assert sorted(plan.device_order) == list(range(16))
    assert (np.diff(order[:, 0]) == 1).all(), "x is fastest in the numbers of devices"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 0, *range(2, 16)], "every device once"),
        ([*range(8)], "8 devices for a mesh of 16"),
        ("many", "expected a list"),
    ],
)
def test_a_wrong_device_order_is_refused(plan: shardwise.Plan, tmp_path: Path, order: object, message: str) -> None:
    data = json.loads(plan.to_json()) | {"device_order": order}
    (tmp_path / "plan.json").write_text(signed(data))
    with pytest.raises(PlanError, match=message):
        shardwise.load_plan(tmp_path / "plan.json")


def test_one_device_of_a_larger_memory_holds_more() -> None:
    small, large = (
        shardwise.plan(step, *SHAPES, mesh={"x": 8}, tactics=[], topology=f"8 {name}").predicted
        for name in ("v5e", "v5p")
    )
    assert small.usable_bytes < large.usable_bytes and small.comm_s == large.comm_s == 0


def test_a_mesh_that_does_not_fit_the_topology() -> None:
    with pytest.raises(shardwise.errors.ShardwiseError, match="has 8 devices and v5e:4x4 has 16"):
        shardwise.plan(step, *SHAPES, mesh={"x": 8}, topology="v5e:4x4")
    with pytest.raises(shardwise.errors.ShardwiseError, match="v5e"):
        shardwise.plan(step, *SHAPES, mesh={"x": 8}, topology="v5:4x2")
