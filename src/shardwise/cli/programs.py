"""Commands about programs: ``plan``, ``tune``, ``inspect``, ``compare`` and ``zoo``."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.cli import options
from shardwise.cli.options import Result, argument, flag
from shardwise.cli.targets import load_target
from shardwise.errors import PlanError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

_REMAT: Final = {"yes": True, "no": None, "gathers": "gathers", "auto": "auto"}
_OFFLOAD: Final = {"yes": True, "no": None, "auto": "auto"}
_INTERRUPTED: Final = 130


def _count(text: str) -> int | str:
    return int(text) if text.isdigit() else text


_PLANNING: Final = (
    options.target(),
    *options.mesh(" (default: the devices of JAX)", "; a size of ? is searched (default: all are)"),
    argument("--budget", dest="budget_s", metavar="SECONDS", type=float, help="the longest time that the search takes"),
    argument("--evaluations", dest="budget_evals", metavar="N", type=int, help="the most states that are evaluated"),
    argument("--seed", metavar="N", type=int, help="seed of the search"),
    argument("--objective", metavar="O", help="what to minimize: time (default), memory or devices"),
    argument("--step-time", dest="step_time_s", metavar="SECONDS", type=float, help="a limit for the other objectives"),
    argument("--memory-limit", metavar="SIZE", help="the memory of a device that may be used, such as 12GiB"),
    argument("--tactics", metavar="NAMES", help="tactics in order, such as fsdp:data,auto:model (default: auto)"),
    *options.ROLES,
    argument("--microbatches", metavar="N", default="auto", type=_count, help="micro-batches (default: as few as fit)"),
    argument("--pipeline", metavar="N", type=_count, help="stages of a pipeline, or auto (default: none)"),
    argument(
        "--remat",
        choices=tuple(_REMAT),
        default="auto",
        help="rematerialize layers, or gathered parameters alone (default: if needed to fit, or faster)",
    ),
    argument(
        "--offload",
        choices=tuple(_OFFLOAD),
        default="auto",
        help="keep the optimizer's stacked state in the memory of the host (default: if needed to fit)",
    ),
    flag("--allow-infeasible", "return the smallest plan if none fits"),
    argument("--output", metavar="FILE.json", type=Path, help="save the plan there"),
    argument("--report", metavar="FILE.html", type=Path, help="write the plan as a page to open in a browser"),
    flag("--all", "list every argument and collective"),
    flag("--json", "print the plan as JSON"),
    options.QUIET,
    flag("--verbose", "a line for each improvement; the full traceback where something fails"),
)


@options.command("plan", *_PLANNING)
def _plan(arguments: argparse.Namespace) -> Result:
    """Find how a program is best split over devices.

    Searches for the fastest plan that fits the devices' memory. Nothing is compiled and nothing runs; no device
    is needed.

      shardwise plan zoo:t7b:7b,remat --topology v5p:2x2x2
      shardwise plan train.py:make_step --mesh data=4,model=8 --output plan.json
      shardwise plan zoo:t2b --mesh data=4,model=4 --tactics fsdp:data,auto:model
      shardwise plan zoo:t2b --topology v5e:4x8 --objective devices --step-time 2
    """
    from shardwise.planner.planning import plan

    return _planned(arguments, plan)


def _planned(arguments: argparse.Namespace, plan: Callable[..., Plan], **more: Any) -> Result:
    from shardwise.files import check_writable

    for file in filter(None, (arguments.output, arguments.report)):
        check_writable(file, PlanError)
    from shardwise.report.plan_text import plan_page
    from shardwise.report.progress import ProgressLine
    from shardwise.search.run import Ended

    target = load_target(arguments.target)
    names = (
        "mesh topology tactics budget_s budget_evals seed objective step_time_s memory_limit pipeline "
        "allow_infeasible".split()
    )
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    values |= {
        "roles": options.roles(arguments),
        "remat": _REMAT[arguments.remat],
        "offload": _OFFLOAD[arguments.offload],
    }
    values["microbatches"] = None if arguments.microbatches == 1 else arguments.microbatches
    with ProgressLine(not arguments.quiet, lines=arguments.verbose) as show:
        planned = plan(target.fn, *target.args, **target.options, **values, **more, progress=show)
    if arguments.output is not None:
        planned.save(arguments.output)
    if arguments.report is not None:
        planned.report(arguments.report, arguments.typed, arguments.target)
    if arguments.json:
        text = planned.to_json()
    else:
        text = plan_page(planned, options.width(), arguments.all).text(options.colored())
        if arguments.topology is None:
            text += f"\nNo --topology was given: this is for {planned.predicted.hardware}.\n"
            text += "  --topology v5e:4x4 plans for 16 TPU chips, h100:8 for 8 GPUs\n"
        text += _next(arguments)
    return text, _INTERRUPTED if planned.search is not None and planned.search.ended is Ended.INTERRUPTED else 0


@options.command(
    "tune",
    *_PLANNING,
    argument("--finalists", metavar="N", type=int, default=6, help="how many plans are compiled or run (default: 6)"),
    argument("--jobs", metavar="N", type=int, help="how many compile at once (default: half as many as cores)"),
    argument("--judge", metavar="J", default="auto", help="compiler, devices or auto (default)"),
    argument(
        "--cache", metavar="FOLDER", type=Path, help="results of earlier compiles (default: the user's cache folder)"
    ),
    accelerators=True,
)
def _tune(arguments: argparse.Namespace) -> Result:
    """Search, then compile or run the best few plans.

    The best of them is kept. The TPU compiler needs no TPU. With --judge devices the plans run on the devices of JAX.

      shardwise tune zoo:mlp --topology v5e:4x4 --finalists 4
    """
    if arguments.judge != "devices":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardwise.tuning.tune import tune

    return _planned(
        arguments, tune, **{name: getattr(arguments, name) for name in ("finalists", "jobs", "judge", "cache")}
    )


def _next(arguments: argparse.Namespace) -> str:
    """Returns text with the files that were written, and what to do next."""
    text = f"\nPage: {arguments.report}\n" if arguments.report is not None else ""
    if arguments.output is not None:
        plan = str(arguments.output)
        commands = (["code", plan], ["verify", plan, arguments.target])
        return f"{text}\nSaved. Next:\n" + "".join(f"  {shlex.join(['shardwise', *words])}\n" for words in commands)
    hints = {
        "output": "--output plan.json    keeps the plan, for shardwise code, explain and verify",
        "report": "--report plan.html    draws it, as a page for the browser",
        "all": "--all                 lists every array and collective",
    }
    return f"{text}\nNext:\n" + "".join(f"  {hint}\n" for name, hint in hints.items() if not getattr(arguments, name))


@options.command(
    "inspect",
    options.target(),
    flag("--all", "also list groups that do not matter (loops, dimensions that stay replicated)"),
    argument("--why", nargs=2, metavar=("A", "B"), help="what ties two dimensions together, each as PATH:DIM"),
    flag("--program", "print the captured program with its rules instead"),
    flag("--json", "print the analysis as JSON"),
    options.VERBOSE,
)
def _inspect(arguments: argparse.Namespace) -> Result:
    """Show what can be sharded in a program.

    Lists colors, groups, conflicts (where sharding is ambiguous) and opaque operations. Nothing runs.

      shardwise inspect zoo:t2b
      shardwise inspect train.py:make_step --why params/w1:0 batch:1
    """
    from shardwise.dims.analysis import analyze
    from shardwise.ir.program import format_program
    from shardwise.report.inspection import analysis_page

    target = load_target(arguments.target)
    analysis = analyze(target.fn, *target.args, **target.options)
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


@options.command(
    "compare",
    options.target(),
    *options.mesh(" (default: those of the plans)", " (default: that of the plans)"),
    options.saved_plan("--plans", nargs="+", default=[], help="plans that Plan.save wrote"),
    argument("--tactics", metavar="NAMES", help="uses of an axis, such as dp,megatron+sequence (default: all)"),
    *options.ROLES,
    flag("--all", "list every combination, and why others do not apply"),
    options.JSON,
    options.VERBOSE,
)
def _compare(arguments: argparse.Namespace) -> Result:
    """Compare named strategies (FSDP, Megatron, ...) and saved plans.

    Predicts time, memory and communication of every sensible combination of strategies over the axes of a mesh, and
    of saved plans beside them. Nothing runs.

      shardwise compare zoo:t2b --plans plan.json
      shardwise compare zoo:t2b --topology v5e:4x4 --mesh data=4,model=4
      shardwise compare train.py:make_step --mesh data=8
    """
    target = load_target(arguments.target)
    from shardwise.report.compare import compare, comparison_text

    values = {name: getattr(arguments, name) for name in ("plans", "mesh", "topology", "tactics")}
    compared = compare(target.fn, *target.args, **target.options, **values, roles=options.roles(arguments))
    return compared.to_json() if arguments.json else comparison_text(compared, options.width(), arguments.all)


@options.command("zoo", options.JSON)
def _zoo(arguments: argparse.Namespace) -> Result:
    """List the programs that come with Shardwise.

    The default configuration of each is the first. A target is zoo:NAME or zoo:NAME:CONFIG, and may go on with
    options: zoo:gpt:tiny,layers=3,remat.

      shardwise inspect zoo:llama3:70b
    """
    from shardwise import zoo

    programs = [{"name": n, "configs": zoo.configs(n), "description": zoo.description(n)} for n in zoo.names()]
    if arguments.json:
        return {"schema": 1, "programs": programs}
    return "".join(f"{p['name']:8} {' '.join(p['configs'])}\n         {p['description']}\n" for p in programs)
