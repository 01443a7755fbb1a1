"""``shardwise plan``: a program and devices in, a plan out."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ShardwiseError
from shardwise.report.units import seconds

if TYPE_CHECKING:
    from shardwise.search.result import Improvement


def add_command(commands: Any) -> None:
    """Registers ``plan``."""
    plan = commands.add_parser(
        "plan",
        help="find how a program is best split over devices",
        description="Searches for the fastest plan that fits the devices' memory. Nothing is compiled and nothing runs; no "
        "device is needed.",
        epilog="examples:  shardwise plan zoo:t7b:7b,remat --topology v5p:2x2x2   "
        "shardwise plan train.py:make_step --topology h100:8x4 --mesh data=4,model=8 --output plan.json",
    )
    plan.add_argument("target", metavar="TARGET", help="zoo:NAME[:CONFIG], or file.py:function returning (fn, args)")
    plan.add_argument("--topology", metavar="T", help="devices and links, such as v5e:4x4 or h100:8x4")
    plan.add_argument(
        "--mesh",
        metavar="AXES",
        help="axes and sizes, such as data=4,model=4; a size of ? is searched (default: all are)",
    )
    plan.add_argument("--budget", metavar="SECONDS", type=float, help="how long the search may take")
    plan.add_argument(
        "--evaluations", metavar="N", type=int, help="how many states it may look at: the same plan anywhere"
    )
    plan.add_argument("--seed", metavar="N", type=int, default=0, help="of the search (default 0)")
    plan.add_argument(
        "--method", metavar="NAME", default="mcts", help="mcts (default), beam, greedy, random, exhaustive, ilp"
    )
    plan.add_argument(
        "--workers", metavar="N", type=int, default=1, help="processes that search side by side (default 1)"
    )
    plan.add_argument("--allow-infeasible", action="store_true", help="give the smallest plan where none fits")
    plan.add_argument("--output", metavar="FILE.json", type=Path, help="save the plan there")
    plan.add_argument("--report", metavar="FILE.html", type=Path, help="write the plan as a page to open in a browser")
    plan.add_argument("--all", action="store_true", help="list every argument, constraint and collective")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--quiet", action="store_true", help="no progress")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> str:
    # Planning needs shapes only: no accelerator is to be opened, nor its absence complained about.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments.topology is None and arguments.mesh is None:
        raise ShardwiseError("say what to plan for: --topology v5e:4x4, or --mesh data=4,model=4, or both")
    mesh = mesh_of(arguments.mesh) if arguments.mesh is not None else None
    from shardwise.cli.targets import load_target
    from shardwise.rewrite.planning import plan

    target = load_target(arguments.target)
    show = Progress(not arguments.quiet and sys.stderr is not None and sys.stderr.isatty())
    donate: dict[str, Any] = {"donate_argnums": target.donate_argnums} if target.donate_argnums else {}
    try:
        made = plan(
            target.fn,
            *target.args,
            mesh=mesh,
            topology=arguments.topology,
            budget_s=arguments.budget,
            budget_evals=arguments.evaluations,
            seed=arguments.seed,
            method=arguments.method,
            workers=arguments.workers,
            progress=show,
            allow_infeasible=arguments.allow_infeasible,
            **donate,
            **target.kwargs,
        )
    finally:
        show.end()
    if arguments.output is not None:
        made.save(arguments.output)
    if arguments.report is not None:
        made.report(arguments.report)
    if arguments.json:
        return made.to_json()
    from shardwise.report.plan_text import plan_text
    from shardwise.report.summary import summary_text

    width = terminal_width()
    text = plan_text(made, width) if arguments.all else summary_text(made, width)
    return text + _next(arguments)


def _next(arguments: argparse.Namespace) -> str:
    if arguments.output is None:
        return "\nnext: --output plan.json saves it, --report plan.html draws it, --all lists all\n"
    backend = arguments.topology or "host"
    return f"\nsaved; next: shardwise verify {arguments.output} {arguments.target} --backend {backend}\n"


def mesh_of(text: str) -> dict[str, int | None]:
    """
    >>> mesh_of("data=4,model=?")
    {'data': 4, 'model': None}
    """
    found: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not name or not (size == "?" or size.isdigit()) or name in found:
            raise ShardwiseError(f"{text!r} is no mesh: write axes and sizes, such as data=4,model=4 or data=?,model=4")
        found[name] = None if size == "?" else int(size)
    return found


def terminal_width() -> int:
    """The terminal's width between 80 and 120 columns; 80 where there is none."""
    try:
        return min(max(os.get_terminal_size(1).columns, 80), 120)
    except OSError:
        return 80


class Progress:
    """One line on the terminal that is written over: the best so far."""

    def __init__(self, shown: bool):
        self._shown, self._open = shown, False

    def __call__(self, improvement: Improvement, share: float) -> None:
        if not self._shown:
            return
        best = improvement.best.cost
        done = "#" * round(20 * share) + "." * (20 - round(20 * share))
        figures = f"best {seconds(best.time_s)}, {best.peak_bytes / 2**30:.1f} GiB"
        text = f"[{done}] {improvement.evaluations:,} evaluated, {figures}"
        sys.stderr.write(f"\r{text:<79}")
        sys.stderr.flush()
        self._open = True

    def end(self) -> None:
        if self._open:
            sys.stderr.write(f"\r{'':<79}\r")
            sys.stderr.flush()
            self._open = False
