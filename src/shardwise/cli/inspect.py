"""``shardwise inspect``: what can be sharded in a program."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli import options
from shardwise.errors import ShardwiseError


def add_command(commands: Any) -> None:
    """Registers ``inspect``."""
    inspect = options.add_command(
        commands,
        "inspect",
        help="show what can be sharded in a program, and where that is ambiguous",
        description="Shows what can be sharded in a program: colors, groups, conflicts, opaque operations. Nothing runs.",
        examples="""
        shardwise inspect zoo:t2b
        shardwise inspect train.py:make_step --why params/w1:0 batch:1
        """,
    )
    options.add_target(inspect)
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
    options.add_json(inspect, "the analysis as JSON")
    options.add_loudness(inspect)
    inspect.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import load_target, without_devices

    without_devices()
    from shardwise.dims.analysis import analyze

    target = load_target(arguments.target)
    donate = {"donate_argnums": target.donate_argnums} if target.donate_argnums else {}
    analysis = analyze(target.fn, *target.args, **donate, grouping=not arguments.no_grouping, kwargs=target.kwargs)
    if arguments.why:
        (path_a, dim_a), (path_b, dim_b) = (_place(text) for text in arguments.why)
        return f"{analysis.why(path_a, dim_a, path_b, dim_b)}\n"
    if arguments.program:
        from shardwise.ir.text import format_program

        return format_program(analysis.program, sources=True) + "\n"
    if arguments.json:
        return json.dumps(analysis.to_json(), indent=2) + "\n"
    from shardwise.report.inspection import analysis_text

    return analysis_text(analysis, options.terminal_width(), arguments.all)


def _place(text: str) -> tuple[str, int]:
    path, colon, dim = text.rpartition(":")
    if not colon or not dim.lstrip("-").isdigit():
        raise ShardwiseError(f"{text!r} is no dimension: write PATH:DIM, for example params/w1:0")
    return path, int(dim)
