"""``shardwise``: the command line. JAX is imported only by the commands that need it."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import shardwise
from shardwise.cli import (
    compare,
    completion,
    diff,
    doctor,
    explain,
    hardware,
    inspect,
    options,
    plan,
    report,
    verify,
    what_if,
    zoo,
)
from shardwise.cli.answer import Answer
from shardwise.errors import ShardwiseError
from shardwise.interruption import interruptible

#: What a terminal that cannot show our signs gets, one character each so that columns stay in line.
_PLAIN: Final = str.maketrans({"…": "~", "×": "x", "→": ">", "–": "-", "·": ".", "µ": "u"})
_NEEDED: Final = ("jax", "jaxlib", "numpy", "scipy", "rich", "jinja2", "argcomplete")
_EPILOG: Final = """'shardwise COMMAND --help' says more, with examples.

exit codes:
  0    done
  1    the input was wrong; of diff: the plans differ; of doctor: a problem
  2    the command was wrong; of diff: there was trouble
  130  interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 1 the input was wrong, 2 the command was, 130 interrupted.

    Of ``diff`` and ``doctor`` 1 is an answer.
    """
    trouble, verbose = 1, False
    try:
        arguments = _arguments(argv)
        trouble, verbose = getattr(arguments, "trouble", trouble), getattr(arguments, "verbose", verbose)
        # What a target prints is not our output: it must not end up inside JSON.
        with contextlib.redirect_stdout(sys.stderr), interruptible():
            answer: str | Answer = arguments.run(arguments)
        text, code = (answer, 0) if isinstance(answer, str) else (answer.text, answer.code)
        _write(text)
        return code
    except ShardwiseError as error:
        if verbose:
            origin = error.__cause__ or error.__context__ or error
            _say("".join(traceback.format_exception(origin)).rstrip())
        _say(f"shardwise: {error}")
        return trouble
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        _say(f"shardwise: the package {error.name} is missing; 'shardwise doctor' says what else")
        return trouble
    except KeyboardInterrupt:
        if argv is None:  # From here on the program ends, and whoever is in a hurry ends it at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        _say("shardwise: interrupted")
        return 130


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Help and version are output like any other: written in one place, whoever reads them."""
    parser = _parser()
    completion.answer_shell(parser)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            return parser.parse_args(argv)
    except SystemExit:
        if shown.getvalue():
            _write(shown.getvalue())
        raise


def _say(text: str) -> None:
    """To standard error, if anybody listens."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _write(text: str) -> None:
    """Prints the whole output; a reader that has gone (``| head``) is no error, a full disk is one."""
    if sys.stdout is None:
        raise ShardwiseError("the output cannot be written: standard output is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # Python must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ShardwiseError(f"the output cannot be written: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = options.Parser(
        prog="shardwise",
        description="Decides how a JAX program is split over many accelerators.",
        epilog=_EPILOG,
        formatter_class=options.Help,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (plan, inspect, explain, what_if, compare, diff, verify, report, zoo, hardware, doctor, completion):
        module.add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
