"""``shardwise explain``: one argument or output of a saved plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def add_command(commands: Any) -> None:
    """Registers ``explain``."""
    explain = commands.add_parser(
        "explain",
        help="say how an argument or output is sharded under a saved plan, and what moves for it",
        description="Says how an argument or output is sharded, in how many shards, and which collectives it causes, with "
        "the lines of the source that ask for them.",
        epilog="example:  shardwise explain plan.json params/first/kernel",
    )
    explain.add_argument("plan", metavar="PLAN", help="a plan that Plan.save wrote")
    explain.add_argument("path", metavar="PATH", help="an argument or output by its path in the plan")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> str:
    from shardwise.cli.plan import terminal_width
    from shardwise.plans.load import load_plan
    from shardwise.report.wrapping import wrapped

    made = load_plan(arguments.plan)
    text = made.explain(arguments.path)  # refuses a wrong path, also for JSON
    if not arguments.json:
        return wrapped(text, terminal_width())
    array = next(a for a in (*made.arguments, *made.outputs) if a.path == arguments.path)
    data = {
        "schema": 1,
        "mesh": dict(zip(made.mesh.names, made.mesh.sizes, strict=True)),
        **asdict(array),
        "collectives": [asdict(c) for c in made.collectives if c.value == arguments.path],
        "notes": [note for note in made.notes if note.startswith(f"{arguments.path}[")],
    }
    return json.dumps(data, indent=2) + "\n"
