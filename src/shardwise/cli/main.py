"""``shardwise``: the command line. JAX is imported only by the commands that need it."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

import shardwise
from shardwise.cli import compare, diff, doctor, explain, hardware, plan, report, verify, zoo
from shardwise.cli.answer import Answer
from shardwise.errors import ShardwiseError

#: What a terminal that cannot show our signs gets, one character each so that columns stay in line.
_PLAIN: Final = str.maketrans({"…": "~", "×": "x", "→": ">", "–": "-"})
_NEEDED: Final = ("jax", "jaxlib", "numpy", "scipy", "rich", "jinja2")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 1 the input was wrong, 2 the command was, 130 interrupted.

    Of ``diff`` and ``doctor`` 1 is an answer.
    """
    trouble = 1
    try:
        arguments = _arguments(argv)
        trouble = getattr(arguments, "trouble", trouble)
        # What a target prints is not our output: it must not end up inside JSON.
        with contextlib.redirect_stdout(sys.stderr):
            answer: str | Answer = arguments.run(arguments)
        text, code = (answer, 0) if isinstance(answer, str) else (answer.text, answer.code)
        _write(text)
        return code
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return trouble
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        print(f"shardwise: the package {error.name} is missing; 'shardwise doctor' says what else", file=sys.stderr)
        return trouble
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return 130


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Help and version are output like any other: written in one place, whoever reads them."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            return _parser().parse_args(argv)
    except SystemExit:
        if shown.getvalue():
            _write(shown.getvalue())
        raise


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
    parser = argparse.ArgumentParser(
        prog="shardwise", description="Decides how a JAX program is split over many accelerators."
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    plan.add_command(commands)
    inspect = commands.add_parser(
        "inspect",
        help="show what can be sharded in a program, and where that is ambiguous",
        description="Shows what can be sharded in a program: colors, groups, conflicts, opaque operations. Nothing runs.",
        epilog="examples:  shardwise inspect zoo:t2b   shardwise inspect train.py:make_step --json",
    )
    inspect.add_argument("target", metavar="TARGET", help="zoo:NAME[:CONFIG], or file.py:function returning (fn, args)")
    inspect.add_argument("--json", action="store_true", help="print the analysis as JSON")
    inspect.add_argument(
        "--all", action="store_true", help="list also groups that do not matter (loops, whole dimensions)"
    )
    inspect.add_argument("--no-grouping", action="store_true", help="decide repeated layers one by one")
    inspect.add_argument(
        "--why",
        nargs=2,
        metavar=("A", "B"),
        help="show what ties two dimensions together, each as PATH:DIM (params/w1:0)",
    )
    inspect.add_argument("--program", action="store_true", help="print the captured program with its rules instead")
    inspect.set_defaults(run=_inspect)
    explain.add_command(commands)
    compare.add_command(commands)
    diff.add_command(commands)
    verify.add_command(commands)
    report.add_command(commands)
    zoo.add_command(commands)
    hardware.add_commands(commands)
    doctor.add_command(commands)
    return parser


def _inspect(arguments: argparse.Namespace) -> str:
    # Planning needs shapes only: no accelerator is to be opened, nor its absence complained about.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardwise.cli.targets import load_target
    from shardwise.dims.analysis import analyze

    target = load_target(arguments.target)
    donate = {"donate_argnums": target.donate_argnums} if target.donate_argnums else {}
    analysis = analyze(target.fn, *target.args, **donate, grouping=not arguments.no_grouping, **target.kwargs)
    if arguments.why:
        (path_a, dim_a), (path_b, dim_b) = (_place(text) for text in arguments.why)
        return f"{analysis.why(path_a, dim_a, path_b, dim_b)}\n"
    if arguments.program:
        from shardwise.ir.text import format_program

        return format_program(analysis.program, sources=True) + "\n"
    if arguments.json:
        return json.dumps(analysis.to_json(), indent=2) + "\n"
    from shardwise.report.inspection import analysis_text

    return analysis_text(analysis, plan.terminal_width(), arguments.all)


def _place(text: str) -> tuple[str, int]:
    path, colon, dim = text.rpartition(":")
    if not colon or not dim.lstrip("-").isdigit():
        raise ShardwiseError(f"{text!r} is no dimension: write PATH:DIM, for example params/w1:0")
    return path, int(dim)


if __name__ == "__main__":
    sys.exit(main())
