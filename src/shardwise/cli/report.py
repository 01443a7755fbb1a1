"""``shardwise report``: a saved plan as a page to open in a browser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shardwise.cli import completers, options
from shardwise.errors import ShardwiseError


def add_command(commands: Any) -> None:
    """Registers ``report``."""
    report = options.add_command(
        commands,
        "report",
        help="write a saved plan as an HTML page",
        description="Writes a saved plan as one HTML file that needs no network.",
        examples="""shardwise report plan.json
        shardwise report plan.json zoo:t2b --output plan.html""",
    )
    options.add_plan(report, type=Path)
    options.add_target(report, "with it the page also has times by line, memory over time, effects and experts")
    options.completed(
        report.add_argument(
            "--output", metavar="FILE.html", type=Path, help="where it goes (default: PLAN.html beside it)"
        ),
        completers.files("html"),
    )
    options.add_json(report, "the page's data as JSON and write no page")
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import loaded_plan

    made = loaded_plan(arguments.plan, arguments.target)
    if arguments.json:
        from shardwise.report.data import report_data

        return json.dumps(report_data(made), indent=2) + "\n"
    output = arguments.output or arguments.plan.with_suffix(".html")
    if output.exists() and output.samefile(arguments.plan):
        raise ShardwiseError(f"the page would take the place of the plan {output}: give another --output")
    made.report(output)
    return f"written to {output}\n"
