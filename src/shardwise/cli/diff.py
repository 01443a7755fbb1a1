"""``shardwise diff``: two saved plans."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli import options
from shardwise.cli.answer import Answer


def add_command(commands: Any) -> None:
    """Registers ``diff``."""
    diff = options.add_command(
        commands,
        "diff",
        help="say what differs between two saved plans",
        description="Says what differs between two saved plans: predicted figures, mesh, decisions, specs, constraints, "
        "bytes moved. As with diff, the exit code is 0 if they are the same, 1 if they differ, 2 if there was trouble.",
        examples="shardwise diff before.json after.json",
    )
    options.add_plan(diff, "one", "A")
    options.add_plan(diff, "other", "B", help="another")
    options.add_json(diff)
    diff.set_defaults(run=_diff, trouble=2)


def _diff(arguments: argparse.Namespace) -> Answer:
    from shardwise.plans.load import load_plan
    from shardwise.report.difference import difference, difference_text

    found = difference(load_plan(arguments.one), load_plan(arguments.other))
    code = 0 if found.same else 1
    if arguments.json:
        return Answer(json.dumps(found.to_json(), indent=2) + "\n", code)
    return Answer(difference_text(found, arguments.one, arguments.other, options.terminal_width()), code)
