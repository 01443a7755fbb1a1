"""Commands about saved plans: ``explain``, ``what-if``, ``diff``, ``verify``, ``code`` and ``report``."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardwise.cli import options
from shardwise.cli.options import Result, argument, flag
from shardwise.cli.targets import load_target
from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

#: Of an argument that can be repeated.
_MANY: Final[dict[str, Any]] = {"action": "append", "default": []}


def _loaded(arguments: argparse.Namespace, target: str | None) -> Plan:
    """Returns the saved plan, bound to its target if there is one."""
    from shardwise.plans.load import load_plan

    plan = load_plan(arguments.plan)
    if target is None:
        return plan
    loaded = load_target(target)
    return plan.bind(loaded.fn, *loaded.args, kwargs=loaded.kwargs)


@options.command(
    "explain",
    options.saved_plan(),
    argument("path", metavar="PATH", help="an argument or output by its path, or by the end of it; not with --program"),
    options.target("with it also what each decision is worth, and the lines of the device-local program"),
    flag("--program", "print the device-local program of TARGET: local shapes, collectives, source lines"),
    options.JSON,
)
def _explain(arguments: argparse.Namespace) -> Result:
    """Say how one array of a saved plan is sharded, and why.

    Shows the decisions behind it and the collectives it causes, with the source lines that need them.

      shardwise explain plan.json params/first/kernel
      shardwise explain plan.json params/first/kernel zoo:mlp
      shardwise explain plan.json zoo:mlp --program
    """
    from shardwise.report.program_text import program_data
    from shardwise.units import wrapped

    if arguments.program:
        if arguments.target is not None:
            arguments.parser.error("--program prints the complete program: leave PATH out")
        plan = _loaded(arguments, arguments.path)
        if not arguments.json:
            return plan.program(options.width())
        return {"schema": 1, "mesh": plan.mesh.shape, **program_data(plan.inquiry.analysis.program, plan.sharded)}
    plan = _loaded(arguments, arguments.target)
    text, array = plan.explain(arguments.path), plan.array(arguments.path)
    if not arguments.json:
        return wrapped(text, options.width())
    return {
        "schema": 1,
        "mesh": plan.mesh.shape,
        **asdict(array),
        "collectives": [asdict(c) for c in plan.collectives if c.value == array.path],
        "notes": [note for note in plan.notes if note.startswith(f"{array.path}[")],
        "explained": text.splitlines(),
    }


@options.command(
    "what-if",
    options.saved_plan(),
    options.target(),
    argument("--without", metavar="DECISION", **_MANY, help="a decision to leave out: its number, or words of it"),
    argument("--shard", metavar="PATH,DIM,AXIS", **_MANY, help="give a dimension, and all of its color, a mesh axis"),
    argument("--keep", metavar="PATH,AXIS", **_MANY, help="store an argument replicated on an axis"),
    argument("--tactics", metavar="NAMES", help="tactics to apply after the plan's decisions, such as megatron:model"),
    argument("--topology", metavar="T", help="other devices for the same mesh, such as v5p:4x4"),
    options.JSON,
    options.VERBOSE,
)
def _what_if(arguments: argparse.Namespace) -> Result:
    """Predict a saved plan with other decisions.

    Says what time and memory would be without some decisions, with others, or on other devices, and why they
    differ. Nothing is searched.

      shardwise what-if plan.json zoo:t2b --without 2
      shardwise what-if plan.json train.py:make_step --shard params/w,0,model
      shardwise what-if plan.json zoo:t2b --topology v5p:4x4
    """
    changed = arguments.without or arguments.tactics or arguments.shard or arguments.keep or arguments.topology
    plan = _loaded(arguments, arguments.target if changed else None)
    if not changed:
        decisions = "".join(f"\n  {k}. {text}" for k, text in enumerate(plan.choices, 1))
        raise ShardwiseError(
            f"say what to change: --without, --tactics, --shard, --keep or --topology; the decisions are:{decisions}"
        )
    from shardwise.report.difference import what_if_text
    from shardwise.tactics.strategies import Keep, Shard

    tactics: list[Any] = [arguments.tactics] if arguments.tactics else []
    for text in arguments.shard:
        path, dim, axis = _parts(text, 3, "--shard PATH,DIM,AXIS, such as --shard params/w,0,model")
        if not dim.isdigit():
            raise ShardwiseError(f"{text!r}: {dim!r} is no dimension; they are counted from 0")
        tactics.append(Shard(path, int(dim), axis))
    tactics += [Keep(*_parts(text, 2, "--keep PATH,AXIS, such as --keep params/w,data")) for text in arguments.keep]
    without = [int(text) if text.isdigit() else text for text in arguments.without]
    asked = plan.what_if(*tactics, without=without, topology=arguments.topology)
    return asked.to_json() if arguments.json else what_if_text(asked, options.width())


def _parts(text: str, count: int, form: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != count or not all(parts):
        raise ShardwiseError(f"{text!r} is not understood: write {form}")
    return parts


@options.command(
    "diff", options.saved_plan("one", "A"), options.saved_plan("other", "B", help="another"), options.JSON, trouble=2
)
def _diff(arguments: argparse.Namespace) -> Result:
    """Say what differs between two saved plans.

    Compares predicted figures, mesh, decisions, specs and bytes moved. As with diff, the exit code is 0 if they
    are the same, 1 if they differ, 2 if there was trouble.

      shardwise diff before.json after.json
    """
    from shardwise.plans.load import load_plan
    from shardwise.report.difference import difference_data, difference_text

    names = arguments.one, arguments.other
    one, other = map(load_plan, names)
    data = difference_data(one, other)
    return data if arguments.json else difference_text(one, other, names, options.width()), 1 - data["same"]


@options.command(
    "verify",
    options.saved_plan(),
    options.target(),
    argument("--backend", metavar="B", default="host", help="host (default) or a TPU topology such as v5e:4x4"),
    options.JSON,
    options.VERBOSE,
)
def _verify(arguments: argparse.Namespace) -> Result:
    """Compile a saved plan and check what it predicts.

    Shows the collectives of the compiled program beside the predicted ones. On host devices arrays are also run
    through both programs, and the results compared.

      shardwise verify plan.json train.py:make_step --backend v5e:4x4
    """
    from shardwise.plans.load import load_plan

    plan = load_plan(arguments.plan)
    # As many host devices as the plan needs; JAX reads this when it is imported.
    count = f"--xla_force_host_platform_device_count={plan.mesh.devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
    from shardwise.report.progress import ProgressLine
    from shardwise.verification.verify import verify

    target = load_target(arguments.target)
    with ProgressLine(lines=arguments.verbose) as line:
        verified = verify(
            plan, target.fn, *target.args, backend=arguments.backend, kwargs=target.kwargs, progress=line.phase
        )
    compiled, differences = verified.compiled, verified.differences
    if not compiled.fits:
        raise ShardwiseError(str(verified))
    if not arguments.json:
        return str(verified)
    return {
        "schema": 1,
        "function": plan.function,
        "mesh": plan.mesh.shape,
        "backend": compiled.backend,
        "matched": verified.matched,
        "collectives": [asdict(row) for row in verified.rows],
        "memory": asdict(compiled.memory) if compiled.memory is not None else None,
        "outputs": differences and [asdict(d) | {"explained": d.explained} for d in differences],
    }


@options.command(
    "code",
    options.saved_plan(),
    options.target("with it the code also has constraints for use without Shardwise"),
    argument("--style", choices=("jax", "flax", "maxtext"), default="jax", help="jax (default), or logical axis rules"),
    argument("--output", metavar="FILE", type=Path, help="write it there instead of printing it"),
)
def _code(arguments: argparse.Namespace) -> Result:
    """Print a saved plan as code to paste.

    Mesh, PartitionSpecs, and how to place arguments and run the step; repeated layers are written once. The styles
    flax and maxtext are logical axis rules, and list the arrays that these do not shard as planned.

      shardwise code plan.json --output shardings.py
      shardwise code plan.json --style flax
    """
    from shardwise.files import write_whole

    text = _loaded(arguments, arguments.target).code(arguments.style, arguments.plan)
    if arguments.output is None:
        return text
    write_whole(arguments.output, text, ShardwiseError)
    return f"written to {arguments.output}\n"


@options.command(
    "report",
    options.saved_plan(type=Path),
    options.target("with it the page also has times by line, memory over time, effects and strategies"),
    argument("--output", metavar="FILE.html", type=Path, help="where it goes (default: PLAN.html beside it)"),
    flag("--json", "print the page's data as JSON and write no page"),
)
def _report(arguments: argparse.Namespace) -> Result:
    """Write a saved plan as one HTML page that needs no network.

    shardwise report plan.json
    shardwise report plan.json zoo:t2b --output plan.html
    """
    from shardwise.report.data import report_data

    plan = _loaded(arguments, arguments.target)
    if arguments.json:
        return report_data(plan)
    output = arguments.output or arguments.plan.with_suffix(".html")
    if output.exists() and output.samefile(arguments.plan):
        raise ShardwiseError(f"the page would take the place of the plan {output}: give another --output")
    plan.report(output, arguments.typed, arguments.target or "")
    return f"written to {output}\n"
