"""Plain text of a given width: what all reports print on, in a terminal, a file or a notebook alike."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table


class Page:
    """Lines of text, collected.

    >>> page = Page(40)
    >>> shown = table(("kind", "left"), ("bytes", "right"))
    >>> shown.add_row("all-gather", "512 B")
    >>> page.print("moved"); page.print(shown); print(page.text(), end="")
    moved
    kind        bytes
    all-gather  512 B
    """

    def __init__(self, width: int):
        self.width = width
        self._out = io.StringIO()
        # Without these two, Rich writes escape codes in a notebook.
        plain = {"force_jupyter": False, "color_system": None}
        self._console = Console(file=self._out, width=width, highlight=False, emoji=False, markup=False, **plain)  # type: ignore[arg-type]

    def print(self, shown: str | Table = "") -> None:
        self._console.print(shown)

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self._out.getvalue().splitlines()) + "\n"


def table(*columns: tuple[str, str]) -> Table:
    """A table without lines. Columns are (title, ``left``, ``right`` or ``text``); the last may be text that wraps."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for title, justify in columns:
        last = justify == "text"
        made.add_column(title, justify="left" if last else justify, no_wrap=not last, overflow="fold")  # type: ignore[arg-type]
    return made
