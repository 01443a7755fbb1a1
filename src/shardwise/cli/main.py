"""``shardwise``: the command line. JAX is imported only by the commands that need it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import shardwise
from shardwise.cli import hardware, machine, options, programs, saved
from shardwise.errors import ShardwiseError
from shardwise.interruption import interruptible

#: Replacements for terminals that cannot show these characters; one for one, so that columns stay aligned.
_PLAIN: Final = str.maketrans({"…": "~", "×": "x", "→": ">", "–": "-", "·": ".", "µ": "u"})
_NEEDED: Final = ("jax", "jaxlib", "numpy", "scipy", "rich", "jinja2", "argcomplete")
_EPILOG: Final = """start with:
  shardwise plan zoo:t2b:2b,remat --topology v5e:4x4 --report plan.html

'shardwise COMMAND --help' says more, with examples.

exit codes:
  0    done
  1    wrong input; diff: the plans differ; doctor: a problem
  2    wrong command; diff: trouble
  130  interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code, as listed in ``_EPILOG``."""
    trouble, verbose = 1, False
    try:
        arguments = _arguments(argv)
        command: options.Command = arguments.command
        trouble, verbose = command.trouble, getattr(arguments, "verbose", verbose)
        if not command.accelerators:  # Shapes are enough. JAX reads the variable when it is imported.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # The prints of a target are not our output: they must not end up inside JSON.
        with contextlib.redirect_stdout(sys.stderr), interruptible():
            result = command.run(arguments)
        output, code = result if isinstance(result, tuple) else (result, 0)
        _write(output if isinstance(output, str) else json.dumps(output, indent=2) + "\n")
        if argv is None:
            gc.freeze()  # At exit Python would scan all objects for garbage, which takes half a second.
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
        _say("shardwise: interrupted")
        if argv is None:  # A compiler that is still running would not survive an orderly end of Python.
            os._exit(130)
        return 130


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command; help and version are written like any other output."""
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # A shell asks for completions.
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            words = sys.argv[1:] if argv is None else argv
            arguments: argparse.Namespace = parser.parse_args(words or ["--help"])
            arguments.typed = shlex.join(["shardwise", *words])
            return arguments
    except SystemExit:
        if shown.getvalue():
            _write(shown.getvalue())
        raise


def _say(text: str) -> None:
    """Prints to standard error, if that can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _write(text: str) -> None:
    """Prints the output; a closed pipe (``| head``) is no error, a full disk is one."""
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_commands(commands, programs)
    _add_commands(commands, saved)
    about = "list known devices and their figures, or measure this machine"
    actions = commands.add_parser("hardware", help=about, description=about)
    _add_commands(actions.add_subparsers(title="actions", metavar="ACTION", required=True), hardware)
    _add_commands(commands, machine)
    return parser


def _add_commands(commands: Any, module: ModuleType) -> None:
    for value in vars(module).values():
        if isinstance(value, options.Command):
            value.add_to(commands)


if __name__ == "__main__":
    sys.exit(main())
