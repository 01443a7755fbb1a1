"""Figures with units, and lines that fit a terminal. Needs nothing but Python."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence


def si(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix.

    >>> si(1.969e15, "FLOP"), si(1280), si(0)
    ('1.97 PFLOP', '1.28 k', '0')
    """
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if value < 999.5 or prefix == "Z":
            break
        value /= 1000
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def count(value: int) -> str:
    """
    >>> count(2506172416), count(70 * 10**6), count(512)
    ('2.51 billion', '70 million', '512')
    """
    for power, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if value >= power:
            return si(value / power) + f" {word}"
    return f"{value:,}"


def seconds(value: float) -> str:
    """
    >>> seconds(0.4123), seconds(3.2e-6), seconds(12.0), seconds(1130), seconds(0)
    ('412 ms', '3.20 µs', '12 s', '1,130 s', '0 s')
    """
    if value >= 999.5:
        return f"{value:,.0f} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 0.9995 or value == 0:
            return si(value * factor, unit)
    return si(value * 1e9, "ns")


def binary(nbytes: float) -> str:
    """Memory, as devices have it.

    >>> binary(16 * 2**30), binary(380928), binary(12), binary(3 * 2**41)
    ('16.00 GiB', '372.00 KiB', '12 B', '6.00 TiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes > 0.999 * 2**power:
            return f"{nbytes / 2**power:.2f} {unit}"
    return f"{nbytes:.0f} B"


def change(value: float, show: Callable[[float], str]) -> str:
    """Returns a difference with its sign.

    >>> change(0.25, seconds), change(-2048.0, binary), change(0, seconds)
    ('+250 ms', '−2.00 KiB', '±0')
    """
    if value == 0:
        return "±0"
    return f"{'+' if value > 0 else '−'}{show(abs(value))}"


def plural(count: int, noun: str, many: str = "") -> str:
    """
    >>> plural(1, "color"), plural(2, "family", "families")
    ('1 color', '2 families')
    """
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def listed(texts: Sequence[str], most: int) -> str:
    """
    >>> listed(["w", "b", "x"], most=2)
    'w, b and 1 more'
    """
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def wrapped(text: str, width: int) -> str:
    """Returns the text with long lines continued below, indented; a word is broken only where it alone is longer.

    >>> print(wrapped("  all-gather over data, for dot_general at train.py:12", 40), end="")
      all-gather over data, for dot_general
        at train.py:12
    """
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent + "  ", break_on_hyphens=False) or [""]
    return "".join(f"{line}\n" for line in lines)
