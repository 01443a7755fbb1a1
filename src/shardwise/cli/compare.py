"""``shardwise compare``: named strategies and saved plans side by side."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli import options
from shardwise.errors import ShardwiseError


def add_command(commands: Any) -> None:
    """Registers ``compare``."""
    compare = options.add_command(
        commands,
        "compare",
        help="set named strategies (data parallelism, FSDP, Megatron, ...) and saved plans side by side",
        description="Predicts time, memory and communication of every sensible combination of named strategies over the axes "
        "of a mesh, and sets saved plans for the same program beside them, the best first. Nothing runs.",
        examples="""
        shardwise compare zoo:t2b --plans plan.json
        shardwise compare zoo:t2b --topology v5e:4x4 --mesh data=4,model=4
        shardwise compare train.py:make_step --mesh data=8
        """,
    )
    options.add_target(compare)
    options.add_where(compare, " (default: those of the plans)", " (default: that of the plans)")
    options.add_plan(compare, "--plans", nargs="+", default=[], help="plans that Plan.save wrote")
    options.add_tactics(compare, "what an axis may be used for, such as dp,fsdp,megatron+sequence (default: all)")
    options.add_roles(compare)
    compare.add_argument("--all", action="store_true", help="list every combination, and why others do not apply")
    options.add_json(compare)
    options.add_loudness(compare)
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> str:
    from shardwise.cli.targets import load_target, without_devices

    without_devices()
    if arguments.mesh is None and not arguments.plans:
        raise ShardwiseError("say what to compare on: --mesh data=4,model=4, or --plans plan.json, which has one")
    mesh = options.mesh_of(arguments.mesh) if arguments.mesh is not None else None
    target = load_target(arguments.target)
    from shardwise.report.compare import compare
    from shardwise.report.comparison import comparison_text

    compared = compare(
        target.fn,
        *target.args,
        plans=arguments.plans,
        mesh=mesh,
        topology=arguments.topology,
        roles=options.roles(arguments),
        tactics=arguments.tactics,
        donate_argnums=target.donate_argnums or None,
        kwargs=target.kwargs,
    )
    if arguments.json:
        return json.dumps(compared.to_json(), indent=2) + "\n"
    return comparison_text(compared, options.terminal_width(), arguments.all, ("--all lists them", "--all says why"))
