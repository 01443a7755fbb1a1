"""``python -m shardwise.search.worker``: a process that searches for another one (``shardwise.search.crew``).

It reads messages (``shardwise.search.tasks``) from its standard input and writes its own to its standard output, one pickle
after another. It ends with its input: if whoever started it is gone, however that came about, so is the worker. JAX is not
imported.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

from shardwise.search.tasks import Desk, Failed, Program, Task, dumped

#: The first message, and the first element of one that tells to forget a searcher.
READY = "ready"
FORGET = "forget"


def main() -> None:
    """Does tasks until the input ends."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    # What anything prints here must not get in between the messages, and an interrupt is the parent's to deal with.
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, inbox), daemon=True).start()

    def send(message: Any) -> None:
        sink.write(dumped(message))
        sink.flush()

    desk = Desk()
    with contextlib.suppress(BrokenPipeError):
        send(READY)
        while True:
            message = inbox.get()
            if isinstance(message, Task):
                desk.do(message, send)
            elif isinstance(message, Program):
                desk.take(message)
            elif isinstance(message, Failed):
                send(message)
            else:
                desk.forget(message[1])


def _read(source: BinaryIO, inbox: queue.SimpleQueue[Any]) -> None:
    """In a thread, so that the end of the input ends a search that is under way."""
    while True:
        try:
            inbox.put(pickle.load(source))
        except EOFError:
            sys.stderr.flush()
            os._exit(0)
        except Exception as error:
            inbox.put(Failed(-1, f"{type(error).__name__}: {error}"))
            return


if __name__ == "__main__":
    main()
