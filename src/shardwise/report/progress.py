"""The progress of a search: the best plan so far, on a terminal or in the cell of a notebook."""

from __future__ import annotations

import importlib
import math
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from shardwise.units import binary, seconds

if TYPE_CHECKING:
    from rich.live import Live

    from shardwise.search.run import Improvement
    from shardwise.search.searcher import Journal

#: How often a line of the terminal is drawn anew, in a second.
_PER_SECOND: Final = 4


class ProgressLine:
    """An argument for ``progress=``, to be closed when the search is over; ``progress="auto"`` does both.

    On a terminal the lines move as long as something is done, and are removed afterwards; in a notebook they stay. Where there
    is neither, or ``shown`` is false, nothing is written. With ``lines`` each improvement is a line on standard error, wherever
    that goes.

    >>> with ProgressLine(shown=False) as line:
    ...     line(None, 0.5)
    """

    def __init__(self, shown: bool = True, lines: bool = False):
        self._lines = lines and sys.stderr is not None
        self._notebook = shown and not lines and _in_notebook()
        self._terminal = shown and not lines and not self._notebook and sys.stderr is not None and sys.stderr.isatty()
        self._live: Live | None = None
        self._cell: Any = None
        self._phase = self._best = self._words = ""
        self._journal: Journal | None = None
        self._start = time.monotonic()

    def __call__(self, improvement: Improvement, share: float) -> None:
        if not (self._lines or self._notebook or self._terminal):
            return
        cost = improvement.best.cost
        self._best = f"best {seconds(cost.time_s)}, {binary(cost.peak_bytes)}"
        self._words = improvement.words
        figures = f"{improvement.evaluations:,} evaluated, {self._best}"
        if self._lines:
            print(figures, file=sys.stderr, flush=True)
        elif self._notebook:
            self._show(f"{_bar(share)} {figures}")
        else:
            self._draw()

    def begin(self) -> None:
        """Says that a program is traced and analyzed."""
        self._start, self._journal = time.monotonic(), None
        if self._terminal:
            self._draw()

    def watch(self, journal: Journal) -> None:
        """Shows the evaluations of a search between its improvements, what is left to do, and for how long at most."""
        self._journal = journal

    def phase(self, phase: str, elapsed_s: float) -> None:
        """Shows what is done and for how long; with ``lines`` once, when it begins."""
        text = f"{phase}, {elapsed_s:.0f} s"
        if self._lines and phase != self._phase:
            print(phase, file=sys.stderr, flush=True)
        elif self._notebook:
            self._show(text)
        self._phase, self._journal = phase, None
        if self._terminal:
            self._words = text
            self._draw()

    def _text(self) -> str:
        """The lines of a terminal as of now."""
        elapsed, journal = time.monotonic() - self._start, self._journal
        if self._phase and journal is None:
            return self._words
        if journal is None:
            return f"tracing and analyzing, {elapsed:.0f} s"
        left = journal.budget.seconds
        limit = f", at most {left:.0f} s left" if math.isfinite(left) else ""
        figures = [f"{_bar(journal.share)} {journal.evaluated:,} evaluated", self._best, f"{elapsed:.0f} s{limit}"]
        lines = (", ".join(filter(None, texts)) for texts in (figures, [journal.stage, self._words]))
        return "\n".join(_short(line) for line in lines if line)

    def _show(self, text: str) -> None:
        if self._cell is None:
            display = importlib.import_module("IPython.display").display
            self._cell = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._cell.update({"text/plain": text}, raw=True)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            console = Console(file=sys.stderr, width=_width(), highlight=False, emoji=False, markup=False)
            self._live = Live(
                console=console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                refresh_per_second=_PER_SECOND,
                get_renderable=lambda: Text(self._text()),
            )
            self._live.start()
        self._live.refresh()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _bar(share: float) -> str:
    return f"[{'#' * round(10 * share):.<10}]"


def _width() -> int:
    return max(20, shutil.get_terminal_size().columns - 1)


def _short(line: str) -> str:
    return line if len(line) <= _width() else f"{line[: _width() - 1]}…"


def _in_notebook() -> bool:
    """Nothing is imported: in a notebook IPython is there."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None
