"""The progress of a search: the best plan so far, on a terminal or in the cell of a notebook."""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from shardwise.report.units import binary, seconds

if TYPE_CHECKING:
    from types import TracebackType

    from rich.live import Live

    from shardwise.search.result import Improvement

_WIDTH: Final = 79


class ProgressLine:
    """Given to ``progress=``, and ended when the search is over; ``progress="auto"`` does both.

    On a terminal the lines are removed afterwards, in a notebook they stay. Where there is neither, or ``shown`` is false,
    nothing is written. With ``lines`` each improvement is a line on standard error, wherever that goes.

    >>> with ProgressLine(shown=False) as line:
    ...     line(None, 0.5)
    """

    def __init__(self, shown: bool = True, lines: bool = False):
        self._lines = lines and sys.stderr is not None
        self._notebook = shown and not lines and _in_notebook()
        self._terminal = shown and not lines and not self._notebook and sys.stderr is not None and sys.stderr.isatty()
        self._live: Live | None = None
        self._display: Any = None
        self._figures, self._words, self._share, self._at = "", "", 0.0, 0.0
        self._start = time.monotonic()

    def __call__(self, improvement: Improvement, share: float) -> None:
        if not (self._lines or self._notebook or self._terminal):
            return
        if share < self._share:  # another search
            self._start = time.monotonic()
        cost = improvement.best.cost
        self._figures = f"{improvement.evaluations:,} evaluated, best {seconds(cost.time_s)}, {binary(cost.peak_bytes)}"
        self._words, self._share, self._at = improvement.words, share, time.monotonic() - self._start
        if self._lines:
            print(self._figures, file=sys.stderr, flush=True)
        elif self._notebook:
            self._show(f"{_bar(share)} {self._figures}")
        elif self._live is None:
            self._live = _live(self._text)
            self._live.start()

    def _text(self) -> str:
        """Two lines: figures, and what is sharded. Between improvements the share is extrapolated."""
        now = time.monotonic() - self._start
        share = min(0.99, self._share * now / self._at) if self._at else self._share
        left = f", {now / share - now:.0f} s left" if share > 0.05 else ""
        words = self._words if len(self._words) <= _WIDTH else f"{self._words[: _WIDTH - 1]}…"
        return f"{_bar(share)} {self._figures}{left}\n{words}"

    def end(self) -> None:
        """The search is over. May be called again."""
        if self._live is not None:
            self._live.stop()
        elif self._notebook and self._figures:
            self._show(self._figures)
        self._live, self._figures = None, ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _show(self, text: str) -> None:
        if self._display is None:
            display = importlib.import_module("IPython.display").display
            self._display = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._display.update({"text/plain": text}, raw=True)


def _live(text: Any) -> Live:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=sys.stderr, width=_WIDTH, highlight=False, emoji=False, markup=False, color_system=None)
    refresh: dict[str, Any] = {"refresh_per_second": 5, "redirect_stdout": False, "redirect_stderr": False}
    return Live(console=console, get_renderable=text, transient=True, **refresh)


def _bar(share: float) -> str:
    """
    >>> _bar(0.5)
    '[##########..........]'
    """
    return f"[{'#' * round(20 * share):.<20}]"


def _in_notebook() -> bool:
    """Nothing is imported: in a notebook IPython is there."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None
