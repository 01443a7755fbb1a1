"""From tactics to decisions: on the mesh that was given, or on the best of those that could be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from shardwise.capture.trace import JitOptions
from shardwise.cost.memory import BLOCK
from shardwise.cost.model import Cost, CostModel
from shardwise.dims.analysis import Analysis
from shardwise.errors import MeshError
from shardwise.hardware.layout import Placement, ideal, place, placements
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.hardware.topology import topology as topology_of
from shardwise.ir.program import Program
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import lower_state
from shardwise.lowering.structure import Structure
from shardwise.planner.mesh import RACE_S, OpenMesh, Race, cuts, meshes, race
from shardwise.plans.search_log import MOST_TRADES, Improved, MeshTried, SearchLog, Trade
from shardwise.search.bounds import finest, peak_bound
from shardwise.search.budget import Budget
from shardwise.search.front import thinned
from shardwise.search.result import Ended
from shardwise.search.searcher import SETTLED, Journal, Options, Purse, Searcher
from shardwise.tactics.named import Given, as_tactics
from shardwise.tactics.pins import make_pins, stated_shards
from shardwise.tactics.roles import Given as GivenRoles
from shardwise.tactics.roles import Roles
from shardwise.tactics.strategies import Auto
from shardwise.tactics.tactic import Context, Tactic, decide
from shardwise.transforms.variants import Wanted

#: Ways to lay the best mesh on the links that are tried.
_MOST_PLACEMENTS: Final = 5


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a plan, whatever the function (``shardwise.plan`` says what each means). ``roles`` are those given,
    until the program tells the others."""

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
    def of(
        mesh: Any,
        topology: str | Topology | Placement | None,
        tactics: Given | None,
        pins: Mapping[str, Any] | None,
        roles: GivenRoles | None,
        search: Options,
        allow_infeasible: bool,
        jit: JitOptions,
        wanted: Wanted,
    ) -> Asked:
        """No tactics at all, which is not an empty list of them, stands for a search over all axes."""
        own = (Auto(),) if tactics is None else as_tactics(tactics)
        given = {role: (p,) if isinstance(p, str) else tuple(p) for role, p in (roles or {}).items()}
        return Asked(mesh, topology, own, pins, given, search, allow_infeasible, jit, wanted)


@dataclass(frozen=True, slots=True)
class Decided:
    """The decisions for a program on one mesh. ``ended``: why each search among the tactics did; ``quick``: whether that was
    only a first look. ``total`` is None where nobody asked."""

    cost: HardwareCost
    decisions: tuple[Decision, ...]
    total: Cost | None
    fits: bool
    evaluations: int
    ended: tuple[Ended, ...]
    quick: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        assert self.total is not None
        return (0, self.total.time_ps) if self.fits else (1, self.total.peak_blocks)

    @property
    def settled(self) -> bool:
        return not self.ended or (not self.quick and all(why in SETTLED for why in self.ended))


def decide_asked(analysis: Analysis, asked: Asked) -> tuple[Decided, SearchLog | None]:
    """What a person asked for, decided; and how it was searched for, where it was."""
    placed, open_ = _placed(asked)
    _check_manual_axes(analysis.program, [p.mesh for p in placed])
    if open_:
        return _raced(analysis, asked, placed)
    journal = Journal(asked.search, Purse(asked.search.budget()))
    made = _Tactics(analysis, placed[0], asked, journal).run(asked.search.budget(), compare=False)
    return made, _log(journal, made, made.ended, ()) if made.ended else None


def _check_manual_axes(program: Program, meshes: Sequence[MeshAxes]) -> None:
    """A ``shard_map`` keeps its own mesh axes, which must be there, as large as it has them."""
    for op in program.ops:
        if op.kind not in ("shard_map.input", "shard_map.output"):
            continue
        used = {axis for axes in op.attribute("axes") for axis in axes}
        sizes = {name: size for name, size in op.attribute("mesh") if name in used}
        had = {name for mesh in meshes for name in mesh.names}
        if sizes.keys() - had:
            listed, known = ", ".join(sorted(sizes.keys() - had)), ", ".join(sorted(had))
            first = sorted(sizes.keys() - had)[0]
            raise MeshError(
                f"the shard_map at {program.source_of(op)} runs over the mesh axes {listed}, and the mesh of the plan has "
                f"{known}: name them alike, as in mesh={{{first!r}: {sizes[first]}}}"
            )
        if not any(
            all(dict(zip(m.names, m.sizes, strict=True)).get(n) == size for n, size in sizes.items()) for m in meshes
        ):
            name = next(iter(sizes))
            raise MeshError(
                f"the shard_map at {program.source_of(op)} has {sizes[name]} devices on {name}, and the plan's mesh has "
                "another number: its body was traced for blocks of that size"
            )


def least_peak(analysis: Analysis, asked: Asked) -> tuple[int, int]:
    """The bytes that every plan takes on a device at least, and those that there are."""
    placed, open_ = _placed(asked)
    cost = HardwareCost(placed[0])
    bound = peak_bound(CostModel(Structure.of(analysis), cost), mesh=finest(placed[0].mesh.devices) if open_ else None)
    return bound.peak_bytes, cost.profile.usable_bytes


def _placed(asked: Asked) -> tuple[list[Placement], bool]:
    """The mesh that was given on its devices, or those that could be; and whether there is a choice."""
    wanted = OpenMesh.of(asked.mesh)
    if wanted is None or isinstance(asked.topology, Placement):
        return [placement_of(asked.mesh, asked.topology)], False
    if asked.topology is None:
        raise MeshError(_unplaced(asked.mesh))
    where = topology_of(asked.topology) if isinstance(asked.topology, str) else asked.topology
    symmetric = not asked.pins and all(isinstance(t, Auto) and not t.axes for t in asked.tactics)
    return list(meshes(wanted, where, ordered=not symmetric)), True


def _unplaced(mesh: Any) -> str:
    if mesh is None:
        return "say what to plan for: mesh={'data': 4, 'model': 2}, or topology='v5e:4x4', or both"
    return f"the mesh {OpenMesh.of(mesh)} has open sizes: give a topology as well, such as topology='v5e:4x4', or all sizes"


def placement_of(mesh: Any, where: str | Topology | Placement | None) -> Placement:
    """The mesh on the devices that were named; without any, on a row of links for every axis."""
    if isinstance(where, Placement):
        if mesh is not None and MeshAxes.of(mesh) != where.mesh:
            raise MeshError(f"the mesh is {MeshAxes.of(mesh)}, and the placement is one of {where.mesh}")
        return where
    axes = MeshAxes.of(mesh)
    if where is None:
        return ideal(axes)
    return place(axes, topology_of(where) if isinstance(where, str) else where)


class _Tactics:
    """Tactics on one mesh, tried again with larger budgets."""

    def __init__(self, analysis: Analysis, placed: Placement, asked: Asked, journal: Journal):
        self.cost = HardwareCost(placed)
        pins = make_pins(analysis, placed.mesh, asked.pins or {})
        self._first: tuple[Decision, ...] = (*pins, *stated_shards(analysis, placed.mesh))
        self._tactics = asked.tactics
        self._searches = sum(isinstance(t, Auto) for t in asked.tactics)
        self._searcher = Searcher(analysis, self.cost, journal)
        self._context = Context(analysis, placed.mesh, self.cost, asked.roles, self._searcher)

    def run(self, budget: Budget, compare: bool, method: str | None = None) -> Decided:
        """``compare``: whether the whole cost is asked for, to compare meshes."""
        self._searcher.begin(budget, self._searches, method)
        decisions = tuple(decide(self._context, self._tactics, self._first))
        done = self._searcher.done
        total = None
        if len(done) == self._searches > 0 and isinstance(self._tactics[-1], Auto):
            total = done[-1].best.cost
        elif compare:
            total = _total(self._context.analysis, self.cost, decisions)
        return Decided(
            self.cost,
            decisions,
            total,
            all(found.fits for found in done) if total is None else _fits(total, self.cost),
            sum(found.evaluations for found in done),
            tuple(found.ended for found in done),
            quick=method is not None,
        )


def _total(analysis: Analysis, cost: HardwareCost, decisions: Sequence[Decision]) -> Cost:
    lowered = lower_state(analysis, State(cost.placement.mesh, tuple(decisions)), cost)
    return CostModel(lowered.structure, cost).evaluate(lowered)


def _fits(total: Cost, cost: HardwareCost) -> bool:
    return total.peak_bytes <= cost.profile.usable_bytes


def _raced(analysis: Analysis, asked: Asked, placed: Sequence[Placement]) -> tuple[Decided, SearchLog]:
    """The best mesh of several."""
    budget = asked.search.budget(RACE_S)
    journal = Journal(asked.search, Purse(budget))
    known: dict[int, _Tactics] = {}

    def run(number: int, turn: int, part: Budget) -> Decided:
        if number not in known:
            known[number] = _Tactics(analysis, placed[number], asked, journal)
        quick = turn == 0 and len(placed) > 1
        return known[number].run(part, compare=True, method="greedy" if quick else None)

    raced = race(len(placed), run, known.pop, journal.purse, lambda: journal.interrupted)
    if not raced.outcomes:
        reasons = {str(error): error for error in raced.failed.values()}
        if len(reasons) == 1:
            raise next(iter(reasons.values()))
        lines = [f"  {placed[k].mesh}: {error}" for k, error in sorted(raced.failed.items())]
        raise MeshError(f"no mesh of {placed[0].topology.text} can be used:\n" + "\n".join(lines))
    first = raced.order[0]
    best = raced.outcomes[first]
    if raced.interrupted:
        ended: tuple[Ended, ...] = (Ended.INTERRUPTED,)
    elif len(raced.outcomes) + len(raced.failed) < len(placed):
        ended = (Ended.EVALUATIONS if journal.purse.seconds else Ended.SECONDS,)
    else:
        ended = best.ended or (Ended.EXHAUSTED,)
    if not raced.interrupted:
        best = raced.outcomes[first] = _suited(analysis, best)
    return best, _log(journal, best, ended, tuple(_tried(raced, placed)))


def _suited(analysis: Analysis, made: Decided) -> Decided:
    """The same decisions on the placement of the same mesh that suits them best, of those that cut no more rows."""
    where = made.cost.placement
    others = placements(where.mesh, where.topology, limit=_MOST_PLACEMENTS)[1:]
    for other in (p for p in others if cuts(p) <= cuts(where)):
        cost = HardwareCost(other)
        total = _total(analysis, cost, made.decisions)
        moved = replace(made, cost=cost, total=total, fits=_fits(total, cost))
        made = min(made, moved, key=lambda one: one.rank)
    return made


def _log(journal: Journal, made: Decided, ended: Sequence[Ended], tried: tuple[MeshTried, ...]) -> SearchLog:
    usable = made.cost.profile.usable_bytes // BLOCK
    front = thinned(journal.fronts.get(made.cost.placement.mesh, ()), MOST_TRADES, usable)
    trades = tuple(Trade(ps * 1e-12, blocks * BLOCK, blocks <= usable) for ps, blocks in front)
    steps = [
        Improved(s.evaluations, mesh, cost.time_s, cost.peak_bytes, cost.peak_blocks <= usable, s.seconds)
        for mesh, s in journal.steps
        for cost in [s.best.cost]
    ]
    asked = journal.options
    # Of several searches: what cut one of them short, or else why the last ended.
    short = [why for why in (Ended.INTERRUPTED, Ended.SECONDS, Ended.EVALUATIONS) if why in ended]
    why = (*short, ended[-1])[0]
    return SearchLog(
        asked.method,
        int(asked.seed),
        why,
        journal.evaluations,
        tuple(steps),
        tried,
        front=trades,
        seconds=journal.seconds,
    )


def _tried(raced: Race[Decided], placed: Sequence[Placement]) -> Iterator[MeshTried]:
    """The meshes, the best first."""
    for k in raced.order:
        made = raced.outcomes[k]
        assert made.total is not None
        yield MeshTried(placed[k].mesh, made.total.time_s, made.total.peak_bytes, made.fits)
    for k, where in enumerate(placed):
        if k not in raced.outcomes:
            spent = "it was interrupted" if raced.interrupted else "the budget was spent"
            why = str(raced.failed.get(k, f"{spent} before it was searched"))
            yield MeshTried(where.mesh, why=why)
