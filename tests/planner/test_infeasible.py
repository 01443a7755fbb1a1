"""The bound on memory is one: no state goes below it; and what is said where nothing fits is true."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise
from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.cost.predict import predict
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.errors import InfeasibleError
from shardwise.hardware.layout import ideal, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology, topology
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import lower_state
from shardwise.lowering.structure import Structure
from shardwise.planner import infeasible
from shardwise.planner.infeasible import Change, does_not_fit, with_small_moments
from shardwise.planner.inquiry import Inquiry, Settled
from shardwise.plans.search_log import NOT_FOUND, MeshTried, SearchLog, VariantTried
from shardwise.search import bounds
from shardwise.search.bounds import Bound, finest, peak_bound
from shardwise.search.exhaustive import exhaustive
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.run import Budget, Ended
from shardwise.search.searcher import unless_hopeless
from tests.fuzz.generate import Drawn, drawn_programs, random_decisions
from tests.planner.test_plan_search import shapes, small_memory, step

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2})
spec = jax.ShapeDtypeStruct


def analyzed(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> Analysis:
    return analyze_program(lower(trace(fn, tuple(args), {}, JitOptions(**options))))


@cache
def trained(width: int = 1024, batch: int = 65536) -> Analysis:
    return analyzed(step, shapes(width, batch), donate_argnums=(0, 1))


def cost(where: str | Topology = "v5e:2x2", **mesh: int) -> HardwareCost:
    return HardwareCost(place(MeshAxes.of(mesh or {"x": 4}), topology(where) if isinstance(where, str) else where))


#: Enough memory for everything, and none on the chip.
LARGE = small_memory("v5e:2x2", 2**34)


def random_base(analysis: Analysis, mesh: MeshAxes, rng: random.Random) -> list[Decision]:
    """A value that is pinned and one that is kept, or neither."""
    program, made = analysis.program, list[Decision]()
    colors = Structure(analysis).colors
    if rng.random() < 0.5:
        value = rng.choice(program.values)
        left, dims = list(mesh.names), list[tuple[str, ...] | None]()
        rng.shuffle(left)
        for size in value.shape:
            fits = bool(left) and size % mesh.sizes[mesh.index(left[-1])] == 0
            dims.append(rng.choice([None, (), (left.pop(),)] if fits else [None, ()]))
        made.append(Pin(value.id, tuple(dims), colors[value.id]))
    if rng.random() < 0.5:
        made.append(Keep((rng.choice(program.values).id,), rng.choice(mesh.names)))
    return made


def as_searched(model: CostModel, decision: Decision) -> Decision:
    """The decision, padded only where a search pads."""
    if not isinstance(decision, Shard) or not decision.padded:
        return decision
    structure, mesh = model.structure, model.cost.placement.mesh
    group = next(g for g in structure.analysis.groups if g.colors == decision.colors)
    return replace(decision, padded=bool(structure.padded_sizes(group, mesh.sizes[mesh.index(decision.axis)])))


def check(model: CostModel, rng: random.Random, count: int) -> None:
    """No state goes below the bound, and no value lies in a way that the bound does not know of."""
    analysis, mesh = model.structure.analysis, model.cost.placement.mesh
    base = random_base(analysis, mesh, rng)
    bound, least = peak_bound(model, base), bounds._Least(model, mesh, base)
    for _ in range(count):
        chosen = (as_searched(model, d) for d in random_decisions(analysis, mesh, rng.randrange(2**32)))
        state = State(mesh, (*base, *chosen))
        lowered = lower_state(analysis, state, model.cost)
        assert bound.peak_bytes <= model.evaluate(lowered).peak_bytes, state.decisions
        for v in model.life.values():
            found = lowered.actual[v].local_shape(analysis.program.values[v].shape, mesh)
            assert found in least._local_shapes(v), (analysis.program.label(v), state.decisions)


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_programs, st.integers(0, 2**32))
def test_no_state_of_a_random_program_goes_below_the_bound(drawn: Drawn, seed: int) -> None:
    fn, args = drawn.function()
    analysis, rng = analyzed(fn, args), random.Random(seed)
    structure = Structure(analysis)
    for mesh in MESHES:
        hardware = rng.choice(["v5e", "h100"])
        check(CostModel(structure, HardwareCost(ideal(MeshAxes.of(mesh), hardware))), rng, 3)


@pytest.mark.parametrize("name", ["gpt", "mixtral", "gns", "itx", "wresnet"])
def test_no_state_of_the_zoo_goes_below_the_bound(name: str) -> None:
    program = zoo.load(name, "tiny")
    analysis = analyzed(program.fn, program.args, donate_argnums=program.donate_argnums)
    rng = random.Random(3)
    model = CostModel.of(analysis, HardwareCost.of(MeshAxes.of({"x": 2, "y": 4})))
    for _ in range(3):
        check(model, rng, 2)


@pytest.mark.parametrize(("width", "batch", "share"), [(1024, 65536, 0.95), (4096, 4096, 0.6)])
def test_the_bound_is_near_the_best_of_all_states(width: int, batch: int, share: float) -> None:
    """Where weights are as large as activations, one of them has to be gathered, and gradients are there whole while rings
    reduce them: the bound counts neither."""
    problem = Problem(CostModel.of(trained(width, batch), cost(small_memory("v5e:2x2", 2**10))))
    best = exhaustive(problem).best.cost.peak_bytes
    assert share * best <= peak_bound(problem.model).peak_bytes <= best


def test_pins_and_keeps_raise_the_bound() -> None:
    analysis = trained()
    model, colors = CostModel.of(analysis, cost()), Structure(analysis).colors
    x = analysis.program.paths["x"]
    free = peak_bound(model)
    whole, kept = peak_bound(model, [Pin(x, ((), ()), colors[x])]), peak_bound(model, [Keep((x,), "x")])
    assert free.peak_bytes < whole.peak_bytes == kept.peak_bytes
    assert (whole.alive[0].label, whole.alive[0].nbytes) == ("x", analysis.program.values[x].nbytes)
    assert peak_bound(model, [Pin(x, (("x",), ()), colors[x])]).peak_bytes == free.peak_bytes


def test_what_does_not_divide_stays_whole() -> None:
    analysis = analyzed(lambda x, w: x @ w, [spec((8190, 1022), "float32"), spec((1022, 1024), "float32")])
    found = {a.label: a.nbytes for a in peak_bound(CostModel.of(analysis, cost())).alive}
    assert found["x"] >= 8190 * 1022 * 4 and found["w"] < 1022 * 1024 * 4 / 2


def test_the_finest_mesh_bounds_all() -> None:
    model = CostModel.of(trained(), cost("v5e:2x4", x=8))
    every = peak_bound(model, mesh=finest(8)).peak_bytes
    for sizes in ({"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 2, "c": 2}):
        assert every <= peak_bound(model, mesh=MeshAxes.of(sizes)).peak_bytes


def test_the_line_and_the_tensors_to_blame() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sort(x[:, None] * x, axis=0) ** 2)

    bound = peak_bound(CostModel.of(analyzed(fn, [spec((8192,), "float32")]), cost()))
    assert bound.source.startswith("test_infeasible.py:")
    assert [a.nbytes for a in bound.alive] == sorted((a.nbytes for a in bound.alive), reverse=True)
    assert "test_infeasible.py" in bound.alive[0].label and sum(a.nbytes for a in bound.alive) == bound.peak_bytes


def test_a_hopeless_search_ends_at_once() -> None:
    problem = Problem(CostModel.of(trained(), cost(small_memory("v5e:2x2", 2**20))))
    found = unless_hopeless(problem, lambda budget: mcts(problem, budget), Budget(600, 10**6, 10**6))
    assert found.ended is Ended.INFEASIBLE and found.evaluations <= 200 and not found.fits
    assert found.best.cost.peak_bytes < 1.5 * peak_bound(problem.model).peak_bytes


def test_a_hopeful_search_does_not() -> None:
    problem = Problem(CostModel.of(trained(), cost()))
    asked: list[Budget] = []

    def search(budget: Budget) -> Any:
        asked.append(budget)
        return mcts(problem, budget)

    assert unless_hopeless(problem, search, Budget(600, 150)).fits and asked == [Budget(600, 150)]


def test_what_other_axes_may_still_do_is_hope() -> None:
    """On one axis alone nothing fits, on both something does: a tactic may come later."""
    least = peak_bound(CostModel.of(trained(), cost(x=2, y=2))).peak_bytes
    problem = Problem(CostModel.of(trained(), cost(small_memory("v5e:2x2", 1.2 * least), x=2, y=2)), axes=["x"])
    found = unless_hopeless(problem, lambda budget: mcts(problem, budget), Budget(600, 150))
    assert not found.fits and found.ended is not Ended.INFEASIBLE


# What is said.


def settled(analysis: Analysis, where: HardwareCost, decisions: Sequence[Decision] = ()) -> tuple[Inquiry, Settled]:
    made = lower_state(analysis, State(where.placement.mesh, tuple(decisions)), where)
    model = CostModel(made.structure, where)
    return Inquiry(model), Settled(made, (), predict(model, made))


def log(ended: Ended = Ended.CONVERGED) -> SearchLog:
    return SearchLog("mcts", 0, ended, 10, ())


def said(nbytes: float, analysis: Analysis | None = None, ended: Ended = Ended.CONVERGED, **asked: Any) -> str:
    return does_not_fit(*settled(analysis or trained(), cost(small_memory("v5e:2x2", nbytes))), log(ended), **asked)


def bound() -> Bound:
    return peak_bound(CostModel.of(trained(), cost(LARGE)))


def section(text: str, heading: str) -> list[str]:
    """The lines below a heading."""
    lines = text.splitlines()
    if heading not in lines:
        return []
    rest = lines[lines.index(heading) + 1 :]
    return [line.strip() for line in rest[: next(k for k, line in enumerate(rest) if not line.startswith(" "))]]


def test_proven_and_not_proven() -> None:
    least = bound().peak_bytes
    below, above = said(least - 2**20, check=False), said(least + 2**20, check=False)
    text = f"{least / 2**20:.2f} MiB per device"
    assert below.startswith(
        f"no plan can fit: at least {text}, v5e:2x2 has {(least - 2**20) / 2**20:.2f} MiB\nproven: "
    )
    assert (
        above.startswith("no plan was found that fits: ") and f"not proven for all plans: the bound is {text}" in above
    )
    assert bound().alive[0].label in section(below, "largest there, each at its smallest:")[0]


def test_a_proof_for_a_tactic_is_none_for_all_plans() -> None:
    text = said(bound().peak_bytes + 2**20, ended=Ended.INFEASIBLE, check=False)
    assert text.startswith("no plan with these tactics can fit: ") and "not proven for all plans" in text


def test_a_proof_for_one_mesh_or_variant_is_none_for_others() -> None:
    """The bound with pins is one for the mesh of the plan, and other variants have other bounds."""
    least, axes = bound().peak_bytes, MeshAxes.of({"x": 4})
    analysis, where = trained(), cost(small_memory("v5e:2x2", least - 2**20))
    pin = Pin(analysis.program.paths["x"], ((), ()), analysis.value_colors[analysis.program.paths["x"]])
    proven, found = MeshTried(axes, peak_bytes=least), MeshTried(axes, 1.0, 2 * least, why=NOT_FOUND)
    other = VariantTried("rematerialized", 1.0, 2 * least, why=NOT_FOUND)
    for decisions, meshes, variants, can_fit in (
        ([], (proven, found), (), False),  # without pins the bound holds for all meshes
        ([pin], (proven, found), (), True),
        ([pin], (proven, proven), (), False),
        ([], (), (other,), True),
        ([], (), (replace(other, time_s=None, why=""),), False),
    ):
        some = replace(log(Ended.INFEASIBLE), meshes=meshes, variants=variants)
        text = does_not_fit(*settled(analysis, where, decisions), some, check=False)
        assert text.startswith("no plan was found that fits: " if can_fit else "no plan can fit: at least "), text
        assert ("proven for this mesh and variant of the program, not for others: at least " in text) is can_fit


def test_a_longer_search_is_proposed_where_it_might_help() -> None:
    least = bound().peak_bytes
    for nbytes, ended, proposed in (
        (least + 2**20, Ended.EVALUATIONS, True),
        (least + 2**20, Ended.CONVERGED, False),
        (least - 2**20, Ended.EVALUATIONS, False),
    ):
        assert ("a longer search" in said(nbytes, ended=ended, check=False)) is proposed


def test_the_smallest_relaxations_are_checked() -> None:
    text = said(0.4 * bound().peak_bytes)
    (more,) = section(text, "would do (checked):")
    assert more.startswith("v5e:4x4, mesh x 16: ")
    assert "to try" not in text
    assert section(text, "would not do (checked):")[0].startswith("moments in bfloat16: at least ")


def test_what_is_said_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes, clock = 0.6 * bound().peak_bytes, itertools.count(step=100)
    before = said(nbytes)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    assert said(nbytes) == before and "would do (checked):" in before


def test_checks_start_from_the_named_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a single evaluation of a search, what a named strategy fits is found."""
    monkeypatch.setattr(infeasible, "_CHECK", Budget(math.inf, 0))
    made, state = settled(trained(), cost(small_memory("v5e:2x2", 0.6 * bound().peak_bytes)))
    more = "v5e:2x4, mesh x 8: "
    nothing = does_not_fit(Inquiry(made.model), state, log())
    strategies = does_not_fit(Inquiry(made.model, {"params": ("params",), "batch": ("x",)}), state, log())
    assert any(line.startswith(more) for line in section(strategies, "would do (checked):"))
    assert not any(line.startswith(more) for line in section(nothing, "would do (checked):"))


def test_moments_in_bfloat16_may_do() -> None:
    analysis = trained(8192, 512)
    model = CostModel.of(analysis, cost(LARGE))
    least, smaller = peak_bound(model).peak_bytes, with_small_moments(model.structure)
    assert smaller is not None
    text = said(0.95 * least, analysis)
    assert text.startswith("no plan can fit") and section(text, "would do (checked):")[0].startswith(
        "moments in bfloat16: "
    )
    halved = {v.path for v in smaller.program.values if v.path and v.dtype == "bfloat16"}
    assert halved == {"moments/up", "moments/down", "out/1/up", "out/1/down"}


def test_a_program_without_moments() -> None:
    analysis = analyzed(lambda w, x: x @ w, [spec((1024, 1024), "float32"), spec((1024, 1024), "float32")])
    assert with_small_moments(Structure(analysis)) is None and "bfloat16" not in said(2**10, analysis)


def test_variants_that_the_caller_can_make() -> None:
    made: list[int] = []

    def smaller(batch: int) -> Change:
        def make() -> Analysis:
            made.append(batch)
            return trained(1024, batch)

        return Change("microbatches", f"microbatches={65536 // batch}", make)

    text = said(0.4 * bound().peak_bytes, changes=[smaller(32768), smaller(8192), smaller(4096)])
    assert made == [4096, 32768, 8192], "could the largest fit? Then from the smallest on"
    assert section(text, "would do (checked):")[0].startswith("microbatches=8: ")


def test_a_variant_that_cannot_be_made_is_not_named() -> None:
    def make() -> Analysis:
        raise shardwise.ShardwiseError("there is no loop")

    assert "remat" not in said(2**10, changes=[Change("remat", "remat=True", make)])


def test_the_largest_change_that_can_be_made_is_named_where_none_does() -> None:
    def change(batch: int) -> Change:
        def make() -> Analysis:
            if batch < 8192:
                raise shardwise.ShardwiseError("too small")
            return trained(1024, batch)

        return Change("microbatches", f"batch {batch}", make)

    text = said(0.05 * bound().peak_bytes, changes=[change(2**k) for k in (15, 14, 13, 12, 11)])
    assert "\n  batch 8192: at least " in text and text.count("batch ") == 1


def test_changes_are_combined_where_none_alone_does() -> None:
    def changes(one: int) -> list[Change]:
        sizes = {"one": one, "both": 4096}
        return [Change(kind, kind, lambda n=n: trained(1024, n)) for kind, n in sizes.items()]  # type: ignore[misc]

    least = 0.3 * bound().peak_bytes
    assert section(said(least, changes=changes(65536)), "would do (checked):")[0].startswith("both: ")
    assert "both" not in said(least, changes=changes(4096))


def looped(params: dict[str, Any], x: jax.Array) -> dict[str, Any]:
    """A training step of layers in a loop, whose activations take the memory."""

    def loss(params: dict[str, Any]) -> jax.Array:
        body = lambda h, w: (jnp.tanh(h @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, params["w"])[0] ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


@pytest.mark.parametrize("roles", [None, {"batch": "x"}])
def test_variants_of_a_plan_are_checked_and_do_as_is_said(roles: dict[str, str] | None) -> None:
    shapes = {"w": spec((8, 256, 256), "float32")}, spec((65536, 256), "float32")
    asked: dict[str, Any] = {"mesh": {"x": 4}, "budget_evals": 200, "donate_argnums": (0,), "roles": roles}
    free = shardwise.plan(looped, *shapes, topology="v5e:2x2", **asked)
    tight = small_memory("v5e:2x2", 0.6 * free.predicted.peak_bytes)
    with pytest.raises(InfeasibleError) as caught:
        shardwise.plan(looped, *shapes, topology=tight, **asked)
    told = section(str(caught.value), "would do (checked):")
    (line,) = (line for line in told if line.startswith("microbatches="))
    assert "to try" not in str(caught.value)
    count = int(line.partition("=")[2].split(",")[0].split(":")[0])
    asked |= {"topology": tight}
    assert shardwise.plan(looped, *shapes, microbatches=count, **asked).predicted.fits
    if count > 2:
        with pytest.raises(InfeasibleError, match=r"tried|no plan"):
            shardwise.plan(looped, *shapes, microbatches=count // 2, **asked)


def test_pins_hold_in_a_variant() -> None:
    """With the batch pinned whole, a smaller batch is what fits."""
    analysis, where = trained(), cost(small_memory("v5e:2x2", 64 * 2**20))
    x = analysis.program.paths["x"]
    made = settled(analysis, where, [Pin(x, ((), ()), Structure(analysis).colors[x])])
    changes = [Change("batch", f"batch {n}", lambda n=n: trained(1024, n)) for n in (16384, 4096)]  # type: ignore[misc]
    text = does_not_fit(*made, log(), changes=changes)
    assert section(text, "would do (checked):")[0].startswith("batch 4096: ")
    free = does_not_fit(*settled(analysis, where), log(), changes=changes)
    assert section(free, "would do (checked):")[0].startswith("batch 16384: ")


def test_lines_are_short_and_the_plan_says_it() -> None:
    with pytest.raises(InfeasibleError) as caught:
        shardwise.plan(step, *shapes(), mesh={"x": 4}, topology=small_memory("v5e:2x2", 2**25), donate_argnums=(0, 1))
    lines = str(caught.value).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("no plan can fit: at least ")
    asked: dict[str, Any] = {"mesh": {"x": 4}, "topology": small_memory("v5e:2x2", 2**25), "donate_argnums": (0, 1)}
    plan = shardwise.plan(step, *shapes(), allow_infeasible=True, **asked)
    assert plan.notes[0] == lines[0] and plan.search is not None and plan.search.ended is Ended.INFEASIBLE


def test_pins_that_a_longer_axis_does_not_divide() -> None:
    fn = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    analysis = analyzed(fn, [spec((1024, 4), "float32"), spec((2**16, 1024), "float32")])
    w = analysis.program.paths["w"]
    pin = Pin(w, ((), ("x",)), Structure(analysis).colors[w])
    text = does_not_fit(*settled(analysis, cost(small_memory("v5e:2x2", 2**25)), [pin]), log())
    assert "would do" not in text
    free = does_not_fit(*settled(analysis, cost(small_memory("v5e:2x2", 2**25))), log())
    assert section(free, "would do (checked):")[0].startswith("v5e:4x4, mesh x 16")
