"""A plan as plain data: everything that its page shows."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from shardwise.cost.compute import widest_dtype
from shardwise.cost.memory import BLOCK
from shardwise.cost.predict import PARTS, Predicted, alive
from shardwise.ir.paths import collapsed, pattern
from shardwise.ir.program import HEAVY
from shardwise.plans.codec import encode
from shardwise.plans.parts import ArrayPlan
from shardwise.plans.plan import Plan
from shardwise.report.code import STYLES, code_text
from shardwise.report.diagram import colors_in, diagram, line_text
from shardwise.report.insights import kind_of, memory_by_kind, products_of
from shardwise.report.plan_text import (
    decided,
    decision_of,
    evidence_lines,
    schedule_rows,
    shards,
    spec_text,
    variant_lines,
)
from shardwise.report.program_text import listing_data
from shardwise.report.verdict import arrays_of, dimension_names, strategy_words
from shardwise.units import binary

SCHEMA: Final = 2
#: A curve has no more points than a wide screen can show.
_POINTS: Final = 600
#: Lines of the device-local program, source lines, and kernels and collectives of the timeline that are shown.
_MOST_LINES: Final = 2000
_MOST_SOURCES: Final = 400
_MOST_EVENTS: Final = 20_000
#: Allocations that are named where memory is looked at, named strategies, and those of them with their specs.
_MOST_ALLOCATIONS: Final = 120
_MOST_ALIVE: Final = 20
_MOST_BASELINES: Final = 150
_WITH_SPECS: Final = 12


def report_data(plan: Plan) -> dict[str, Any]:
    """Returns what ``plan.report`` shows. ``made_here`` says whether the plan has what is not saved: times by line, and memory
    over the program."""
    p, search, program = plan.predicted, plan.search, plan.asked and plan.asked.analysis.program
    sharded, rest = decided(plan)
    found, parts = plan.verdict, diagram(plan)
    return {
        "schema": SCHEMA,
        "function": plan.function,
        "made_here": bool(p.rows),
        "versions": dict(plan.versions),
        "mesh": {
            "text": str(plan.mesh),
            "names": list(plan.mesh.names),
            "sizes": list(plan.mesh.sizes),
            "devices": plan.mesh.devices,
            "placement": list(plan.placement),
            "device_order": list(plan.device_order or range(plan.mesh.devices)),
        },
        "verdict": list(found.lines),
        "insights": list(plan.insights),
        "parameters": sum(math.prod(a.shape) for a in arrays_of(plan, "params")),
        "roles": {role: [path for (path,) in collapsed((p,) for p in paths)] for role, paths in plan.roles.items()},
        "variant": variant_lines(plan),
        "sharded": [{"what": what, "axes": axes} for _, axes, what in sharded],
        "decisions": rest,
        "judged": evidence_lines(plan),
        "notes": list(plan.notes),
        "evidence": plan.evidence and encode(plan.evidence),
        "predicted": p.to_json() | {"fits": p.fits},
        "split": _split(plan),
        "peak": memory_by_kind(plan).peak if plan.asked else {"in use": p.peak_bytes},
        "device": _device(plan),
        "arrays": [
            *(_array(plan, a, "argument") for a in plan.arguments),
            *(_array(plan, a, "output") for a in plan.outputs),
        ],
        "diagram": parts,
        "colors": _colors(plan, colors_in(parts)),
        "lines": _lines(plan),
        "timeline": _timeline(p),
        "program": program and listing_data(program, plan.sharded, _MOST_LINES),
        "memory": _memory(plan),
        "alive": _alive(plan),
        "breakdown": _breakdown(p),
        "effects": [
            asdict(row)
            | {"decision": str(row.decision)}
            | {"slower_s": row.time_s - p.time_s, "more_bytes": row.peak_bytes - p.peak_bytes}
            for row in plan.effects
        ],
        "schedule": [
            encode(applied) | {"changes": row[-1].splitlines()}
            for applied, row in zip(plan.schedule, schedule_rows(plan, every=True), strict=True)
        ],
        "best": [row.name for row in found.baselines],
        "specs": _specs(plan.arguments),
        "baselines": _baselines(plan),
        "search": search and encode(search) | {"ended_text": search.ended.value, "text": str(search)},
        "code": {style: code_text(plan, style, constraints=False) for style in STYLES},
    }


def _split(plan: Plan) -> dict[str, float]:
    """Returns the parts of the step time."""
    p, exposed = plan.predicted, {"exposed communication": max(0.0, plan.predicted.time_s - plan.predicted.compute_s)}
    if not p.rows or plan.asked is None:
        return {"compute": p.compute_s} | exposed
    kinds = products_of(plan)
    products = sum(row.time_s for row in p.rows if row.kind == "compute" and row.op in kinds)
    return {"matrix products": products, "other kernels": p.compute_s - products} | exposed


def _device(plan: Plan) -> dict[str, Any] | None:
    """Returns the rates that bound kernels, for the type of most products, and what products are called."""
    if plan.asked is None:
        return None
    profile, program = plan.inquiry.model.cost.profile, plan.inquiry.analysis.program
    flops = Counter[str]()
    for op in (op for op in program.ops if op.unit in HEAVY):
        flops[widest_dtype(program, op.operands)] += op.flops * program.runs[op.region]
    dtype = max(flops, key=lambda name: flops[name], default="bfloat16")
    rates = {"flops_per_s": profile.matrix_rate(dtype), "bytes_per_s": profile.memory_bytes_per_s}
    return {"dtype": dtype, "products": sorted(products_of(plan)), **rates}


def _array(plan: Plan, array: ArrayPlan, role: str) -> dict[str, Any]:
    count = shards(plan, (axis for axes in array.spec for axis in axes))
    itemsize = _item_bytes(array.dtype)
    nbytes = None if itemsize is None else math.ceil(math.prod(array.shape) * itemsize / count)
    return {
        "path": array.path,
        "role": role,
        "shape": list(array.shape),
        "spec": [list(axes) for axes in array.spec],
        "text": spec_text(array),
        "shards": count,
        "device_bytes": nbytes,
        "device_bytes_text": "?" if nbytes is None else binary(nbytes),
    }


def _item_bytes(dtype: str) -> float | None:
    """Returns the bytes of an element; None for a dtype that is no number, such as a key.

    >>> _item_bytes("bfloat16"), _item_bytes("int4"), _item_bytes("bool"), _item_bytes("key<fry>")
    (2.0, 0.5, 1.0, None)
    """
    bits = re.match(r"(?:b?float|u?int|complex)(\d+)", dtype)
    return 1.0 if dtype == "bool" else int(bits[1]) / 8 if bits else None


def _specs(arrays: Iterable[ArrayPlan]) -> list[list[str]]:
    """Returns paths with their sharding, repeated layers as one."""
    return [list(row) for row in collapsed((a.path, spec_text(a)) for a in arrays)]


def _colors(plan: Plan, shown: set[int]) -> dict[int, dict[str, Any]]:
    """Returns what the dimensions of a color are called, and why they are sharded as they are."""
    names = dimension_names(plan)
    return {
        c: {"name": names.get(c, ""), "why": [text for axis in plan.mesh.names if (text := decision_of(plan, c, axis))]}
        for c in sorted(shown)
    }


def _baselines(plan: Plan) -> list[dict[str, Any]]:
    """Returns the named strategies without mirror images, the first few with the specs of their arguments."""
    figures = ("name", "time_s", "compute_s", "comm_s", "peak_bytes", "fits", "variant")
    baselines = plan.baselines if plan.mesh.devices > 1 else ()
    every = zip(baselines, plan.asked.best_baselines if plan.asked and baselines else (), strict=True)
    shown = [(row, best) for row, best in every if not row.mirrors][:_MOST_BASELINES]
    rows = [{key: getattr(row, key) for key in figures} | {"words": strategy_words(row, plan.mesh)} for row, _ in shown]
    best = [found for _, found in shown[:_WITH_SPECS]]
    rivals = {r.variant: r.inquiry for r in plan.asked.rivals} if rows else {}
    for row, (variant, baseline) in zip(rows, best, strict=False):
        inquiry = plan.asked if variant is None else rivals.get(variant)
        if inquiry is None:
            continue
        lowered = inquiry.context.lower(baseline.decisions, ())
        values = [lowered.program.values[a.value] for a in lowered.program.arguments]
        arrays = (ArrayPlan(v.path, v.shape, v.dtype, lowered.storage[v.id].spec(lowered.mesh)) for v in values)
        row["specs"] = _specs(arrays)
    return rows


def _lines(plan: Plan) -> list[dict[str, Any]]:
    """Compute and collectives by source line, the longest first. A loaded plan has the bytes of its collectives only."""
    if plan.predicted.rows:
        rows = [(r.source, r.kind, r.axes, r.time_s, r.overlapped_s, r.nbytes) for r in plan.predicted.rows]
    else:
        rows = [(c.source, c.kind, c.axes, 0.0, 0.0, c.nbytes * c.times) for c in plan.collectives]
    by_line: dict[str, dict[tuple[str, tuple[str, ...]], dict[str, Any]]] = {}
    for source, kind, axes, time_s, overlapped_s, nbytes in rows:
        empty = {"kind": kind, "axes": list(axes), "count": 0, "time_s": 0.0, "overlapped_s": 0.0, "nbytes": 0.0}
        part = by_line.setdefault(source, {}).setdefault((kind, axes), empty)
        part["count"] += 1
        part["time_s"] += time_s
        part["overlapped_s"] += overlapped_s
        part["nbytes"] += nbytes
    texts = _source_texts(plan)
    lines = [
        {
            "source": source,
            "text": texts.get(source, ""),
            "time_s": sum(p["time_s"] for p in parts.values()),
            "nbytes": sum(p["nbytes"] for p in parts.values()),
            "parts": sorted(parts.values(), key=_largest_first),
        }
        for source, parts in by_line.items()
    ]
    lines.sort(key=_largest_first)
    if rest := lines[_MOST_SOURCES:]:
        sums = {key: sum(line[key] for line in rest) for key in ("time_s", "nbytes")}
        part = {"kind": "compute", "axes": [], "count": len(rest), "overlapped_s": 0.0, **sums}
        lines[_MOST_SOURCES:] = [{"source": f"{len(rest)} more lines", "text": "", **sums, "parts": [part]}]
    return lines


def _source_texts(plan: Plan) -> dict[str, str]:
    """Returns the text of the program's source lines, where the files can be read."""
    if plan.asked is None:
        return {}
    program = plan.asked.analysis.program
    places = {place for op in program.ops if (place := program.source_of(op)).file}
    return {str(place): line_text(place) for place in places}


def _largest_first(row: dict[str, Any]) -> tuple[float, float]:
    return -row["time_s"], -row["nbytes"]


def _timeline(p: Predicted) -> dict[str, Any] | None:
    """Returns kernels and collectives as ``[lane, name, source, start, duration, bytes, axes]``: names, sources and axes by
    number, microseconds. The shortest are left out of a long one."""
    if not p.rows:
        return None
    events = [e for e in p.timeline()["traceEvents"] if e["ph"] == "X"]
    names, sources, axes = dict[str, int](), dict[str, int](), dict[tuple[str, ...], int]()
    rows = []
    for event, row in zip(events, p.rows, strict=True):
        numbers = (
            names.setdefault(event["name"], len(names)),
            sources.setdefault(row.source, len(sources)),
            round(event["ts"], 2),
            round(event["dur"], 2),
            round(row.nbytes),
            axes.setdefault(row.axes, len(axes)),
        )
        rows.append([event["tid"] - 1, *numbers])
    kept = rows
    if len(rows) > _MOST_EVENTS:
        least = sorted((row[4] for row in rows), reverse=True)[_MOST_EVENTS]
        kept = [row for row in rows if row[4] > least]
    return {
        "names": list(names),
        "sources": list(sources),
        "axes": [list(a) for a in axes],
        "events": kept,
        "left_out": len(rows) - len(kept),
    }


def _memory(plan: Plan) -> dict[str, Any] | None:
    """Returns bytes by kind over the program, in at most ``_POINTS`` steps, each at the point where most is in use, so that the
    peak stays; and the largest allocations with their steps."""
    if not plan.predicted.curve or plan.asked is None:
        return None
    memory, program = memory_by_kind(plan), plan.inquiry.analysis.program
    curve = memory.curve
    step = math.ceil(len(curve) / _POINTS)
    at = [k + int(np.argmax(curve[k : k + step])) for k in range(0, len(curve), step)]
    largest = sorted(plan.settled.predicted.allocations, key=lambda a: -a.blocks)[:_MOST_ALLOCATIONS]
    kinds = kind_of(plan)
    return {
        "points": len(curve),
        "step": step,
        "bytes": [int(curve[k]) for k in at],
        "peak_at": int(np.argmax(curve)),
        "kinds": {kind: [int(values[k]) for k in at] for kind, values in memory.kinds.items() if values.any()},
        "largest": [
            {
                "label": program.label(a.value) if a.what == "value" else f"{a.what} of {program.label(a.value)}",
                "kind": kinds(a),
                "nbytes": a.blocks * BLOCK,
                "first": a.first // step,
                "last": a.last // step,
            }
            for a in largest
        ],
    }


def _alive(plan: Plan) -> list[list[Any]]:
    """Returns what is in memory at the peak: names, their number and their bytes. Values of one line, or of the same place in
    several layers, are one."""
    p = plan.predicted
    rows = [(a.label, a.nbytes) for a in p.alive]
    if plan.asked is not None and p.curve:
        at = int(np.argmax(p.curve))
        there = [a for a in plan.settled.predicted.allocations if a.first <= at <= a.last]
        every = alive(plan.inquiry.analysis.program, there, p.peak_bytes // BLOCK, len(there))
        rows = [(re.sub(r"%\d+ \((.*)\)", r"\1", a.label), a.nbytes) for a in every]
    groups: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for label, nbytes in rows:
        groups[pattern(f"/{label}")].append((label, nbytes))
    merged: list[tuple[str, int, int]] = [
        (key[1:] if len(some) > 1 else some[0][0], len(some), sum(nbytes for _, nbytes in some))
        for key, some in groups.items()
    ]
    merged.sort(key=lambda row: -row[2])
    rest = merged[_MOST_ALIVE:]
    more = [("others", sum(count for _, count, _ in rest), sum(nbytes for *_, nbytes in rest))] if rest else []
    return [list(row) for row in (*merged[:_MOST_ALIVE], *more)]


def _breakdown(p: Predicted) -> list[dict[str, Any]]:
    """Returns seconds by kind, and by region and operation if the plan was not loaded; each adds up to ``serial_s``."""
    if p.rows:
        return [{"by": by, "seconds": p.breakdown(by)} for by in ("kind", *(x for x in PARTS if x in ("op", "region")))]
    times = {"compute": p.compute_s}
    for moved in p.collectives:
        times[moved.kind] = times.get(moved.kind, 0.0) + moved.time_s
    return [{"by": "kind", "seconds": dict(sorted(times.items(), key=lambda item: -item[1]))}]
