"""What reports are printed on: paragraphs and tables, shown as plain text in a terminal and as HTML in a notebook."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from shardwise.report.colors import painted
from shardwise.units import wrapped

#: Longer lines of prose are hard to read.
_PROSE: Final = 120


class Strong(str):
    """A headline: bold in a notebook and in a terminal with colors."""

    strong: Final = True


class Page:
    """Paragraphs and tables for a terminal of ``width`` columns. The names of ``axes`` have their colors where these are asked
    for.

    >>> page = Page(40)
    >>> page.print("Collectives")
    >>> page.table(["kind", ">bytes"], [["all-gather", "512 B"]])
    >>> print(page.text(), end="")
    Collectives
    kind        bytes
    all-gather  512 B
    """

    def __init__(self, width: int = 80, axes: Sequence[str] = ()):
        self.width, self.axes = width, tuple(axes)
        self.items: list[str | Table] = []

    def print(self, item: str = "", strong: bool = False) -> None:
        self.items.append(Strong(item) if strong else item)

    def table(self, titles: Sequence[str], rows: Iterable[Sequence[str]], heading: str = "") -> None:
        """Prints a table without lines. The cells under ``>title`` are right-aligned, those under ``*title`` may wrap; without
        any titles there is no header. A ``heading`` stands above it, between blank lines."""
        header = any(title.strip(">*") for title in titles)
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False, show_header=header)
        for title in titles:
            justify = "right" if title.startswith(">") else "left"
            shown.add_column(title.lstrip(">*"), justify=justify, no_wrap=not title.startswith("*"), overflow="fold")  # type: ignore[arg-type]
        for row in rows:
            shown.add_row(*row)
        self.items += [Strong(f"\n{heading}\n"), shown] if heading else [shown]

    def text(self, colored: bool = False) -> str:
        return "".join(self._item(item, colored) for item in self.items)

    def _item(self, item: str | Table, colored: bool) -> str:
        text = wrapped(f"{item}\n", min(self.width, _PROSE)) if isinstance(item, str) else self._text(item)
        if not colored:
            return text
        if isinstance(item, Strong):
            return "".join(f"\x1b[1m{line}\x1b[0m\n" if line else "\n" for line in text.splitlines())
        return "".join(painted(line, self.axes) for line in text.splitlines(keepends=True))

    def _text(self, shown: Table) -> str:
        # Without these two, Rich writes escape codes in a notebook.
        plain = {"force_jupyter": False, "color_system": None}
        out = io.StringIO()
        console = Console(file=out, width=self.width, highlight=False, emoji=False, markup=False, **plain)  # type: ignore[arg-type]
        console.print(shown)
        return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
