"""``shardwise diff``: two saved plans."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli.answer import Answer


def add_command(commands: Any) -> None:
    """Registers ``diff``."""
    diff = commands.add_parser(
        "diff",
        help="say what differs between two saved plans",
        description="Says what differs between two saved plans: predicted figures, mesh, decisions, specs, constraints, "
        "bytes moved. As with diff, the exit code is 0 if they are the same, 1 if they differ, 2 if there was trouble.",
        epilog="example:  shardwise diff before.json after.json",
    )
    diff.add_argument("one", metavar="A", help="a plan that Plan.save wrote")
    diff.add_argument("other", metavar="B", help="another")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=_diff, trouble=2)


def _diff(arguments: argparse.Namespace) -> Answer:
    from shardwise.cli.plan import terminal_width
    from shardwise.plans.load import load_plan
    from shardwise.report.difference import difference, difference_text

    found = difference(load_plan(arguments.one), load_plan(arguments.other))
    code = 0 if found.same else 1
    if arguments.json:
        return Answer(json.dumps(found.to_json(), indent=2) + "\n", code)
    return Answer(difference_text(found, arguments.one, arguments.other, terminal_width()), code)
