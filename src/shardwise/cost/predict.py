"""The prediction for a plan: step time with its bounds, peak memory with what is alive there, and the breakdown of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from shardwise.cost.compute import widest_dtype
from shardwise.cost.memory import BLOCK, Allocation
from shardwise.cost.model import CostModel, Figures, Term, TermKind, total
from shardwise.errors import PlanError
from shardwise.ir.program import HEAVY, Op, Program
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Kind

#: How many of the tensors alive at the peak are kept by name.
_NAMED: Final = 20
#: The kind of rows of what moves between the memories of host and device.
TRANSFER: Final = "host-transfer"
PARTS: Final = ("op", "source", "kind", "region")


@dataclass(frozen=True, slots=True)
class Alive:
    """Something that takes memory at the peak."""

    label: str
    nbytes: int
    source: str


@dataclass(frozen=True, slots=True)
class Moved:
    """All collectives of a kind over the same axes: their number, and the bytes and seconds of one device in a step."""

    kind: str
    axes: tuple[str, ...]
    count: int
    nbytes: float
    time_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A kernel or a collective: what it is, where it is from, and seconds in the whole step, overlapped ones included."""

    kind: str  # "compute", "host-transfer", or the kind of collective
    op: str
    source: str
    region: str
    runs: float
    time_s: float
    overlapped_s: float = 0.0
    nbytes: float = 0.0
    point: int = 0
    axes: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True)
class Predicted:
    """The prediction for a plan on hardware. The step time ``time_s`` is between ``overlapped_s`` (all communication overlaps
    with compute) and ``serial_s`` (none does). ``utilization`` is the MFU. ``rows``, ``curve`` (bytes at each point of the
    program) and ``allocations`` are empty in a loaded plan."""

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
    allocations: tuple[Allocation, ...] = field(default=(), compare=False, repr=False)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    def breakdown(self, by: str = "kind") -> dict[str, float]:
        """Seconds by ``op``, ``source`` line, ``kind`` or ``region``, the largest first; they add up to ``serial_s``."""
        if by not in PARTS:
            raise PlanError(f"time is broken down by {', '.join(PARTS)}, not by {by!r}")
        self._check_rows()
        times: dict[str, float] = {}
        for row in self.rows:
            name = getattr(row, by)
            times[name] = times.get(name, 0.0) + row.time_s
        return dict(sorted(times.items(), key=lambda item: -item[1]))

    def timeline(self) -> dict[str, Any]:
        """A trace of the step in Chrome's format (chrome://tracing, Perfetto): compute, communication, memory. The runs of a
        loop's body are one event with their number."""
        self._check_rows()
        overlapped = sum(row.overlapped_s for row in self.rows)
        share = min(1.0, self.compute_s / overlapped) if overlapped else 0.0
        names = (("process_name", self.hardware), ("thread_name", "compute"), ("thread_name", "communication"))
        events: list[dict[str, Any]] = [
            {"name": what, "ph": "M", "pid": 0, "tid": n, "args": {"name": name}}
            for n, (what, name) in enumerate(names)
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
            clock += row.time_s - row.overlapped_s * share
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def _check_rows(self) -> None:
        if not self.rows and self.time_s:  # a program that only passes its arguments on has none
            raise PlanError("a loaded plan has the sums of its prediction only: plan again to take them apart")

    def to_json(self) -> dict[str, Any]:
        data = asdict(replace(self, rows=(), curve=(), allocations=()))
        for name in ("rows", "curve", "allocations"):
            del data[name]
        return data


def predict(model: CostModel, lowered: Lowered) -> Predicted:
    """The prediction for a lowered state: the sum of the model's terms, with every term by name."""
    figures = [model.figures(lowered, term) for term in model.terms]
    cost, curve = total(model, figures)
    at = int(np.argmax(curve))
    rows = [row for term, own in zip(model.terms, figures, strict=True) for row in _rows(model, term, own)]
    peak = (a for own in figures for a in own.allocations if a.first <= at <= a.last)
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
        alive=tuple(alive(model.structure.program, peak, cost.peak_blocks)),
        collectives=tuple(_collectives(rows)),
        rows=tuple(sorted(rows, key=lambda row: row.point)),
        curve=tuple((curve * BLOCK).tolist()),
        allocations=tuple(a for own in figures for a in own.allocations),
    )


def _least_s(model: CostModel) -> float:
    """The time of the program's products on one device, at its peak rate."""
    program, seconds = model.structure.program, 0.0
    for op in program.ops:
        if op.unit in HEAVY and op.flops:
            rate = model.cost.profile.matrix_rate(widest_dtype(program, op.operands))
            seconds += op.flops * float(program.runs[op.region]) / rate
    return seconds


def _rows(model: CostModel, term: Term, figures: Figures) -> Iterable[Row]:
    program, life, names = model.structure.program, model.life, model.cost.placement.mesh.names

    def place(op: Op, region: int) -> tuple[str, str, float]:
        name = f"{program.regions[region].kind} {region}" if region else "program"
        return str(program.source_of(op)), name, float(program.runs[region])

    if term.kind is TermKind.KERNEL:
        kernel = model.kernels[term.number]
        main = program.ops[kernel.main]
        point = max(life.point.get(k, 0) for k in (main.id, *kernel.roots))
        where = place(main, kernel.region)
        name = f"loop of {main.kind}" if kernel.looped else main.kind
        yield Row("compute", name, *where, figures.compute_ps * 1e-12, point=point)
        if kernel.transfers:
            nbytes = figures.comm_ps * 1e-12 * model.cost.profile.host_bytes_per_s
            times = figures.comm_ps * 1e-12, figures.overlapped_ps * 1e-12
            yield Row(TRANSFER, main.kind, *where, *times, nbytes, point)
    if term.kind is TermKind.COPY and figures.compute_ps:
        op = program.ops[term.number]
        yield Row("compute", "copy", *place(op, op.region), figures.compute_ps * 1e-12, point=max(life.runs[op.id]))
    for move in figures.reshards:
        op = program.ops[move.op]
        where, point = place(op, move.region), max(life.runs[op.id], default=0)
        for step, (copy_ps, comm_ps, overlapped_ps) in zip(move.steps, model.step_ps(move), strict=True):
            if copy_ps:
                yield Row("compute", "copy", *where, copy_ps * 1e-12, point=point)
            if step.kind is not Kind.SLICE:
                axes, nbytes = tuple(names[a] for a in step.axes), where[-1] * step.nbytes * step.count
                times = comm_ps * 1e-12, overlapped_ps * 1e-12
                yield Row(step.kind.value, op.kind, *where, *times, nbytes, point, axes, step.count)


def _collectives(rows: Iterable[Row]) -> Iterable[Moved]:
    groups: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        if row.kind != "compute":
            groups.setdefault((row.kind, row.axes), []).append(row)
    for (kind, axes), same in sorted(groups.items()):
        yield Moved(kind, axes, sum(r.count for r in same), sum(r.nbytes for r in same), sum(r.time_s for r in same))


def alive(program: Program, allocations: Iterable[Allocation], blocks: int, most: int = _NAMED) -> Iterable[Alive]:
    """The largest allocations by name, the rest as one: those in memory, which are so many ``blocks`` in sum."""
    ordered = sorted(_in_memory(list(allocations), blocks), key=lambda a: (-a.blocks, a.value, a.what))
    for a in ordered[:most]:
        op = program.ops[program.definitions[a.value][0]]
        # A stacked result of a loop is named by the value in its body: the loop's line is that of all its results.
        stacked = op.kind == "scan.output" and not program.values[a.value].path
        label = f"stack of {program.label(op.operands[0])}" if stacked else program.label(a.value)
        named = label if a.what == "value" else f"{a.what} of {label}"
        yield Alive(named, a.blocks * BLOCK, str(program.source_of(op)))
    rest = sum(a.blocks for a in ordered[most:])
    if rest:
        yield Alive(f"{len(ordered) - most} more", rest * BLOCK, "")


def _in_memory(allocations: list[Allocation], blocks: int) -> Iterable[Allocation]:
    """The allocations that are in memory, so many ``blocks`` in sum: the smallest temporaries are on the chip, one in part."""
    on_chip = sum(a.blocks for a in allocations) - blocks
    for a in sorted(allocations, key=lambda a: (a.blocks, a.value, a.what)):
        taken = min(on_chip, a.blocks) if a.on_chip else 0
        on_chip -= taken
        if taken < a.blocks:
            yield replace(a, blocks=a.blocks - taken)
