"""The state nearest to the integer program's solution: what was decided beforehand holds, the bound stands beside it."""

from __future__ import annotations

import random
import signal
import threading
from typing import Any

import pytest
import scipy.optimize

import shardwise
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard
from shardwise.search.budget import Budget
from shardwise.search.exhaustive import exhaustive
from shardwise.search.ilp import NoShardingError, ilp, local_s
from shardwise.search.ilp_state import _towards, ilp_state
from shardwise.search.problem import Problem, Scored
from shardwise.search.result import Ended
from shardwise.search.run import Run
from tests.search.test_ilp import analyzed, forward, model_of, product, shape, step, sums

LONG = Budget(seconds=600, evaluations=10**6)


@pytest.mark.parametrize("fn", [product, forward])
def test_a_solution_that_is_a_state_is_found(fn: Any) -> None:
    analysis = analyzed(fn)
    model, mesh = model_of(analysis, x=4)
    problem, optimum = Problem(model), ilp(model, mesh)
    *_, nearest = _towards(Run(problem, LONG, None), optimum.lies)
    own = local_s(model, problem.evaluator.lowered(nearest))
    assert own == pytest.approx(optimum.bound_s, rel=2e-3)
    assert own < local_s(model, problem.evaluator.lowered(())) / 2
    found = ilp_state(problem, LONG)
    assert found.ended is Ended.CONVERGED and found.fits
    assert problem.rank(found.best) <= problem.rank(Scored(nearest, problem.cost(nearest)))


@pytest.mark.parametrize("mesh", [{"x": 4}, {"x": 2, "y": 2}])
def test_it_is_near_the_best_state(mesh: dict[str, int]) -> None:
    analysis = analyzed(step)
    model, _ = model_of(analysis, **mesh)
    found = ilp_state(Problem(model), LONG)
    best = exhaustive(Problem(model, keeps=False), LONG).best.cost.time_s
    assert found.best.cost.time_s <= 1.15 * best
    assert found.evaluations < 200


def test_the_bound_stands_beside_it() -> None:
    analysis = analyzed(sums)
    model, mesh = model_of(analysis, x=4)
    (note,) = ilp_state(Problem(model), LONG).notes
    assert note.startswith("ilp: in local costs") and f"{ilp(model, mesh, gap=1e-3).bound_s:.4g} s (" in note


def bases() -> dict[str, tuple[list[Decision], list[str]]]:
    """By name: what is decided beforehand, and the axes that are open."""
    analysis = analyzed(step)
    model, _ = model_of(analysis, x=2, y=2)
    up, x = (analysis.program.paths[path] for path in ("up", "x"))
    colors = model.structure.colors
    return {
        "pinned whole": ([Pin(up, ((), ()), colors[up])], ["x", "y"]),
        "pinned in part": ([Pin(up, (None, ("y",)), colors[up])], ["x", "y"]),
        "pinned on both": ([Pin(up, (("x",), ("y",)), colors[up])], ["x", "y"]),
        "kept": ([Keep((up,), "x")], ["x", "y"]),
        "one axis": ([], ["y"]),
        "batch over x": ([Shard((colors[x][0],), "x")], ["y"]),
        "batch over y": ([Shard((colors[x][0],), "y")], ["x"]),
    }


@pytest.mark.parametrize("name", bases())
def test_no_state_on_top_of_a_base_costs_less_than_its_bound(name: str) -> None:
    base, axes = bases()[name]
    analysis = analyzed(step)
    model, mesh = model_of(analysis, x=2, y=2)
    free, bound = ilp(model, mesh).bound_s, ilp(model, mesh, base=base, axes=axes).bound_s
    problem = Problem(model, base, axes, keeps=False)
    rng, times = random.Random(0), []
    for _ in range(300):
        state: tuple[int, ...] = ()
        while (allowed := problem.allowed(state)) and rng.random() < 0.8:
            state = (*state, rng.choice(allowed))
        times.append(local_s(model, problem.evaluator.lowered(state)))
    assert free * (1 - 1e-3) <= bound <= min(times) * (1 + 1e-6)
    assert min(times) <= 1.4 * bound


def test_axes_that_are_not_open_and_pins_hold_in_the_solution() -> None:
    model, mesh = model_of(analyzed(step), x=2, y=2)
    lies = ilp(model, mesh, axes=["y"]).lies
    assert not any(0 in lie.axes() for lie in lies.values()) and any(1 in lie.axes() for lie in lies.values())
    up = model.structure.program.paths["up"]
    pinned = ilp(model, mesh, base=[Pin(up, (("x",), ()), model.structure.colors[up])])
    assert pinned.lies[up].dims == ((0,), ())


def test_what_cannot_fit_is_proven_and_a_small_state_is_given() -> None:
    analysis = analyzed(step, 1 << 23)
    model, mesh = model_of(analysis, x=4)
    with pytest.raises(NoShardingError):
        ilp(model, mesh)
    problem = Problem(model)
    found = ilp_state(problem, LONG)
    assert found.ended is Ended.INFEASIBLE and not found.fits and not found.notes
    assert found.best.cost.peak_bytes < problem.cost(()).peak_bytes / 2


def test_an_interrupt_while_it_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver does not listen; the method does."""
    over, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def deaf(*args: Any, **options: Any) -> Any:
        signal.pthread_kill(main, signal.SIGINT)
        over.wait(30)

    monkeypatch.setattr(scipy.optimize, "milp", deaf)
    analysis = analyzed(forward)
    found = ilp_state(Problem(model_of(analysis, x=4)[0]), LONG)
    over.set()
    assert found.ended is Ended.INTERRUPTED and found.best.state == () and found.seconds < 20


def test_an_error_of_the_solver_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(scipy.optimize, "milp", broken)
    with pytest.raises(MemoryError, match="no room"):
        ilp(*model_of(analyzed(forward), x=4))


def test_a_plan_says_the_bound() -> None:
    shapes = [shape(s, "float32") for s in [(512, 1024), (1024, 4096), (4096, 1024)]]
    plan = shardwise.plan(forward, *shapes, mesh={"x": 4}, topology="v5e:2x2", method="ilp")
    assert plan.search is not None and plan.search.method == "ilp" and plan.search.ended is Ended.CONVERGED
    assert plan.notes[0].startswith("ilp: in local costs, op by op, this plan takes ")
    raced = shardwise.plan(forward, *shapes, topology="v5e:2x2", method="ilp", budget_evals=300)
    assert raced.search is not None and len(raced.search.meshes) > 1
    assert sum(note.startswith("ilp: ") for note in raced.notes) == 1
