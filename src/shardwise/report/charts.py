"""Lines of charts as SVG paths in a box of 1000 by 300, which a style sheet stretches to its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 1000
HEIGHT: Final = 300
#: Below this share of the limit a curve would be flat under it: then it is drawn by itself.
_FLAT: Final = 0.1
#: A limit that lies so many widths right of the front, or less, is drawn.
_NEAR: Final = 2


@dataclass(frozen=True, slots=True)
class Area:
    """Memory over the program: the filled curve, where the limit lies if it is in the picture, and where the peak is."""

    path: str
    top_bytes: float
    limit_y: float | None
    peak_x: float
    peak_y: float


@dataclass(frozen=True, slots=True)
class Steps:
    """The best time over evaluations: a line of steps, and a point for each improvement."""

    path: str
    top_s: float
    points: tuple[tuple[float, float, bool], ...]


@dataclass(frozen=True, slots=True)
class Trades:
    """Time over memory: the front as steps and points, the found plan, the limit if it is in the picture, and what the picture
    spans."""

    path: str
    points: tuple[tuple[float, float, bool], ...]
    plan: tuple[float, float]
    limit_x: float | None
    bytes_from: float
    bytes_to: float
    s_from: float
    s_to: float


def memory_area(curve: dict[str, Any], limit: int) -> Area:
    most: list[int] = curve["bytes"]
    peak = max(most)
    shown = peak >= _FLAT * limit
    top = 1.05 * max(peak, limit if shown else 0, 1)
    wide = WIDTH / len(most)
    corners = []
    for k, nbytes in enumerate(most):
        y = HEIGHT * (1 - nbytes / top)
        corners.append(f"L{k * wide:.1f} {y:.1f}H{(k + 1) * wide:.1f}")
    path = f"M0 {HEIGHT}{''.join(corners)}V{HEIGHT}Z"
    limit_y = HEIGHT * (1 - limit / top) if shown else None
    return Area(path, top, limit_y, (most.index(peak) + 0.5) * wide, HEIGHT * (1 - peak / top))


def search_steps(search: dict[str, Any]) -> Steps:
    """
    >>> one = {"evaluations": 1, "time_s": 2.0, "fits": True}
    >>> search_steps({"evaluations": 4, "improvements": [one]}).points
    ((250.0, 14.3, True),)
    """
    improved = search["improvements"]
    top = 1.05 * max((i["time_s"] for i in improved), default=1.0) or 1.0
    wide = WIDTH / max(search["evaluations"], 1, *(i["evaluations"] for i in improved))
    points = [
        (round(i["evaluations"] * wide, 1), round(HEIGHT * (1 - i["time_s"] / top), 1), i["fits"]) for i in improved
    ]
    path = "".join(f"{'H' if k else 'M'}{x}{'V' if k else ' '}{y}" for k, (x, y, _) in enumerate(points))
    return Steps(f"{path}H{WIDTH}" if points else "", top, tuple(points))


def search_front(front: list[dict[str, Any]], predicted: dict[str, Any]) -> Trades:
    """
    >>> plan = {"time_s": 2.0, "peak_bytes": 100, "usable_bytes": 150}
    >>> drawn = search_front([plan | {"fits": True}, {"time_s": 1.0, "peak_bytes": 200, "fits": False}], plan)
    >>> drawn.points, drawn.limit_x
    (((83.3, 25.0, True), (916.7, 275.0, False)), 500.0)
    """
    limit = predicted["usable_bytes"]
    shown = [*front, predicted]
    left, right = _span([one["peak_bytes"] for one in shown])
    if right < limit <= right + _NEAR * (right - left):
        left, right = _span([left, limit])
    low, high = _span([one["time_s"] for one in shown])

    def at(one: dict[str, Any]) -> tuple[float, float]:
        x = WIDTH * (one["peak_bytes"] - left) / (right - left)
        return round(x, 1), round(HEIGHT * (high - one["time_s"]) / (high - low), 1)

    points = [(*at(one), one["fits"]) for one in front]
    path = "".join(f"{'H' if k else 'M'}{x}{'V' if k else ' '}{y}" for k, (x, y, _) in enumerate(points))
    limit_x = round(WIDTH * (limit - left) / (right - left), 1) if left <= limit <= right else None
    return Trades(f"{path}H{WIDTH}", tuple(points), at(predicted), limit_x, left, right, low, high)


def _span(values: list[float]) -> tuple[float, float]:
    """What an axis spans: the values, and some room around them. Never nothing."""
    low, high = min(values), max(values)
    room = max((high - low) / 10, 0.01 * high, 1e-12)
    return max(0.0, low - room), high + room
