"""Commands about programs: ``plan``, ``inspect``, ``compare`` and ``zoo``."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any, Final

from shardwise.cli import options
from shardwise.cli.options import Result
from shardwise.cli.targets import load_target
from shardwise.errors import PlanError, ShardwiseError

_REMAT: Final = {"yes": True, "no": None, "auto": "auto"}
_INTERRUPTED: Final = 130


def add_plan(commands: Any) -> None:
    plan = options.add_command(commands, "plan", _plan)
    options.add_target(plan)
    options.add_mesh(plan, "", "; a size of ? is searched (default: all are)")
    plan.add_argument("--budget", dest="budget_s", metavar="SECONDS", type=float, help="how long the search may take")
    help = "how many states it may evaluate: the same plan on every machine"
    plan.add_argument("--evaluations", dest="budget_evals", metavar="N", type=int, help=help)
    plan.add_argument("--seed", metavar="N", type=int, help="of the search")
    plan.add_argument(
        "--tactics",
        metavar="NAMES",
        help="tactics in order, such as fsdp:data,auto:model or fsdp:data+model (default: auto, a search)",
    )
    options.add_roles(plan)
    help = "number of micro-batches (default: as few as fit in memory)"
    plan.add_argument("--microbatches", metavar="N", default="auto", type=_count, help=help)
    help = "rematerialize the bodies of loops and repeated blocks (default auto: if nothing fits otherwise)"
    plan.add_argument("--remat", choices=tuple(_REMAT), default="auto", help=help)
    plan.add_flag("--allow-infeasible", help="give the smallest plan where none fits")
    plan.add_argument("--output", metavar="FILE.json", type=Path, help="save the plan there")
    help = "write the plan as a page to open in a browser"
    plan.add_argument("--report", metavar="FILE.html", type=Path, help=help)
    plan.add_flag("--all", help="list every argument and collective")
    options.add_json(plan, "the plan as JSON")
    options.add_loudness(plan, "a line for each improvement, terminal or not")


def _plan(arguments: argparse.Namespace) -> Result:
    """Find how a program is best split over devices.

    Searches for the fastest plan that fits the devices' memory. Nothing is compiled and nothing runs; no device
    is needed.

      shardwise plan zoo:t7b:7b,remat --topology v5p:2x2x2
      shardwise plan train.py:make_step --mesh data=4,model=8 --output plan.json
      shardwise plan zoo:t2b --mesh data=4,model=4 --tactics fsdp:data,auto:model
    """
    from shardwise.files import check_writable

    if arguments.topology is None and arguments.mesh is None:
        raise ShardwiseError("say what to plan for: --topology v5e:4x4, or --mesh data=4,model=4, or both")
    for file in filter(None, (arguments.output, arguments.report)):
        check_writable(file, PlanError)
    from shardwise.planner.planning import plan
    from shardwise.report.plan_text import plan_page
    from shardwise.report.progress import ProgressLine
    from shardwise.search.result import Ended

    target = load_target(arguments.target)
    names = ("mesh", "topology", "tactics", "budget_s", "budget_evals", "seed")
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    with ProgressLine(not arguments.quiet, lines=arguments.verbose) as show:
        planned = plan(
            target.fn,
            *target.args,
            **values,
            progress=show,
            allow_infeasible=arguments.allow_infeasible,
            roles=options.roles(arguments),
            microbatches=None if arguments.microbatches == 1 else arguments.microbatches,
            remat=_REMAT[arguments.remat],
            donate_argnums=target.donate_argnums or None,
            kwargs=target.kwargs,
        )
    if arguments.output is not None:
        planned.save(arguments.output)
    if arguments.report is not None:
        planned.report(arguments.report)
    if arguments.json:
        text = planned.to_json()
    else:
        text = plan_page(planned, options.width(), arguments.all).text()
        if arguments.topology is None:
            text += f"\nNo --topology was given: this is for {planned.predicted.hardware}.\n"
        text += _next(arguments)
    return text, _INTERRUPTED if planned.search is not None and planned.search.ended is Ended.INTERRUPTED else 0


def _next(arguments: argparse.Namespace) -> str:
    """The files that were written, and what to do next."""
    text = f"\nDrawn in {arguments.report}\n" if arguments.report is not None else ""
    if arguments.output is not None:
        return (
            f"{text}\nsaved; next:\n  {shlex.join(['shardwise', 'verify', str(arguments.output), arguments.target])}\n"
        )
    hints = {"output": "--output plan.json saves it", "report": "--report plan.html draws it", "all": "--all lists all"}
    return f"{text}\nnext: {', '.join(hint for option, hint in hints.items() if not getattr(arguments, option))}\n"


def _count(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def add_inspect(commands: Any) -> None:
    inspect = options.add_command(commands, "inspect", _inspect)
    options.add_target(inspect)
    inspect.add_flag("--all", help="list also groups that do not matter (loops, dimensions that stay replicated)")
    help = "show what ties two dimensions together, each as PATH:DIM (params/w1:0)"
    inspect.add_argument("--why", nargs=2, metavar=("A", "B"), help=help)
    inspect.add_flag("--program", help="print the captured program with its rules instead")
    options.add_json(inspect, "the analysis as JSON")
    options.add_loudness(inspect)


def _inspect(arguments: argparse.Namespace) -> Result:
    """Show what can be sharded in a program, and where that is ambiguous.

    Shows what can be sharded in a program: colors, groups, conflicts, opaque operations. Nothing runs.

      shardwise inspect zoo:t2b
      shardwise inspect train.py:make_step --why params/w1:0 batch:1
    """
    from shardwise.dims.analysis import analyze
    from shardwise.ir.program import format_program
    from shardwise.report.inspection import analysis_page

    target = load_target(arguments.target)
    donated = target.donate_argnums or None
    analysis = analyze(target.fn, *target.args, donate_argnums=donated, kwargs=target.kwargs)
    if arguments.why:
        (path_a, dim_a), (path_b, dim_b) = map(_dimension, arguments.why)
        return f"{analysis.why(path_a, dim_a, path_b, dim_b)}\n"
    if arguments.program:
        return format_program(analysis.program, sources=True) + "\n"
    return analysis.to_json() if arguments.json else analysis_page(analysis, options.width(), arguments.all).text()


def _dimension(text: str) -> tuple[str, int]:
    path, colon, dim = text.rpartition(":")
    if not colon or not dim.lstrip("-").isdigit():
        raise ShardwiseError(f"{text!r} is no dimension: write PATH:DIM, for example params/w1:0")
    return path, int(dim)


def add_compare(commands: Any) -> None:
    compare = options.add_command(commands, "compare", _compare)
    options.add_target(compare)
    options.add_mesh(compare, " (default: those of the plans)", " (default: that of the plans)")
    options.add_plan(compare, "--plans", nargs="+", default=[], help="plans that Plan.save wrote")
    compare.add_argument(
        "--tactics",
        metavar="NAMES",
        help="what an axis may be used for, such as dp,fsdp,megatron+sequence (default: all)",
    )
    options.add_roles(compare)
    compare.add_flag("--all", help="list every combination, and why others do not apply")
    options.add_json(compare)
    options.add_loudness(compare)


def _compare(arguments: argparse.Namespace) -> Result:
    """Set named strategies (data parallelism, FSDP, Megatron, ...) and saved plans side by side.

    Predicts time, memory and communication of every sensible combination of named strategies over the axes of a
    mesh, and sets saved plans for the same program beside them, the best first. Nothing runs.

      shardwise compare zoo:t2b --plans plan.json
      shardwise compare zoo:t2b --topology v5e:4x4 --mesh data=4,model=4
      shardwise compare train.py:make_step --mesh data=8
    """
    target = load_target(arguments.target)
    from shardwise.report.compare import compare, comparison_text

    compared = compare(
        target.fn,
        *target.args,
        plans=arguments.plans,
        mesh=arguments.mesh,
        topology=arguments.topology,
        roles=options.roles(arguments),
        tactics=arguments.tactics,
        donate_argnums=target.donate_argnums or None,
        kwargs=target.kwargs,
    )
    return compared.to_json() if arguments.json else comparison_text(compared, options.width(), arguments.all)


def add_zoo(commands: Any) -> None:
    zoo = options.add_command(commands, "zoo", _zoo)
    options.add_json(zoo)


def _zoo(arguments: argparse.Namespace) -> Result:
    """List the programs that come with Shardwise.

    Lists the programs that come with Shardwise, and the configurations of each, the default first. A target is
    zoo:NAME or zoo:NAME:CONFIG, and may go on with options: zoo:gpt:tiny,layers=3,remat.

      shardwise inspect zoo:llama3:70b
    """
    from shardwise import zoo

    programs = [{"name": n, "configs": zoo.configs(n), "description": zoo.description(n)} for n in zoo.names()]
    if arguments.json:
        return {"schema": 1, "programs": programs}
    return "".join(f"{p['name']:8} {' '.join(p['configs'])}\n         {p['description']}\n" for p in programs)


COMMANDS: Final = (add_plan, add_inspect, add_compare, add_zoo)
