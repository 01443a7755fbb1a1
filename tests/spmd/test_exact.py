"""The collectives of emitted programs are the predicted ones: kind, axes, bytes, trips and number, without exception."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import shardwise
from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.mesh import MeshAxes
from shardwise.planner.apply import Applied
from shardwise.planner.devices import make_mesh
from shardwise.plans.plan import Plan
from tests.fuzz.generate import Drawn, drawn_programs, random_decisions, with_rings
from tests.planner.decisions import plan_decisions
from tests.spmd.emitted import emitted, predicted
from tests.verification.strategy_rows import ROWS

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2})
ZOO = [f"{name}:{config}" for name in zoo.names() for config in zoo.configs(name) if config.startswith("tiny")]
PROGRAMS = int(os.environ.get("SHARDWISE_FUZZ", "240")) // 12


def check(plan: Plan, traced: object, program: object, shapes: list[jax.ShapeDtypeStruct]) -> None:
    applied = Applied(plan, traced, program, make_mesh(plan.mesh), rounds=True)  # type: ignore[arg-type]
    found, wanted = emitted(jax.make_jaxpr(applied.__call__)(*shapes)), predicted(plan)
    assert found == wanted, f"emitted {found - wanted}, predicted {wanted - found}"


@pytest.mark.parametrize("name", [name for name in ROWS if ROWS[name].mesh(8).get("model", 0) != 16])
def test_named_strategies(name: str) -> None:
    program, plan = ROWS[name].plan(8)
    traced = trace(program.fn, program.args, {}, JitOptions())
    check(plan, traced, lower(traced), jax.tree.leaves(program.args))


@pytest.mark.parametrize("target", ZOO)
def test_zoo_programs_under_random_decisions(target: str) -> None:
    program = zoo.parse(target)
    traced = trace(program.fn, program.args, {}, JitOptions())
    captured = lower(traced)
    analysis = analyze_program(captured)
    for k, mesh in enumerate(MESHES[1:]):
        axes = MeshAxes.of(mesh)
        plan = plan_decisions(
            traced, analysis, axes, random_decisions(analysis, axes, k), with_rings(axes) if k else None
        )
        check(plan, traced, captured, jax.tree.leaves(program.args))


@settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
@given(drawn_programs, st.integers(0, 2**20))
def test_random_programs(drawn: Drawn, seed: int) -> None:
    fn, shapes = drawn.function()
    traced = trace(fn, tuple(shapes), {}, JitOptions())
    program = lower(traced)
    analysis = analyze_program(program)
    for number, mesh in enumerate(MESHES):
        axes = MeshAxes.of(mesh)
        check(
            plan_decisions(
                traced,
                analysis,
                axes,
                random_decisions(analysis, axes, seed + number),
                with_rings(axes) if seed % 2 else None,
            ),
            traced,
            program,
            shapes,
        )


def test_operands_of_products_move_as_they_are_read() -> None:
    """TPUs read bfloat16 of float32 operands at default precision; other devices do not, and neither do other precisions."""
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (32, 64)))

    def step(w: Any, x: Any, precision: Any = None) -> Any:
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.matmul(x, w, precision=precision)) ** 2))(w)

    def planned(fn: Any, topology: str) -> Plan:
        pins = {"w": PartitionSpec("x"), "x": PartitionSpec("x")}
        return shardwise.plan(fn, w, x, mesh={"x": 8}, topology=topology, tactics=[], pins=pins)

    moved = {
        (topology, fn): sum(nbytes for _, nbytes in planned(fn, topology).moved().values())
        for topology in ("v5e:2x4", "h100:8")
        for fn in (step, functools.partial(step, precision="highest"))
    }
    whole = moved["v5e:2x4", next(fn for t, fn in moved if isinstance(fn, functools.partial))]
    assert moved["v5e:2x4", step] < whole and moved["h100:8", step] >= whole
    plan, traced = planned(step, "v5e:2x4"), trace(step, (w, x), {}, JitOptions())
    check(plan, traced, lower(traced), [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, x)])
    assert "# as bfloat16" in plan.program()
    np.testing.assert_allclose(plan.jit(step)(w, x), step(w, x), atol=1e-4)
