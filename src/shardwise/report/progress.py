"""How far a search is: the best so far, written over and over. The same on a terminal and in a notebook's cell."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from shardwise.report.units import seconds

if TYPE_CHECKING:
    from types import TracebackType

    from shardwise.search.result import Improvement

_WIDTH: Final = 79
_TICK_S: Final = 0.2
#: Puts the cursor one line up.
_UP: Final = "\x1b[A"


def _nothing() -> None:
    """There is nothing to tidy up."""


class ProgressLine:
    """Given to ``progress=``, and ended when the search is over; ``progress="auto"`` does both.

    On a terminal the line is gone afterwards, in a notebook it stays. Where there is neither, or ``shown`` is false, nothing
    is written. With ``lines`` each improvement is a line of its own on standard error, wherever that goes.

    >>> with ProgressLine(shown=False) as line:
    ...     line(None, 0.5)
    """

    def __init__(self, shown: bool = True, lines: bool = False):
        self._write: Callable[[str, float], None] | None = None
        self._end: Callable[[], None] = _nothing
        self._last, self._words, self._at = "", "", 0.0
        if lines and sys.stderr is not None:
            self._write = self._line
        elif shown and _kernel() is not None:
            self._write, self._end = self._cell, self._leave_cell
        elif shown and sys.stderr is not None and sys.stderr.isatty():
            self._write, self._end = self._terminal, self._leave_terminal
        self._display: Any = None
        self._start, self._share = time.monotonic(), 0.0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._ticker: threading.Thread | None = None

    def __call__(self, improvement: Improvement, share: float) -> None:
        if self._write is None:
            return
        best = improvement.best.cost
        figures = f"best {seconds(best.time_s)}, {best.peak_bytes / 2**30:.1f} GiB"
        with self._lock:
            if share < self._share:  # another search
                self._start = time.monotonic()
            self._last = f"{improvement.evaluations:,} evaluated, {figures}"
            self._words, self._share, self._at = improvement.words, share, time.monotonic() - self._start
            self._write(self._last, share)
        if self._ticker is None and self._end != _nothing:
            self._ticker = threading.Thread(target=self._tick, daemon=True)
            self._ticker.start()

    def _tick(self) -> None:
        """Between improvements time goes by as well."""
        while not self._over.wait(_TICK_S):
            with self._lock:
                now = time.monotonic() - self._start
                share = min(0.99, self._share * now / self._at) if self._at else self._share
                left = (now / share - now) if share else 0.0
                if self._last and self._write is not None and not self._over.is_set():
                    self._write(f"{self._last}, {left:.0f} s left" if share > 0.05 else self._last, share)

    def end(self) -> None:
        """The search is over. May be called again."""
        self._over.set()
        with self._lock:
            if self._last:
                self._end()
            self._last = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _line(self, text: str, share: float) -> None:
        print(text, file=sys.stderr, flush=True)

    def _terminal(self, text: str, share: float) -> None:
        """Two lines: figures, and what is sharded. The cursor stays at the beginning of the first."""
        words = self._words if len(self._words) <= _WIDTH else f"{self._words[: _WIDTH - 1]}…"
        sys.stderr.write(f"\r{f'{_bar(share)} {text}':<{_WIDTH}}\n{words:<{_WIDTH}}\r{_UP}")
        sys.stderr.flush()

    def _leave_terminal(self) -> None:
        sys.stderr.write(f"\r{'':<{_WIDTH}}\n{'':<{_WIDTH}}\r{_UP}")
        sys.stderr.flush()

    def _cell(self, text: str, share: float) -> None:
        self._show(
            f"{_bar(share)} {text}", f'<progress max="1" value="{share:.3f}" aria-label="search"></progress> {text}'
        )

    def _leave_cell(self) -> None:
        self._show(self._last, self._last)

    def _show(self, plain: str, html: str) -> None:
        display = importlib.import_module("IPython.display").display
        data = {"text/plain": plain, "text/html": f"<span>{html}</span>"}
        if self._display is None:
            self._display = display(data, raw=True, display_id=True)
        else:
            self._display.update(data, raw=True)


def _bar(share: float) -> str:
    """
    >>> _bar(0.5)
    '[##########..........]'
    """
    done = round(20 * share)
    return f"[{'#' * done}{'.' * (20 - done)}]"


def _kernel() -> Any:
    """The notebook's kernel, None outside of one. Nothing is imported: in a notebook IPython is there."""
    made = sys.modules.get("IPython")
    shell = made.get_ipython() if made is not None else None
    return getattr(shell, "kernel", None)
