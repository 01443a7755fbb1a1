"""``shardwise``: the command line. JAX is imported only by the commands that need it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import shardwise
from shardwise.errors import ShardwiseError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 1 the input was wrong, 2 the command was, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has gone (``| head``): nothing is left to say, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwise", description="Decides how a JAX program is split over many accelerators."
    )
    parser.add_argument("--version", action="version", version=f"shardwise {shardwise.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
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
    zoo = commands.add_parser("zoo", help="list the programs that come with Shardwise")
    zoo.set_defaults(run=_zoo)
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    # Planning needs shapes only: no accelerator is to be opened, nor its absence complained about.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardwise.cli.targets import load_target
    from shardwise.dims.analysis import analyze

    target = load_target(arguments.target)
    donate = {"donate_argnums": target.donate_argnums} if target.donate_argnums else {}
    analysis = analyze(target.fn, *target.args, **donate, grouping=not arguments.no_grouping, **target.kwargs)
    if arguments.why:
        (path_a, dim_a), (path_b, dim_b) = (_place(text) for text in arguments.why)
        print(analysis.why(path_a, dim_a, path_b, dim_b))
    elif arguments.program:
        from shardwise.ir.text import format_program

        print(format_program(analysis.program, sources=True))
    elif arguments.json:
        print(json.dumps(analysis.to_json(), indent=2))
    else:
        from shardwise.report.inspection import analysis_text

        print(analysis_text(analysis, _width(), arguments.all), end="")
    return 0


def _place(text: str) -> tuple[str, int]:
    path, colon, dim = text.rpartition(":")
    if not colon or not dim.lstrip("-").isdigit():
        raise ShardwiseError(f"{text!r} is no dimension: write PATH:DIM, for example params/w1:0")
    return path, int(dim)


def _width() -> int:
    """The terminal's width between 80 and 120 columns; 80 where there is none."""
    try:
        return min(max(os.get_terminal_size(sys.stdout.fileno()).columns, 80), 120)
    except (OSError, ValueError):
        return 80


def _zoo(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        from shardwise import zoo
    except ModuleNotFoundError as error:
        raise ShardwiseError(f'the zoo needs {error.name}: pip install "shardwise[zoo]"') from None
    for name in zoo.names():
        print(f"{name:10} {' '.join(zoo.configs(name))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
