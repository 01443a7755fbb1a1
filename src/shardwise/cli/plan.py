"""``shardwise plan``: a program and devices in, a plan out."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.cli import completers, options
from shardwise.cli.answer import Answer
from shardwise.errors import InfeasibleError, PlanError, ShardwiseError, VariantError

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

#: What the arguments of ``shardwise.plan`` that its errors name are called here.
_AS_OPTIONS: Final = (
    "on the command line: --remat yes, --microbatches N, --topology T, --allow-infeasible, --batch PATH, --params PATH"
)
_REMAT: Final = {"yes": True, "no": None, "auto": "auto"}
_INTERRUPTED: Final = 130
_METHODS: Final = ("mcts", "beam", "greedy", "random", "exhaustive")


def add_command(commands: Any) -> None:
    """Registers ``plan``."""
    plan = options.add_command(
        commands,
        "plan",
        help="find how a program is best split over devices",
        description="Searches for the fastest plan that fits the devices' memory. Nothing is compiled and nothing runs; no "
        "device is needed.",
        examples="""
        shardwise plan zoo:t7b:7b,remat --topology v5p:2x2x2
        shardwise plan train.py:make_step --mesh data=4,model=8 --output plan.json
        shardwise plan zoo:t2b --mesh data=4,model=4 --tactics fsdp:data,auto:model
        """,
    )
    options.add_target(plan)
    options.add_where(plan, "", "; a size of ? is searched (default: all are)")
    plan.add_argument("--budget", metavar="SECONDS", type=float, help="how long the search may take")
    plan.add_argument(
        "--evaluations", metavar="N", type=int, help="how many states it may look at: the same plan anywhere"
    )
    plan.add_argument("--seed", metavar="N", type=int, default=0, help="of the search (default 0)")
    shown = f"{_METHODS[0]} (default), {', '.join(_METHODS[1:])}"
    method = plan.add_argument("--method", metavar="NAME", default=_METHODS[0], help=shown)
    options.completed(method, completers.words(*_METHODS))
    options.add_tactics(
        plan, "tactics in order, such as fsdp:data,auto:model or fsdp:data+model (default: auto, a search)"
    )
    options.add_roles(plan)
    shown = "number of micro-batches (default: as few as fit in memory)"
    plan.add_argument("--microbatches", metavar="N", type=_count, help=shown)
    shown = "compute inside loops again what would be kept (default auto: where it takes that to fit)"
    plan.add_argument("--remat", choices=tuple(_REMAT), default="auto", help=shown)
    plan.add_argument("--allow-infeasible", action="store_true", help="give the smallest plan where none fits")
    output = plan.add_argument("--output", metavar="FILE.json", type=Path, help="save the plan there")
    options.completed(output, completers.files("json"))
    shown = "write the plan as a page to open in a browser"
    report = plan.add_argument("--report", metavar="FILE.html", type=Path, help=shown)
    options.completed(report, completers.files("html"))
    plan.add_argument("--all", action="store_true", help="list every argument, constraint and collective")
    options.add_json(plan, "the plan as JSON")
    options.add_loudness(plan, "a line for each improvement, terminal or not")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> str | Answer:
    from shardwise.cli.targets import load_target, without_devices
    from shardwise.files import check_writable

    without_devices()
    if arguments.topology is None and arguments.mesh is None:
        raise ShardwiseError("say what to plan for: --topology v5e:4x4, or --mesh data=4,model=4, or both")
    mesh = options.mesh_of(arguments.mesh) if arguments.mesh is not None else None
    for file in (arguments.output, arguments.report):
        if file is not None:
            check_writable(file, PlanError)
    from shardwise.planner.planning import plan
    from shardwise.report.progress import ProgressLine
    from shardwise.search.result import Ended

    target = load_target(arguments.target)
    parts = "auto" if arguments.microbatches is None else arguments.microbatches
    donate: dict[str, Any] = {"donate_argnums": target.donate_argnums} if target.donate_argnums else {}
    try:
        with ProgressLine(not arguments.quiet, lines=arguments.verbose) as show:
            made = plan(
                target.fn,
                *target.args,
                mesh=mesh,
                topology=arguments.topology,
                tactics=arguments.tactics,
                budget_s=arguments.budget,
                budget_evals=arguments.evaluations,
                seed=arguments.seed,
                method=arguments.method,
                progress=show,
                allow_infeasible=arguments.allow_infeasible,
                roles=options.roles(arguments),
                microbatches=None if parts == 1 else parts,
                remat=_REMAT[arguments.remat],
                **donate,
                kwargs=target.kwargs,
            )
    except (InfeasibleError, VariantError) as error:
        raise type(error)(f"{error}\n{_AS_OPTIONS}") from None
    if arguments.output is not None:
        made.save(arguments.output)
    if arguments.report is not None:
        made.report(arguments.report)
    text = made.to_json() if arguments.json else _text(arguments, made)
    short = made.search is not None and made.search.ended is Ended.INTERRUPTED
    return Answer(text, _INTERRUPTED) if short else text


def _text(arguments: argparse.Namespace, made: Plan) -> str:
    from shardwise.report.plan_text import plan_text

    width = options.terminal_width()
    text = plan_text(made, width) if arguments.all else made.summary(width)
    if arguments.topology is None:
        text += "\nNo --topology was given: this is for TPU v5e chips, a row of links an axis.\n"
    if arguments.report is not None:
        text += f"\nDrawn in {arguments.report}\n"
    return text + _next(arguments)


def _count(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _next(arguments: argparse.Namespace) -> str:
    if arguments.output is None:
        hints = {
            "output": "--output plan.json saves it",
            "report": "--report plan.html draws it",
            "all": "--all lists all",
        }
        return f"\nnext: {', '.join(hint for option, hint in hints.items() if not getattr(arguments, option))}\n"
    command = ["shardwise", "verify", str(arguments.output), arguments.target, *_backend(arguments.topology)]
    return f"\nsaved; next:\n  {shlex.join(command)}\n"


def _backend(text: str | None) -> list[str]:
    """What it can be compiled for without the devices: a TPU slice, and else the host."""
    from shardwise.hardware.topology import topology

    where = topology(text) if text is not None else None
    if where is None or "*" in where.text or not any(tier.kind == "torus" for tier in where.profile.links):
        return []
    return ["--backend", where.text]
