"""``objective="devices"``: the smallest slice of a topology that is enough.

Slices of 1, 2, 4, ... devices of the same kind are planned in their natural shapes, the smallest first, and the topology itself
last. A slice is passed over without a search where a bound proves that no plan is enough: the lower bound on memory, or the
compute of one device, divided by the number of devices, as a bound on time.

Weak: other numbers of devices are not tried, and each slice is searched from the beginning.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import HardwareError, MeshError, PlanError
from shardwise.hardware.layout import Placement
from shardwise.hardware.topology import Topology
from shardwise.planner.asked import Asked, candidate_meshes
from shardwise.planner.inquiry import Variants
from shardwise.planner.mesh import OpenMesh
from shardwise.planner.racing import Hopeless, Outcome, choose
from shardwise.plans.search_log import NOT_FOUND
from shardwise.search.run import Ended
from shardwise.transforms.variants import AS_IS
from shardwise.units import binary


def choose_slice(variants: Variants, asked: Asked) -> tuple[Outcome, list[str]]:
    """Returns what was chosen on the smallest slice that is enough, or else on the topology, and what smaller slices lack."""
    if asked.topology is None or isinstance(asked.topology, Placement):
        raise PlanError("objective='devices' needs a topology whose slices are tried, such as topology='v5e:4x4'")
    if OpenMesh.of(asked.mesh) is None:
        raise PlanError("objective='devices' chooses the number of devices: leave out the mesh, or give sizes of None")
    lacking: list[str] = []
    for power in range((asked.topology.devices - 1).bit_length()):
        try:
            part = asked.topology.of_size(2**power)
        except HardwareError:  # there is no such slice: one device of a chip with two
            continue
        lack = _tried(variants, replace(asked, topology=part), part)
        if isinstance(lack, Outcome):
            return lack, lacking
        lacking.append(f"{part.text}: {lack}")
    return choose(variants, asked), lacking


def _tried(variants: Variants, asked: Asked, part: Topology) -> Outcome | str:
    """Returns what is chosen on a slice, or what that lacks."""
    limit_s = asked.step_time_s
    try:
        placed, _ = candidate_meshes(asked)
        inquiry = variants[AS_IS].inquiry(placed[0], asked.roles)
        if limit_s is not None:
            least_s = inquiry.model.evaluate(inquiry.context.lower(())).compute_ps * 1e-12 / part.devices
            if least_s > limit_s:
                return f"at least {least_s:.3g} s per step, if all devices share the work evenly"
        outcome = choose(variants, asked, anyway=False)
    except Hopeless as proof:
        return f"at least {binary(proof.least_bytes)} per device"
    except MeshError as error:
        return str(error)
    predicted = outcome.settled.predicted
    enough = predicted.fits and (limit_s is None or predicted.time_s <= limit_s)
    if not enough and outcome.log is not None and outcome.log.ended is Ended.INTERRUPTED:
        raise KeyboardInterrupt
    if not predicted.fits:
        return f"{binary(predicted.peak_bytes)} per device, {NOT_FOUND}"
    return outcome if enough else f"{predicted.time_s:.3g} s per step"
