"""What a plan is predicted to take: time with its bounds, peak memory with what is alive there, and each figure taken apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from shardwise.cost.memory import BLOCK, Allocation
from shardwise.cost.model import Cost, CostModel, Figures, Term, TermKind, memory_curve
from shardwise.errors import PlanError
from shardwise.ir.program import HEAVY
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Kind

#: How many of the tensors alive at the peak are kept by name.
_NAMED: Final = 20
PARTS: Final = ("op", "source", "kind", "region")


@dataclass(frozen=True, slots=True)
class Alive:
    """Something that takes memory at the peak."""

    label: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Moved:
    """All collectives of a kind over the same axes: how many stand in the program, bytes of one device and seconds a step."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel or a collective: what it is, where it is from, and seconds in the whole step, those that hide included."""

    kind: str  # "compute", or the kind of collective
    op: str
    source: str
    region: str
    runs: float
    time_s: float
    hidden_s: float
    nbytes: float
    point: int
    axes: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Predicted:
    """The prediction for a plan on hardware.

    ``time_s`` lies between ``overlapped_s`` (all communication hides behind compute, as far as there is any) and ``serial_s``
    (none does). ``utilization`` is the share of the devices' peak rate that the program's arithmetic takes. ``rows`` and
    ``curve`` (bytes at each point of the program) are there where the plan was made in this process.
    """

    hardware: str
    time_s: float
    serial_s: float
    overlapped_s: float
    compute_s: float
    comm_s: float
    utilization: float
    peak_bytes: int
    usable_bytes: int
    alive: tuple[Alive, ...]
    collectives: tuple[Moved, ...]
    rows: tuple[Row, ...] = field(default=(), compare=False, repr=False)
    curve: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    def breakdown(self, by: str = "kind") -> dict[str, float]:
        """Seconds by ``op``, ``source`` line, ``kind`` or ``region``, the largest first; they add up to ``serial_s``."""
        if by not in PARTS:
            raise PlanError(f"time is broken down by {', '.join(PARTS)}, not by {by!r}")
        self._made_here()
        found: dict[str, float] = {}
        for row in self.rows:
            name = getattr(row, by)
            found[name] = found.get(name, 0.0) + row.time_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def timeline(self) -> dict[str, Any]:
        """A trace of the step in Chrome's format (chrome://tracing, Perfetto): compute, communication, memory.

        The runs of a loop's body are one event with their number. A part that hides runs beside the compute after it.
        """
        self._made_here()
        hidden = sum(row.hidden_s for row in self.rows)
        share = min(1.0, self.compute_s / hidden) if hidden else 0.0
        events: list[dict[str, Any]] = [
            _named(0, "process_name", self.hardware),
            _named(1, "thread_name", "compute"),
            _named(2, "thread_name", "communication"),
        ]
        clock, point = 0.0, -1
        for row in self.rows:
            if self.curve and row.point != point:
                point = row.point
                used = {"bytes": self.curve[point]}
                events.append({"name": "memory", "ph": "C", "pid": 0, "ts": clock * 1e6, "args": used})
            computes = row.kind == "compute"
            events.append(
                {
                    "name": row.op if computes else row.kind,
                    "cat": "compute" if computes else "communication",
                    "ph": "X",
                    "pid": 0,
                    "tid": 1 if computes else 2,
                    "ts": clock * 1e6,
                    "dur": row.time_s * 1e6,
                    "args": {"source": row.source, "region": row.region, "runs": row.runs, "bytes": row.nbytes},
                }
            )
            clock += row.time_s - row.hidden_s * share
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _made_here(self) -> None:
        if not self.rows:
            raise PlanError("a loaded plan has the sums of its prediction only: plan again to take them apart")

    def to_json(self) -> dict[str, Any]:
        plain = {k: getattr(self, k) for k in _FIGURES}
        parts = {"alive": [asdict(a) for a in self.alive], "collectives": [asdict(c) for c in self.collectives]}
        return plain | parts


_FIGURES: Final = (
    "hardware",
    "time_s",
    "serial_s",
    "overlapped_s",
    "compute_s",
    "comm_s",
    "utilization",
    "peak_bytes",
    "usable_bytes",
)


def _named(number: int, what: str, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}


def predict(model: CostModel, lowered: Lowered) -> Predicted:
    """The prediction for a lowered state: the sum of the model's terms, with every term by name."""
    found = [(term, model.figures(lowered, term)) for term in model.terms]
    allocations = [a for _, figures in found for a in figures.allocations]
    curve = memory_curve(model.life.points, allocations)
    at = int(np.argmax(curve))
    cost = Cost(
        sum(f.compute_ps for _, f in found),
        sum(f.comm_ps for _, f in found),
        sum(f.hidden_ps for _, f in found),
        int(curve[at]),
    )
    rows = [row for term, figures in found for row in _rows(model, term, figures)]
    return Predicted(
        hardware=model.cost.placement.topology.text,
        time_s=cost.time_s,
        serial_s=(cost.compute_ps + cost.comm_ps) * 1e-12,
        overlapped_s=max(cost.compute_ps, cost.comm_ps) * 1e-12,
        compute_s=cost.compute_ps * 1e-12,
        comm_s=cost.comm_ps * 1e-12,
        utilization=_least_s(model) / lowered.mesh.devices / cost.time_s if cost.time_ps else 0.0,
        peak_bytes=cost.peak_bytes,
        usable_bytes=model.cost.profile.usable_bytes,
        alive=tuple(_alive(model, (a for a in allocations if a.first <= at <= a.last))),
        collectives=tuple(_collectives(rows)),
        rows=tuple(sorted(rows, key=lambda row: row.point)),
        curve=tuple((curve * BLOCK).tolist()),
    )


def _least_s(model: CostModel) -> float:
    """The time of the program's arithmetic on one device that did nothing else, at its peak."""
    program, profile = model.structure.program, model.cost.profile
    seconds = 0.0
    for op in program.ops:
        if op.unit in HEAVY and op.flops:
            used = [program.values[v] for v in op.operands if v >= 0]
            rate = profile.matrix_rate(max(used, key=lambda value: value.itemsize).dtype)
            seconds += op.flops * float(program.runs[op.region]) / rate
    return seconds


def _rows(model: CostModel, term: Term, figures: Figures) -> Iterable[Row]:
    program, life = model.structure.program, model.life
    if term.kind is TermKind.KERNEL:
        work = model.kernels[term.number]
        main = program.ops[(work.products or work.roots or work.ops)[0]]
        point = max((life.point.get(k, 0) for k in (main.id, *work.roots)), default=0)
        runs = float(program.runs[work.region])
        where = str(program.source_of(main)), _region(model, work.region)
        yield Row("compute", main.kind, *where, runs, figures.compute_ps * 1e-12, 0.0, 0.0, point)
        return
    for move in figures.reshards:
        op = program.ops[move.op]
        runs = float(program.runs[move.region])
        where = str(program.source_of(op)), _region(model, move.region)
        point = max(model.points(op), default=0)
        for step, (copying, moving, hidden) in zip(move.steps, model.step_ps(move), strict=True):
            if copying:
                yield Row("compute", "copy", *where, runs, copying * 1e-12, 0.0, 0.0, point)
            if step.kind is not Kind.SLICE:
                axes = tuple(model.cost.placement.mesh.names[a] for a in step.axes)
                times = moving * 1e-12, hidden * 1e-12
                moved = runs * step.nbytes * step.count
                yield Row(step.kind.value, op.kind, *where, runs, *times, moved, point, axes, step.count)


def _collectives(rows: Iterable[Row]) -> Iterable[Moved]:
    found: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        if row.kind != "compute":
            found.setdefault((row.kind, row.axes), []).append(row)
    for (kind, axes), own in sorted(found.items()):
        yield Moved(kind, axes, sum(r.count for r in own), sum(r.nbytes for r in own), sum(r.time_s for r in own))


def _region(model: CostModel, number: int) -> str:
    region = model.structure.program.regions[number]
    return f"{region.kind} {number}" if number else "program"


def _alive(model: CostModel, allocations: Iterable[Allocation]) -> Iterable[Alive]:
    """The largest by name, the rest as one."""
    program = model.structure.program
    ordered = sorted(allocations, key=lambda a: (-a.blocks, a.value, a.what))
    for a in ordered[:_NAMED]:
        source = program.source_of(program.ops[program.definitions[a.value][0]])
        label = program.label(a.value) if a.what == "value" else f"{a.what} of {program.label(a.value)}"
        yield Alive(label, a.blocks * BLOCK, str(source))
    rest = sum(a.blocks for a in ordered[_NAMED:])
    if rest:
        yield Alive(f"{len(ordered) - _NAMED} more", rest * BLOCK, "")
