"""A plan as the data of its page: plain figures under plain names. Everything the page shows is drawn from this."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from shardwise.cost.predict import PARTS
from shardwise.plans.codec import encode
from shardwise.report.plan_text import spec_text
from shardwise.report.program_text import listing_data
from shardwise.report.summary import decided
from shardwise.report.units import si

if TYPE_CHECKING:
    from shardwise.cost.predict import Predicted
    from shardwise.plans.plan import ArrayPlan, Plan
    from shardwise.plans.search_log import SearchLog

SCHEMA: Final = 1
#: A curve has no more points than a wide screen can show.
_POINTS: Final = 800
#: Lines of the device-local program that are shown.
_MOST_LINES: Final = 4000
#: Characters of a source line that are shown.
_MOST_TEXT: Final = 160


def report_data(plan: Plan) -> dict[str, Any]:
    """What ``plan.report`` shows. ``made_here``: whether it has what is not saved, times by line and the memory's curve."""
    p = plan.predicted
    sharded, rest = decided(plan)
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
        "notes": list(plan.notes),
        "predicted": p.to_json() | {"fits": p.fits},
        "arrays": [
            *(_array(plan, a, "argument") for a in plan.arguments),
            *(_array(plan, a, "output") for a in plan.outputs),
        ],
        "lines": lines(plan),
        "program": _program(plan),
        "curve": _curve(p.curve),
        "breakdown": _breakdown(p),
        "colors": _colors(plan),
        "effects": [_effect(p, row) for row in plan.effects],
        "experts": [_expert(row) for row in plan.experts],
        "search": _search(plan.search) if plan.search is not None else None,
    }


def _array(plan: Plan, array: ArrayPlan, role: str) -> dict[str, Any]:
    shards = math.prod(plan.mesh.sizes[plan.mesh.index(axis)] for axes in array.spec for axis in axes)
    itemsize = item_bytes(array.dtype)
    nbytes = None if itemsize is None else math.ceil(math.prod(array.shape) * itemsize / shards)
    return {
        "path": array.path,
        "role": role,
        "shape": list(array.shape),
        "spec": [list(axes) for axes in array.spec],
        "text": spec_text(array),
        "shards": shards,
        "device_bytes": nbytes,
        "device_bytes_text": "?" if nbytes is None else si(nbytes, "B"),
    }


def item_bytes(dtype: str) -> float | None:
    """Bytes of an element; None for what is no number, such as a key.

    >>> item_bytes("bfloat16"), item_bytes("int4"), item_bytes("bool"), item_bytes("key<fry>")
    (2.0, 0.5, 1.0, None)
    """
    if dtype == "bool":
        return 1.0
    found = re.match(r"(?:b?float|u?int|complex)(\d+)", dtype)
    return int(found[1]) / 8 if found else None


def lines(plan: Plan) -> list[dict[str, Any]]:
    """By source line: what it computes and moves, the longest first. A loaded plan has the collectives' bytes alone."""
    if plan.predicted.rows:
        found = [(r.source, r.kind, r.axes, r.time_s, r.overlapped_s, r.nbytes) for r in plan.predicted.rows]
    else:
        found = [(c.source, c.kind, c.axes, 0.0, 0.0, c.nbytes * c.times) for c in plan.collectives]
    by_line: dict[str, dict[tuple[str, tuple[str, ...]], dict[str, Any]]] = {}
    for source, kind, axes, time_s, hidden_s, nbytes in found:
        empty = {"kind": kind, "axes": list(axes), "count": 0, "time_s": 0.0, "hidden_s": 0.0, "nbytes": 0.0}
        part = by_line.setdefault(source, {}).setdefault((kind, axes), empty)
        part["count"] += 1
        part["time_s"] += time_s
        part["hidden_s"] += hidden_s
        part["nbytes"] += nbytes
    texts = _texts(plan)
    made = [
        {
            "source": source,
            "text": texts.get(source, ""),
            "time_s": sum(p["time_s"] for p in parts.values()),
            "nbytes": sum(p["nbytes"] for p in parts.values()),
            "parts": sorted(parts.values(), key=_largest),
        }
        for source, parts in by_line.items()
    ]
    return sorted(made, key=_largest)


def _program(plan: Plan) -> dict[str, Any] | None:
    """The device-local program, of a plan that knows its program."""
    if plan.asked is None:
        return None
    return listing_data(plan.asked.analysis.program, plan.sharded, _MOST_LINES)


def _texts(plan: Plan) -> dict[str, str]:
    """What stands on the lines that the program's ops are from, where the files can be read."""
    if plan.asked is None:
        return {}
    program = plan.asked.analysis.program
    places = {program.source_of(op) for op in program.ops}
    found = {str(place): linecache.getline(place.file, place.line).strip() for place in places if place.file}
    return {source: text[:_MOST_TEXT] for source, text in found.items()}


def _largest(row: dict[str, Any]) -> tuple[float, float]:
    return -row["time_s"], -row["nbytes"]


def _curve(curve: tuple[int, ...]) -> dict[str, Any] | None:
    """The curve as the most in each of at most ``_POINTS`` equal parts, so that the peak stays."""
    if not curve:
        return None
    step = math.ceil(len(curve) / _POINTS)
    most = [max(curve[k : k + step]) for k in range(0, len(curve), step)]
    return {"points": len(curve), "step": step, "bytes": most, "peak_at": curve.index(max(curve))}


def _breakdown(p: Predicted) -> list[dict[str, Any]]:
    """Seconds by kind, and where the plan was made here by region, line and operation too; each adds up to ``serial_s``."""
    if p.rows:
        return [{"by": by, "seconds": p.breakdown(by)} for by in ("kind", *(x for x in PARTS if x != "kind"))]
    found: dict[str, float] = {"compute": p.compute_s}
    for moved in p.collectives:
        found[moved.kind] = found.get(moved.kind, 0.0) + moved.time_s
    return [{"by": "kind", "seconds": _by_size(found.items())}]


def _by_size(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    return dict(sorted(items, key=lambda item: -item[1]))


def _colors(plan: Plan) -> dict[str, Any] | None:
    if not plan.colors.groups:
        return None
    data: dict[str, Any] = encode(plan.colors)
    for row in data["conflicts"]:
        row["outcome"] = _outcome(row["kept"])
    return data


def _outcome(kept: dict[str, int]) -> str:
    """
    >>> _outcome({"data": 1, "model": 2}), _outcome({"data": 0}), _outcome({})
    ('data on side A, model on side B', 'no consistent side: neither has data', 'open: the group is not sharded')
    """
    if not kept:
        return "open: the group is not sharded"
    if not all(kept.values()):
        return f"no consistent side: neither has {'·'.join(kept)}"
    return ", ".join(f"{axis} on side {'AB'[side - 1]}" for axis, side in kept.items())


def _effect(p: Predicted, row: Any) -> dict[str, Any]:
    """What the plan would be without a decision, and by how much it would be slower and larger."""
    return {
        "decision": str(row.decision),
        "time_s": row.time_s,
        "peak_bytes": row.peak_bytes,
        "fits": row.fits,
        "slower_s": row.time_s - p.time_s,
        "more_bytes": row.peak_bytes - p.peak_bytes,
    }


def _expert(row: Any) -> dict[str, Any]:
    return {key: getattr(row, key) for key in ("name", "time_s", "compute_s", "comm_s", "peak_bytes", "fits")}


def _search(log: SearchLog) -> dict[str, Any]:
    return {**encode(log), "ended_text": log.ended.value, "text": str(log)}
