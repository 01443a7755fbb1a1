"""``shardwise``: the command line. JAX is imported only by the commands that need it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Final

import shardwise
from shardwise.cli import hardware, plan, report
from shardwise.errors import ShardwiseError

#: What a terminal that cannot show our signs gets, one character each so that columns stay in line.
_PLAIN: Final = str.maketrans({"…": "~", "×": "x", "→": ">", "–": "-"})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0 done, 1 the input was wrong, 2 the command was, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        # What a target prints is not our output: it must not end up inside JSON.
        with contextlib.redirect_stdout(sys.stderr):
            text: str = arguments.run(arguments)
        _write(text)
        return 0
    except ShardwiseError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return 130


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
    verify = commands.add_parser(
        "verify",
        help="compile a program under a saved plan and compare with what the plan predicts",
        description="Compiles a program under a saved plan, reads the collectives of the compiled program, and sets them "
        "beside the predicted ones. On host devices it can also run both programs and compare their results.",
        epilog="example:  shardwise verify plan.json train.py:make_step --backend v5e:4x4",
    )
    verify.add_argument("plan", metavar="PLAN", help="a plan that Plan.save wrote")
    verify.add_argument("target", metavar="TARGET", help="zoo:NAME[:CONFIG], or file.py:function returning (fn, args)")
    verify.add_argument("--backend", default="host", help='"host" (default) or a TPU topology such as v5e:4x4')
    verify.set_defaults(run=_verify)
    report.add_command(commands)
    zoo = commands.add_parser("zoo", help="list the programs that come with Shardwise")
    zoo.set_defaults(run=_zoo)
    hardware.add_commands(commands)
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


def _verify(arguments: argparse.Namespace) -> str:
    from shardwise.plans.load import load_plan

    made = load_plan(arguments.plan)
    # As many host devices as the plan needs; JAX reads this when it is imported.
    count = f"--xla_force_host_platform_device_count={made.mesh.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardwise.cli.targets import load_target
    from shardwise.verification.verify import verify

    target = load_target(arguments.target)
    found = verify(made, target.fn, *target.args, backend=arguments.backend, **target.kwargs)
    if not found.compiled.fits:
        raise ShardwiseError(str(found))
    return str(found)


def _place(text: str) -> tuple[str, int]:
    path, colon, dim = text.rpartition(":")
    if not colon or not dim.lstrip("-").isdigit():
        raise ShardwiseError(f"{text!r} is no dimension: write PATH:DIM, for example params/w1:0")
    return path, int(dim)


def _zoo(arguments: argparse.Namespace) -> str:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        from shardwise import zoo
    except ModuleNotFoundError as error:
        raise ShardwiseError(f'the zoo needs {error.name}: pip install "shardwise[zoo]"') from None
    return "".join(f"{name:10} {' '.join(zoo.configs(name))}\n" for name in zoo.names())


if __name__ == "__main__":
    sys.exit(main())
