"""What a collective costs does not depend on what was asked before."""

from __future__ import annotations

import itertools

from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.sharding import Collective, Kind


def test_links_do_not_depend_on_the_order_of_questions() -> None:
    """A ring of permutes has the purpose of a reduce-scatter, and another time."""
    placement = place(MeshAxes.of({"data": 4, "model": 4}), topology("v5e:4x4"))
    ring = Collective(Kind.PERMUTE, (0,), 2.0**20, 2.0**20, near=True, hops=3)
    steps = (
        ring,
        Collective(Kind.REDUCE_SCATTER, (0,), 2.0**22, 2.0**20),
        Collective(Kind.REDUCE_SCATTER, (0,), 2.0**22, 2.0**20, near=True),
        Collective(Kind.PERMUTE, (0,), 2.0**20, 2.0**20, near=True),
        Collective(Kind.PERMUTE, (0,), 2.0**20, 2.0**20, hops=3),
    )
    alone = [HardwareCost(placement).step_s(step) for step in steps]
    for order in itertools.permutations(range(len(steps))):
        cost = HardwareCost(placement)
        assert {k: cost.step_s(steps[k]) for k in order} == dict(enumerate(alone))
    assert len(set(alone)) > 3
