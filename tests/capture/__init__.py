from typing import Any

from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.ir.program import Program


def capture(fn: Any, /, *args: Any, options: JitOptions | None = None, **kwargs: Any) -> Program:
    """The program of ``fn(*args, **kwargs)``."""
    return lower(trace(fn, args, kwargs, options or JitOptions()))
