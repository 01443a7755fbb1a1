"""The colors of mesh axes, the same in terminal, notebook and page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

#: By the number of the axis; more axes begin again.
AXIS_COLORS: Final = ("#4c8ed9", "#e08a2e", "#4fa65a", "#c765b8", "#2aa5a5", "#cf6a5a", "#8a7bd0", "#a89232")


def axis_spans(text: str, axes: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yields begin, end and number of the axes in a text: those that stand alone, after ``over``, ``on`` or a size, or next to
    other axes.

    >>> list(axis_spans("f32[2048, 64/data·model] over model, data points", ["data", "model"]))
    [(14, 18, 0), (19, 24, 1), (31, 36, 1)]
    >>> list(axis_spans("data·model", ["data", "model"])), list(axis_spans("on data 4 × model 4", ["data", "model"]))
    ([(0, 4, 0), (5, 10, 1)], [(3, 7, 0), (12, 17, 1)])
    """
    if not axes:
        return
    names = "|".join(map(re.escape, sorted(axes, key=len, reverse=True)))
    before = r"(?:(?<=[/·:+])|(?<=over )|(?<=on )|(?<= × )|^)"
    for match in re.finditer(rf"{before}({names})(?=$|[·,;.:+\])]| \d| ×|\n)", text):
        yield match.start(1), match.end(1), list(axes).index(match[1])
