"""Several processes that search for one plan.

The problem: a process with JAX in it has threads and must not be forked; one that is spawned the usual way imports the person's
script again, which breaks scripts without ``if __name__ == "__main__"``; and their function cannot be pickled.

The idea. Each process is a plain ``python -m shardwise.search.worker``. It is sent what a search needs
(``shardwise.search.tasks``) and searches with a seed of its own (a *root*), or on a mesh of its own (a *lane* of
``shardwise.search.mesh``). There are as many roots or lanes as were asked for, and never more processes than cores, so that
what is found does not depend on the machine.

An interrupt is ours alone, since the processes are in sessions of their own: what they told until then is the best so far, and
they are killed. They also end by themselves with their input. Where they cannot be started, or one dies, the search is made
here, with a warning.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import shardwise
from shardwise.dims.analysis import Analysis
from shardwise.errors import ShardwiseError
from shardwise.search.tasks import Better, Done, Failed, Program, Started, Task, dumped
from shardwise.search.worker import FORGET, READY

#: How long a process may take to start, and how often an interrupt is looked for.
_START_S: Final = 60.0
_LOOK_S: Final = 0.2

_CREW: ContextVar[Crew | None] = ContextVar("crew", default=None)
_PICKLING: Final = (pickle.PicklingError, TypeError, AttributeError)


class CrewError(ShardwiseError):
    """The processes cannot be used."""


class StoppedError(Exception):
    """The processes were stopped while somebody waited for them."""


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Hand:
    """One process. What it sends goes to whoever has the hand at the moment."""

    def __init__(self) -> None:
        root = str(Path(shardwise.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.search.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self.box: queue.SimpleQueue[tuple[_Hand, Any]] = queue.SimpleQueue()
        self.program = -1
        self.lock = threading.Lock()
        self._sending = threading.RLock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(Exception):  # whatever it is, nothing more will come
            while True:
                message = pickle.load(self.process.stdout)
                self.box.put((self, message))
        self.box.put((self, None))

    def send(self, message: bytes) -> None:
        assert self.process.stdin is not None
        try:
            with self._sending:  # a searcher may be forgotten at any time
                self.process.stdin.write(message)
                self.process.stdin.flush()
        except (OSError, ValueError) as error:
            raise CrewError(f"a process cannot be reached: {error}") from None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Crew:
    """Processes that search, started when first needed, and gone with the ``with``.

    >>> from shardwise.search.crew import Crew
    >>> with Crew(2) as crew:
    ...     crew.roots, crew.started
    (2, False)
    """

    def __init__(self, roots: int):
        self.roots = roots
        self.broken = self.stopped = False
        self._hands: list[_Hand] = []
        self._lane: ContextVar[int | None] = ContextVar("lane", default=None)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._programs: dict[int, tuple[int, Analysis, bytes]] = {}

    def __enter__(self) -> Crew:
        self._token = _CREW.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _CREW.reset(self._token)
        self.stop()

    @staticmethod
    def current() -> Crew | None:
        """The crew of the ``with`` that this runs in, if there is one and it can be used."""
        crew = _CREW.get()
        return crew if crew is not None and crew.roots > 1 and not crew.broken else None

    @property
    def started(self) -> bool:
        return bool(self._hands)

    def stop(self) -> None:
        """Ends all processes; whoever waits for them gets a ``StoppedError``."""
        self.stopped = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            for hand in self._hands:
                hand.end()
            self._hands = []

    def number(self) -> int:
        """A number for a searcher."""
        with self._lock:
            return next(self._numbers)

    def forget(self, searcher: int) -> None:
        """A searcher will not come again."""
        for hand in list(self._hands):
            with contextlib.suppress(CrewError):
                hand.send(dumped((FORGET, searcher)))

    @contextlib.contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """What is asked for here is done by one process. For threads, which have no crew of their own."""
        tokens = _CREW.set(self), self._lane.set(number)
        try:
            yield
        finally:
            _CREW.reset(tokens[0])
            self._lane.reset(tokens[1])

    @property
    def own_lane(self) -> int | None:
        return self._lane.get()

    def search(self, analysis: Analysis, tasks: Sequence[Task], hear: Callable[[Better | Started], None]) -> list[Done]:
        """What came of tasks, in their order; ``hear`` is told what comes on the way."""
        hands = self._started()
        lane = self.own_lane
        if lane is not None:
            hand = hands[lane % len(hands)]
            with hand.lock:
                return self._search([hand], analysis, tasks, hear)
        try:
            return self._search(hands, analysis, tasks, hear)
        except BaseException:
            self._end()  # some of them are still at it
            raise

    def _search(
        self,
        own: Sequence[_Hand],
        analysis: Analysis,
        tasks: Sequence[Task],
        hear: Callable[[Better | Started], None],
    ) -> list[Done]:
        box: queue.SimpleQueue[tuple[_Hand, Any]] = queue.SimpleQueue()
        waiting = {hand: list(tasks[k :: len(own)]) for k, hand in enumerate(own)}
        for hand in own:
            hand.box = box
            self._next(hand, analysis, waiting[hand])
        done: dict[int, Done] = {}
        while len(done) < len(tasks):
            hand, message = self._get(box)
            if isinstance(message, Done):
                done[message.root] = message
                self._next(hand, analysis, waiting[hand])
            elif isinstance(message, Failed):
                if isinstance(message.error, ShardwiseError):
                    raise message.error
                raise CrewError(message.error)
            else:
                hear(message)
        return [done[task.root] for task in tasks]

    def _get(self, box: queue.SimpleQueue[tuple[_Hand, Any]]) -> tuple[_Hand, Any]:
        while True:
            if self.stopped:
                raise StoppedError
            with contextlib.suppress(queue.Empty):
                hand, message = box.get(timeout=_LOOK_S)
                if message is not None:
                    return hand, message
                if not self.stopped:
                    raise CrewError(f"a process ended with {hand.process.wait()} before its search did")

    def _next(self, hand: _Hand, analysis: Analysis, waiting: list[Task]) -> None:
        if waiting:
            number, pickled = self._program(analysis)
            if hand.program != number:
                hand.send(pickled)
                hand.program = number
            hand.send(dumped(replace(waiting.pop(0), program=number)))

    def _program(self, analysis: Analysis) -> tuple[int, bytes]:
        """The number of a program, and it as bytes."""
        with self._lock:
            if id(analysis) not in self._programs:
                number = len(self._programs)
                try:
                    pickled = dumped(Program(number, analysis))
                except _PICKLING as error:
                    raise CrewError(f"the program cannot be sent: {error}") from None
                self._programs[id(analysis)] = (number, analysis, pickled)
            number, _, pickled = self._programs[id(analysis)]
            return number, pickled

    def _started(self) -> list[_Hand]:
        with self._lock:
            if self.stopped:
                raise StoppedError
            if not self._hands:
                self._hands = self._start()
            return self._hands

    def _start(self) -> list[_Hand]:
        hands: list[_Hand] = []
        end = time.perf_counter() + _START_S
        try:
            for _ in range(min(self.roots, cores())):
                hands.append(_Hand())
            for hand in hands:
                while True:
                    if time.perf_counter() > end:
                        raise CrewError(f"a process did not start within {_START_S:.0f} s")
                    with contextlib.suppress(queue.Empty):
                        _, message = hand.box.get(timeout=_LOOK_S)
                        if message != READY:
                            raise CrewError(f"a process ended with {hand.process.wait()} before it had started")
                        break
        except BaseException as error:
            for hand in hands:
                hand.end()
            if isinstance(error, OSError):
                raise CrewError(f"a process cannot be started: {error}") from None
            raise
        return hands
