"""Python's cyclic garbage collector, paused.

A program is a hundred thousand small objects that all stay alive. The collector looks through them again and again as they
grow, which makes capture and analysis grow faster than linearly in depth (20% at 96 layers); nothing is there to collect.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def collector_paused(fn: Callable[P, R]) -> Callable[P, R]:
    """``fn``, run with the collector off and back as it was afterwards."""

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return fn(*args, **kwargs)
        finally:
            if was_on:
                gc.enable()

    return run
