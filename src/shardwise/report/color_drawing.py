"""The graph of groups as places in a box: groups on an ellipse, lines between those that meet, and outside of a group the two
sides of each of its conflicts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

WIDTH: Final = 760
HEIGHT: Final = 520
#: Of the ellipse, and of the largest and the smallest group.
_ACROSS: Final = 300
_DOWN: Final = 180
_LARGE: Final = 21
_SMALL: Final = 12
#: Between the two sides of a conflict, between a group and its conflicts, and, as an angle, between these; how many are drawn.
_APART: Final = 20
_OUT: Final = 26
_FAN: Final = 0.9
_MOST_PAIRS: Final = 3
#: With more groups there is no room for words between them.
_MOST_WRITTEN: Final = 24


@dataclass(frozen=True, slots=True)
class Node:
    """A group: its number, where it is, how large, whether it has axes, what is written below it, and what is said of it where
    one points at it."""

    number: int
    x: float
    y: float
    radius: float
    sharded: bool
    below: str
    title: str


@dataclass(frozen=True, slots=True)
class Line:
    """Between two groups that meet, the thicker the more often."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float


@dataclass(frozen=True, slots=True)
class Side:
    """A side of a conflict; ``kept``: whether it has an axis."""

    x: float
    y: float
    kept: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """A conflict: the group's place, and both sides."""

    x: float
    y: float
    sides: tuple[Side, Side]


@dataclass(frozen=True, slots=True)
class Drawing:
    """All that is drawn."""

    width: int
    height: int
    nodes: tuple[Node, ...]
    lines: tuple[Line, ...]
    pairs: tuple[Pair, ...]


def drawn_colors(data: dict[str, Any]) -> Drawing:
    """The places of everything in ``colors`` of a page's data."""
    groups = data["groups"]
    most = max((g["values"] for g in groups), default=1)
    # Where many stand in a row they are smaller.
    large = min(_LARGE, max(_SMALL, 0.4 * 2 * math.pi * _DOWN / max(len(groups), 1)))
    nodes: dict[int, Node] = {}
    angles: dict[int, float] = {}
    for k, group in enumerate(groups):
        angle = 2 * math.pi * k / len(groups) - math.pi / 2
        x, y = math.cos(angle), math.sin(angle)
        radius = max(_SMALL, large * math.sqrt(math.log1p(group["values"]) / math.log1p(most)))
        angles[group["number"]] = angle
        nodes[group["number"]] = Node(
            group["number"],
            round(WIDTH / 2 + _ACROSS * x, 1),
            round(HEIGHT / 2 + _DOWN * y, 1),
            round(radius, 1),
            bool(group["axes"]),
            "·".join(group["axes"]) if len(groups) <= _MOST_WRITTEN else "",
            f"group {group['number']}: {', '.join(group['places']) or 'inner values'}"
            + (f" over {'·'.join(group['axes'])}" if group["axes"] else ""),
        )
    return Drawing(WIDTH, HEIGHT, tuple(nodes.values()), _lines(data, nodes), _pairs(data, nodes, angles))


def _lines(data: dict[str, Any], nodes: dict[int, Node]) -> tuple[Line, ...]:
    most = max((m["values"] for m in data["meetings"]), default=1)
    found = []
    for m in data["meetings"]:
        one, other = nodes[m["one"]], nodes[m["other"]]
        found.append(Line(one.x, one.y, other.x, other.y, round(0.5 + 3.5 * m["values"] / most, 2)))
    return tuple(found)


def _pairs(data: dict[str, Any], nodes: dict[int, Node], angles: dict[int, float]) -> tuple[Pair, ...]:
    """The first conflicts of each group, fanned out away from the middle."""
    by_group: dict[int, list[dict[str, Any]]] = {}
    for c in data["conflicts"]:
        by_group.setdefault(c["group"], []).append(c)
    found = []
    for number, every in by_group.items():
        if number not in nodes:
            continue
        node, shown = nodes[number], every[:_MOST_PAIRS]
        out = node.radius + _OUT
        for k, c in enumerate(shown):
            middle = angles[number] + _FAN * (k - (len(shown) - 1) / 2)
            ends = (middle - _APART / 2 / out, middle + _APART / 2 / out)
            one, other = (
                Side(
                    round(node.x + out * math.cos(angle), 1),
                    round(node.y + out * math.sin(angle), 1),
                    side in c["kept"].values(),
                )
                for side, angle in zip((1, 2), ends, strict=True)
            )
            found.append(Pair(node.x, node.y, (one, other)))
    return tuple(found)
