"""What there was to decide, as a plan keeps it: the groups, their axes, the side that won each conflict; read back strictly."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise.errors import PlanError
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Shard, State
from shardwise.plans import colors
from shardwise.plans.colors import ColorGraph, color_graph
from shardwise.plans.load import read_plan

MESH = MeshAxes.of({"data": 2, "model": 2})


def attention(w: dict[str, Any], x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dk->bsk", x, w[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bsk,btk->bst", q, k))
    return jnp.einsum("bst,btv->bsv", scores, v)


def shapes() -> tuple[dict[str, Any], Any]:
    shape = jax.ShapeDtypeStruct
    return {name: shape((32, 64), "float32") for name in "qkv"}, shape((4, 128, 32), "float32")


@pytest.fixture(scope="module")
def analysis() -> shardwise.Analysis:
    return shardwise.analyze(attention, *shapes())


def graph_of(analysis: shardwise.Analysis, *sides: int) -> ColorGraph:
    sequence = analysis.color_of("x", 1)
    assert sequence is not None
    (bit,) = analysis.groups[sequence.group].bits
    state = State(MESH, tuple(Shard((sequence.id,), "data", ((bit, side),)) for side in sides))
    return color_graph(analysis, state)


def test_groups_have_their_axes_and_places(analysis: shardwise.Analysis) -> None:
    graph = graph_of(analysis, 0)
    first = graph.groups[0]
    assert first.axes == ("data",) and first.size == 128 and "x[1]" in first.places
    assert all(not g.axes for g in graph.groups[1:]), "the sharded first"
    assert {g.number for g in graph.groups} == {g.id for g in analysis.groups if g.matters}
    assert {n for m in graph.meetings for n in (m.one, m.other)} <= {g.number for g in graph.groups}
    assert [m.values for m in graph.meetings] == sorted((m.values for m in graph.meetings), reverse=True)


def test_a_conflict_says_which_side_stays_sharded(analysis: shardwise.Analysis) -> None:
    """The sides are those of the lowered program: the storage of the scores agrees with what is said."""
    for side in (0, 1):
        (conflict,) = graph_of(analysis, side).conflicts
        ((axis, kept),) = conflict.kept.items()
        assert axis == "data" and conflict.count == len(analysis.conflicts)
        (family,) = analysis.compatibility_sets
        assert kept == 1 + (side ^ family.flipped)
        assert {*conflict.first} <= {str(p) for p in family.first}
        assert {*conflict.second} <= {str(p) for p in family.second}
    (open_,) = graph_of(analysis).conflicts
    assert not open_.kept


def test_a_plan_keeps_it_and_reads_it_back() -> None:
    w, x = shapes()
    pins = {"x": jax.sharding.PartitionSpec(None, "data")}
    made = shardwise.plan(attention, w, x, mesh={"data": 2}, tactics=[], pins=pins)
    assert made.colors.groups[0].axes == ("data",) and made.colors.conflicts[0].kept == {"data": 1}
    data = json.loads(made.to_json())
    assert read_plan(data).colors == made.colors


def test_a_symmetric_sum_has_no_side() -> None:
    shape = jax.ShapeDtypeStruct((64, 64), "float32")
    found = shardwise.analyze(lambda y: jnp.tanh(y + y.T), shape)
    color = found.color_of("y", 0)
    assert color is not None
    graph = color_graph(found, State(MESH, (Shard((color.id,), "model"),)))
    assert [c.kept for c in graph.conflicts] == [{"model": 0}]


def test_it_is_bounded(analysis: shardwise.Analysis, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = graph_of(analysis, 0)
    monkeypatch.setattr(colors, "MOST_GROUPS", 2)
    few = graph_of(analysis, 0)
    assert few.groups == whole.groups[:2] and few.more_groups == len(whole.groups) - 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups": 3}, "colors.groups: expected a list, not 3"),
        ({"more_groups": "x"}, "colors.more_groups: expected a whole number"),
        ({"meetings": [{"one": 98, "other": 99, "values": 1}]}, "not there"),
        (
            {"conflicts": [{"kept": {"data": True}}]},
            r"colors.conflicts\[0\].kept.data: expected a whole number, not True",
        ),
        ({"groups": [{"axes": ["other"]}]}, "no axes of the mesh: other"),
        ({"groups": [{"axes": "data"}]}, r"colors.groups\[0\].axes: expected a list"),
        (None, "colors is missing"),
    ],
)
def test_what_is_no_summary_is_refused(change: dict[str, Any] | None, says: str) -> None:
    w, x = shapes()
    pins = {"x": jax.sharding.PartitionSpec(None, "data")}
    data = json.loads(shardwise.plan(attention, w, x, mesh={"data": 2}, tactics=[], pins=pins).to_json())
    colors = data.pop("colors")
    if change is not None:
        for key, value in change.items():
            rows = isinstance(value, list) and value and key != "meetings"
            colors[key] = [colors[key][0] | value[0], *colors[key][1:]] if rows else value
        data["colors"] = colors
    with pytest.raises(PlanError, match=says):
        read_plan(data)
