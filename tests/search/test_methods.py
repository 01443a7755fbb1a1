"""All methods on problems whose best state is known by trying everything; budgets, seeds, interrupts; the ablations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.search.ablation import ABLATIONS
from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.decisions import Keep, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.exhaustive import all_states, count_states, exhaustive
from shardwise.search.mcts import mcts
from shardwise.search.methods import METHODS, beam, greedy
from shardwise.search.problem import Problem, Scored
from shardwise.search.run import Budget, Ended, Improvement, SearchError, SearchResult

LONG = Budget(seconds=600, evaluations=10**9, patience=60)
shape = jax.ShapeDtypeStruct


def mlp(width: int, batch: int, layers: int = 2) -> tuple[Callable[..., Any], list[Any]]:
    """A training step of a chain of layers of two widths."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    def step(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, x), strict=True)]

    sizes = [(1024, width), (width, 1024)]
    return step, [[shape(sizes[k % 2], "float32") for k in range(layers)], shape((batch, 1024), "float32")]


def attention(batch: int, sequence: int) -> tuple[Callable[..., Any], list[Any]]:
    """One layer with its conflict: a sequence meets itself."""

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        q = x @ w
        scores = jnp.einsum("bqd,bkd->bqk", q, x) / 32.0
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x)

    return fn, [shape((1024, 1024), "bfloat16"), shape((batch, sequence, 1024), "bfloat16")]


@cache
def analyzed(made: Callable[..., Any], *sizes: int) -> Analysis:
    fn, args = made(*sizes)
    return analyze_program(lower(trace(fn, tuple(args), {}, JitOptions())))


def cost(**mesh: int) -> HardwareCost:
    return HardwareCost(place(MeshAxes.of(mesh), topology("v5e:2x2")))


SMALL = {
    "narrow": lambda: Problem(CostModel.of(analyzed(mlp, 1024, 65536), cost(x=4))),
    "wide": lambda: Problem(CostModel.of(analyzed(mlp, 262144, 64), cost(x=4))),
    "attention": lambda: Problem(CostModel.of(analyzed(attention, 4, 4096), cost(x=4))),
    "one long sequence": lambda: Problem(CostModel.of(analyzed(attention, 1, 32768), cost(x=2, y=2)), axes=["x"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_methods_in_the_order_of_what_they_try(name: str) -> None:
    found = {method: run(SMALL[name](), LONG, 1) for method, run in METHODS.items()}
    rank = {method: SMALL[name]().rank(f.best)[:2] for method, f in found.items()}
    assert found["exhaustive"].ended is Ended.EXHAUSTED
    assert rank["exhaustive"] == rank["mcts"] == rank["random"]
    assert rank["exhaustive"] <= rank["beam"] <= rank["greedy"] < SMALL[name]().rank(found["greedy"].log[0].best)
    assert found["greedy"].evaluations < found["beam"].evaluations < found["exhaustive"].evaluations


def test_a_beam_finds_what_greedy_does_not() -> None:
    made = Problem(CostModel.of(analyzed(mlp, 2048, 4096), cost(x=2, y=2)), keeps=False)
    assert made.rank(beam(made, LONG).best)[:2] < made.rank(greedy(made, LONG).best)[:2]


def test_the_tree_search_finds_the_best_of_all_states_of_a_language_model() -> None:
    program = zoo.load("gpt", layers=3, batch=32)
    traced = trace(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums))
    analysis = analyze_program(lower(traced))
    where = HardwareCost(place(MeshAxes.of({"x": 8}), topology("v5e:2x4")))
    made = Problem(CostModel.of(analysis, where), keeps=False)
    best, tree, some, one = (METHODS[name](made, LONG) for name in ("exhaustive", "mcts", "beam", "greedy"))
    found = tree.log[-1].best  # before decisions are dropped that gain almost nothing
    assert made.rank(best.best)[:2] == made.rank(found)[:2]
    assert made.rank(tree.best)[0] == 0 and made.rank(tree.best)[1] <= 1.005 * made.rank(found)[1]
    assert made.rank(found)[:2] <= made.rank(some.best)[:2] <= made.rank(one.best)[:2]


@pytest.mark.parametrize("name", ["narrow", "attention"])
def test_every_state_is_tried_once(name: str) -> None:
    """Against all permutations: no state twice, and every cost that some permutation has."""
    made = SMALL[name]()
    states = [s for part in all_states(made) for s in part]
    words = [
        word
        for depth in range(len(made.actions) + 1)
        for word in itertools.permutations(made.actions, depth)
        if len({made._slots[n] for n in word}) == depth
    ]
    assert len({made.canonical(s) for s in states}) == len(states) == count_states(made)
    assert set(made.costs(words)) == set(made.costs(states))


def test_states_of_two_axes_are_tried_once() -> None:
    made = Problem(CostModel.of(analyzed(mlp, 4096, 512), cost(x=2, y=2)))
    words = {
        made.canonical(word): word
        for depth in range(4)
        for word in itertools.permutations(made.actions, depth)
        if len({made._slots[n] for n in word}) == depth
    }
    states = [s for part in all_states(made) for s in part if len(s) < 4]
    assert len({made.canonical(s) for s in states}) == len(states) <= len(words)
    assert set(made.costs(states)) == set(made.costs(list(words.values())))


def test_the_best_of_all_is_kept_without_remembering_the_others() -> None:
    made = SMALL["attention"]()
    found = exhaustive(made, LONG)
    states = [s for part in all_states(made) for s in part]
    best = min((Scored(s, c) for s, c in zip(states, made.costs(states), strict=True)), key=made.rank)
    assert found.best.cost == best.cost and found.evaluations == len(states)


def test_all_states_are_tried_however_long_nothing_improves() -> None:
    made = SMALL["attention"]()
    found = exhaustive(made, Budget(patience=0.01))
    assert found.ended is Ended.EXHAUSTED and found.evaluations == sum(map(len, all_states(made)))


def test_a_problem_with_too_many_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.search.exhaustive.MOST", 100)
    with pytest.raises(SearchError, match="more than 100 states; search fewer axes"):
        exhaustive(SMALL["narrow"](), LONG)


def same(a: SearchResult, b: SearchResult) -> bool:
    logs = ([(i.evaluations, i.best) for i in f.log] for f in (a, b))
    return (a.best, a.ended, a.evaluations) == (b.best, b.ended, b.evaluations) and next(logs) == next(logs)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_search(method: str) -> None:
    budget = Budget(seconds=600, evaluations=120)
    made = (Problem(CostModel.of(analyzed(mlp, 4096, 512), cost(x=2, y=2))) for _ in range(2))
    assert same(*(METHODS[method](p, budget, 5) for p in made))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("evaluations", [1, 7, 100])
def test_no_more_evaluations_than_the_budget_has(method: str, evaluations: int) -> None:
    made = Problem(CostModel.of(analyzed(mlp, 4096, 512), cost(x=2, y=2)))
    found = METHODS[method](made, Budget(seconds=600, evaluations=evaluations))
    assert found.evaluations == made.evaluations - 1 <= evaluations  # the state in which nothing is decided is free
    assert found.ended is Ended.EVALUATIONS or method == "greedy"


@pytest.mark.parametrize("method", METHODS)
def test_no_time_still_gives_a_state(method: str) -> None:
    found = METHODS[method](SMALL["narrow"](), Budget(seconds=0.0))
    assert found.ended is Ended.SECONDS and found.log[0].best.state == ()


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_keeps_the_best_so_far(method: str) -> None:
    seen: list[Improvement] = []

    def stop(improvement: Improvement, share: float) -> None:
        seen.append(improvement)
        if len(seen) == 2:
            raise KeyboardInterrupt

    found = METHODS[method](SMALL["narrow"](), LONG, 0, stop)
    assert found.ended is Ended.INTERRUPTED and found.best == seen[-1].best and found.log == tuple(seen)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_decide(method: str) -> None:
    analysis = analyze_program(lower(trace(jnp.sort, (shape((7,), "float32"),), {}, JitOptions())))
    assert METHODS[method](Problem(CostModel.of(analysis, cost(x=4))), LONG).ended is Ended.NOTHING


def test_improvements_are_improvements() -> None:
    made = SMALL["wide"]()
    for method in METHODS.values():
        ranks = [made.rank(i.best) for i in method(SMALL["wide"](), LONG).log]
        assert ranks == sorted(ranks, reverse=True) and len(ranks) > 1


def test_ablations_leave_out_what_they_say() -> None:
    layers = analyzed(mlp, 4096, 512, 4)
    whole, alone = (ABLATIONS[name].problem(layers, cost(x=4)) for name in ("whole", "no groups"))
    assert max(map(len, whole.space.units)) > 1 == max(map(len, alone.space.units))
    assert sum(map(len, whole.space.units)) == sum(map(len, alone.space.units))
    started = {name: ABLATIONS[name].started(layers, cost(x=4)).seeds for name in ("whole", "no strategies")}
    assert started["whole"] and not started["no strategies"]


@pytest.mark.parametrize("name", ["no tree", "no openings", "no climbing"])
def test_a_search_without_a_part_is_no_worse_than_its_starts(name: str) -> None:
    ablation = ABLATIONS[name]
    made = ablation.started(analyzed(mlp, 4096, 512, 4), cost(x=2, y=2))
    found = mcts(made, Budget(evaluations=100), tree=ablation.tree)
    assert found.evaluations <= 100
    assert made.rank(found.best)[:2] <= min(made.rank(Scored(s, made.cost(s)))[:2] for s in ((), *made.seeds))


def test_without_resolution_a_sequence_that_meets_itself_stays_whole() -> None:
    analysis = analyzed(attention, 1, 32768)
    whole, left = (ABLATIONS[name].problem(analysis, cost(x=4)) for name in ("whole", "no resolution"))
    assert any(isinstance(a.decision, Shard) and a.decision.sides for a in whole.evaluator.actions)
    assert not any(isinstance(a.decision, Shard) and a.decision.sides for a in left.evaluator.actions)
    best = [exhaustive(p, LONG).best.cost.time_ps for p in (whole, left)]
    assert best[0] < best[1], "queries in parts, keys whole is out of reach"


def test_automap_decides_on_dimensions_of_arguments_one_by_one() -> None:
    analysis = analyzed(mlp, 4096, 512, 4)
    made = ABLATIONS["automap"].problem(analysis, cost(x=4))
    shards = [a.decision for a in made.evaluator.actions if isinstance(a.decision, Shard)]
    keeps = [a.decision for a in made.evaluator.actions if isinstance(a.decision, Keep)]
    assert shards and all(len(shard.colors) == 1 and not shard.sides for shard in shards)
    assert all(analysis.colors[shard.colors[0]].places for shard in shards)
    paths = [[analysis.program.values[v].path for v in keep.values] for keep in keeps]
    assert paths == [*([f"params/{k}", f"out/{k}"] for k in range(4)), ["x"]]
    whole = ABLATIONS["whole"].problem(analysis, cost(x=4))
    assert whole.rank(exhaustive(whole, LONG).best)[:2] <= made.rank(METHODS["mcts"](made, LONG).best)[:2]
