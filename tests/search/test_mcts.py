"""The search finds what can be checked by hand or by trying everything, ends well, and is the same under a seed."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import Cost, CostModel
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.decisions import Keep, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.mcts import Tree, mcts
from shardwise.search.neighbors import Neighbor
from shardwise.search.problem import Problem, Scored
from shardwise.search.run import Budget, Ended, Improvement, Run, Stop
from shardwise.search.searcher import Options


def sgd(width: int, batch: int) -> tuple[Any, list[Any]]:
    """A training step of two layers."""

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params["up"])
        return jnp.mean((hidden @ params["down"]) ** 2)

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    shape = jax.ShapeDtypeStruct
    params = {"up": shape((1024, width), "float32"), "down": shape((width, 1024), "float32")}
    return step, [params, shape((batch, 1024), "float32")]


def analyzed(fn: Any, args: list[Any]) -> Analysis:
    return analyze_program(lower(trace(fn, tuple(args), {}, JitOptions(donate_argnums=0))))


def problem(width: int = 1024, batch: int = 65536, where: str = "v5e:2x2", **mesh: int) -> Problem:
    axes = MeshAxes.of(mesh or {"x": 4})
    return Problem(CostModel.of(analyzed(*sgd(width, batch)), HardwareCost(place(axes, topology(where)))))


def sharded(found: Problem, state: tuple[int, ...]) -> set[tuple[str, str]]:
    """Places that got an axis: (path and dimension of one of them, axis)."""
    names = set()
    for decision in found.decisions(state):
        if isinstance(decision, Shard):
            places = [str(p) for c in decision.colors for p in found.analysis.colors[c].places]
            names.add((places[0] if places else "", decision.axis))
    return names


def test_a_large_batch_of_a_small_model_is_shared_out() -> None:
    made = problem()
    found = mcts(made, Budget(seconds=60, evaluations=400), 0)
    assert found.fits and ("x[0]", "x") in sharded(made, found.best.state)
    assert found.best.cost.time_ps < made.cost(()).time_ps / 3


def test_a_wide_model_of_a_small_batch_is_not() -> None:
    made = problem(width=262144, batch=64)
    found = mcts(made, Budget(seconds=60, evaluations=400), 0)
    assert found.fits
    assert any("up[1]" in name or "down[0]" in name for name, _ in sharded(made, found.best.state))


def test_it_finds_the_best_of_all_states_of_a_small_problem() -> None:
    made = problem(width=4096, batch=512, x=2, y=2)
    all_states = [
        state
        for depth in range(4)
        for state in itertools.permutations(made.actions, depth)
        if len({made._slots[n] for n in state}) == len(state)
    ]
    costs = made.costs(all_states)
    best = min((Scored(s, c) for s, c in zip(all_states, costs, strict=True)), key=made.rank)
    fresh = problem(width=4096, batch=512, x=2, y=2)
    found = mcts(fresh, Budget(seconds=120, evaluations=len(all_states) // 2, patience=60), 0)
    assert fresh.rank(found.best)[:2] <= made.rank(best)[:2]


def test_the_same_seed_gives_the_same_state() -> None:
    budget = Budget(seconds=600, evaluations=150)
    states = [mcts(problem(width=4096, batch=512, x=2, y=2), budget, 3).best.state for _ in range(2)]
    assert states[0] == states[1]


def test_no_time_still_gives_a_state_and_says_why_it_ended() -> None:
    found = mcts(problem(), Budget(seconds=0.0), 0)
    assert found.ended is Ended.SECONDS and found.log


def test_an_interrupt_keeps_the_best_so_far() -> None:
    seen: list[Improvement] = []

    def stop(improvement: Improvement, share: float) -> None:
        seen.append(improvement)
        if len(seen) == 2:
            raise KeyboardInterrupt

    found = mcts(problem(), Budget(seconds=60), 0, stop)
    assert found.ended is Ended.INTERRUPTED and found.best == seen[-1].best


def test_a_neighbor_that_gains_next_to_nothing_does_not_hide_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    run = Run(given, Budget(), None)
    tree, start = Tree(run, 0), Scored((), given.cost(()))
    near = list(itertools.permutations(given.actions, 2))
    times = {near[0]: start.cost.time_ps - 1, near[-1]: start.cost.time_ps // 2}
    visited = []

    def neighbors(state: tuple[int, ...], _gain: Any) -> list[Neighbor]:
        visited.append(state)
        return [] if state else [Neighbor(state) for state in near]

    def scored(states: list[tuple[int, ...]]) -> list[Scored]:
        time_ps = start.cost.time_ps
        return [Scored(s, Cost(times.get(s, 2 * time_ps), 0, 0, start.cost.peak_blocks)) for s in states]

    monkeypatch.setattr(tree.neighbors, "of", neighbors)
    monkeypatch.setattr(run, "score", scored)
    end = tree.climb(start)
    assert len(near) > 16 and visited == [(), near[-1]] and end.state == near[-1]
    assert given.canonical(end.state) in tree.nodes[tree.root].children, "the tree goes on from there"
    assert tree.climb(start) is start and len(visited) == 2, "no climb is made twice"


def test_the_tree_learns_from_climbs_what_a_decision_gains() -> None:
    given = problem(width=4096, batch=512, x=2, y=2)
    run = Run(given, Budget(), None)
    tree = Tree(run, 0)
    tree.climb(Scored((), given.cost(())))
    (n,) = next(step for step in tree.gains if len(step) == 1)
    total, count = tree.gains[n,]
    assert tree.gain((n,)) == total / count and any(tree.gain((n,)) < 0 for n in given.actions)
    assert tree.gain((10**6,)) == 1.0, "what was not tried comes first"


def test_strategies_and_the_unsharded_state_are_where_it_starts() -> None:
    given = problem(width=4096, batch=512, x=2, y=2)
    given.start_from([(given.actions[0],), (given.actions[1],)])
    tree = Tree(Run(given, Budget(), None), 0)
    starts, root, best = [], tree.nodes[tree.root], tree.run.best.state
    assert [tree.nodes[key].state for key in root.children] == list(given.seeds)

    def climb(start: Scored) -> Scored:
        starts.append(start.state)
        return start

    tree.climb = climb  # type: ignore[method-assign]
    with contextlib.suppress(Stop):
        tree.search()
    assert starts[:2] == [best, ()] and set(given.seeds) <= set(starts)


def test_nothing_to_decide() -> None:
    analysis = analyzed(lambda x: jnp.sort(x), [jax.ShapeDtypeStruct((7,), "float32")])
    axes = MeshAxes.of({"x": 4})
    made = Problem(CostModel.of(analysis, HardwareCost(place(axes, topology("v5e:2x2")))))
    assert mcts(made).ended is Ended.NOTHING


def test_parameters_may_be_kept_with_what_replaces_them() -> None:
    made = problem()
    kept = [a.decision for a in made.evaluator.actions if isinstance(a.decision, Keep)]
    paths = {made.analysis.program.label(v) for v in kept[0].values}
    assert {"params/up", "params/down"} <= paths and len(paths) == 4


@pytest.mark.parametrize("swap", [False, True])
def test_only_orders_that_matter_make_two_states(swap: bool) -> None:
    made = problem(x=2, y=2)
    by_slot: dict[int, int] = {}
    for n in made.actions:
        if made.evaluator.actions[n].slot >= 0:
            by_slot.setdefault(made.evaluator.actions[n].slot, n)
    one, other = (by_slot[0], by_slot[2]) if swap else (by_slot[0], by_slot[3])
    same = made.canonical((one, other)) == made.canonical((other, one))
    assert same is not swap, "two units on one axis are in order, on two axes they are not"


def test_more_patience_where_there_is_more_to_find() -> None:
    made = problem(width=4096, batch=512, x=2, y=2)
    run = Run(made, Budget(patience=1.0), None)
    rank = made.rank(run.best)
    assert run.best.state == () and rank[0] == 0, "nothing is sharded, and it fits"
    run._improved = run.spent - max(12, len(made.actions)) - 1
    assert run.left() > 0, "four devices take as long as one"
    made.perfect_ps = run.best.cost.time_ps
    with pytest.raises(Stop):
        run.left()


def test_patience_counts_for_each_action_and_a_given_budget_has_more() -> None:
    short = mcts(problem(x=2, y=2), Budget(patience=1.0))
    made = problem(x=2, y=2)
    longer = mcts(made, Options(budget_evals=10_000).budget())
    assert short.ended is Ended.CONVERGED and short.evaluations < longer.evaluations
    assert longer.ended in (Ended.CONVERGED, Ended.EXHAUSTED) and made.rank(longer.best) <= made.rank(short.best)
