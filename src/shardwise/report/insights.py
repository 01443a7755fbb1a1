"""What stands out in a plan, computed for it: what takes the memory at the peak, what would free it,
and what takes the time.

Nothing is said that was not checked: each change is applied to the program or to its allocations, the cost model gives the new
peak under the same decisions, and only one that lowers the peak is named. Nothing is searched.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from shardwise.capture.trace import JitOptions
from shardwise.cost.compute import work
from shardwise.cost.memory import BLOCK, Allocation
from shardwise.cost.model import CostModel, memory_curve
from shardwise.errors import ShardwiseError
from shardwise.ir.program import HEAVY, Program
from shardwise.lowering.decisions import Shard as ShardDecision
from shardwise.planner.infeasible import with_small_moments
from shardwise.planner.inquiry import Inquiry, Variants
from shardwise.plans.plan import Plan
from shardwise.tactics.strategies import Shard
from shardwise.tactics.tactic import decide
from shardwise.units import binary, seconds

#: A change is named if it lowers the peak by this share at least.
_FREED: Final = 0.05
#: The share of the memory of a device from which it is said what would free some.
_SCARCE: Final = 0.25
#: The shares of the peak and of the memory of a device from which it is checked what rematerialization would free: the step is
#: traced again, which takes a while.
_STACKED: Final = 0.3
_TIGHT: Final = 0.5
#: Parts in which a line is thought to be computed.
_CHUNKS: Final = 8
#: Arrays that live for a smaller share of the program are short-lived, and a line is named from this share of the peak on.
_BRIEF: Final = 0.1
_LEAST: Final = 0.2
#: The utilization of the peak rate below which it is said what of the memory's rate is used.
_SLOW: Final = 0.2
#: The share of the step from which a part of it is named.
_MUCH: Final = 0.1
#: Ops of a program beyond which no changed program is built, so that a verdict takes no seconds.
_LARGE: Final = 8000

#: What an allocation is, in the order in which the page stacks them.
PARAMETERS, OPTIMIZER, CACHE, INPUTS, STACKS, VALUES, COPIES = KINDS = (
    "parameters",
    "optimizer state",
    "cache",
    "other arguments",
    "stacks that loops keep",
    "activations and gradients",
    "copies and buffers",
)


@dataclass(frozen=True)
class Memory:
    """Bytes by kind of allocation at each point of the program. On-chip temporaries are not in ``curve``, the predicted one."""

    kinds: dict[str, np.ndarray]
    curve: np.ndarray

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind at the peak, the largest first."""
        at = int(np.argmax(self.curve)) if len(self.curve) else 0
        there = {kind: int(curve[at]) for kind, curve in self.kinds.items() if len(curve) and curve[at]}
        return dict(sorted(there.items(), key=lambda item: -item[1]))


def memory_by_kind(plan: Plan) -> Memory:
    """Returns what a plan's memory consists of over the program."""
    model, allocations = plan.inquiry.model, plan.settled.predicted.allocations
    kind_for = kind_of(plan)
    by_kind: dict[str, list[Allocation]] = {kind: [] for kind in KINDS}
    for a in allocations:
        by_kind[kind_for(a)].append(a)
    curves = {kind: memory_curve(model.life.points, some) * BLOCK for kind, some in by_kind.items() if some}
    whole = np.array(plan.settled.predicted.curve, np.int64)
    # What is on the chip is not in memory: temporaries give way first, as in the model.
    over = sum(curves.values()) - whole if curves else whole
    for kind in (VALUES, STACKS, COPIES):
        if kind in curves:
            taken = np.minimum(over, curves[kind])
            curves[kind], over = curves[kind] - taken, over - taken
    return Memory(curves, whole)


def kind_of(plan: Plan) -> Callable[[Allocation], str]:
    """Returns a function that gives the kind of an allocation."""
    context, program = plan.inquiry.context, plan.inquiry.analysis.program
    kinds = {a.value: INPUTS for a in program.arguments}
    for role, kind in (("params", PARAMETERS), ("optimizer", OPTIMIZER), ("cache", CACHE)):
        kinds |= {v.id: kind for v in context.arguments(plan.roles.get(role, ()))}
    made = (program.ops[program.definitions[v][0]] for v in plan.inquiry.model.life.temporary)
    kinds |= {op.results[0]: STACKS for op in made if op.kind == "scan.output"}
    return lambda a: kinds.get(a.value, VALUES) if a.what == "value" else COPIES


def products_of(plan: Plan) -> set[str]:
    """Returns the kinds of ops of a plan's program that are matrix products and the like."""
    return {op.kind for op in plan.inquiry.analysis.program.ops if op.unit in HEAVY}


def insights(plan: Plan) -> tuple[str, ...]:
    """Returns a few sentences; none for a loaded plan, which does not know its program."""
    if plan.asked is None:
        return ()
    return (*_of_memory(plan), *_of_time(plan))


def _of_memory(plan: Plan) -> Iterator[str]:
    p, peak = plan.predicted, memory_by_kind(plan).peak
    total = sum(peak.values())
    if not total:
        return
    parts = [f"{nbytes / total:.0%} {kind}" for kind, nbytes in peak.items() if nbytes >= 0.01 * total]
    yield f"Peak memory: {', '.join(parts)}."
    scarce = p.peak_bytes >= _SCARCE * p.usable_bytes
    stacked = peak.get(STACKS, 0) >= _STACKED * total and p.peak_bytes >= _TIGHT * p.usable_bytes
    changes = sorted(_changes(plan, stacked), key=lambda change: change[1]) if scarce else []
    for text, peak_bytes in changes[:2]:
        if peak_bytes < (1 - _FREED) * p.peak_bytes:
            yield f"{text} the peak is {binary(peak_bytes)} instead of {binary(p.peak_bytes)} (checked)."


def _changes(plan: Plan, stacked: bool) -> Iterator[tuple[str, int]]:
    """What would lower the peak, and the peak under the same decisions; ``stacked``: stacks of loops take much of it."""
    yield from _chunked(plan)
    model = plan.inquiry.model
    if len(model.structure.program.ops) > _LARGE:
        return
    kept = _not_donated(model.structure.program)
    if kept:
        donated = _with_donated(model, kept)
        names = _names(plan, kept)
        yield f"Donating {names} (donate_argnums), which the outputs replace,", _peak(plan, donated)
    smaller = with_small_moments(model.structure)
    if smaller is not None:
        yield "With moments in bfloat16", _peak(plan, CostModel.of(smaller, model.cost))
    if stacked and plan.call is not None and not plan.variant.remat:
        yield from _rematerialized(plan)


def _rematerialized(plan: Plan) -> Iterator[tuple[str, int]]:
    """The step with layers that are computed again in the backward pass; its dimensions are those of the same arguments."""
    call, variant = plan.call, replace(plan.variant, remat=True)
    assert call is not None
    try:
        captured = Variants(call.fn, call.args, call.kwargs, JitOptions.of_static(plan.static))[variant]
        donated = {a.path for a in plan.arguments if a.donated}
        values = [a.value for a in captured.analysis.program.arguments]
        values = [v for v in values if captured.analysis.program.values[v].path in donated]
        model = _with_donated(CostModel.of(captured.analysis, plan.inquiry.cost), values)
        inquiry = Inquiry(model, plan.roles)
        tactics = []
        for choice in (c for c in plan.choices if isinstance(c, ShardDecision)):
            places = [p for c in choice.colors for p in plan.inquiry.analysis.colors[c].places]
            tactics += [Shard(places[0].label, places[0].dim, choice.axis)] if places else []
        predicted = inquiry.settle(decide(inquiry.context, tactics)).predicted
    except ShardwiseError:  # there is no such variant, or it has other dimensions
        return
    yield f"With remat=True the step takes {seconds(predicted.time_s)} and", predicted.peak_bytes


def _peak(plan: Plan, model: CostModel) -> int:
    context = Inquiry(model, plan.roles).context
    return model.evaluate(context.lower(plan.decisions)).peak_bytes


def _not_donated(program: Program) -> list[int]:
    """Returns the arguments that are not donated although an output of the same type could take their place."""
    outputs = Counter(program.values[v].type_text for v in program.outputs)
    outputs -= Counter(program.values[a.value].type_text for a in program.arguments if a.donated)
    kept = []
    for a in program.arguments:
        text = program.values[a.value].type_text
        if not a.donated and outputs[text] > 0 and program.values[a.value].shape:
            outputs[text] -= 1
            kept.append(a.value)
    return kept


def _with_donated(model: CostModel, values: Sequence[int]) -> CostModel:
    analysis = model.structure.analysis
    chosen = set(values)
    arguments = tuple(replace(a, donated=a.donated or a.value in chosen) for a in analysis.program.arguments)
    return CostModel.of(replace(analysis, program=replace(analysis.program, arguments=arguments)), model.cost)


def _names(plan: Plan, values: Iterable[int]) -> str:
    program = plan.inquiry.analysis.program
    roots = dict.fromkeys(program.values[v].path.partition("/")[0] for v in values)
    return " and ".join(roots) if len(roots) < 3 else f"{next(iter(roots))} and {len(roots) - 1} more arguments"


def _chunked(plan: Plan) -> Iterator[tuple[str, int]]:
    """The line whose short-lived arrays take most of the peak, and the peak if they were an eighth. What lives long is kept for
    the backward pass, and computing it in chunks would free nothing."""
    model, predicted = plan.inquiry.model, plan.settled.predicted
    program: Program = model.structure.program
    at = int(np.argmax(predicted.curve)) if predicted.curve else 0
    lines: defaultdict[str, list[Allocation]] = defaultdict(list)
    for a in predicted.allocations:
        op = program.ops[program.definitions[a.value][0]]
        short = a.last - a.first <= _BRIEF * model.life.points
        if (
            a.first <= at <= a.last
            and short
            and a.what == "value"
            and a.value in model.life.temporary
            and not op.region
        ):
            place = program.source_of(op)
            if place.file and op.kind not in ("scan.output", "scan.carry"):
                lines[str(place)].append(a)
    line, some = max(lines.items(), key=lambda item: sum(a.blocks for a in item[1]), default=("", []))
    share = sum(a.blocks for a in some) * BLOCK / max(1, predicted.peak_bytes)
    if share < _LEAST:
        return
    largest = max(some, key=lambda a: a.blocks)
    value = program.values[largest.value]
    chosen = {id(a) for a in some}
    cut = [replace(a, blocks=math.ceil(a.blocks / _CHUNKS)) if id(a) in chosen else a for a in predicted.allocations]
    curve = memory_curve(model.life.points, cut, model.on_chip_blocks)
    text = f"{share:.0%} of the peak is what {line} computes ({value.type_text}); in {_CHUNKS} chunks"
    yield text, int(curve.max(initial=0)) * BLOCK


def _of_time(plan: Plan) -> Iterator[str]:
    p = plan.settled.predicted
    if not p.time_s:
        return
    if p.utilization < _SLOW:
        yield from _bandwidth(plan)
    exposed = max(0.0, p.time_s - p.compute_s)
    if exposed > _MUCH * p.time_s:
        rows = Counter[Any]()
        for row in p.rows:
            if row.kind != "compute":
                rows[row.kind, row.axes, row.source] += row.time_s - row.overlapped_s
        (kind, axes, source), time_s = rows.most_common(1)[0]
        where = f" over {' × '.join(axes)}" if axes else ""
        where += f" at {source}" if source and source != "?" else ""
        yield (
            f"{exposed / p.time_s:.0%} of the step is exposed communication; the largest part is {kind}{where}: "
            f"{seconds(time_s)}."
        )
    products = products_of(plan)
    other = Counter[str]()
    for row in p.rows:
        if row.kind == "compute" and row.op not in products:
            other[f"{row.op} at {row.source}" if row.source and row.source != "?" else row.op] += row.time_s
    if sum(other.values()) > _MUCH * p.time_s:
        what, time_s = other.most_common(1)[0]
        yield (
            f"{sum(other.values()) / p.time_s:.0%} of the step is kernels without a matrix product; the longest is "
            f"{what}: {seconds(time_s)}."
        )


def _bandwidth(plan: Plan) -> Iterator[str]:
    """What of the rate of the memory is used: the figure that counts where kernels are bound by it, as in a decode step."""
    model, lowered, p = plan.inquiry.model, plan.settled.lowered, plan.predicted
    profile, program = model.cost.profile, lowered.program
    if len(program.ops) > _LARGE:
        return
    kernels = [k for k in model.kernels if k.returned is None and k.transposed is None]
    moved = (work(lowered, k, profile, model.life.layouts)[1] * float(program.runs[k.region]) for k in kernels)
    nbytes = sum(moved)
    share = nbytes / profile.memory_bytes_per_s / p.time_s
    if share > p.utilization:
        yield f"Each device reads and writes {binary(nbytes)} of memory in a step: {share:.0%} of what it could in this time."
