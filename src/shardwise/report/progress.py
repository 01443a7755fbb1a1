"""The progress of a search: the best plan so far, on a terminal or in the cell of a notebook."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

from shardwise.report.units import binary, seconds

if TYPE_CHECKING:
    from rich.live import Live

    from shardwise.search.run import Improvement

_WIDTH: Final = 79


class ProgressLine:
    """An argument for ``progress=``, to be closed when the search is over; ``progress="auto"`` does both.

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
        self._cell: Any = None
        self._phase = ""

    def __call__(self, improvement: Improvement, share: float) -> None:
        if not (self._lines or self._notebook or self._terminal):
            return
        cost = improvement.best.cost
        figures = f"{improvement.evaluations:,} evaluated, best {seconds(cost.time_s)}, {binary(cost.peak_bytes)}"
        text = f"[{'#' * round(20 * share):.<20}] {figures}"
        if self._lines:
            print(figures, file=sys.stderr, flush=True)
        elif self._notebook:
            self._show(text)
        else:
            words = improvement.words
            self._update(f"{text}\n{words if len(words) <= _WIDTH else f'{words[: _WIDTH - 1]}…'}")

    def phase(self, phase: str, elapsed_s: float) -> None:
        """Shows what is done and for how long; with ``lines`` once, when it begins."""
        text = f"{phase}, {elapsed_s:.0f} s"
        if self._lines and phase != self._phase:
            print(phase, file=sys.stderr, flush=True)
        elif self._notebook:
            self._show(text)
        elif self._terminal:
            self._update(text)
        self._phase = phase

    def _show(self, text: str) -> None:
        if self._cell is None:
            display = importlib.import_module("IPython.display").display
            self._cell = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._cell.update({"text/plain": text}, raw=True)

    def _update(self, text: str) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            console = Console(file=sys.stderr, width=_WIDTH, highlight=False, emoji=False, markup=False)
            self._live = Live(console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _in_notebook() -> bool:
    """Nothing is imported: in a notebook IPython is there."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None
