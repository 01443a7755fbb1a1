"""Tables against the plain specification: equal to the picosecond and to the block, for random programs and states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel, TermKind, total
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.evaluator.evaluator import Evaluator
from shardwise.evaluator.space import Space
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.structure import Structure
from tests.fuzz.generate import Drawn, drawn_programs
from tests.lowering.test_totals import layered, recurrent

HOST = Path(__file__).parents[2] / "benchmarks" / "fidelity" / "measured" / "host8.toml"
MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2})


def build(
    analysis: Analysis, mesh: MeshAxes, rng: random.Random, base: Sequence[Decision] = (), hardware: str = ""
) -> Evaluator:
    """All groups on all axes with random sides, padded or not, some arguments and inner values that may be kept."""
    structure = Structure(analysis)
    groups = [g for g in analysis.groups if g.matters]
    values = [a.value for a in analysis.program.arguments]
    values += rng.sample(range(len(analysis.program.values)), min(2, len(analysis.program.values)))
    keeps = tuple((v,) for v in dict.fromkeys(rng.sample(values, min(3, len(values)))))
    able = frozenset(itertools.product(range(len(groups)), range(len(mesh.names))))
    space = Space(mesh, tuple(g.colors for g in groups), tuple(tuple(g.bits) for g in groups), keeps, tuple(base), able)
    actions: list[Decision] = [Keep(values, axis) for values in keeps for axis in mesh.names]
    for group in groups:
        for axis in mesh.names:
            for _ in range(min(3, 2 ** len(group.bits))):
                sides = tuple((bit, rng.randint(0, 1)) for bit in group.bits)
                actions += [Shard(group.colors, axis, sides, padded=padded) for padded in (False, True)]
    cost = HardwareCost(place(mesh, topology(hardware))) if hardware else HardwareCost.of(mesh)
    return Evaluator(CostModel(structure, cost), space, list(dict.fromkeys(actions)))


def test_meshes_share_what_does_not_depend_on_them() -> None:
    program = zoo.load("gpt", "tiny", scan=False)
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, JitOptions())))
    groups = [g for g in analysis.groups if g.matters]
    model, evaluators = None, list[Evaluator]()
    for sizes in MESHES:
        mesh = MeshAxes.of(sizes)
        cost = HardwareCost(place(mesh, topology("v5e:2x4")))
        model = CostModel.of(analysis, cost) if model is None else model.on(cost)
        space = Space(mesh, tuple(g.colors for g in groups), tuple(tuple(g.bits) for g in groups))
        actions = [space.shard(n, axis) for n in range(len(groups)) for axis in mesh.names]
        evaluators.append(Evaluator(model, space, actions))
    assert len({id(evaluator.dependencies) for evaluator in evaluators}) == 1
    rng = random.Random(5)
    for evaluator in evaluators:
        for state in (random_state(evaluator, rng) for _ in range(4)):
            model, lowered = evaluator.model, evaluator.lowered(state)
            cost, curve = total(model, [model.figures(lowered, term) for term in model.terms])
            assert evaluator.evaluate([state])[0] == cost and (evaluator.curve(state) == curve).all()


def random_state(evaluator: Evaluator, rng: random.Random, most: int = 7) -> tuple[int, ...]:
    """Actions in a random order, each unit at most once on an axis."""
    chosen: list[int] = []
    taken: set[object] = set()
    for n in rng.sample(range(len(evaluator.actions)), len(evaluator.actions)):
        action = evaluator.actions[n]
        place = (action.slot, n if action.slot < 0 else 0)
        if place not in taken and len(chosen) < most:
            taken.add(place)
            chosen.append(n)
    return tuple(chosen[: rng.randint(0, len(chosen))]) if chosen else ()


def check(evaluator: Evaluator, rng: random.Random, count: int) -> None:
    states = [random_state(evaluator, rng) for _ in range(count)]
    costs = evaluator.evaluate(states)
    for k, state in enumerate(states):
        plain = evaluator.model.evaluate(evaluator.lowered(state))
        assert costs[k] == plain, [evaluator.actions[n].decision for n in state]


def space_of(structure: Structure, mesh: MeshAxes) -> Space:
    groups = [g for g in structure.analysis.groups if g.matters]
    return Space(mesh, tuple(g.colors for g in groups), tuple(tuple(g.bits) for g in groups))


def analyzed(fn: object, shapes: Sequence[object]) -> Analysis:
    return analyze_program(lower(trace(fn, tuple(shapes), {}, JitOptions())))  # type: ignore[arg-type]


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(drawn_programs, st.integers(0, 2**32))
def test_costs_equal_the_specification(drawn: Drawn, seed: int) -> None:
    analysis = analyzed(*drawn.function())
    rng = random.Random(seed)
    for mesh in MESHES:
        evaluator = build(analysis, MeshAxes.of(mesh), rng)
        for _ in range(2):
            check(evaluator, rng, 3)


@pytest.mark.parametrize("name", ["gpt:tiny", "mixtral:tiny", "gns:tiny", "itx:tiny", "ssm:tiny", "unet:tiny,levels=1"])
def test_costs_equal_the_specification_on_the_zoo(name: str) -> None:
    program = zoo.parse(name)
    options = JitOptions(donate_argnums=program.donate_argnums)
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, options)))
    rng = random.Random(7)
    evaluator = build(analysis, MeshAxes.of({"x": 2, "y": 4}), rng)
    check(evaluator, rng, 4)
    check(evaluator, rng, 4)  # starts from what the first left


@pytest.mark.parametrize(("step", "totals"), [(recurrent(), 3), (layered(), 3)], ids=["recurrent", "layered"])
def test_costs_equal_the_specification_where_loops_add_up(step: tuple[Any, Any], totals: int) -> None:
    """Gradients over time steps; and those of layers over parts of the batch, which inner loops stack."""
    rng = random.Random(11)
    analysis = analyzed(*step)
    assert len(Structure(analysis).totals) == totals
    for mesh in MESHES:
        check(build(analysis, MeshAxes.of(mesh), rng, hardware="v5e:2x4"), rng, 12)


def test_costs_equal_the_specification_with_copies_and_on_chip() -> None:
    """Layers that are equal but for where they look up: before a loop, in it, and after it; an output that is copied."""

    def rows(tables: jax.Array, at: jax.Array) -> jax.Array:
        return jax.vmap(lambda table, k: table.at[k].get(mode="promise_in_bounds"))(tables, at)

    def fn(tables: jax.Array, at: jax.Array, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = rows(tables, at) * 2.0
        z, _ = jax.lax.scan(lambda c, _: (jnp.sin(c + rows(tables, at)), None), y, None, length=3)
        z = jnp.concatenate([z, rows(tables, at)], 1)
        return z.sum(0), x @ w + 1.0

    def array(*sizes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    shapes = [array(65536, 33, 64), array(65536, dtype="int32"), array(512, 128, 256), array(256, 1024)]
    rng = random.Random(3)
    evaluator = build(analyzed(fn, shapes), MeshAxes.of({"x": 2, "y": 4}), rng)
    assert any(term.kind is TermKind.COPY for term in evaluator.model.terms)
    for _ in range(3):
        check(evaluator, rng, 4)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_costs_equal_the_specification_on_a_measured_host(name: str) -> None:
    """Its profile has a rate for transposed reads, which other profiles do not have: they are separate kernels."""
    program = zoo.load(name, "tiny")
    options = JitOptions(donate_argnums=program.donate_argnums)
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, options)))
    rng = random.Random(11)
    evaluator = build(analysis, MeshAxes.of({"x": 2, "y": 4}), rng, hardware=f"{HOST}:8")
    turned = [n for n, kernel in enumerate(evaluator.model.kernels) if kernel.transposed]
    assert turned
    check(evaluator, rng, 8)
    lowered = [evaluator.lowered(random_state(evaluator, rng)) for _ in range(8)]
    terms = [term for term in evaluator.model.terms if term.kind is TermKind.KERNEL and term.number in turned]
    seconds = {evaluator.model.figures(state, term).compute_ps > 0 for state in lowered for term in terms}
    assert seconds == {True, False}, "only sums over devices cost"


def test_of_results_that_stay_the_first_is_taken() -> None:
    """Under this state two ways win by leaving a result as they make it, and take the same time."""
    program = zoo.load("llama3", "tiny", remat=True)
    options = JitOptions(donate_argnums=program.donate_argnums)
    structure = Structure(analyze_program(lower(trace(program.fn, program.args, {}, options))))
    mesh = MeshAxes.of({"x": 2, "y": 2, "z": 2})
    space = space_of(structure, mesh)
    taken = [(9, "z", (1, 0)), (9, "x", (1, 1)), (4, "x", ()), (8, "x", ()), (0, "z", ()), (2, "y", ())]
    actions = [space.shard(space.units.index((color,)), axis, sides) for color, axis, sides in taken]
    evaluator = Evaluator(CostModel(structure, HardwareCost.of(mesh)), space, actions)
    found = evaluator.evaluate([range(len(actions))])[0]
    assert found == evaluator.model.evaluate(evaluator.lowered(range(len(actions))))


def test_who_reads_what_uses_were_asked_for_rests_on_it_too() -> None:
    """The masks of these experts stay as they are computed under one state only. What reads them, and was worked out in the
    same state after they were, must not be taken for known under the other."""
    program = zoo.load("mixtral", "tiny")
    options = JitOptions(donate_argnums=program.donate_argnums)
    structure = Structure(analyze_program(lower(trace(program.fn, program.args, {}, options))))
    mesh = MeshAxes.of({"data": 4, "model": 4})
    space = space_of(structure, mesh)
    taken = [
        [(11, "model", 0), (10, "model", 1), (2, "data", 0), (4, "model", 0), (6, "data", 0), (13, "data", 0)],
        [(6, "data", 0), (10, "model", 0), (10, "data", 0), (12, "model", 0), (3, "model", 0), (13, "data", 0)],
    ]
    states = [[space.shard(unit, axis, (side,) * bool(side)) for unit, axis, side in state] for state in taken]
    actions = list(dict.fromkeys(action for state in states for action in state))
    cost = HardwareCost(place(mesh, topology("v5e:4x4")))
    evaluator = Evaluator(CostModel(structure, cost), space, actions)
    for state in states:
        numbers = [actions.index(action) for action in state]
        assert evaluator.evaluate([numbers])[0] == evaluator.model.evaluate(evaluator.lowered(numbers))


def test_repeated_layers_are_worked_out_once() -> None:
    def deep(layers: int) -> Evaluator:
        def fn(ws: list[jax.Array], x: jax.Array) -> jax.Array:
            for up, down in ws:  # type: ignore[misc]
                x = x + jnp.tanh(x @ up) @ down
            return x

        shapes = [(jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256, 64), "float32"))] * layers
        analysis = analyzed(fn, [shapes, jax.ShapeDtypeStruct((32, 64), "float32")])
        return build(analysis, MeshAxes.of({"x": 2, "y": 4}), random.Random(0))

    six, twelve = deep(6), deep(12)
    assert len(six._classes) == len(twelve._classes), "more layers, no more classes"
    assert len(six.dependencies.nodes) == len(twelve.dependencies.nodes)


def test_what_is_decided_already_is_part_of_every_state() -> None:
    fn = lambda w, x: jnp.tanh(x @ w) @ w.T  # noqa: E731
    analysis = analyzed(fn, [jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")])
    mesh, rng = MeshAxes.of({"x": 2, "y": 4}), random.Random(1)
    weight, rows = analysis.program.arguments[0].value, analysis.color_of("x", 0).id
    colors = tuple(analysis.color_of("w", d).id for d in range(2))
    for base in ([Shard((rows,), "x")], [Pin(weight, ((), ("y",)), colors)], [Keep((weight,), "y")]):
        check(build(analysis, mesh, rng, base), rng, 20)


def test_a_long_chain_needs_no_deep_stack() -> None:
    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        for _ in range(400):
            y = y + 1.0
        return y

    analysis = analyzed(fn, [jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((32, 64), "float32")])
    rng = random.Random(2)
    check(build(analysis, MeshAxes.of({"x": 2, "y": 4}), rng), rng, 4)
