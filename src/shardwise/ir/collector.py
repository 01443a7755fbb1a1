"""Pauses Python's cyclic garbage collector, which takes a fifth of the time of capture at 96 layers and has nothing to
collect. What was made meanwhile is then among the old objects: otherwise the next collection visits all of it at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector, as a context or, with parentheses, as a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
