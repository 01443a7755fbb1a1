"""What is said where nothing fits: whether that is proven, what takes the memory, and the smallest changes that would do.

Proof. A lower bound over all states (``shardwise.search.bounds``) that is above what a device has. It is asked before a search
starts (``shardwise.search.searcher``), so that a hopeless one ends at once with a small state instead of the smallest.

Relaxations. Each is checked, by the same bound and, where that lets it pass, by a short search that stops at the first state
that fits:

- more devices: up to 16 times as many in their natural shape, on the same mesh axes, some of them longer;
- moments in bfloat16, by structure: float32 arguments that outputs replace and that no product or lookup uses;
- variants of the function (remat, micro-batches), where the caller can make them; both together where nothing before them
  fits.

Weak: others are not combined, and a short search may miss a state that fits: then the next larger change is named.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shardwise.cost.model import CostModel
from shardwise.cost.predict import Alive, Predicted
from shardwise.dims.analysis import Analysis
from shardwise.errors import HardwareError, MeshError, ShardwiseError
from shardwise.hardware.layout import Placement, ideal, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.ir.program import HEAVY
from shardwise.lowering.decisions import Pin
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.storage import views
from shardwise.lowering.structure import Structure
from shardwise.search.bounds import Bound, finest, peak_bound
from shardwise.search.budget import Budget
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.result import Ended, Improvement
from shardwise.search.run import Stop
from shardwise.search.simple import greedy

#: How many of the tensors alive at the peak are named, and in how many columns.
_NAMED: Final = 6
_COLUMNS: Final = 80

#: Ends of a search that was cut short.
_SHORT: Final = (Ended.SECONDS, Ended.EVALUATIONS, Ended.INTERRUPTED)

#: The search that checks a relaxation; the seconds for all of them, and those that one has at least.
_CHECK: Final = Budget(seconds=2.0, evaluations=400)
_ALL_S: Final = 8.0
_LEAST_S: Final = 0.5
#: How often the devices are doubled, and meshes of one size that are searched.
_DOUBLINGS: Final = 4
_MESHES: Final = 2


class Change(NamedTuple):
    """A variant of the function that might fit: of what kind, what it is in words, and how to make its analysis. Of one kind
    the smaller change comes first; a ``combined`` one is checked only if no change before it fits."""

    kind: str
    what: str
    make: Callable[[], Analysis]
    combined: bool = False


@dataclass(frozen=True, slots=True)
class Checked:
    """A change that was checked: the peak of a state that fits, or the least that was seen; ``proven`` where none fits."""

    what: str
    fits: bool
    peak_bytes: int
    proven: bool = False

    def __str__(self) -> str:
        how = "" if self.fits else "at least " if self.proven else "the smallest found is "
        return f"{self.what}: {how}{size(self.peak_bytes)} a device"


def does_not_fit(
    lowered: Lowered,
    predicted: Predicted,
    arguments_bytes: int,
    ended: Ended,
    evaluations: int,
    others: Sequence[str] = (),
    changes: Sequence[Change] = (),
    untried: Sequence[str] = ("remat", "microbatches"),
    check: bool = True,
) -> str:
    """The message for the state with the smallest peak that was found.

    Args:
      lowered, predicted: that state, and what it is predicted to take.
      arguments_bytes: what the arguments take of it on one device.
      ended, evaluations: why the search stopped, and after how much; one that was cut short might have found more.
      others: lines about other meshes that were tried.
      changes: variants of the function that may be checked as well.
      untried: options that would make others, to be proposed.
      check: whether relaxations are checked, which takes seconds.
    """
    cost = lowered.cost
    assert isinstance(cost, HardwareCost)
    base = tuple(d for d in lowered.state.decisions if isinstance(d, Pin))
    model = CostModel(lowered.structure, cost)
    every = finest(lowered.mesh.devices) if others and not base else None
    bound = peak_bound(model, base, mesh=every)
    proven = bound.peak_bytes > predicted.usable_bytes
    lines = [*_proof(bound, predicted, proven, ended), *_named(bound.alive if proven else predicted.alive)]
    if proven:
        lines.append(f"the smallest peak found is {size(predicted.peak_bytes)} a device")
    lines.append(f"the arguments take {size(arguments_bytes)} of it")
    if others:
        lines += ["on other meshes:", *(f"  {line}" for line in others)]
    checked = list(_Relaxing(model, base, changes).run()) if check else []
    lines += _list("would do (checked):", [str(c) for c in checked if c.fits])
    lines += _list("would not do (checked):", [str(c) for c in checked if not c.fits])
    tried = {change.kind for change in changes}
    ways = [f"{option}='auto'" for option in untried if option not in tried]
    if not proven and ended in _SHORT:
        ways = [
            "a longer search (budget_s, budget_evals):",
            f"  {ended.value} after {evaluations:,} evaluations",
            *ways,
        ]
    lines += _list("to try:", ways)
    lines.append("allow_infeasible=True gives this plan all the same")
    return "\n".join(lines)


def _proof(bound: Bound, predicted: Predicted, proven: bool, ended: Ended) -> list[str]:
    """What is known, and the heading of what is to blame."""
    least, limit = size(bound.peak_bytes), f"{predicted.hardware} has {size(predicted.usable_bytes)}"
    where = f" at {bound.source}" if bound.source else ""
    if proven:
        return [
            f"no plan can fit: at least {least} a device, {limit}",
            f"proven: so much is alive{where}, however it is sharded",
            "largest there, each at its smallest:",
        ]
    why = "no plan with these tactics can fit" if ended is Ended.INFEASIBLE else "no plan was found that fits"
    return [
        f"{why}: {size(predicted.peak_bytes)} a device, {limit}",
        f"not proven for all plans: the bound is {least} a device{where}",
        "largest at the peak:",
    ]


def _named(alive: Iterable[Alive]) -> Iterator[str]:
    for a in itertools.islice(alive, _NAMED):
        line = f"  {size(a.nbytes):>10}  "
        room = _COLUMNS - len(line)
        yield line + (a.label if len(a.label) <= room else "…" + a.label[1 - room :])


def _list(heading: str, lines: Sequence[str]) -> list[str]:
    return [heading, *(f"  {line}" for line in lines)] if lines else []


class _Relaxing:
    """Changes that are checked one by one, the smallest of each kind."""

    def __init__(self, model: CostModel, base: Sequence[Pin], changes: Sequence[Change]):
        self.model, self.base, self.changes = model, tuple(base), changes
        self.analysis = model.structure.analysis
        self._usable = model.cost.profile.usable_bytes
        self._end = 0.0

    def run(self) -> Iterator[Checked]:
        """What is left of the time is shared by the kinds that are left."""
        by_kind: dict[str, list[Change]] = {}
        for change in self.changes:
            by_kind.setdefault(change.kind, []).append(change)
        kinds = [self._moments(), *map(self._changed, by_kind.values()), self._more()]
        last = {k for k, own in enumerate(by_kind.values(), 1) if own[0].combined}
        fits = False
        end = time.perf_counter() + _ALL_S
        for k, checks in enumerate(kinds):
            now = time.perf_counter()
            self._end = now + max(0.0, end - now) / (len(kinds) - k)
            for checked in self._smallest(checks) if k not in last or not fits else ():
                fits |= checked.fits
                yield checked

    def _moments(self) -> Iterator[Checked]:
        smaller = with_small_moments(self.analysis)
        if smaller is not None:
            yield self._check("moments in bfloat16", smaller, self.base)

    def _changed(self, changes: Sequence[Change]) -> Iterator[Checked]:
        """Changes of one kind, the larger the smaller the bound: from the first whose bound lets it pass, or the largest."""
        known: dict[int, Analysis | None] = {}

        def made(k: int) -> Analysis | None:
            if k not in known:
                try:
                    known[k] = changes[k].make()
                except ShardwiseError:  # it cannot be made of this program
                    known[k] = None
            return known[k]

        def kernels(k: int) -> bool:
            analysis = made(k)
            return analysis is None or self._bound(analysis) <= self._usable

        left = range(bisect.bisect_left(range(len(changes)), True, key=kernels), len(changes))
        able = (k for k in left if time.perf_counter() < self._end and made(k) is not None)
        first = next(able, max((k for k, own in known.items() if own is not None), default=None))
        for k in itertools.chain([] if first is None else [first], able):
            analysis = known[k]
            assert analysis is not None
            yield self._check(changes[k].what, analysis, self._pins(analysis))

    def _bound(self, analysis: Analysis) -> int:
        return peak_bound(CostModel(Structure.of(analysis), self.model.cost), self._pins(analysis)).peak_bytes

    def _pins(self, analysis: Analysis) -> tuple[Pin, ...]:
        """The same pins on another program, as far as they are on arguments and outputs."""
        colors, paths = Structure.of(analysis).colors, analysis.program.paths
        named = [(self.analysis.program.values[pin.value].path, pin) for pin in self.base]
        return tuple(Pin(paths[path], pin.spec, colors[paths[path]]) for path, pin in named if path in paths)

    def _smallest(self, checks: Iterator[Checked]) -> Iterator[Checked]:
        """The first that fits, or else the last."""
        last = None
        for last in checks:
            if last.fits or time.perf_counter() > self._end:
                break
        if last is not None:
            yield last

    def _check(self, what: str, analysis: Analysis, base: Sequence[Pin]) -> Checked:
        bound = peak_bound(CostModel(Structure.of(analysis), self.model.cost), base)
        if bound.peak_bytes > self._usable:
            return Checked(what, False, bound.peak_bytes, proven=True)
        peak = self._search(analysis, self.model.cost, base)
        return Checked(what, peak <= self._usable, peak)

    def _search(self, analysis: Analysis, cost: HardwareCost, base: Sequence[Pin]) -> int:
        """The peak of the first state that fits, or of the smallest."""
        problem = Problem(analysis, cost, base)
        left = self._end - time.perf_counter()
        budget = replace(_CHECK, seconds=max(_LEAST_S, min(_CHECK.seconds, left)))

        def watch(made: Improvement, share: float) -> None:
            if problem.fits(made.best.cost):
                raise Stop(Ended.CONVERGED)

        least = math.inf
        for method in (greedy, mcts):
            found = method(problem, budget, progress=watch)
            least = min(least, found.best.cost.peak_bytes)
            if found.fits:
                break
        return int(least)

    def _more(self) -> Iterator[Checked]:
        """More devices, by doublings: for each number the better meshes."""
        for power in range(1, _DOUBLINGS + 1):
            placed = [p for mesh in _longer(self._mesh, power) if (p := self._placed(mesh)) is not None]
            bounds = [peak_bound(self.model, self.base, mesh=p.mesh).peak_bytes for p in placed]
            order = sorted(zip(bounds, placed, strict=True), key=lambda pair: (pair[0], max(pair[1].mesh.sizes)))
            hopeful = [own for least, own in order if least <= self._usable]
            if order and not hopeful:
                yield Checked(_where(order[0][1]), False, order[0][0], proven=True)
            for own in hopeful[:_MESHES]:
                peak = self._search(self.analysis, HardwareCost(own), self.base)
                yield Checked(_where(own), peak <= self._usable, peak)

    @property
    def _mesh(self) -> MeshAxes:
        return self.model.cost.placement.mesh

    def _placed(self, mesh: MeshAxes) -> Placement | None:
        """A larger mesh on devices of the same kind; None where there is none, or pins do not divide."""
        own = self.model.cost.placement.topology
        values = self.analysis.program.values
        for pin in self.base:
            for count, axes in zip(values[pin.value].shape, pin.spec, strict=False):
                parts = 1
                for axis in axes or ():
                    parts *= mesh.sizes[mesh.index(axis)]
                if count % parts:
                    return None
        name, colon, _ = own.text.rpartition(":")
        try:
            if not colon:  # no topology was given
                found = ideal(mesh, own.profile.name)
            else:
                found = place(mesh, topology(f"{mesh.devices} {re.sub(r'^[0-9]+[*]', '', name)}"))
        except (HardwareError, MeshError):
            return None
        return replace(found, topology=replace(found.topology, profile=own.profile))


def _longer(mesh: MeshAxes, power: int) -> Iterator[MeshAxes]:
    """Meshes with the same axes and ``2**power`` times as many devices."""
    for powers in itertools.product(range(power + 1), repeat=len(mesh.sizes)):
        if sum(powers) == power:
            yield MeshAxes(mesh.names, tuple(s << p for s, p in zip(mesh.sizes, powers, strict=True)))


def _where(placed: Placement) -> str:
    return f"{placed.topology.text}, mesh {placed.mesh}"


def with_small_moments(analysis: Analysis) -> Analysis | None:
    """The same program with its moments in bfloat16; None where it has none.

    A moment is a float32 argument that an output of the same type and colors replaces and that no product or lookup uses,
    directly or as a view.
    """
    program, colors = analysis.program, Structure.of(analysis).colors
    made = {op.results[0]: op.operands[0] for op in program.ops if op.kind == "output"}
    users = [op for op in program.ops if op.unit in HEAVY or op.kind == "gather"]
    looked_at = {v for op in users for v in op.operands}
    outputs: dict[object, list[int]] = {}
    for out in program.outputs:
        outputs.setdefault((program.values[out].type_text, colors[out]), []).append(out)
    small: set[int] = set()
    for argument in program.arguments:
        v = program.values[argument.value]
        matches = outputs.get((v.type_text, colors[v.id]))
        if not matches:
            continue
        out = matches.pop(0)
        if v.dtype == "float32" and not looked_at & views(program, [v.id]):
            small |= {v.id, out, made.get(out, out)}
    if not small:
        return None
    values = tuple(replace(v, dtype="bfloat16", itemsize=2) if v.id in small else v for v in program.values)
    return replace(analysis, program=replace(program, values=values))


def size(nbytes: float) -> str:
    """
    >>> size(3 * 2**30), size(1536), size(12)
    ('3.00 GiB', '1.50 KiB', '12 B')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes > 0.999 * 2**power:
            return f"{nbytes / 2**power:.2f} {unit}"
    return f"{nbytes:.0f} B"
