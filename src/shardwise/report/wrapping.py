"""Lines that fit a terminal."""

from __future__ import annotations

import textwrap


def wrapped(text: str, width: int) -> str:
    """Lines that are too long go on below, further in; a word is broken only where it alone is longer.

    >>> print(wrapped("  all-gather over data, for dot_general at train.py:12", 40), end="")
      all-gather over data, for dot_general
        at train.py:12
    """
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent + "  ", break_on_hyphens=False) or [""]
    return "".join(f"{line}\n" for line in lines)
