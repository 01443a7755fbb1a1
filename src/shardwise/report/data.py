"""A plan as plain data: everything that its page shows."""

from __future__ import annotations

import linecache
import math
import re
from dataclasses import asdict
from typing import Any, Final

from shardwise.cost.predict import PARTS, Predicted
from shardwise.plans.codec import encode
from shardwise.plans.plan import ArrayPlan, Plan
from shardwise.report.plan_text import decided, evidence_lines, schedule_rows, shards, spec_text
from shardwise.report.program_text import listing_data
from shardwise.report.units import binary

SCHEMA: Final = 1
#: A curve has no more points than a wide screen can show.
_POINTS: Final = 800
#: Lines of the device-local program that are shown.
_MOST_LINES: Final = 4000
#: Characters of a source line that are shown.
_MOST_TEXT: Final = 160


def report_data(plan: Plan) -> dict[str, Any]:
    """Returns what ``plan.report`` shows. ``made_here`` says whether the plan has what is not saved: times by line, and memory
    over the program."""
    p, search, program = plan.predicted, plan.search, plan.asked and plan.asked.analysis.program
    sharded, rest = decided(plan)
    figures = ("name", "time_s", "compute_s", "comm_s", "peak_bytes", "fits", "variant")
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
        "variant": list(plan.variant.lines()),
        "sharded": [{"what": what, "axes": axes} for what, axes in sharded.items()],
        "decisions": rest,
        "notes": [*evidence_lines(plan), *plan.notes],
        "evidence": plan.evidence and encode(plan.evidence),
        "predicted": p.to_json() | {"fits": p.fits},
        "arrays": [
            *(_array(plan, a, "argument") for a in plan.arguments),
            *(_array(plan, a, "output") for a in plan.outputs),
        ],
        "lines": _lines(plan),
        "program": program and listing_data(program, plan.sharded, _MOST_LINES),
        "curve": _curve(p.curve),
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
        "baselines": [{key: getattr(row, key) for key in figures} for row in plan.baselines],
        "search": search and encode(search) | {"ended_text": search.ended.value, "text": str(search)},
    }


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
    return sorted(lines, key=_largest_first)


def _source_texts(plan: Plan) -> dict[str, str]:
    """Returns the text of the program's source lines, where the files can be read."""
    if plan.asked is None:
        return {}
    program = plan.asked.analysis.program
    places = {place for op in program.ops if (place := program.source_of(op)).file}
    return {str(place): linecache.getline(place.file, place.line).strip()[:_MOST_TEXT] for place in places}


def _largest_first(row: dict[str, Any]) -> tuple[float, float]:
    return -row["time_s"], -row["nbytes"]


def _curve(curve: tuple[int, ...]) -> dict[str, Any] | None:
    """Returns the maximum of the curve in each of at most ``_POINTS`` equal parts, so that the peak stays."""
    if not curve:
        return None
    step = math.ceil(len(curve) / _POINTS)
    most = [max(curve[k : k + step]) for k in range(0, len(curve), step)]
    return {"points": len(curve), "step": step, "bytes": most, "peak_at": curve.index(max(curve))}


def _breakdown(p: Predicted) -> list[dict[str, Any]]:
    """Returns seconds by kind, and by region, line and operation if the plan was not loaded; each adds up to ``serial_s``."""
    if p.rows:
        return [{"by": by, "seconds": p.breakdown(by)} for by in ("kind", *(x for x in PARTS if x != "kind"))]
    times = {"compute": p.compute_s}
    for moved in p.collectives:
        times[moved.kind] = times.get(moved.kind, 0.0) + moved.time_s
    return [{"by": "kind", "seconds": dict(sorted(times.items(), key=lambda item: -item[1]))}]
