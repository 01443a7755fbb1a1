"""Specs, arguments and outputs of a plan as text, and the plan as code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardwise.lowering.decisions import Pin, Shard
from shardwise.report.program_text import laid_out, touching
from shardwise.report.units import binary, plural, seconds, si
from shardwise.spmd.text import program_lines

if TYPE_CHECKING:
    from shardwise.plans.plan import ArrayPlan, Plan, Spec

#: Lines of the device-local program that are shown for one argument or output.
_MOST_LINES: Final = 12


def dims(array: ArrayPlan) -> Spec:
    """The mesh axes of every dimension: a spec may leave out the last ones."""
    return (*array.spec, *((),) * (len(array.shape) - len(array.spec)))


def spec_text(array: ArrayPlan) -> str:
    """``float32[2048, 16384/model]``: the size of each dimension, and the axes that shard it."""
    sizes = [f"{s}/{'·'.join(axes)}" if axes else str(s) for s, axes in zip(array.shape, dims(array), strict=True)]
    return f"{array.dtype}[{', '.join(sizes)}]"


def axes_text(spec: Spec) -> str:
    """
    >>> axes_text((("data", "model"), ()))
    '[data·model, -]'
    """
    return f"[{', '.join('·'.join(axes) or '-' for axes in spec)}]"


def shards(plan: Plan, axes: Iterable[str]) -> int:
    return math.prod(plan.mesh.sizes[plan.mesh.index(axis)] for axis in axes)


def _call(spec: Spec) -> str:
    """``P(None, "model")``."""
    entries = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in spec]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})".replace("'", '"')


def explain_text(plan: Plan, array: ArrayPlan) -> str:
    """See :meth:`Plan.explain`."""
    path, count = array.path, shards(plan, (axis for axes in array.spec for axis in axes))
    lines = [f"{path}  {spec_text(array)}", f"  {_call(array.spec)}, {plural(count, 'shard')}"]
    if path in plan.variant.batch:
        parts = plan.variant.microbatches
        lines.append(f"  cut into {parts} micro-batches of {plural(array.shape[0] // parts, 'example')}")
    lines += [f"  note: {note}" for note in plan.notes if note.startswith(f"{path}[")]
    lines += _reasons(plan, array)
    collectives = [c for c in plan.collectives if c.value == path or c.value.startswith(f"{path} as ")]
    for c in collectives:
        size = f"{si(c.nbytes, 'B')}{f' × {c.times:g}' if c.times != 1 else ''}{c.value.removeprefix(path)}"
        lines.append(f"  {c.kind} over {'·'.join(c.axes)}, {size}, for {c.op} at {c.source}")
    if not collectives:
        lines.append("  no collectives, neither for it nor for a cast or another view of it")
    if plan.asked is not None:
        lines += ["  in the device-local program:", *_local_lines(plan, path)]
    return "\n".join(lines) + "\n"


def _local_lines(plan: Plan, path: str) -> list[str]:
    """The first lines of the device-local program that are about an argument or output."""
    program = plan.inquiry.analysis.program
    about = touching(program, program_lines(program, plan.sharded), path)
    rows = laid_out([replace(line, depth=0) for line in about[:_MOST_LINES]], 80 - 4)
    lines = [f"    {text}" for row in rows for text in row.splitlines()]
    return lines + ([f"    and {plural(len(about) - _MOST_LINES, 'line')} more"] if len(about) > _MOST_LINES else [])


def _reasons(plan: Plan, array: ArrayPlan) -> list[str]:
    """For each dimension, the decision behind each of its axes, and why it does not have an axis of its color."""
    lines = []
    for d, axes in enumerate(dims(array)):
        color = array.colors[d] if array.colors else -1
        lines += [f"  dimension {d} (color {color}) over {axis}: {_decided(plan, color, axis)}" for axis in axes]
        for k, choice in enumerate(plan.choices, 1):
            if isinstance(choice, Shard) and color in choice.colors and choice.axis not in axes:
                why = _not_here(plan, array, d, choice.axis)
                lines.append(f"  dimension {d} (color {color}) not over {choice.axis} as in decision {k}: {why}")
    return lines


def _not_here(plan: Plan, array: ArrayPlan, dim: int, axis: str) -> str:
    """Why a dimension does not have an axis of its color."""
    spec = dims(array)
    for other, axes in enumerate(spec):
        if axis in axes:
            return f"dimension {other} has the axis"
    parts = shards(plan, (axis, *spec[dim]))
    return f"{array.shape[dim]} cannot be cut into {parts} parts" if array.shape[dim] % parts else "replicated on it"


def _decided(plan: Plan, color: int, axis: str) -> str:
    """The decision that gave a color an axis, and the cost of the plan without it."""
    for k, choice in enumerate(plan.choices):
        pinned = isinstance(choice, Pin) and any(
            c == color and axis in (axes or ()) for c, axes in zip(choice.colors, choice.spec, strict=False)
        )
        if pinned or (isinstance(choice, Shard) and color in choice.colors and axis == choice.axis):
            text = f"decision {k + 1}, {choice}"
            if not plan.effects:
                return text
            effect, now = plan.effects[k], plan.predicted
            fits = "" if effect.fits or not now.fits else ", which does not fit"
            return (
                f"{text}; without it step time {seconds(effect.time_s)} instead of {seconds(now.time_s)}, "
                f"peak memory {binary(effect.peak_bytes)} instead of {binary(now.peak_bytes)}{fits}"
            )
    return "follows from its operands"


def code_text(plan: Plan) -> str:
    """Python with the specs by path, and each constraint beside the line it belongs to."""
    lines = ["from jax.sharding import PartitionSpec as P", "", "in_specs = {"]
    lines += [f'    "{a.path}": {_call(a.spec)},' for a in plan.arguments]
    lines += ["}", "out_specs = {"]
    lines += [f'    "{a.path}": {_call(a.spec)},' for a in plan.outputs]
    lines.append("}")
    if plan.constraints:
        lines += ["", "# Inside the function, with jax.lax.with_sharding_constraint:"]
    for c in plan.constraints:
        what = {"used": f"operand {c.index}", "computed": "the computed result"}.get(c.place, "the result")
        lines.append(f"#   {c.source}: {what} of {c.op} {list(c.shape)}: {_call(c.spec)}")
    return "\n".join(lines) + "\n"
