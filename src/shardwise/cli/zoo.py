"""``shardwise zoo``: which programs there are.

The modules that have the configurations bring JAX, which takes a second; so their names stand here as well, and a test sets
them beside ``zoo.configs``.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

#: A program and its configurations, the default first.
PROGRAMS: Final = tuple(
    tuple(line.split())
    for line in """
    t2b      2b tiny
    t7b      7b tiny
    gpt      2.6b 6.7b 39b tiny
    llama3   8b 70b 405b tiny
    mixtral  8x7b tiny
    gns      full tiny
    unet     full tiny
    itx      decode prefill step tiny tiny-prefill tiny-step
    vit      l16 h14 tiny
    wresnet  1b 4b tiny
    t5       3b 11b tiny
    ssm      2.8b tiny
    dlrm     full tiny
    mlp      full tiny
    """.strip().splitlines()
)


def add_command(commands: Any) -> None:
    """Registers ``zoo``."""
    zoo = commands.add_parser(
        "zoo",
        help="list the programs that come with Shardwise",
        description="Lists the programs that come with Shardwise, and the configurations of each, the default first.",
        epilog="example of a target:  zoo:llama3:70b",
    )
    zoo.add_argument("--json", action="store_true", help="print JSON")
    zoo.set_defaults(run=_zoo)


def _zoo(arguments: argparse.Namespace) -> str:
    if arguments.json:
        programs = [{"name": name, "configs": configs} for name, *configs in PROGRAMS]
        return json.dumps({"schema": 1, "programs": programs}, indent=2) + "\n"
    return "".join(f"{name:10} {' '.join(configs)}\n" for name, *configs in PROGRAMS)
