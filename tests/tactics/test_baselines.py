"""Strategies by name and their combinations: those that people know are there, the others say why they are not."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwise
from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import lower_state
from shardwise.lowering.small import keep_small
from shardwise.lowering.structure import Structure
from shardwise.search.goal import EQUAL, Goal
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.tactics import strategies
from shardwise.tactics.baselines import MENU, Baseline, Combinations, baselines
from shardwise.tactics.named import PARTS
from shardwise.tactics.places import Places, find_places
from shardwise.tactics.tactic import Context
from tests.planner.test_plan_search import small_memory

MESH = {"data": 2, "model": 4}


@cache
def analyzed(name: str) -> tuple[Analysis, tuple[str, ...]]:
    program = zoo.load(name, "tiny")
    traced = trace(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums))
    return analyze_program(lower(traced)), program.roles


def setting(name: str, mesh: dict[str, int], **roles: Any) -> tuple[Context, CostModel]:
    analysis, known = analyzed(name)
    axes = MeshAxes.of(mesh)
    cost = HardwareCost(place(axes, small_memory("v5e:2x4", 2**34)))  # nothing is kept on the chip
    return Context(analysis, axes, cost, roles or {r: (r,) for r in known}), CostModel.of(analysis, cost)


def options(*names: str) -> list[tuple[str, ...]]:
    return [tuple(name.split("+")) for name in names]


@cache
def tried(name: str, *menu: str) -> dict[str, Baseline]:
    found = baselines(*setting(name, MESH), options(*menu))
    assert len({e.name for e in found}) == len(found)
    return {e.name: e for e in found}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("t2b", Places((("batch/inputs", 1),), (("params/embed", 0),))),
        (
            "mixtral",
            Places(
                (("batch/inputs", 1),),
                (("params/embed", 0), ("params/head", 1)),
                (("params/layers/experts/down", 1),),
            ),
        ),
        ("gns", Places(edges=(("batch/edges", 0),))),
        ("mlp", Places(vocabularies=(("params/last/bias", 0),))),  # the classes, of which the loss looks up one
        ("t5", Places((("batch/decoder_inputs", 1), ("batch/encoder_inputs", 1)), (("params/embed", 0),))),
    ],
)
def test_what_strategies_are_about_is_found_by_structure(name: str, expected: Places) -> None:
    analysis, _ = analyzed(name)
    values = [analysis.program.values[a.value] for a in analysis.program.arguments]
    batch, params = ([v for v in values if v.path.startswith(role)] for role in ("batch", "params"))
    assert find_places(analysis, batch, params) == expected


def test_square_weights_are_no_experts() -> None:
    """Both of their dimensions have one color in a recurrence or a residual stream."""

    def fn(w: Any, x: Any) -> Any:
        for _ in range(2):
            x = x + jnp.tanh(x @ w)
        return x

    analysis = shardwise.analyze(
        fn, jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")
    )
    w, x = (analysis.program.values[a.value] for a in analysis.program.arguments)
    assert find_places(analysis, [x], [w]).experts == ()


def test_the_known_combinations_of_a_language_model() -> None:
    found = tried("t2b", "dp", "fsdp", "megatron", "megatron+sequence", "context", "expert")
    applied = {name for name, e in found.items() if e.applies}
    assert {
        "replicated", "dp:data", "fsdp:data", "megatron:model", "dp:data+model",
        "dp:data,megatron:model", "dp:data,megatron:model,sequence:model", "fsdp:data,megatron:model",
        "dp:data,fsdp:model", "dp:data,context:model", "fsdp:data+model", "megatron:data+model",
    } <= applied  # fmt: skip
    assert {name: e.reason for name, e in found.items() if not e.applies} == {
        f"expert:{axis}": "expert: the program has no parameter dimension by which rows choose their matrix"
        for axis in MESH
    }


def test_the_known_combinations_of_a_mixture_of_experts() -> None:
    found = tried("mixtral", "expert", "fsdp", "megatron", "edges")
    applied = {name for name, e in found.items() if e.applies}
    assert {
        "expert:data",
        "expert:data,megatron:model",
        "fsdp:model,expert:data",
        "fsdp:data,megatron:model",
    } <= applied
    assert {e.name for e in found.values() if e.reason} == {"edges:data", "edges:model"}
    assert all(e.decisions and e.tactics for e in found.values() if e.applies and e.parts)


def test_a_baseline_costs_what_its_plan_would() -> None:
    context, model = setting("t2b", MESH)
    baseline = tried("t2b", "dp", "fsdp", "megatron", "megatron+sequence", "context", "expert")[
        "fsdp:data,megatron:model"
    ]
    taken: list[Any] = []
    for tactic in (strategies.FSDP("data"), strategies.Megatron("model")):
        taken += tactic.decide(context, taken)
    assert baseline.decisions == tuple(taken)
    small = keep_small(Structure(context.analysis), context.cost, context.mesh)
    lowered = lower_state(context.analysis, State(context.mesh, (*small, *taken)), context.cost)
    assert baseline.cost == model.evaluate(lowered) and baseline.fits


def test_the_best_come_first_and_none_decides_the_same_as_another() -> None:
    found = list(tried("mixtral", "expert", "fsdp", "megatron", "edges").values())
    times = [e.cost.time_ps for e in found if e.cost is not None]
    assert times == sorted(times) and [e.applies for e in found] == sorted((e.applies for e in found), reverse=True)
    decided = [State(MeshAxes.of(MESH), e.decisions) for e in found if e.applies]
    assert len({(s.order, s.kept, tuple(s.sides.items())) for s in decided}) == len(decided)


def test_moments_alone_may_be_sharded() -> None:
    found = baselines(*setting("mlp", {"data": 8}), options("dp", "fsdp", "zero1", "zero2"))
    peak = {e.name: e.cost.peak_blocks for e in found if e.cost is not None}
    assert peak["fsdp:data"] < peak["zero2:data"] < peak["dp:data"] < peak["replicated"] and "zero1:data" in peak


def test_without_roles_every_strategy_says_what_it_needs() -> None:
    found = baselines(*setting("mlp", {"data": 8}, params=("params",)), options("dp", "fsdp", "megatron"))
    assert {e.name for e in found if e.applies} == {"replicated", "megatron:data"}
    assert all("which arguments are the batch" in e.reason for e in found if not e.applies)


def test_axes_of_size_one_are_not_used() -> None:
    found = baselines(*setting("mlp", {"data": 8, "model": 1}), options("dp", "megatron"))
    assert {axis for e in found for _, axis in e.parts} == {"data"}


def test_three_axes() -> None:
    context, model = setting("t2b", {"x": 2, "y": 2, "z": 2})
    made = {b.parts for b in baselines(context, model) if b.applies}
    assert (("fsdp", "x"), ("fsdp", "y"), ("fsdp", "z")) in made and () in made
    assert any(len({axis for _, axis in parts}) == 3 and len({part for part, _ in parts}) > 2 for parts in made)
    assert not any({"fsdp", "zero2"} <= {part for part, _ in parts} for parts in made)
    assert len(made) < 600 and all(part in PARTS for entry in MENU for part in entry)


def test_equal_axes_are_costed_once() -> None:
    context, model = setting("t2b", {"x": 2, "y": 2, "z": 2})
    (equal,) = [axes for axes in Combinations(context, context.mesh.names)._equal_axes if len(axes) > 1]
    combinations = Combinations(context, equal[:2])
    problem = Problem(model, extra=combinations.decisions)
    costs = {b.parts: b.cost for b in combinations.costed(problem)}
    first, second = ((("dp", a), ("megatron", b)) for a, b in (equal[:2], equal[1::-1]))
    assert costs[first] == costs[second] == problem.cost(problem.state(combinations._baseline(second).decisions))
    seeds = combinations.seeds(problem, quick=False)
    before = problem.evaluations
    problem.costs(seeds)
    assert problem.evaluations == before and len(seeds) < len(costs)


def test_a_search_starts_from_every_combination_or_its_mirror_image() -> None:
    """On three equal axes the combinations are a part of all, and a mirror image may be all that there is of one."""
    context, model = setting("itx", {"a": 2, "b": 2, "c": 2})
    combinations = Combinations(context, context.mesh.names)
    problem = Problem(model, extra=combinations.decisions)
    every = {combinations._mirrored(b.parts) for b in combinations.costed(problem) if b.applies}
    starts = {problem.canonical(state) for state in combinations.seeds(problem, quick=False)}
    lost = []
    for parts in every:
        state = problem.state(combinations._baseline(parts).decisions)
        if state and problem.canonical(state) not in starts:
            lost.append(parts)
    assert not lost
    assert len(starts) > 20


@pytest.mark.parametrize("name", ["itx", "gns"])
def test_with_memory_as_the_goal_no_single_change_is_smaller(name: str) -> None:
    """Climbs go by exact peaks, and the search goes on until there is no smaller neighbor, up to what counts as equal."""
    context, model = setting(name, MESH)
    combinations = Combinations(context, context.mesh.names)
    problem = Problem(model, extra=combinations.decisions, goal=Goal(memory=True))
    problem.start_from(combinations.seeds(problem, quick=False))
    best = mcts(problem).best
    added = [(*best.state, n) for n in problem.allowed(best.state)]
    dropped = [best.state[:k] + best.state[k + 1 :] for k in range(len(best.state))]
    starts = problem.costs(problem.seeds)
    assert best.cost.peak_blocks < min(cost.peak_blocks for cost in starts)
    assert min(c.peak_blocks for c in problem.costs([*added, *dropped])) >= best.cost.peak_blocks / (1 + EQUAL)
