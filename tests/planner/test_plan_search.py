"""``shardwise.plan`` without tactics: what it finds, when it stops, what it says where nothing fits."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwise
from shardwise import zoo
from shardwise.cost.model import CostModel
from shardwise.errors import InfeasibleError, PlanError
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology, topology
from shardwise.lowering.decisions import State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import lower_state
from shardwise.search.problem import Problem
from shardwise.search.run import Ended, Improvement
from shardwise.tactics.strategies import DataParallel
from shardwise.tactics.tactic import Context
from tests.plans.files import signed
from tests.search.test_mcts import analyzed


def step(params: dict[str, jax.Array], moments: dict[str, jax.Array], x: jax.Array) -> Any:
    """A training step of two layers with momentum."""

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)

    grads = jax.grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def shapes(width: int = 1024, batch: int = 65536, inner: int = 1024) -> list[Any]:
    shape = jax.ShapeDtypeStruct
    params = {"up": shape((inner, width), "float32"), "down": shape((width, inner), "float32")}
    return [params, params, shape((batch, inner), "float32")]


def small_memory(text: str, nbytes: float) -> Topology:
    """A topology whose devices have that much usable memory, and none on the chip, where small programs fit as a whole."""
    found = topology(text)
    memory = int(nbytes / found.profile.usable_share)
    return replace(found, profile=replace(found.profile, memory_bytes=memory, on_chip_bytes=0))


def planned(*, args: list[Any] | None = None, **asked: Any) -> shardwise.Plan:
    asked = {"mesh": {"x": 4}, "topology": "v5e:2x2", "budget_evals": 150, "donate_argnums": (0, 1)} | asked
    return shardwise.plan(step, *(shapes() if args is None else args), **asked)


def test_a_large_batch_of_a_small_model_is_shared_out() -> None:
    """Only gradients and parameters move, no activations; whether parameters are whole at rest is a matter of their update."""
    plan = planned()
    assert plan.array("x").spec == (("x",), ())
    moved = sum(nbytes for _, nbytes in plan.moved().values())
    assert moved <= 2.1 * sum(4 * math.prod(a.shape) for a in plan.arguments if a.path.startswith("params"))
    assert plan.search is not None and plan.search.method == "mcts" and plan.search.improvements[-1].fits


def test_parameters_that_do_not_fit_are_sharded_with_the_batch() -> None:
    """Whole parameters and moments take 256 MiB: data parallelism does not fit, ZeRO-3 is found."""
    where: dict[str, Any] = {"args": shapes(4096, 16384, 4096), "topology": small_memory("v5e:1x4", 430 * 2**20)}
    plan = planned(**where)
    assert plan.predicted.fits and plan.array("x").spec == (("x",), ())
    for path in ("params/up", "params/down", "moments/up", "moments/down"):
        assert any(plan.array(path).spec), path
    assert not planned(tactics=[DataParallel("x")], roles={"batch": "x"}, **where).predicted.fits


def test_the_same_seed_and_evaluations_give_the_same_bytes() -> None:
    asked: dict[str, Any] = {"args": shapes(4096, 512), "mesh": {"x": 2, "y": 2}, "seed": 5}
    one, other = planned(**asked), planned(**asked)
    assert one.to_json() == other.to_json() and one == other
    assert one.search is not None and one.search.seed == 5 and one.search.seconds is not None


def test_the_log_says_how_it_went() -> None:
    told: list[tuple[Improvement, float]] = []
    plan = planned(progress=lambda improvement, share: told.append((improvement, share)))
    log = plan.search
    assert log is not None and log.meshes == () and log.evaluations > 1
    assert [i.evaluations for i in log.improvements] == [made.evaluations for made, _ in told]
    times = [i.time_s for i in log.improvements if i.fits]
    assert times == sorted(times, reverse=True) and times
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert str(log).startswith(f"mcts: {log.evaluations} evaluations in ") and str(log).endswith(log.ended.value)


def test_keeping_small_arguments_makes_no_found_plan_worse() -> None:
    for width in (128, 1024):
        plan = planned(args=shapes(width, 4096, 512))
        assert plan.search is not None
        # Decisions that gain next to nothing were dropped, half a percent in all.
        assert plan.predicted.time_s <= plan.search.improvements[-1].time_s * 1.005


def test_an_interrupt_keeps_the_best_so_far_and_says_so() -> None:
    seen: list[Improvement] = []

    def stop(improvement: Improvement, share: float) -> None:
        seen.append(improvement)
        raise KeyboardInterrupt

    plan = planned(progress=stop)
    assert plan.search is not None and plan.search.ended is Ended.INTERRUPTED
    assert plan.notes[0].startswith("the search was interrupted: this is the best plan of")
    assert plan.search.improvements[-1].time_s == seen[-1].best.cost.time_s == plan.predicted.time_s


def test_other_errors_of_a_progress_callback_are_not_swallowed() -> None:
    def wrong(improvement: Improvement, share: float) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        planned(progress=wrong)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"method": "mtcs"}, r"method is one of mcts, .*not 'mtcs'; did you mean 'mcts'\?"),
        ({"seed": -1}, "seed is a whole number that is not negative, not -1"),
        ({"seed": 0.5}, "seed is a whole number"),
        ({"budget_s": -1}, "budget_s is a number of seconds, not -1"),
        ({"budget_s": "5"}, "budget_s is a number of seconds, not '5'"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"budget_evals": -1}, "budget_evals is a whole number of evaluations, not -1"),
        ({"budget_evals": True}, "budget_evals"),
        ({"progress": 3}, "progress is 'auto' or called at every improvement; int cannot be called"),
        ({"method": "x", "seed": -1}, "method.*; seed"),
    ],
)
def test_options_that_cannot_be_used(option: dict[str, Any], message: str) -> None:
    for make in (planned, lambda **asked: shardwise.jit(step, mesh={"x": 4}, **asked)):
        with pytest.raises(shardwise.ShardwiseError, match=message):
            make(**option)


@pytest.mark.parametrize("method", ["greedy", "beam", "random"])
def test_other_methods(method: str) -> None:
    plan = planned(method=method)
    assert plan.search is not None and plan.search.method == method and plan.array("x").spec == (("x",), ())


def test_an_empty_list_of_tactics_decides_nothing() -> None:
    plan = planned(tactics=[])
    assert plan.search is None and plan.decisions == () and plan.array("x").spec == ((), ())


def test_nothing_fits() -> None:
    tiny = small_memory("v5e:2x2", 2**20)
    with pytest.raises(InfeasibleError) as caught:
        planned(topology=tiny)
    text = str(caught.value)
    plan = planned(topology=tiny, allow_infeasible=True)
    assert f"the smallest peak found is {plan.predicted.peak_bytes / 2**20:.2f} MiB per device" in text
    for part in (
        "no plan can fit",
        "has 1.00 MiB",
        "microbatches=64: at least ",
        "v5e:8x8, mesh x 64",
        "moments in bfloat16",
    ):
        assert part in text
    assert "remat" not in text, "there is no loop"
    assert plan.search is not None and plan.search.ended is Ended.INFEASIBLE and "a longer search" not in text
    with pytest.raises(
        InfeasibleError, match=r"a longer search .*:\n +evaluation budget exhausted after \d+ evaluations"
    ):
        planned(topology=small_memory("v5e:2x2", 201 * 2**20), budget_evals=5)
    assert "allow_infeasible=True" in text and "no topology was given" not in text
    assert plan.notes[0] == text.splitlines()[0] and not plan.predicted.fits
    by_hand = planned(topology=tiny, tactics=[DataParallel("x")], roles={"batch": "x"})
    assert not by_hand.predicted.fits and plan.predicted.peak_bytes <= by_hand.predicted.peak_bytes


def test_saved_and_loaded(tmp_path: Path) -> None:
    plan, file = planned(), tmp_path / "plan.json"
    plan.save(file)
    loaded = shardwise.load_plan(file)
    assert loaded == plan and loaded.to_json() == file.read_text()
    assert loaded.search is not None and loaded.search.seconds is None and "seconds" not in file.read_text()
    assert plan.search is not None and loaded.search.improvements == plan.search.improvements


@cache
def saved() -> str:
    return planned().to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda log: log.update(ended="tired"), "search.ended: expected one of converged, exhausted, .*not 'tired'"),
        (lambda log: log.update(evaluations=1.5), "search.evaluations: expected a whole number, not 1.5"),
        (lambda log: log.pop("method"), "search: method is missing"),
        (lambda log: log.update(improvements={}), "search.improvements: expected a list, not {}"),
        (lambda log: log["improvements"][0].update(time_s=None), r"search.improvements\[0\].time_s: expected a number"),
        (lambda log: log["improvements"][0].update(fits=1), r"search.improvements\[0\].fits: expected true or false"),
        (lambda log: log["improvements"][0].update(mesh={"x": 0}), "search: .*not a positive"),
        (lambda log: log.update(meshes=[{"mesh": {"x": 4}}]), r"search.meshes\[0\]: time_s is missing"),
        (lambda log: log.pop("front"), "search: front is missing"),
        (lambda log: log.update(front=[{"time_s": 1, "peak_bytes": 1}]), r"search.front\[0\]: fits is missing"),
    ],
)
def test_a_damaged_log_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    data = json.loads(saved())
    change(data["search"])
    (tmp_path / "plan.json").write_text(signed(data))
    with pytest.raises(PlanError, match=message):
        shardwise.load_plan(tmp_path / "plan.json")


def test_states_on_top_of_decisions_cost_what_the_model_says() -> None:
    analysis = analyzed(step, shapes(4096, 512))
    mesh = MeshAxes.of({"x": 2, "y": 2})
    cost = HardwareCost(place(mesh, topology("v5e:2x2")))
    base = DataParallel("x").decide(Context(analysis, mesh, cost, {"batch": ("x",)}), [])
    problem = Problem(CostModel.of(analysis, cost), base, ["x", "y"])
    rng = np.random.default_rng(0)
    model = CostModel(problem.model.structure, cost)
    for _ in range(12):
        state: tuple[int, ...] = ()
        for _ in range(3):
            state = (*state, int(rng.choice(problem.allowed(state))))
        lowered = lower_state(analysis, State(mesh, problem.decisions(state)), cost)
        assert problem.cost(state) == model.evaluate(lowered)


def test_jit_searches_at_the_first_call_and_runs() -> None:
    @shardwise.jit(mesh={"x": 8}, budget_evals=60)
    def power(x: jax.Array, *, seed: int = 2) -> jax.Array:
        return x**seed

    x = jnp.arange(4096.0 * 64).reshape(4096, 64)
    np.testing.assert_allclose(power(x, seed=3), x**3, rtol=1e-6)
    found = power.plan(x, seed=3)
    assert found.search is not None and found.search.evaluations > 0


def test_a_plan_found_in_little_memory_computes_the_same() -> None:
    """A small program is fastest unsharded; with half the memory that this takes it has to be sharded."""
    program = zoo.load("mlp", "tiny")
    asked: dict[str, Any] = {"mesh": {"data": 2, "model": 4}, "donate_argnums": program.donate_argnums}
    whole = shardwise.plan(program.fn, *program.args, topology="v5e:2x4", tactics=[], **asked).predicted
    tight = small_memory("v5e:2x4", whole.peak_bytes / 2)
    plan = shardwise.plan(program.fn, *program.args, topology=tight, budget_evals=200, **asked)
    assert plan.predicted.fits and any(any(a.spec) for a in plan.arguments)
    assert shardwise.verify(plan, program.fn, *program.make_args()).agrees


def test_a_short_search_is_no_worse_than_the_named_strategies() -> None:
    """Where it is said which arguments are the batch and the parameters."""
    program = zoo.parse("t2b:layers=2,d=512,heads=8,head=64,ffn=2048,vocab=1024,batch=32,seq=256")
    where = {"mesh": {"data": 4, "model": 4}, "topology": "v5e:4x4", "roles": {"batch": "batch", "params": "params"}}
    for evaluations in (0, 2):
        plan = shardwise.plan(program.fn, *program.args, budget_evals=evaluations, **where)
        assert plan.predicted.time_s <= plan.baselines[0].time_s
    assert shardwise.plan(program.fn, *program.args, budget_s=0, **where).search.evaluations <= 2
    longer = shardwise.plan(program.fn, *program.args, budget_evals=300, **where)
    assert longer.predicted.time_s < longer.baselines[0].time_s


def test_a_step_that_takes_no_time_is_planned(tmp_path: Path) -> None:
    """An identity has no kernel: nothing is divided by its step time."""
    x = jax.ShapeDtypeStruct((64, 8), "float32")
    made = shardwise.plan(lambda x: {"same": x}, x, mesh={"data": 2, "model": 4}, topology="v5e:2x4")
    assert made.predicted.time_s == 0 and str(made)
    made.timeline(tmp_path / "step.json")
    made.report(tmp_path / "page.html")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
