"""Better hardware is never slower and never makes a plan infeasible; the bounds hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import Cost, CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.layout import Placement, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.hardware.topology import Topology, topology
from shardwise.lowering.decisions import State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.structure import Structure
from tests.fuzz.generate import random_decisions

MESH = MeshAxes.of({"x": 4, "y": 4})
#: One figure made better at a time.
BETTER: dict[str, Any] = {
    "memory_bytes_per_s": lambda p: replace(p, memory_bytes_per_s=2 * p.memory_bytes_per_s),
    "matrix_flops_per_s": lambda p: replace(
        p, matrix_flops_per_s=tuple((name, 2 * rate) for name, rate in p.matrix_flops_per_s)
    ),
    "vector_flops_per_s": lambda p: replace(p, vector_flops_per_s=2 * p.vector_flops_per_s),
    "launch_s": lambda p: replace(p, launch_s=p.launch_s / 2),
    "collective_s": lambda p: replace(p, collective_s=p.collective_s / 2),
    "links": lambda p: replace(p, links=tuple(replace(t, bytes_per_s=2 * t.bytes_per_s) for t in p.links)),
    "latency": lambda p: replace(p, links=tuple(replace(t, latency_s=t.latency_s / 2) for t in p.links)),
}


def on(profile: Profile, of: Placement) -> Placement:
    """The same placement with a changed profile."""
    tiers = profile.links
    axes = tuple(
        replace(a, bytes_per_s=tiers[a.tier].bytes_per_s, latency_s=tiers[a.tier].latency_s) for a in of.topology.axes
    )
    return replace(of, topology=Topology(profile, of.topology.text, axes))


def cost(structure: Structure, lowered: Lowered, placement: Placement) -> Cost:
    """Of a state that was lowered once: the choices stay, the figures change."""
    return CostModel(structure, HardwareCost(placement)).evaluate(lowered)


@pytest.fixture(scope="module", params=["gpt", "mixtral", "gns"])
def structure(request: pytest.FixtureRequest) -> Structure:
    program = zoo.load(request.param, "tiny")
    options = JitOptions(donate_argnums=program.donate_argnums)
    return Structure(analyze_program(lower(trace(program.fn, program.args, {}, options))))


@pytest.mark.parametrize("hardware", ["v5e:4x4", "h100:8x2"])
def test_better_hardware_is_never_slower(structure: Structure, hardware: str) -> None:
    placement = place(MESH, topology(hardware))
    profile = placement.topology.profile
    for seed in range(3):
        state = State(MESH, tuple(random_decisions(structure.analysis, MESH, seed)))
        lowered = Lowered(structure, state, HardwareCost(placement))
        lowered.lower_all()
        before = cost(structure, lowered, placement)
        assert max(before.compute_ps, before.comm_ps) <= before.time_ps <= before.compute_ps + before.comm_ps
        assert before.compute_ps > 0 and before.peak_blocks > 0
        for name, better in BETTER.items():
            after = cost(structure, lowered, on(better(profile), placement))
            assert after.compute_ps <= before.compute_ps, name
            assert after.comm_ps <= before.comm_ps, name
            assert after.time_ps <= before.time_ps, name
            assert after.peak_blocks == before.peak_blocks, f"{name} takes no memory"


def test_some_figures_do_matter(structure: Structure) -> None:
    placement = place(MESH, topology("v5e:4x4"))
    state = State(MESH, tuple(random_decisions(structure.analysis, MESH, 0)))
    lowered = Lowered(structure, state, HardwareCost(placement))
    lowered.lower_all()
    before = cost(structure, lowered, placement)
    for name in ("memory_bytes_per_s", "launch_s", "links"):
        assert (
            cost(structure, lowered, on(BETTER[name](placement.topology.profile), placement)).time_ps < before.time_ps
        )


def test_more_memory_is_never_infeasible(structure: Structure) -> None:
    placement = place(MESH, topology("v5e:4x4"))
    profile = placement.topology.profile
    larger = replace(profile, memory_bytes=2 * profile.memory_bytes)
    models = [CostModel(structure, HardwareCost(on(p, placement))) for p in (profile, larger)]
    lowered = Lowered(structure, State(MESH, ()), models[0].cost)
    peaks = [model.evaluate(lowered).peak_blocks for model in models]
    assert peaks[0] == peaks[1]
    assert models[1].usable_blocks == 2 * models[0].usable_blocks


def test_whole_programs_take_what_one_device_takes(structure: Structure) -> None:
    """Nothing decided: no communication, and as much compute and memory as on a mesh of any size."""
    costs = []
    for mesh, where in (({"x": 4, "y": 4}, "v5e:4x4"), ({"x": 1, "y": 1}, "v5e")):
        axes = MeshAxes.of(mesh)
        model = CostModel(structure, HardwareCost(place(axes, topology(where))))
        lowered = Lowered(structure, State(axes, ()), model.cost)
        lowered.lower_all()
        costs.append(model.evaluate(lowered))
    assert costs[0] == costs[1] and costs[0].comm_ps == 0
