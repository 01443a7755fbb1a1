"""Cases in processes, one for each, and the roles of their arguments."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_processes(function: Callable[[T], R], cases: Sequence[T], processes: int) -> Iterator[tuple[T, R]]:
    """Yields the cases with their results, those that are done first. A process has one case at a time."""
    if processes < 2:
        yield from ((case, function(case)) for case in cases)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = {pool.submit(function, case): case for case in cases}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
