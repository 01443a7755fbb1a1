"""``shardwise explain``: one argument or output of a saved plan, or its device-local program."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from shardwise.cli import completers, options


def add_command(commands: Any) -> None:
    """Registers ``explain``."""
    explain = options.add_command(
        commands,
        "explain",
        help="say how an argument or output is sharded under a saved plan, and what moves for it",
        description="Says how an argument or output is sharded, in how many shards, and which collectives it causes, with "
        "the lines of the source that ask for them; or prints the whole program of one device.",
        examples="""shardwise explain plan.json params/first/kernel
        shardwise explain plan.json params/first/kernel zoo:mlp
        shardwise explain plan.json zoo:mlp --program""",
    )
    options.add_plan(explain)
    shown = "an argument or output by its path, or by the end of it; with --program TARGET stands here"
    options.completed(explain.add_argument("path", metavar="PATH", help=shown), completers.paths)
    options.add_target(explain, "with it also what each decision is worth, and the lines of the device-local program")
    shown = "print the device-local program: local shapes, collectives, source lines; needs TARGET"
    explain.add_argument("--program", action="store_true", help=shown)
    options.add_json(explain)
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import loaded_plan
    from shardwise.report.wrapping import wrapped

    if arguments.program:
        return _program(arguments)
    made = loaded_plan(arguments.plan, arguments.target)
    text = made.explain(arguments.path)  # refuses a wrong path, also for JSON
    if not arguments.json:
        return wrapped(text, options.terminal_width())
    array = made.array(arguments.path)
    data = {
        "schema": 1,
        "mesh": dict(zip(made.mesh.names, made.mesh.sizes, strict=True)),
        **asdict(array),
        "collectives": [asdict(c) for c in made.collectives if c.value == array.path],
        "notes": [note for note in made.notes if note.startswith(f"{array.path}[")],
        "explained": text.splitlines(),
    }
    return json.dumps(data, indent=2) + "\n"


def _program(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import loaded_plan
    from shardwise.report.program_text import program_data

    if arguments.target is not None:
        arguments.parser.error("--program prints the whole program: leave PATH out")
    made = loaded_plan(arguments.plan, arguments.path)
    if not arguments.json:
        return made.program(options.terminal_width())
    data = program_data(made.inquiry.analysis.program, made.sharded)
    mesh = dict(zip(made.mesh.names, made.mesh.sizes, strict=True))
    return json.dumps({"schema": 1, "mesh": mesh, **data}, indent=2) + "\n"
