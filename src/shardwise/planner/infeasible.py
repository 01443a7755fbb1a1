"""What is said where nothing fits: whether that is proven, what takes the memory, and the smallest changes that would do.

Proof. A lower bound over all states (``shardwise.search.bounds``) that is above what a device has. It is computed before a
search starts (``shardwise.search.searcher``), so that a hopeless one ends at once with a small state instead of the smallest.

Relaxations. Each is checked, by the same bound and, where that lets it pass, by a short search that stops at the first state
that fits. It starts from the named strategies, and all searches together have a number of evaluations, so that the same is said
on every machine:

- more devices: up to 16 times as many in their natural shape, on the same mesh axes, some of them longer;
- moments in bfloat16, by structure: float32 arguments that outputs replace and that no product or lookup uses;
- variants of the function that were not asked for: ``remat=True``, ``offload=True``, ``microbatches=4``, and two of them where
  nothing before fits.

Weak: others are not combined, and a short search may miss a state that fits: then the next larger change is named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shardwise.cost.model import CostModel
from shardwise.cost.predict import Alive, Predicted
from shardwise.dims.analysis import Analysis
from shardwise.errors import HardwareError, MeshError, ShardwiseError
from shardwise.hardware.layout import Placement, ideal, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Pin
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.structure import Structure
from shardwise.planner.inquiry import Inquiry, Settled, Variants
from shardwise.plans.search_log import SearchLog
from shardwise.search.bounds import Bound, finest, peak_bound
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.run import Budget, Ended, Improvement, Stop
from shardwise.tactics.baselines import Combinations
from shardwise.tactics.roles import Roles
from shardwise.transforms.variants import AS_IS, AUTO, Variant, Wanted
from shardwise.units import binary

#: What to do where no plan is given.
ANYWAY: Final = "--allow-infeasible (allow_infeasible=True) gives this plan all the same"

#: How many of the tensors alive at the peak are named, and in how many columns.
_NAMED: Final = 6
_COLUMNS: Final = 80

#: Ends of a search that was cut short.
_SHORT: Final = (Ended.SECONDS, Ended.EVALUATIONS, Ended.INTERRUPTED)

#: The search that checks a relaxation, and the evaluations for all of them.
_CHECK: Final = Budget(seconds=math.inf, evaluations=400)
_ALL: Final = 4000
#: How often the devices are doubled, and meshes of one size that are searched.
_DOUBLINGS: Final = 4
_MESHES: Final = 2


class Change(NamedTuple):
    """A variant of the function that might fit. Of one kind the smaller change comes first; those of kind ``both`` are checked
    only if no change before them fits."""

    kind: str
    what: str
    analyze: Callable[[], Analysis]


@dataclass(frozen=True, slots=True)
class Checked:
    """A change that was checked: the peak of a state that fits, or the smallest peak; ``proven`` if no state fits."""

    what: str
    fits: bool
    peak_bytes: int
    proven: bool = False

    def __str__(self) -> str:
        how = "" if self.fits else "at least " if self.proven else "the smallest found is "
        return f"{self.what}: {how}{binary(self.peak_bytes)} per device"


def variant_changes(variants: Variants, variant: Variant, wanted: Wanted, roles: Roles) -> Iterator[Change]:
    """Changes to a variant that were not asked for, the smallest of each kind first."""

    def change(kind: str, what: str, other: Variant) -> Change:
        return Change(kind, what, lambda: variants[other].analysis)

    if wanted.remat is None:
        yield change("remat", "remat=True", replace(variant, remat=True))
    offloaded = replace(variant, offload=roles.get("optimizer", ()))
    if wanted.offload is None and offloaded.offload:
        yield change("offload", "offload=True", offloaded)
        if wanted.remat is None:
            yield change("both", "remat=True, offload=True", replace(offloaded, remat=True))
    if wanted.microbatches is not None or variant.stages > 1:
        return
    _, *others = Wanted(AUTO).variants(variants[AS_IS].traced, roles)
    parted = [replace(variant, microbatches=other.microbatches, batch=other.batch) for other in others]
    for other in parted:
        yield change("microbatches", f"microbatches={other.microbatches}", other)
    for other in parted if wanted.remat is None else ():
        yield change("both", f"remat=True, microbatches={other.microbatches}", replace(other, remat=True))


def does_not_fit(
    inquiry: Inquiry, settled: Settled, log: SearchLog, changes: Sequence[Change] = (), check: bool = True
) -> str:
    """The message for the state with the smallest peak that was found.

    Args:
      inquiry, settled: the program, and that state.
      log: how it was searched for, and the other variants that were tried; a search that was cut short might have found more.
      changes: variants of the function that are checked as well.
      check: whether relaxations are checked, which takes seconds.
    """
    model, lowered, predicted = inquiry.model, settled.lowered, settled.predicted
    base = tuple(d for d in lowered.state.decisions if isinstance(d, Pin))
    others = [f"{t.mesh}: {t.peak_text or t.why}" for t in log.meshes[1:]]
    bound = peak_bound(model, base, mesh=finest(lowered.mesh.devices) if others and not base else None)
    proven = bound.peak_bytes > predicted.usable_bytes
    # With pins the bound is one for this mesh alone.
    elsewhere = any(t.time_s is not None for t in (*log.variants, *(log.meshes[1:] if base else ())))
    heading = _proof(bound, predicted, proven, log.ended, elsewhere)
    lines = [*heading, *_named(bound.alive if proven else predicted.alive)]
    if proven and not elsewhere:
        lines.append(f"the smallest peak found is {binary(predicted.peak_bytes)} per device")
    arguments = [lowered.program.values[a.value] for a in lowered.program.arguments]
    used = sum(v.nbytes // lowered.storage[v.id].shards(lowered.mesh) for v in arguments)
    lines.append(f"the arguments take {binary(used)} of it")
    lines += _list("on other meshes:", others)
    checked = list(_Relaxing(inquiry, base, changes).run()) if check else []
    lines += _list("would do (checked):", [str(c) for c in checked if c.fits])
    lines += _list("would not do (checked):", [str(c) for c in checked if not c.fits])
    if not proven and log.ended in _SHORT:
        spent = f"  {log.ended.value} after {log.evaluations:,} evaluations"
        lines += _list("to try:", ["a longer search (--evaluations, --budget; budget_evals, budget_s):", spent])
    lines.append(ANYWAY)
    return "\n".join(lines)


def _proof(bound: Bound, predicted: Predicted, proven: bool, ended: Ended, elsewhere: bool) -> list[str]:
    """What is known, and the heading of the list of tensors. ``elsewhere``: of another mesh or variant that is not proven."""
    least, limit = binary(bound.peak_bytes), f"{predicted.hardware} has {binary(predicted.usable_bytes)}"
    where = f" at {bound.source}" if bound.source else ""
    found = f"no plan was found that fits: {binary(predicted.peak_bytes)} per device, {limit}"
    if proven and elsewhere:
        return [
            found,
            f"proven for this mesh and variant of the program, not for others: at least {least} per device{where}",
            "largest there, each at its smallest:",
        ]
    if proven:
        return [
            f"no plan can fit: at least {least} per device, {limit}",
            f"proven: so much is alive{where}, however it is sharded",
            "largest there, each at its smallest:",
        ]
    of_tactics = f"no plan with these tactics can fit: {binary(predicted.peak_bytes)} per device, {limit}"
    return [
        of_tactics if ended is Ended.INFEASIBLE and not elsewhere else found,
        f"not proven for all plans: the bound is {least} per device{where}",
        "largest at the peak:",
    ]


def _named(alive: Iterable[Alive]) -> Iterator[str]:
    for a in itertools.islice(alive, _NAMED):
        line = f"  {binary(a.nbytes):>10}  "
        room = _COLUMNS - len(line)
        yield line + (a.label if len(a.label) <= room else "…" + a.label[1 - room :])


def _list(heading: str, lines: Sequence[str]) -> list[str]:
    return [heading, *(f"  {line}" for line in lines)] if lines else []


class _Relaxing:
    """Checks changes, of each kind the smallest that fits."""

    def __init__(self, inquiry: Inquiry, base: Sequence[Pin], changes: Sequence[Change]):
        self.model, self.roles, self.base, self.changes = inquiry.model, inquiry.roles, tuple(base), changes
        self._usable = self.model.cost.profile.usable_bytes
        self._left = 0  # evaluations

    def run(self) -> Iterator[Checked]:
        """Checks all kinds. The evaluations that are left are shared by the kinds that are left."""
        by_kind = itertools.groupby(self.changes, lambda change: change.kind)
        changed = {kind: self._changed(list(changes)) for kind, changes in by_kind}
        kinds = {"moments": self._moments(), **changed, "devices": self._more_devices()}
        fits, left = False, _ALL
        for k, (kind, checks) in enumerate(kinds.items()):
            self._left = share = left // (len(kinds) - k)
            checked = None if kind == "both" and fits else self._first_that_fits(checks)
            if checked is not None:
                fits |= checked.fits
                yield checked
            left -= share - self._left

    def _first_that_fits(self, checks: Iterator[Checked]) -> Checked | None:
        """The first that fits, or else the last within the evaluations."""
        checked = None
        for checked in checks:
            if checked.fits or self._left <= 0:
                break
        return checked

    def _moments(self) -> Iterator[Checked]:
        smaller = with_small_moments(self.model.structure)
        if smaller is not None:
            yield self._check("moments in bfloat16", CostModel.of(smaller, self.model.cost), self.base)

    def _changed(self, changes: Sequence[Change]) -> Iterator[Checked]:
        """Changes of one kind, the smallest first; the largest alone where that is proven not to fit."""
        largest = self._changed_model(changes[-1])
        proven = largest is not None and peak_bound(largest, self._pins(largest)).peak_bytes > self._usable
        for change in changes[-1:] if proven else changes:
            if (model := self._changed_model(change)) is not None:
                yield self._check(change.what, model, self._pins(model))

    def _changed_model(self, change: Change) -> CostModel | None:
        try:
            return CostModel.of(change.analyze(), self.model.cost)
        except ShardwiseError:  # this program has no such variant
            return None

    def _pins(self, model: CostModel) -> tuple[Pin, ...]:
        """The same pins on another program, as far as they are on arguments and outputs."""
        colors, paths = model.structure.colors, model.structure.program.paths
        named = [(self.model.structure.program.values[pin.value].path, pin) for pin in self.base]
        return tuple(Pin(paths[path], pin.spec, colors[paths[path]]) for path, pin in named if path in paths)

    def _check(self, what: str, model: CostModel, base: Sequence[Pin]) -> Checked:
        """Searches for the first state that fits, or for the smallest, from the named strategies on; unless none can fit."""
        least_bytes = peak_bound(model, base).peak_bytes
        if least_bytes > self._usable:
            return Checked(what, False, least_bytes, proven=True)
        context = Inquiry(model, self.roles).context
        strategies = Combinations(context, context.mesh.names, base)
        problem = Problem(model, base, extra=strategies.decisions)
        problem.start_from(strategies.seeds(problem, quick=False))

        def stop_if_fits(improvement: Improvement, share: float) -> None:
            if problem.fits(improvement.best.cost):
                raise Stop(Ended.CONVERGED)

        result = mcts(problem, _CHECK, progress=stop_if_fits)
        self._left -= result.evaluations
        return Checked(what, result.fits, result.best.cost.peak_bytes)

    def _more_devices(self) -> Iterator[Checked]:
        """More devices, by doublings: for each number the better meshes."""
        for power in range(1, _DOUBLINGS + 1):
            longer = _longer(self.model.cost.placement.mesh, power)
            placed = [p for mesh in longer if (p := self._placed(mesh)) is not None]
            bounds = [peak_bound(self.model, self.base, mesh=p.mesh).peak_bytes for p in placed]
            order = sorted(zip(bounds, placed, strict=True), key=lambda pair: (pair[0], max(pair[1].mesh.sizes)))
            may_fit = [placement for least, placement in order if least <= self._usable]
            if order and not may_fit:
                yield Checked(_where(order[0][1]), False, order[0][0], proven=True)
            for placement in may_fit[:_MESHES]:
                yield self._check(_where(placement), self.model.on(HardwareCost(placement)), self.base)

    def _placed(self, mesh: MeshAxes) -> Placement | None:
        """A larger mesh on devices of the same kind; None where there is none, or pins do not divide."""
        ours = self.model.cost.placement.topology
        for pin in self.base:
            shape = self.model.structure.program.values[pin.value].shape
            for count, axes in zip(shape, pin.spec, strict=False):
                if count % math.prod(mesh.sizes[mesh.index(axis)] for axis in axes or ()):
                    return None
        try:
            if ":" in ours.text:
                return place(mesh, ours.of_size(mesh.devices))
            placement = ideal(mesh, ours.profile.name)  # no topology was given
        except (HardwareError, MeshError):
            return None
        return replace(placement, topology=replace(placement.topology, profile=ours.profile))


def _longer(mesh: MeshAxes, power: int) -> Iterator[MeshAxes]:
    """Meshes with the same axes and ``2**power`` times as many devices."""
    for powers in itertools.product(range(power + 1), repeat=len(mesh.sizes)):
        if sum(powers) == power:
            yield MeshAxes(mesh.names, tuple(s << p for s, p in zip(mesh.sizes, powers, strict=True)))


def _where(placement: Placement) -> str:
    return f"{placement.topology.text}, mesh {placement.mesh}"


def with_small_moments(structure: Structure) -> Analysis | None:
    """The same program with its moments in bfloat16; None where it has none.

    A moment is a float32 argument that an output replaces and that no product or lookup uses, directly or as a view.
    """
    program = structure.program
    computed = {op.results[0]: op.operands[0] for op in program.ops if op.kind == "output"}
    small: set[int] = set()
    for v, out in structure.analysis.replaced_by.items():
        if program.values[v].dtype == "float32" and v not in program.multiplied:
            small |= {v, out, computed.get(out, out)}
    if not small:
        return None
    values = tuple(replace(v, dtype="bfloat16", itemsize=2) if v.id in small else v for v in program.values)
    return replace(structure.analysis, program=replace(program, values=values))
