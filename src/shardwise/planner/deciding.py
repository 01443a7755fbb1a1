"""From tactics to decisions: on the given mesh, or on the best of the possible ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.capture.trace import JitOptions
from shardwise.cost.memory import BLOCK
from shardwise.errors import MeshError
from shardwise.hardware.layout import Placement, placements
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Program
from shardwise.lowering.decisions import Decision
from shardwise.planner.captured import Captured
from shardwise.planner.mesh import OpenMesh, cuts, meshes, placement_of
from shardwise.planner.racing import RACE_S, Decided, Race, race
from shardwise.plans.search_log import MOST_TRADES, Improved, MeshTried, SearchLog, Trade
from shardwise.search.bounds import finest, peak_bound
from shardwise.search.budget import Budget
from shardwise.search.front import thinned
from shardwise.search.result import Ended
from shardwise.search.searcher import Journal, Options, Purse, Searcher
from shardwise.tactics.named import Given, as_tactics
from shardwise.tactics.pins import make_pins, stated_shards
from shardwise.tactics.roles import Given as GivenRoles
from shardwise.tactics.roles import Roles
from shardwise.tactics.strategies import Auto
from shardwise.tactics.tactic import Tactic, decide
from shardwise.transforms.variants import Wanted

#: Placements of the best mesh that are tried.
_MOST_PLACEMENTS: Final = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of ``shardwise.plan``. ``roles`` are completed by the planner from the program."""

    mesh: Any
    topology: str | Topology | Placement | None
    tactics: tuple[Tactic, ...]
    pins: Mapping[str, Any] | None
    roles: Roles
    search: Options
    allow_infeasible: bool
    jit: JitOptions
    wanted: Wanted

    @staticmethod
    def of(tactics: Given | None, roles: GivenRoles | None, **options: Any) -> Asked:
        """No tactics at all, which is not an empty list of them, stands for a search over all axes."""
        paths = {role: (p,) if isinstance(p, str) else tuple(p) for role, p in (roles or {}).items()}
        return Asked(tactics=(Auto(),) if tactics is None else as_tactics(tactics), roles=paths, **options)

    @property
    def searches_all(self) -> bool:
        """Whether nothing but a search over all axes decides."""
        return not self.pins and all(isinstance(t, Auto) and not t.axes for t in self.tactics)


def decide_asked(captured: Captured, asked: Asked) -> tuple[Decided, SearchLog | None]:
    """The decisions, and the log of the search if there was one."""
    placed, is_open = _candidates(asked)
    _check_manual_axes(captured.analysis.program, [p.mesh for p in placed])
    if is_open:
        return _raced(captured, asked, placed)
    journal = Journal(asked.search, Purse(asked.search.budget()))
    decided = _OnMesh(captured, placed[0], asked, journal).run(asked.search.budget(), compare=False)
    return decided, _log(journal, decided, decided.ended, ()) if decided.ended else None


def _check_manual_axes(program: Program, meshes: Sequence[MeshAxes]) -> None:
    """A ``shard_map`` keeps its own mesh axes: some mesh must have them, with the same sizes."""
    for op in program.ops:
        if op.kind not in ("shard_map.input", "shard_map.output"):
            continue
        used = {axis for axes in op.attribute("axes") for axis in axes}
        sizes = {name: size for name, size in op.attribute("mesh") if name in used}
        names = {name for mesh in meshes for name in mesh.names}
        if missing := sorted(sizes.keys() - names):
            raise MeshError(
                f"the shard_map at {program.source_of(op)} runs over the mesh axes {', '.join(missing)}, and the mesh of the "
                f"plan has {', '.join(sorted(names))}: name them alike, as in mesh={{{missing[0]!r}: {sizes[missing[0]]}}}"
            )
        if not any(sizes.items() <= dict(zip(m.names, m.sizes, strict=True)).items() for m in meshes):
            name = next(iter(sizes))
            raise MeshError(
                f"the shard_map at {program.source_of(op)} has {sizes[name]} devices on {name}, and the plan's mesh has "
                "another number: its body was traced for blocks of that size"
            )


def least_peak(captured: Captured, asked: Asked) -> tuple[int, int]:
    """The bytes that every plan takes on a device at least, and those that a device has."""
    placed, is_open = _candidates(asked)
    model = captured.inquiry(placed[0], asked.roles).model
    bound = peak_bound(model, mesh=finest(placed[0].mesh.devices) if is_open else None)
    return bound.peak_bytes, model.cost.profile.usable_bytes


def _candidates(asked: Asked) -> tuple[list[Placement], bool]:
    """The meshes that could be chosen, and whether there is a choice."""
    wanted = OpenMesh.of(asked.mesh)
    if wanted is None or isinstance(asked.topology, Placement):
        return [placement_of(asked.mesh, asked.topology)], False
    if asked.topology is None:
        raise MeshError(
            "say what to plan for: mesh={'data': 4, 'model': 2}, or topology='v5e:4x4', or both"
            if asked.mesh is None
            else f"the mesh {wanted} has open sizes: give a topology as well, such as topology='v5e:4x4', or all sizes"
        )
    topology = topology_of(asked.topology) if isinstance(asked.topology, str) else asked.topology
    return list(meshes(wanted, topology, ordered=not asked.searches_all)), True


class _OnMesh:
    """Tactics on one mesh, applied again with larger budgets."""

    def __init__(self, captured: Captured, placement: Placement, asked: Asked, journal: Journal):
        self._inquiry = captured.inquiry(placement, asked.roles)
        pins = make_pins(captured.analysis, placement.mesh, asked.pins or {})
        self._first: tuple[Decision, ...] = (*pins, *stated_shards(captured.analysis, placement.mesh))
        self._tactics = asked.tactics
        self._searches = sum(isinstance(t, Auto) for t in asked.tactics)
        self._searcher = Searcher(self._inquiry.model, journal)
        self._context = replace(self._inquiry.context, searcher=self._searcher)

    def run(self, budget: Budget, compare: bool, method: str | None = None) -> Decided:
        """``compare``: whether the total cost is needed, to compare meshes."""
        self._searcher.begin(budget, self._searches, method)
        decisions = tuple(decide(self._context, self._tactics, self._first))
        model, results = self._inquiry.model, self._searcher.done
        total = None
        if len(results) == self._searches > 0 and isinstance(self._tactics[-1], Auto):
            total = results[-1].best.cost
        elif compare:
            total = model.evaluate(self._context.lower(decisions))
        return Decided(
            self._inquiry,
            decisions,
            total,
            fits=all(r.fits for r in results) if total is None else total.peak_blocks <= model.usable_blocks,
            evaluations=sum(r.evaluations for r in results),
            ended=tuple(r.ended for r in results),
            quick=method is not None,
        )


def _raced(captured: Captured, asked: Asked, placed: Sequence[Placement]) -> tuple[Decided, SearchLog]:
    """The decisions on the best of several meshes."""
    journal = Journal(asked.search, Purse(asked.search.budget(RACE_S)))
    searches: dict[int, _OnMesh] = {}

    def run(number: int, turn: int, budget: Budget) -> Decided:
        if number not in searches:
            searches[number] = _OnMesh(captured, placed[number], asked, journal)
        quick = turn == 0 and len(placed) > 1
        return searches[number].run(budget, compare=True, method="greedy" if quick else None)

    raced = race(len(placed), run, searches.pop, journal.purse)
    if not raced.results:
        reasons = {str(error): error for error in raced.failed.values()}
        if len(reasons) == 1:
            raise next(iter(reasons.values()))
        lines = [f"  {placed[k].mesh}: {error}" for k, error in sorted(raced.failed.items())]
        raise MeshError(f"no mesh of {placed[0].topology.text} can be used:\n" + "\n".join(lines))
    first = raced.order[0]
    best = raced.results[first]
    if raced.interrupted:
        ended: tuple[Ended, ...] = (Ended.INTERRUPTED,)
    elif len(raced.results) + len(raced.failed) < len(placed):
        ended = (Ended.EVALUATIONS if journal.purse.seconds else Ended.SECONDS,)
    else:
        ended = best.ended or (Ended.EXHAUSTED,)
    if not raced.interrupted:
        best = raced.results[first] = _best_placement(captured, asked, best)
    return best, _log(journal, best, ended, tuple(_meshes_tried(raced, placed)))


def _best_placement(captured: Captured, asked: Asked, best: Decided) -> Decided:
    """The same decisions on the best placement of the same mesh, of those that cut no more rows."""
    default = best.inquiry.cost.placement
    others = placements(default.mesh, default.topology, limit=_MOST_PLACEMENTS)[1:]
    for other in (p for p in others if cuts(p) <= cuts(default)):
        inquiry = captured.inquiry(other, asked.roles)
        total = inquiry.model.evaluate(inquiry.context.lower(best.decisions))
        fits = total.peak_blocks <= inquiry.model.usable_blocks
        best = min(best, replace(best, inquiry=inquiry, total=total, fits=fits), key=lambda one: one.rank)
    return best


def _log(journal: Journal, decided: Decided, ended: Sequence[Ended], tried: tuple[MeshTried, ...]) -> SearchLog:
    usable = decided.inquiry.model.usable_blocks
    front = thinned(journal.fronts.get(decided.inquiry.cost.placement.mesh, ()), MOST_TRADES, usable)
    # Of several searches: what cut one of them short, or else why the last ended.
    short = [why for why in (Ended.INTERRUPTED, Ended.SECONDS, Ended.EVALUATIONS) if why in ended]
    return SearchLog(
        journal.options.method,
        int(journal.options.seed),
        (*short, ended[-1])[0],
        journal.evaluations,
        tuple(
            Improved(s.evaluations, mesh, cost.time_s, cost.peak_bytes, cost.peak_blocks <= usable, s.seconds)
            for mesh, s in journal.steps
            for cost in [s.best.cost]
        ),
        tried,
        front=tuple(Trade(ps * 1e-12, blocks * BLOCK, blocks <= usable) for ps, blocks in front),
        seconds=journal.seconds,
    )


def _meshes_tried(raced: Race, placed: Sequence[Placement]) -> Iterator[MeshTried]:
    """The meshes, the best first."""
    for k in raced.order:
        total = raced.results[k].total
        assert total is not None
        yield MeshTried(placed[k].mesh, total.time_s, total.peak_bytes, raced.results[k].fits)
    spent = "it was interrupted" if raced.interrupted else "the budget was spent"
    for k, placement in enumerate(placed):
        if k not in raced.results:
            yield MeshTried(placement.mesh, why=str(raced.failed.get(k, f"{spent} before it was searched")))
