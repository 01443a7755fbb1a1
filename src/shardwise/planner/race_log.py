"""The log of a race: why it ended, what improved, what was found on each mesh; or why no mesh could be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.cost.memory import BLOCK
from shardwise.errors import MeshError, ShardwiseError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.planner.arms import Arm, Decided
from shardwise.plans.search_log import MOST_TRADES, NOT_FOUND, Improved, MeshTried, SearchLog, Trade, VariantTried
from shardwise.search.goal import thinned
from shardwise.search.run import Ended
from shardwise.transforms.variants import Variant

if TYPE_CHECKING:
    from shardwise.planner.racing import Race


def search_log(race: Race, best: Decided, mesh: MeshAxes) -> SearchLog:
    """The log of a race that was won on a mesh, whose axes may have other names now."""
    journal, usable = race.journal, best.inquiry.model.usable_blocks
    front = thinned(journal.fronts.get(mesh, ()), MOST_TRADES, usable)
    named = {mesh: best.inquiry.cost.placement.mesh}
    ended = (Ended.INTERRUPTED,) if journal.interrupted else best.ended or (Ended.EXHAUSTED,)
    # Of several searches: what cut one of them short, or else why the last ended.
    short = [why for why in (Ended.INTERRUPTED, Ended.SECONDS, Ended.EVALUATIONS) if why in ended]
    return SearchLog(
        journal.options.method,
        int(journal.options.seed),
        (*short, ended[-1])[0],
        journal.evaluations,
        tuple(
            Improved(s.evaluations, named.get(on, on), c.time_s, c.peak_bytes, c.peak_blocks <= usable, s.seconds)
            for on, s in journal.steps
            for c in [s.best.cost]
        ),
        tuple(replace(m, mesh=named.get(m.mesh, m.mesh)) for m in _meshes(race)) if race.is_open else (),
        front=tuple(Trade(ps * 1e-12, blocks * BLOCK, blocks <= usable) for ps, blocks in front),
        seconds=journal.seconds,
    )


def _meshes(race: Race) -> Iterator[MeshTried]:
    """The meshes, the best first; of equals the one that lies better."""
    by_mesh: dict[Placement, Arm] = {}
    for arm in sorted(race.arms, key=lambda arm: arm.best.rank):
        by_mesh.setdefault(arm.placement, arm)
    for placement, arm in by_mesh.items():
        total, least_bytes = arm.best.total, race.least_bytes(placement)
        if arm.best.fits or least_bytes is None:
            why = "" if arm.best.fits else NOT_FOUND
            yield MeshTried(placement.mesh, total.time_s, total.peak_bytes, arm.best.fits, why)
        else:
            yield MeshTried(placement.mesh, peak_bytes=least_bytes)
    for placement in race.placed:
        if placement not in by_mesh:
            missed = "it was interrupted before it was searched"
            yield MeshTried(placement.mesh, why=str(race.failed.get(placement, missed)))


def variant_tried(variant: Variant, best: Decided | None = None, **found: Any) -> VariantTried:
    """The log of a variant, with the best that was found for it, or other findings."""
    if best is not None:
        found = {"time_s": best.total.time_s, "peak_bytes": best.total.peak_bytes, "fits": best.fits}
        found |= {} if best.fits else {"why": NOT_FOUND}
    return VariantTried(str(variant), stages=variant.stages, **found)


def failure(failed: Mapping[Placement, ShardwiseError]) -> ShardwiseError:
    """The error of meshes of which none can be used."""
    reasons = {str(error): error for error in failed.values()}
    if len(reasons) == 1:
        return next(iter(reasons.values()))
    lines = [f"  {placement.mesh}: {error}" for placement, error in failed.items()]
    return MeshError(f"no mesh of {next(iter(failed)).topology.text} can be used:\n" + "\n".join(lines))
