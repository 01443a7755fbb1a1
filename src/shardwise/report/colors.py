"""The colors of mesh axes, the same in terminal, notebook and page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

#: By the number of the axis; more axes begin again.
AXIS_COLORS: Final = ("#4c8ed9", "#e08a2e", "#4fa65a", "#c765b8", "#2aa5a5", "#cf6a5a", "#8a7bd0", "#a89232")
#: The nearest colors of a terminal with 256 of them.
_TERMINAL: Final = (68, 172, 71, 170, 37, 167, 98, 142)


def axis_spans(text: str, axes: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Yields begin, end and number of the axes in a text: those that stand alone, after ``over``, ``on`` or a size, or next to
    other axes.

    >>> list(axis_spans("f32[2048, 64/data·model] over model, data points", ["data", "model"]))
    [(13, 17, 0), (18, 23, 1), (30, 35, 1)]
    >>> list(axis_spans("data·model", ["data", "model"])), list(axis_spans("on data 4 × model 4", ["data", "model"]))
    ([(0, 4, 0), (5, 10, 1)], [(3, 7, 0), (12, 17, 1)])
    """
    if not axes:
        return
    names = "|".join(map(re.escape, sorted(axes, key=len, reverse=True)))
    before = r"(?:(?<=[/·:+])|(?<=over )|(?<=on )|(?<= × )|(?<=  )|^)"
    for match in re.finditer(rf"{before}({names})(?=$|[·,;.:+\])]| \d| ×|\n|  )", text):
        yield match.start(1), match.end(1), list(axes).index(match[1])


def painted(text: str, axes: Sequence[str]) -> str:
    """Returns a line with the names of mesh axes in their colors, for a terminal.

    >>> painted("over model", ["data", "model"])
    'over \\x1b[1;38;5;172mmodel\\x1b[0m'
    """
    for begin, end, axis in reversed(list(axis_spans(text, axes))):
        color = _TERMINAL[axis % len(_TERMINAL)]
        text = f"{text[:begin]}\x1b[1;38;5;{color}m{text[begin:end]}\x1b[0m{text[end:]}"
    return text
