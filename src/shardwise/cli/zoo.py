"""``shardwise zoo``: which programs there are. Their modules bring JAX, and are not imported."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli import options


def add_command(commands: Any) -> None:
    """Registers ``zoo``."""
    zoo = options.add_command(
        commands,
        "zoo",
        help="list the programs that come with Shardwise",
        description="Lists the programs that come with Shardwise, and the configurations of each, the default first. A target "
        "is zoo:NAME or zoo:NAME:CONFIG, and may go on with options: zoo:gpt:tiny,layers=3,remat.",
        examples="shardwise inspect zoo:llama3:70b",
    )
    options.add_json(zoo)
    zoo.set_defaults(run=_zoo)


def _zoo(arguments: argparse.Namespace) -> str:
    from shardwise import zoo

    programs = [{"name": n, "configs": zoo.configs(n), "description": zoo.description(n)} for n in zoo.names()]
    if arguments.json:
        return json.dumps({"schema": 1, "programs": programs}, indent=2) + "\n"
    return "".join(f"{p['name']:8} {' '.join(p['configs'])}\n         {p['description']}\n" for p in programs)
