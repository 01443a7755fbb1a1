"""An interruption (Ctrl-C) is heard, wherever it falls.

Python raises ``KeyboardInterrupt`` in the main thread, whatever that is doing. In a callback of the garbage collector (JAX has
one) or of a weak reference nothing can be raised: Python writes the exception out and goes on. Such an interruption is sent
again until it is raised once more; several times, as a signal that comes right before the program begins to wait does not wake
it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, Final

#: How long after an interruption that was lost it is sent again.
_AGAIN_S: Final = 0.05
#: How often a person sees that work in the background goes on.
_WAITING_S: Final = 0.25


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Interruptions are not lost inside. Where they are ignored (a background job) or somebody else's, nothing is changed."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    listener = _Listener(sys.unraisablehook)
    signal.signal(signal.SIGINT, listener.interrupt)
    sys.unraisablehook = listener.lost
    try:
        yield
    finally:
        listener.heard = True
        sys.unraisablehook = listener.before
        signal.signal(signal.SIGINT, signal.default_int_handler)


def in_background(work: Callable[[], Any], waiting: Callable[[float], None] | None = None) -> Any:
    """Returns ``work()``, which may take minutes inside of a compiler that hears no signals: an interruption is raised at once,
    and ``waiting`` is called with the seconds that have passed, a few times in each. An interrupted thread runs to its end."""
    future = Future[Any]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    start = time.monotonic()
    threading.Thread(target=run, daemon=True).start()  # Python does not wait for it at exit, as for one of an executor.
    while not future.done():
        wait([future], _WAITING_S)
        if waiting is not None:
            waiting(time.monotonic() - start)
    return future.result()


class _Listener:
    """``heard``: there is no interruption to be sent again; ``busy``: in a hook, from which nothing can be raised either. No
    lock: a signal's handler may run while one is held."""

    def __init__(self, before: Any):
        self.before, self.heard, self.busy = before, True, False

    def interrupt(self, *_: object) -> None:
        if not self.busy:
            self.heard = True
            raise KeyboardInterrupt

    def lost(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self.before(unraisable)
            return
        self.busy, self.heard = True, False
        threading.Thread(target=self._again, daemon=True).start()
        self.busy = False

    def _again(self) -> None:
        while True:
            time.sleep(_AGAIN_S)
            if self.heard:
                return
            os.kill(os.getpid(), signal.SIGINT)
