"""Pauses Python's cyclic garbage collector.

A program is a hundred thousand small objects that all stay alive. The collector scans them again and again while they are
created, which takes a fifth of the time of tracing and capture at 96 layers, and there is nothing to collect.
"""

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
            gc.enable()
