"""``shardwise.compare``: strategies and plans side by side, and everything that is wrong with what was given at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.errors import CaptureError, DecisionError, MeshError, PlanError, QueryError, ShardwiseError
from shardwise.hardware.layout import place
from shardwise.hardware.topology import topology
from shardwise.plans.plan import Plan
from shardwise.report.compare import Comparison, comparison_text
from shardwise.tactics.strategies import FSDP, DataParallel

ROLES = {"batch": "x", "params": "w"}
SHAPES = [jax.ShapeDtypeStruct(sizes, "float32") for sizes in ((256, 256), (65536, 256))]


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def another(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def made(fn: Callable[..., Any] = step, tactic: Any = FSDP, **where: Any) -> Plan:
    where = {"mesh": {"data": 4}, "topology": "v5e:2x2", **where}
    return shardwise.plan(fn, *SHAPES, tactics=[tactic("data")], roles=ROLES, **where)


def compared(**given: Any) -> Comparison:
    return shardwise.compare(step, *SHAPES, **{"roles": ROLES, "tactics": ["dp", "fsdp"], **given})


def test_the_best_is_first_and_the_text_is_that_of_the_table() -> None:
    found = compared(plans=[("mine", made(tactic=DataParallel))])
    assert found.ranked[0].name == "plan mine"
    assert {row.name for row in found.rows} == {"plan mine", "dp:data", "fsdp:data", "replicated"}
    times = [row.time_s for row in found.ranked]
    assert times == sorted(times)
    text = str(found)
    assert text.startswith("step on data 4: v5e:2x2, ") and text.index("plan mine") < text.index("fsdp:data")
    assert max(map(len, text.splitlines())) <= 80 and "--all" not in text
    data = json.loads(json.dumps(found.to_json()))
    assert [row["name"] for row in data["rows"]] == [row.name for row in found.ranked]


def test_a_long_table_says_where_the_rest_is() -> None:
    text = str(compared(mesh={"data": 2, "model": 2}, topology="v5e:2x2", tactics=None))
    assert "combinations more: --all or .ranked" in text and "not possible: --all or .refused says why" in text


def test_mirror_images_are_one_row_of_the_table() -> None:
    where: dict[str, Any] = {"topology": "v5e:4x4", "tactics": ["dp", "fsdp", "zero1"]}
    found = compared(mesh={"data": 4, "model": 4}, **where)
    by_name = {row.name: row for row in found.rows}
    pair = {"dp:data,fsdp:model", "dp:model,fsdp:data"}
    (second,) = (row for row in found.rows if row.name in pair and row.mirrors)
    (first,) = pair - {second.name}
    assert second.mirrors == first and second.time_s == by_name[first].time_s and not by_name[first].mirrors
    names = [line.partition("  ")[0].replace(", ", ",") for line in str(found).splitlines()]
    assert first in names and second.name not in names
    assert second.name.replace(",", ", ") in comparison_text(found, every=True)
    text = str(found)
    shown = sum(line.endswith(("yes", "no", "tight")) for line in text.splitlines())
    assert f"and {len(found.rows) - shown} combinations more" in text
    uneven = compared(mesh={"data": 2, "model": 8}, **where)
    assert not any(row.mirrors for row in uneven.rows)


def test_a_plan_of_another_method_says_so() -> None:
    found = shardwise.plan(
        step, *SHAPES, mesh={"data": 4}, topology="v5e:2x2", roles=ROLES, method="greedy", budget_evals=5
    )
    rows = compared(plans=[("found", found), ("mine", made())], tactics=[]).rows
    assert [row.name for row in rows][:2] == ["plan found, greedy", "plan mine"]


def test_plans_come_as_objects_pairs_and_files(tmp_path: Path) -> None:
    plan = made()
    plan.save(file := tmp_path / "saved.json")
    names = [row.name for row in compared(plans=[plan, ("mine", plan), file, str(file)], tactics=[]).rows]
    assert names == ["plan 1", "plan mine", f"plan {file}", "replicated"]
    for one in (plan, file, str(file)):
        assert len(compared(plans=one, tactics=[]).rows) == 2


def test_where_is_taken_from_the_plans() -> None:
    assert (found := compared(plans=[made()])).hardware == "v5e:2x2" and found.mesh == "data 4"
    assert compared(plans=[made(topology=None)]).hardware == "4 cpu"
    # Another mesh of the same devices is named in the row.
    cut = made(mesh={"data": 2, "model": 2})
    found = compared(plans=[made(), ("cut", cut)], mesh={"data": 4})
    assert any(row.name == "plan cut, on data 2 × model 2" for row in found.rows)
    assert compared(topology=place({"data": 4}, topology("v5e:2x2"))).mesh == "data 4"


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({}, MeshError, "say what to compare on: mesh={'data': 4, 'model': 4}, or plans"),
        ({"mesh": {"data": None}}, MeshError, "data ?: strategies are compared on one mesh, give all its sizes"),
        ({"mesh": {"data": 3}, "topology": "v5e:2x2"}, ShardwiseError, "devices"),
        ({"mesh": {"data": 4}, "roles": {"batch": "z"}}, QueryError, "no argument has the path 'z'"),
        ({"mesh": {"data": 4}, "tactics": "dp,fsdpp"}, DecisionError, "'fsdpp' (did you mean 'fsdp'?)"),
        ({"mesh": {"data": 4}, "plans": [3]}, PlanError, "paths of saved plans; number 1 is int"),
        ({"mesh": {"data": 4}, "plans": ["nowhere.json"]}, PlanError, "cannot read nowhere.json"),
    ],
)
def test_wrong_input(given: dict[str, Any], kind: type[ShardwiseError], says: str) -> None:
    with pytest.raises(kind) as caught:
        compared(**given)
    assert says in str(caught.value)


def test_plans_that_cannot_stand_beside() -> None:
    small = [jax.ShapeDtypeStruct(sizes, "float32") for sizes in ((256, 256), (4096, 256))]
    for plans, says in (
        ([made(another)], "1 was made for another version of another"),
        ([made(topology="v5p:2x2x1"), made()], "for different devices (1: v5p:2x2x1, 2: v5e:2x2)"),
        ([made(), made(mesh={"data": 2, "model": 2})], "for different meshes (1: data 4, 2: data 2 × model 2)"),
        ([made(), made(topology=None)], "for different devices (1: v5e:2x2, 2: cpu)"),
        ([("a", made()), ("a", made(tactic=DataParallel))], "two plans are called 'a'"),
    ):
        with pytest.raises(ShardwiseError) as caught:
            compared(plans=plans)
        assert says in str(caught.value)
    with pytest.raises(
        PlanError, match=r"other shapes: x is float32\[65536, 256\] there and float32\[4096, 256\] here"
    ):
        shardwise.compare(step, *small, plans=made(), roles=ROLES)


def test_a_function_that_cannot_be_traced_is_said_first() -> None:
    with pytest.raises(CaptureError):
        shardwise.compare(lambda w, x: w @ x.T @ w.T @ x, *SHAPES, mesh={"data": 4}, roles=ROLES)


def test_a_plan_of_a_variant_stands_beside_and_says_so() -> None:
    def trained(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(step(w, x)))(w)

    where = {"mesh": {"data": 4}, "roles": ROLES}
    plan = shardwise.plan(trained, *SHAPES, tactics=[DataParallel("data")], microbatches=2, **where)
    found = shardwise.compare(trained, *SHAPES, plans=plan, tactics=["dp"], **where)
    assert [row.text for row in found.rows if row.kind == "plan"] == ["plan 1, 2 micro-batches"]
    assert "plan 1, 2 micro-batches" in str(found)
    alone = shardwise.compare(trained, *SHAPES, tactics=["dp"], **where)
    for row in found.rows[1:]:
        (as_is,) = (other for other in alone.rows if other.name == row.name)
        assert row.rank <= as_is.rank and row.name in ("dp:data", "replicated")


def test_keywords_static_and_donated_arguments() -> None:
    def scaled(w: Any, x: Any, times: int, *, bias: Any) -> Any:
        return step(w, x) * times + bias

    options = {"static_argnums": 2, "donate_argnums": 1}
    given = {"kwargs": {"bias": jax.ShapeDtypeStruct((256,), "float32")}, "mesh": {"data": 4}, "roles": ROLES}
    plan = shardwise.plan(scaled, *SHAPES, 3, tactics=[FSDP("data")], **options, **given)
    found = shardwise.compare(scaled, *SHAPES, 3, plans=plan, tactics=["fsdp"], **options, **given)
    rows = {row.name: row for row in found.rows}
    assert rows["plan 1"].time_s == pytest.approx(rows["fsdp:data"].time_s)
