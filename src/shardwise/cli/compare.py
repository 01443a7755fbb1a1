"""``shardwise compare``: named strategies and saved plans side by side."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from typing import TYPE_CHECKING, Any

from shardwise.errors import MeshError, PlanError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.cli.targets import Target
    from shardwise.dims.analysis import Analysis
    from shardwise.hardware.layout import Placement
    from shardwise.plans.plan import Plan


def add_command(commands: Any) -> None:
    """Registers ``compare``."""
    compare = commands.add_parser(
        "compare",
        help="set named strategies (data parallelism, FSDP, Megatron, ...) and saved plans side by side",
        description="Predicts time, memory and communication of every sensible combination of named strategies over the axes "
        "of a mesh, and sets saved plans for the same program beside them, the best first. Nothing runs.",
        epilog="examples:  shardwise compare zoo:t2b --topology v5e:4x4 --mesh data=4,model=4 --plans plan.json   "
        "shardwise compare train.py:make_step --mesh data=8 --batch x --params w --strategies dp,fsdp",
    )
    compare.add_argument("target", metavar="TARGET", help="zoo:NAME[:CONFIG], or file.py:function returning (fn, args)")
    compare.add_argument("--topology", metavar="T", help="devices and links, such as v5e:4x4 or h100:8x4")
    compare.add_argument("--mesh", metavar="AXES", required=True, help="axes and sizes, such as data=4,model=4")
    compare.add_argument("--plans", metavar="PLAN", nargs="+", default=[], help="plans that Plan.save wrote")
    compare.add_argument(
        "--strategies",
        metavar="NAMES",
        help="what an axis may be used for, such as dp,fsdp,megatron+sequence (default: all)",
    )
    compare.add_argument("--batch", metavar="PATH", action="append", help="an argument that is the batch (zoo: known)")
    compare.add_argument("--params", metavar="PATH", action="append", help="one that is parameters (zoo: known)")
    compare.add_argument("--all", action="store_true", help="list every combination, and why others do not apply")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> str:
    # Planning needs shapes only: no accelerator is to be opened, nor its absence complained about.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardwise.cli.plan import terminal_width
    from shardwise.cli.targets import load_target
    from shardwise.cost.local import HardwareCost
    from shardwise.cost.model import CostModel
    from shardwise.cost.structure import Structure
    from shardwise.plans.load import load_plan
    from shardwise.plans.variant import AS_IS
    from shardwise.report.comparison import Comparison, comparison_text, expert_row, plan_row
    from shardwise.tactics.experts import experts
    from shardwise.tactics.tactic import Context

    menu = _menu(arguments.strategies)
    place = _place(arguments.mesh, arguments.topology)
    plans = [(name, load_plan(name)) for name in dict.fromkeys(arguments.plans)]
    target = load_target(arguments.target)
    roles = dict(target.roles)
    roles |= {role: tuple(paths) for role in ("batch", "params") if (paths := getattr(arguments, role))}
    if not roles:
        raise ShardwiseError("say which arguments are the batch and the parameters: --batch PATH --params PATH")
    analysis = _analyzed(target, AS_IS)
    problems = [problem for name, made in plans for problem in _problems(name, made, target, analysis, place)]
    if problems:
        raise PlanError("\n".join(problems))
    cost = HardwareCost(place)
    context = Context(analysis, place.mesh, cost, roles)
    for role in roles:
        context.role(role, "compare")  # a wrong path is one error, not one of every strategy
    found = experts(context, CostModel(Structure.of(analysis), cost), menu)
    compared = Comparison(
        analysis.program.name,
        str(place.mesh),
        place.topology.text,
        cost.profile.usable_bytes,
        (
            *(plan_row(name, made, str(place.mesh)) for name, made in plans),
            *(expert_row(e) for e in found if e.applies),
        ),
        tuple((e.name, e.reason) for e in found if not e.applies),
    )
    if arguments.json:
        return json.dumps(compared.to_json(), indent=2) + "\n"
    return comparison_text(compared, terminal_width(), arguments.all)


def _menu(text: str | None) -> list[tuple[str, ...]]:
    """What an axis may be used for, from ``dp,megatron+sequence``."""
    from shardwise.tactics.experts import MENU, PARTS

    if text is None:
        return list(MENU)
    menu = [tuple(part.strip() for part in option.split("+")) for option in text.split(",")]
    for part in (part for option in menu for part in option):
        if part not in PARTS:
            near = difflib.get_close_matches(part, PARTS, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ShardwiseError(f"no strategy is called {part!r}{hint} There are {', '.join(PARTS)}")
    return list(dict.fromkeys(menu))


def _place(mesh: str, topology: str | None) -> Placement:
    from shardwise.cli.plan import mesh_of
    from shardwise.hardware.layout import ideal, place
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.hardware.topology import topology as topology_of

    sizes = mesh_of(mesh)
    if None in sizes.values():
        raise MeshError(f"{mesh}: strategies are compared on one mesh, give all its sizes")
    axes = MeshAxes.of(sizes)
    return ideal(axes) if topology is None else place(axes, topology_of(topology))


def _analyzed(target: Target, variant: Any) -> Analysis:
    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions
    from shardwise.dims.analysis import analyze_program
    from shardwise.rewrite.variants import trace_variant

    options = JitOptions(donate_argnums=target.donate_argnums or None)
    return analyze_program(lower(trace_variant(target.fn, target.args, target.kwargs, options, variant)))


def _problems(name: str, made: Plan, target: Target, analysis: Analysis, place: Placement) -> list[str]:
    """Why a saved plan cannot stand beside the others."""
    from shardwise.plans.variant import AS_IS
    from shardwise.rewrite.fingerprint import fingerprint

    here = {analysis.program.values[a.value].path: analysis.program.values[a.value] for a in analysis.program.arguments}
    for array in made.arguments:
        own = here.get(array.path)
        if own is None:
            return [f"{name} is a plan for another program: {array.path} is no argument of {target.name}"]
        if own.shape != array.shape or own.dtype != array.dtype:
            theirs, ours = f"{array.dtype}{list(array.shape)}", f"{own.dtype}{list(own.shape)}"
            return [f"{name} is a plan for other shapes: {array.path} is {theirs} there and {ours} here"]
    program = (analysis if made.variant == AS_IS else _analyzed(target, made.variant)).program
    if fingerprint(program) != made.fingerprint:
        return [f"{name} was made for another version of {made.function} (other code or JAX version): plan again"]
    if made.predicted.hardware != place.topology.text:
        return [f"{name} is a plan for {made.predicted.hardware}, and this is about {place.topology.text}"]
    return []
