"""``shardwise what-if``: a saved plan with something decided otherwise."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardwise.cli import completers, options
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.tactics.tactic import Tactic


def add_command(commands: Any) -> None:
    """Registers ``what-if``."""
    what_if = options.add_command(
        commands,
        "what-if",
        help="say what a saved plan would take with something decided otherwise",
        description="Leaves decisions of a saved plan out, adds others or takes other devices, and says what time and memory "
        "would be, and what makes the difference. Nothing is searched.",
        examples="""shardwise what-if plan.json zoo:t2b --without 2
        shardwise what-if plan.json train.py:make_step --shard params/w,0,model
        shardwise what-if plan.json zoo:t2b --topology v5p:4x4""",
    )
    options.add_plan(what_if)
    options.add_target(what_if)
    shown = "a decision to leave out: its number in the plan, or words of it"
    what_if.add_argument("--without", metavar="DECISION", action="append", default=[], help=shown)
    shown = "give a dimension, and all that need the same, a mesh axis"
    what_if.add_argument("--shard", metavar="PATH,DIM,AXIS", action="append", default=[], help=shown)
    shown = "keep an argument whole on an axis at rest"
    what_if.add_argument("--keep", metavar="PATH,AXIS", action="append", default=[], help=shown)
    options.add_tactics(what_if, "tactics to apply after the plan's decisions, such as megatron:model")
    shown = "other devices for the same mesh, such as v5p:4x4"
    options.completed(what_if.add_argument("--topology", metavar="T", help=shown), completers.topologies)
    options.add_json(what_if)
    options.add_loudness(what_if)
    what_if.set_defaults(run=_what_if)


def _what_if(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import bound, without_devices
    from shardwise.plans.load import load_plan

    made = load_plan(arguments.plan)
    if not (arguments.without or arguments.tactics or arguments.shard or arguments.keep or arguments.topology):
        listed = "".join(f"\n  {k}. {words}" for k, words in enumerate(made.choices, 1))
        raise ShardwiseError(
            f"say what would be otherwise: --without, --tactics, --shard, --keep or --topology; decided is:{listed}"
        )
    without_devices()
    from shardwise.report.what_if_text import what_if_text

    changes = [*map(_shard, arguments.shard), *map(_keep, arguments.keep)]
    named = [arguments.tactics] if arguments.tactics else []
    without = [int(text) if text.isdigit() else text for text in arguments.without]
    found = bound(made, arguments.target).what_if(*named, *changes, without=without, topology=arguments.topology)
    if arguments.json:
        return json.dumps(found.to_json(), indent=2) + "\n"
    return what_if_text(found, options.terminal_width())


def _shard(text: str) -> Tactic:
    from shardwise.tactics.strategies import Shard

    path, dim, axis = _parts(text, 3, "--shard PATH,DIM,AXIS, such as --shard params/w,0,model")
    if not dim.isdigit():
        raise ShardwiseError(f"{text!r}: {dim!r} is no dimension; they are counted from 0")
    return Shard(path, int(dim), axis)


def _keep(text: str) -> Tactic:
    from shardwise.tactics.strategies import Keep

    path, axis = _parts(text, 2, "--keep PATH,AXIS, such as --keep params/w,data")
    return Keep(path, axis)


def _parts(text: str, count: int, form: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != count or not all(parts):
        raise ShardwiseError(f"{text!r} is not understood: write {form}")
    return parts
