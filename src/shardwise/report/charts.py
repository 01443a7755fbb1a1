"""Lines of charts as SVG paths in a box of 1000 by 300, which a style sheet stretches to its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 1000
HEIGHT: Final = 300
#: Below this share of the limit a curve would be flat under it: then it is drawn by itself.
_FLAT: Final = 0.1


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
