"""What collectives cost does not depend on which were asked for before."""

from shardwise.hardware.layout import place
from shardwise.hardware.topology import topology
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.sharding import Collective, Kind


def test_rings_and_reduce_scatters_have_links_of_their_own() -> None:
    placement = place({"data": 4, "model": 4}, topology("v5e:4x4"))
    scatter = Collective(Kind.REDUCE_SCATTER, (0,), 4e6, 1e6)
    ring = Collective(Kind.PERMUTE, (0,), 1e6, 1e6, near=False, hops=3)
    halo = Collective(Kind.PERMUTE, (0,), 1e6, 1e6, near=True)
    steps = [scatter, ring, halo, Collective(Kind.PERMUTE, (0,), 1e6, 1e6)]
    forwards, backwards = HardwareCost(placement), HardwareCost(placement)
    costs = [forwards.step_s(step) for step in steps]
    assert costs == [backwards.step_s(step) for step in reversed(steps)][::-1]
    assert costs[0] != costs[1]
