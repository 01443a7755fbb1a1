"""Goals other than the fastest plan (the smallest, the fewest devices, a limit of memory), and Automap's decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.errors import InfeasibleError, PlanError
from shardwise.lowering.decisions import Shard
from shardwise.search.run import Ended
from tests.planner.test_infeasible import looped
from tests.planner.test_plan_search import planned, shapes, small_memory, step

MIB = 2**20


def sliced(nbytes: float, devices: int = 8, **asked: Any) -> shardwise.Plan:
    where = small_memory(f"{devices} v5e", nbytes)
    options: dict[str, Any] = {"topology": where, "budget_evals": 100, "donate_argnums": (0, 1)} | asked
    return shardwise.plan(step, *shapes(), objective="devices", **options)


# Memory.


def test_the_smallest_plan_is_the_smallest_of_all() -> None:
    fastest, smallest = planned(), planned(objective="memory")
    every = planned(objective="memory", method="exhaustive", budget_evals=10_000)  # no decisions of strategies alone
    assert every.search is not None and every.search.ended is Ended.EXHAUSTED
    assert smallest.predicted.peak_bytes <= every.predicted.peak_bytes < fastest.predicted.peak_bytes
    assert smallest.predicted.time_s > fastest.predicted.time_s
    assert smallest.predicted.peak_bytes <= 1.008 * min(row.peak_bytes for row in smallest.baselines)
    assert "the plan has the smallest peak memory that was found" in smallest.notes


def test_the_smallest_plan_may_have_a_longest_time() -> None:
    fastest, smallest = planned().predicted, planned(objective="memory").predicted
    limit = 0.5 * (fastest.time_s + smallest.time_s)
    between = planned(objective="memory", step_time_s=limit)
    assert between.predicted.time_s <= limit and between.predicted.peak_bytes >= smallest.peak_bytes
    every = planned(objective="memory", step_time_s=limit, method="exhaustive")
    assert between.predicted.peak_bytes == every.predicted.peak_bytes <= fastest.peak_bytes
    assert between.notes[0].endswith(f" with a step time of at most {limit:g} s")


def test_no_plan_is_fast_enough() -> None:
    fastest = planned().predicted.time_s
    with pytest.raises(
        InfeasibleError, match=r"^no plan was found that takes at most 1e-06 s: [0-9.]+ s\n--allow-infeasible"
    ):
        planned(objective="memory", step_time_s=1e-6)
    plan = planned(objective="memory", step_time_s=1e-6, allow_infeasible=True)
    assert (
        plan.predicted.time_s == pytest.approx(fastest, rel=0.01) and "no plan was found that takes" in plan.notes[-1]
    )


def test_the_smallest_plan_may_need_another_mesh_or_variant() -> None:
    args: list[Any] = [
        {"w": jax.ShapeDtypeStruct((8, 256, 256), "float32")},
        jax.ShapeDtypeStruct((4096, 256), "float32"),
    ]
    where = small_memory("v5e:2x2", 2**34)  # nothing is kept on the chip
    asked: dict[str, Any] = {"topology": where, "budget_evals": 100, "donate_argnums": (0,), "objective": "memory"}
    plain = shardwise.plan(looped, *args, **asked)
    varied = shardwise.plan(looped, *args, remat="auto", microbatches="auto", **asked)
    assert plain.search is not None and all(
        plain.predicted.peak_bytes <= 1.001 * (mesh.peak_bytes or 0) for mesh in plain.search.meshes
    )
    assert varied.predicted.peak_bytes < 0.7 * plain.predicted.peak_bytes and varied.variant.microbatches > 1


# Devices.


def test_the_fewest_devices_that_fit() -> None:
    enough = sliced(300 * MIB)
    count = enough.mesh.devices
    assert (
        1 < count < 8 and enough.predicted.fits and enough.predicted.usable_bytes == pytest.approx(300 * MIB, rel=1e-6)
    )
    assert "the plan is for the fewest devices on which one was found that fits" in enough.notes
    lacking = [note for note in enough.notes if note.startswith("v5e:")]
    assert len(lacking) == count.bit_length() - 1 and lacking[0].startswith("v5e:1x1: at least ")
    with pytest.raises(InfeasibleError):
        shardwise.plan(step, *shapes(), topology=small_memory(f"{count // 2} v5e", 300 * MIB), donate_argnums=(0, 1))


def test_the_fewest_devices_that_are_fast_enough() -> None:
    one = sliced(2**34)
    assert one.mesh.devices == 1
    four = sliced(2**34, step_time_s=0.3 * one.predicted.time_s)
    assert four.mesh.devices == 4 and four.predicted.time_s <= 0.3 * one.predicted.time_s
    assert [note for note in four.notes if "if all devices share the work evenly" in note]
    with pytest.raises(InfeasibleError, match="that takes at most 1e-05 s") as caught:
        sliced(2**34, step_time_s=1e-5)
    assert "v5e:2x2: at least " in str(caught.value)


def test_no_slice_fits() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan can fit: .*v5e:2x4 has") as caught:
        sliced(MIB)
    assert "v5e:2x2: at least " in str(caught.value)


def test_slices_with_open_axes() -> None:
    plan = sliced(300 * MIB, mesh={"data": None, "model": 2})
    assert plan.mesh.names == ("data", "model") and plan.mesh.sizes[1] == 2
    assert any("its sizes multiply to 2" in note for note in plan.notes if note.startswith("v5e:1x1: "))


# Memory limit.


@pytest.mark.parametrize("limit", [207 * MIB, "207MiB", " 0.2021484375 GiB"])
def test_a_memory_limit_replaces_the_memory_of_a_device(limit: Any, tmp_path: Path) -> None:
    free, plan = planned(), planned(memory_limit=limit)
    assert plan.predicted.usable_bytes == 207 * MIB >= plan.predicted.peak_bytes
    assert free.predicted.peak_bytes > 207 * MIB and plan.predicted.time_s > free.predicted.time_s
    assert any(not row.fits for row in plan.baselines) and "of 207.00 MiB" in str(plan)
    plan.save(tmp_path / "plan.json")
    again = shardwise.load_plan(tmp_path / "plan.json").bind(step, *shapes())
    assert again.inquiry.settle(plan.choices).predicted.usable_bytes == 207 * MIB


def test_a_memory_limit_in_the_message() -> None:
    with pytest.raises(InfeasibleError, match=r"v5e:2x2 has 32.00 MiB(.|\n)*would do \(checked\):\n"):
        planned(memory_limit="32MiB")
    with pytest.raises(InfeasibleError, match=r"has 32.00 MiB"):
        planned(memory_limit="32MiB", mesh={"x": 4}, topology=None)


# What cannot be.


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"objective": "speed"}, "objective is one of 'time', 'memory', 'devices', not 'speed'"),
        ({"step_time_s": 1.0}, "with objective='time' the plan is the fastest that is found"),
        ({"objective": "memory", "step_time_s": 0}, "step_time_s is a number of seconds above zero, not 0"),
        ({"objective": "memory", "step_time_s": "1"}, "step_time_s is a number of seconds above zero, not '1'"),
        ({"objective": "devices"}, "objective='devices' chooses the number of devices: leave out the mesh"),
        ({"objective": "devices", "topology": None, "mesh": None}, "objective='devices' needs a topology"),
        ({"memory_limit": "much"}, "memory_limit is a number of bytes, or text such as '12GiB', not 'much'"),
        ({"memory_limit": 0}, "memory_limit is a number of bytes"),
        (
            {"memory_limit": "17GiB"},
            "memory_limit is 18,253,611,008 bytes, which is more than the 17,179,869,184 of v5e",
        ),
    ],
)
def test_wrong_goals(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(**asked)
    assert says in str(caught.value)


def test_jit_takes_goals_but_not_devices() -> None:
    double: Any = shardwise.jit(lambda x: x * 2, mesh={"data": 1}, objective="memory", memory_limit="1MiB")
    assert double(jnp.arange(4)).tolist() == [0, 2, 4, 6]
    assert double.plan(jnp.arange(4)).predicted.usable_bytes == MIB
    with pytest.raises(PlanError, match="uses the devices that are there"):
        shardwise.jit(lambda x: x, objective="devices", topology="v5e:2x2")


# Automap.


def test_automap_is_a_method() -> None:
    """It decides on dimensions of arguments one by one, and starts from nothing."""
    plan = planned(method="automap")
    program = plan.inquiry.analysis.program
    of_arguments = {c for a in program.arguments for c in plan.inquiry.analysis.value_colors[a.value]}
    shards = [d for d in plan.choices if isinstance(d, Shard)]
    assert shards and all(len(d.colors) == 1 and set(d.colors) <= of_arguments and not d.sides for d in shards)
    assert plan.search is not None and plan.search.method == "automap"
    assert plan.predicted.time_s > 0.9 * planned(method="exhaustive").predicted.time_s, "finer decisions gain little"
    unsharded = planned(tactics=[])
    assert planned(method="automap", budget_evals=0).predicted.time_s == unsharded.predicted.time_s
    assert planned(budget_evals=0).predicted.time_s < unsharded.predicted.time_s


def test_a_plan_that_only_just_fits_says_so() -> None:
    def tight(limit: float) -> tuple[int, list[str]]:
        x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
        asked: dict[str, Any] = {"mesh": {"data": 4}, "topology": "v5e:2x2", "tactics": "dp", "memory_limit": limit}
        plan = shardwise.plan(lambda x: (x @ x.T).sum(), x, roles={"batch": "x"}, **asked)
        assert plan.predicted is not None
        return plan.predicted.peak_bytes, [note for note in plan.notes if note.startswith("tight")]

    peak_bytes, notes = tight(2**34)
    assert not notes
    (note,) = tight(peak_bytes * 1.04)[1]
    assert note.startswith("tight: the peak is between ") and "memory_limit" in note


def test_a_gather_of_narrow_rows_that_may_be_padded_says_so() -> None:
    """The compiler takes 130 MiB for the rows of three, 7 MiB without padding (tests/verification/test_tpu.py)."""

    def notes(features: int, limit: str) -> list[str]:
        table = jax.ShapeDtypeStruct((2**16, features), jnp.float32)
        rows = jax.ShapeDtypeStruct((2**18,), jnp.int32)
        plan = shardwise.plan(lambda t, i: (t[i] * 2).sum(), table, rows, topology="v5e:1x1", memory_limit=limit)
        return [note for note in plan.notes if note.startswith("tight")]

    assert notes(3, "100MiB") and not notes(3, "200MiB")
    assert not notes(128, "400MiB")
