"""Programs on placed meshes: what decisions cost there, and how they are named."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from shardwise.capture.lower import lower
from shardwise.capture.trace import Call, JitOptions, Traced
from shardwise.cost.model import CostModel
from shardwise.cost.predict import Predicted, predict
from shardwise.dims.analysis import Analysis, analyze_program
from shardwise.errors import PlanError
from shardwise.hardware.layout import Placement
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.paths import merged, pattern
from shardwise.lowering.candidates import Candidates
from shardwise.lowering.decisions import Decision, Keep, Pin, Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, Memo
from shardwise.lowering.small import keep_small
from shardwise.planner.mesh import on_axes
from shardwise.search.problem import Problem
from shardwise.search.searcher import Problems
from shardwise.tactics.baselines import Baseline, Combinations
from shardwise.tactics.roles import Roles
from shardwise.tactics.tactic import Context
from shardwise.transforms.variants import Variant, trace_variant

#: Siblings of a place that are named.
_SIBLINGS: Final = 3


class Settled(NamedTuple):
    """Decisions lowered, with those added for small arguments, and the predicted cost."""

    lowered: Lowered
    small: tuple[Keep, ...]
    predicted: Predicted


class Rival(NamedTuple):
    """Another variant of a program on the same mesh; ``quick`` if only some named strategies were looked at."""

    variant: Variant
    inquiry: Inquiry
    quick: bool


class Inquiry:
    """The owner of what is built once for a program and a placed mesh: the cost model and the memo of lowering. A plan keeps
    that of its program, to be asked about other decisions, with ``rivals``."""

    def __init__(self, model: CostModel, roles: Roles | None = None, structure: dict[object, Any] | None = None):
        self.model, self.roles = model, roles or {}
        self.rivals: tuple[Rival, ...] = ()
        self._original: tuple[Inquiry, dict[str, str]] | None = None  # that with other names of axes, and the new ones
        self._structure = {} if structure is None else structure
        self.analysis, self.cost = model.structure.analysis, model.cost
        self.problems: Problems = {}
        self._settled: tuple[tuple[Decision, ...], Settled] | None = None

    @cached_property
    def context(self) -> Context:
        mesh = self.cost.placement.mesh
        memo = Memo(Candidates(self.model.structure, mesh, self.cost))
        return Context(self.analysis, mesh, self.cost, self.roles, memo=memo, cache=self._structure)

    def settle(self, decisions: Sequence[Decision]) -> Settled:
        """Lowers decisions and predicts their cost. Small arguments are replicated where that is faster and fits. The first
        result is kept: it is that of the plan, which is shown."""
        key = tuple(decisions)
        if self._settled is None:
            self._settled = key, self._settle(key)
        return self._settled[1] if self._settled[0] == key else self._settle(key)

    def _settle(self, decisions: tuple[Decision, ...]) -> Settled:
        plain = self.context.lower(decisions)
        small = keep_small(self.model.structure, self.cost, plain.mesh, decisions)
        if small:
            kept = self.context.lower((*decisions, *small))
            before, after = self.model.evaluate(plain), predict(self.model, kept)
            if after.time_s < before.time_s and (after.fits or before.peak_bytes > after.usable_bytes):
                return Settled(kept, tuple(self._changed(kept.state, small)), after)
        return Settled(plain, (), predict(self.model, plain))

    def _changed(self, state: State, keeps: Sequence[Keep]) -> Iterator[Keep]:
        """The decisions for those values that the state would shard otherwise."""
        for keep in keeps:
            sharded = {color for color, axis in state.order if axis == state.mesh.index(keep.axis)}
            values = tuple(v for v in keep.values if not sharded.isdisjoint(self.analysis.value_colors[v]))
            if values:
                yield replace(keep, values=values)

    def renamed(self, decisions: Sequence[Decision], names: Sequence[str]) -> tuple[Inquiry, tuple[Decision, ...]]:
        """Returns a copy with other names of the mesh axes, and the decisions with these names."""
        placement = self.cost.placement
        new = dict(zip(placement.mesh.names, names, strict=True))
        mesh = MeshAxes(tuple(names), placement.mesh.sizes)
        other = Inquiry(self.model.on(HardwareCost(replace(placement, mesh=mesh))), self.roles, self._structure)
        other._original = self, new
        return other, on_axes(decisions, new)

    def beside(self, rivals: Iterable[Rival]) -> Inquiry:
        """Returns a copy with other variants on the same mesh, which baselines are compared with."""
        other = copy.copy(self)
        other.rivals = tuple(rivals)
        return other

    @cached_property
    def baselines(self) -> list[Baseline]:
        """The named strategies that apply, the best first."""
        return self.strategies(quick=False)

    @cached_property
    def best_baselines(self) -> list[tuple[Variant | None, Baseline]]:
        """The named strategies, the best first, each at the variant where it is best: that of a rival, or None for its own."""
        if self._original is not None:
            original, new = self._original
            return [(variant, _renamed(b, new)) for variant, b in original.best_baselines]
        every: list[tuple[Variant | None, Baseline]] = [(None, b) for b in self.baselines]
        for rival in self.rivals:
            every += [(rival.variant, b) for b in rival.inquiry.strategies(rival.quick)]
        best: dict[str, tuple[Variant | None, Baseline]] = {}
        for variant, baseline in sorted(every, key=lambda pair: pair[1].rank):
            best.setdefault(baseline.name, (variant, baseline))
        return list(best.values())

    def strategies(self, quick: bool) -> list[Baseline]:
        """The named strategies that apply, the best first; ``quick`` leaves out most."""
        if self._original is not None:
            original, new = self._original
            return [_renamed(b, new) for b in original.strategies(quick)]
        problem, combinations = self.problems.get(((), self.context.mesh.names, None), (None, None))
        if problem is None or not isinstance(combinations, Combinations):
            combinations = Combinations(self.context, self.context.mesh.names)
            problem = Problem(self.model, extra=combinations.decisions)
        return sorted((b for b in combinations.costed(problem, quick) if b.applies), key=lambda b: b.rank)


def _renamed(baseline: Baseline, new: dict[str, str]) -> Baseline:
    parts = tuple((part, new[axis]) for part, axis in baseline.parts)
    return replace(baseline, parts=parts, decisions=on_axes(baseline.decisions, new))


class Captured:
    """A variant of a function, traced and analyzed, with one inquiry for each placed mesh."""

    def __init__(self, variant: Variant, traced: Traced, analysis: Analysis):
        self.variant, self.traced, self.analysis = variant, traced, analysis
        self._inquiries: dict[Placement, Inquiry] = {}
        self._structure: dict[object, Any] = {}  # what tactics find out about the program, on any mesh

    def inquiry(self, placement: Placement, roles: Roles) -> Inquiry:
        if placement not in self._inquiries:
            cost, other = HardwareCost(placement), next(iter(self._inquiries.values()), None)
            model = CostModel.of(self.analysis, cost) if other is None else other.model.on(cost)
            self._inquiries[placement] = Inquiry(model, roles, self._structure)
        return self._inquiries[placement]


class Variants:
    """The variants of a function for some arguments."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], options: JitOptions):
        self._call = fn, args, kwargs, options
        self._traces: dict[tuple[int, bool | str], Traced] = {}
        self._captured: dict[Variant, Captured] = {}

    @property
    def call(self) -> Call:
        """The function and the shapes of its arguments."""
        return Call.of(*self._call[:3])

    def __getitem__(self, variant: Variant) -> Captured:
        if variant not in self._captured:
            traced = trace_variant(*self._call, variant, self._traces)
            analysis = analyze_program(lower(traced))
            if not analysis.program.arguments:
                raise PlanError(f"{traced.name} has no array arguments: there is nothing to shard")
            self._captured[variant] = Captured(variant, traced, analysis)
        return self._captured[variant]


def described(analysis: Analysis, decision: Decision) -> Decision:
    """The decision with the text of what it is about."""
    if isinstance(decision, Pin):
        return replace(decision, what=analysis.program.label(decision.value))
    if isinstance(decision, Keep):
        arguments = {a.value for a in analysis.program.arguments}
        values = [v for v in decision.values if v in arguments] or decision.values
        first, more = analysis.program.label(values[0]), len(values) - 1
        return replace(decision, what=f"{first}{f' and {more} more' if more else ''}")
    size = analysis.colors[decision.colors[0]].size
    padded = ", padded" if decision.padded else ""
    return replace(decision, what=f"{places_text(_places(analysis, decision))} (size {size:,}{padded})")


def decisions_text(analysis: Analysis, decisions: Sequence[Decision]) -> str:
    """Several decisions in one line: what is sharded, with all its axes in order."""
    axes: dict[str, list[str]] = {}
    for decision in decisions:
        if isinstance(decision, Shard):
            what = _siblings(_places(analysis, decision))[0]
            axes.setdefault(what, []).append(f"{decision.axis}{' (padded)' if decision.padded else ''}")
    return "; ".join(f"{what} over {'·'.join(names)}" for what, names in axes.items()) or "nothing sharded"


def _places(analysis: Analysis, decision: Shard) -> list[str]:
    """The dimensions of arguments that a decision is about, or those of outputs if there are none."""
    arguments = {a.path for a in analysis.program.arguments}
    places = [p for c in decision.colors for p in analysis.colors[c].places]
    return [str(p) for p in places if p.label in arguments] or [str(p) for p in places]


def places_text(places: Sequence[str]) -> str:
    """The first of some places with its siblings, in all repeated layers, and a count of the others.

    >>> places_text(["params/mlp/down[0]", "params/mlp/up[1]", "moments/mlp/down[0]", "moments/mlp/up[1]"])
    'params/mlp/{down[0], up[1]} and 2 in moments'
    >>> places_text(["p/0/up[1]", "p/0/down[0]", "p/1/up[1]", "p/1/down[0]", "p/out[0]"])
    'p/*/{up[1], down[0]} and 1 in p'
    >>> places_text(["x[0]"]), places_text([])
    ('x[0]', 'inner values')
    """
    text, others = _siblings(places)
    counts = Counter(p.partition("/")[0].partition("[")[0] for p in others)
    more = ", ".join(f"{count} in {name}" for name, count in counts.items())
    return f"{text} and {more}" if more else text


def _siblings(places: Sequence[str]) -> tuple[str, list[str]]:
    """The text of the first of some places with its siblings, in all repeated layers, and the other places."""
    if not places:
        return "inner values", []
    parent = pattern(places[0]).rpartition("/")[0]
    family = [p for p in places if pattern(p).rpartition("/")[0] == parent] if parent else [places[0]]
    names = list(dict.fromkeys(p.rpartition("/")[2] for p in family))[:_SIBLINGS]
    beside = [p for p in family if p.rpartition("/")[2] in names]
    above = merged([p.rpartition("/")[0] for p in beside])
    text = f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]
    return f"{above}/{text}" if above else text, [p for p in places if p not in beside]
