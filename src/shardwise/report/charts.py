"""Coordinates of the charts of the page. Curves are SVG paths in a box of 1000 by 300, which a style sheet stretches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

WIDTH: Final = 1000
HEIGHT: Final = 300
#: Below this share of the limit a curve would be flat under it: then it is drawn without the limit.
_FLAT: Final = 0.1
#: A limit is drawn if it is at most this many widths right of the front.
_NEAR: Final = 2

#: The box of the graph of groups; the half axes of its ellipse; the largest and the smallest radius of a group.
GRAPH: Final = (760, 520)
_ELLIPSE: Final = (300, 180)
_RADIUS: Final = (21, 12)
#: The distance between the two sides of a conflict and from their group, the angle between conflicts, and their number.
_APART: Final = 20
_OUT: Final = 26
_FAN: Final = 0.9
_MOST_CONFLICTS: Final = 3
#: With more groups there is no room for text between them.
_MOST_LABELED: Final = 24

Point = tuple[float, float, bool]


def memory_area(curve: dict[str, Any], limit: int) -> dict[str, Any]:
    """Memory over the program: the filled curve, the height of the limit where that is in the picture, and the peak."""
    most: list[int] = curve["bytes"]
    peak = max(most)
    shown = peak >= _FLAT * limit
    top = 1.05 * max(peak, limit if shown else 0, 1)
    step = WIDTH / len(most)
    corners = [f"L{k * step:.1f} {HEIGHT * (1 - b / top):.1f}H{(k + 1) * step:.1f}" for k, b in enumerate(most)]
    return {
        "path": f"M0 {HEIGHT}{''.join(corners)}V{HEIGHT}Z",
        "top_bytes": top,
        "limit_y": HEIGHT * (1 - limit / top) if shown else None,
        "peak_x": (most.index(peak) + 0.5) * step,
        "peak_y": HEIGHT * (1 - peak / top),
    }


def search_steps(search: dict[str, Any]) -> dict[str, Any]:
    """The best time over evaluations: a line of steps, and a point (x, y, fits) for each improvement.

    >>> one = {"evaluations": 1, "time_s": 2.0, "fits": True}
    >>> search_steps({"evaluations": 4, "improvements": [one]})["points"]
    [(250.0, 14.3, True)]
    """
    improved = search["improvements"]
    top = 1.05 * max((i["time_s"] for i in improved), default=1.0) or 1.0
    last = max(search["evaluations"], 1, *(i["evaluations"] for i in improved))
    points = [_point(i["evaluations"] / last, 1 - i["time_s"] / top, i["fits"]) for i in improved]
    return {"path": _steps(points), "top_s": top, "points": points}


def search_front(front: list[dict[str, Any]], predicted: dict[str, Any]) -> dict[str, Any]:
    """Time over memory: the front as steps and points, the plan, the limit if it is in the picture, and the ranges.

    >>> plan = {"time_s": 2.0, "peak_bytes": 100, "usable_bytes": 150, "fits": True}
    >>> drawn = search_front([plan, {"time_s": 1.0, "peak_bytes": 200, "fits": False}], plan)
    >>> drawn["points"], drawn["limit_x"]
    ([(83.3, 25.0, True), (916.7, 275.0, False)], 500.0)
    """
    limit, shown = predicted["usable_bytes"], [*front, predicted]
    left, right = _span([state["peak_bytes"] for state in shown])
    if right < limit <= right + _NEAR * (right - left):
        left, right = _span([left, limit])
    low, high = _span([state["time_s"] for state in shown])
    *points, plan = (
        _point((s["peak_bytes"] - left) / (right - left), (high - s["time_s"]) / (high - low), s["fits"]) for s in shown
    )
    return {
        "path": _steps(points),
        "points": points,
        "plan": plan[:2],
        "limit_x": round(WIDTH * (limit - left) / (right - left), 1) if left <= limit <= right else None,
        "bytes": (left, right),
        "times": (low, high),
    }


def _point(x: float, y: float, fits: bool) -> Point:
    return round(WIDTH * x, 1), round(HEIGHT * y, 1), fits


def _steps(points: Sequence[Point]) -> str:
    path = "".join(f"{'H' if k else 'M'}{x}{'V' if k else ' '}{y}" for k, (x, y, _) in enumerate(points))
    return f"{path}H{WIDTH}" if points else ""


def _span(values: list[float]) -> tuple[float, float]:
    """The range of an axis: the values, and some room around them."""
    low, high = min(values), max(values)
    room = max((high - low) / 10, 0.01 * high, 1e-12)
    return max(0.0, low - room), high + room


def color_graph(data: dict[str, Any]) -> dict[str, Any]:
    """Groups as nodes on an ellipse, lines between groups that meet, and around a group the two sides of its conflicts."""
    groups = data["groups"]
    most = max((g["values"] for g in groups), default=1)
    # Many nodes in a row are smaller.
    largest = min(_RADIUS[0], max(_RADIUS[1], 0.8 * math.pi * _ELLIPSE[1] / max(len(groups), 1)))
    nodes = {}
    for k, group in enumerate(groups):
        angle, axes = 2 * math.pi * k / len(groups) - math.pi / 2, "·".join(group["axes"])
        radius = max(_RADIUS[1], largest * math.sqrt(math.log1p(group["values"]) / math.log1p(most)))
        places = ", ".join(group["places"]) or "inner values"
        nodes[group["number"]] = {
            "number": group["number"],
            "angle": angle,
            "x": round(GRAPH[0] / 2 + _ELLIPSE[0] * math.cos(angle), 1),
            "y": round(GRAPH[1] / 2 + _ELLIPSE[1] * math.sin(angle), 1),
            "radius": round(radius, 1),
            "sharded": bool(axes),
            "below": axes if len(groups) <= _MOST_LABELED else "",
            "title": f"group {group['number']}: {places}{f' over {axes}' if axes else ''}",
        }
    thickest = max((m["values"] for m in data["meetings"]), default=1)
    lines = [
        (nodes[m["one"]], nodes[m["other"]], round(0.5 + 3.5 * m["values"] / thickest, 2)) for m in data["meetings"]
    ]
    conflicts = defaultdict(list)
    for conflict in data["conflicts"]:
        conflicts[conflict["group"]].append(conflict)
    pairs = [
        (nodes[number], _sides(nodes[number], conflict, _FAN * (k - (min(len(all_), _MOST_CONFLICTS) - 1) / 2)))
        for number, all_ in conflicts.items()
        if number in nodes
        for k, conflict in enumerate(all_[:_MOST_CONFLICTS])
    ]
    return {"width": GRAPH[0], "height": GRAPH[1], "nodes": list(nodes.values()), "lines": lines, "pairs": pairs}


def _sides(node: dict[str, Any], conflict: dict[str, Any], turned: float) -> list[Point]:
    """Where the two sides of a conflict are, outside of their group; and whether a side keeps an axis."""
    out = node["radius"] + _OUT
    points = []
    for side, apart in ((1, -_APART), (2, _APART)):
        angle = node["angle"] + turned + apart / 2 / out
        x, y = node["x"] + out * math.cos(angle), node["y"] + out * math.sin(angle)
        points.append((round(x, 1), round(y, 1), side in conflict["kept"].values()))
    return points
