"""A plan as text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shardwise.lowering.decisions import Pin, Shard
from shardwise.report.page import Page, table
from shardwise.report.program_text import laid_out, touching
from shardwise.report.summary import print_origin, roles_lines
from shardwise.report.units import binary, plural, seconds, si
from shardwise.spmd.text import program_lines

if TYPE_CHECKING:
    from shardwise.plans.plan import ArrayPlan, Plan, Spec

#: Lines of the device-local program that are shown for one argument or output.
_MOST_LINES: Final = 12


def spec_text(array: ArrayPlan) -> str:
    """``float32[2048, 16384/model]``: each dimension's size, and the axes it is cut over."""
    spec = [*array.spec, *((),) * (len(array.shape) - len(array.spec))]
    dims = [f"{s}/{'·'.join(axes)}" if axes else str(s) for s, axes in zip(array.shape, spec, strict=True)]
    return f"{array.dtype}[{', '.join(dims)}]"


def _call(spec: Spec) -> str:
    """``P(None, "model")``."""
    entries = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in spec]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})".replace("'", '"')


def explain_text(plan: Plan, array: ArrayPlan) -> str:
    path, shards = array.path, 1
    for axes in array.spec:
        for axis in axes:
            shards *= plan.mesh.sizes[plan.mesh.index(axis)]
    lines = [f"{path}  {spec_text(array)}", f"  {_call(array.spec)}, {plural(shards, 'shard')}"]
    if path in plan.variant.batch:
        parts = plan.variant.microbatches
        lines.append(f"  cut into {parts} micro-batches of {plural(array.shape[0] // parts, 'example')}")
    lines += [f"  note: {note}" for note in plan.notes if note.startswith(f"{path}[")]
    lines += _reasons(plan, array)
    moved = [c for c in plan.collectives if c.value == path or c.value.startswith(f"{path} as ")]
    for c in moved:
        times = f" × {c.times:g}" if c.times != 1 else ""
        seen = c.value.removeprefix(path)
        size = f"{si(c.nbytes, 'B')}{times}{seen}"
        lines.append(f"  {c.kind} over {'·'.join(c.axes)}, {size}, for {c.op} at {c.source}")
    if not moved:
        lines.append("  nothing moves for it, neither itself nor a cast or another view of it")
    if plan.asked is not None:
        lines += ["  in the device-local program:", *_local_lines(plan, path)]
    return "\n".join(lines) + "\n"


def _local_lines(plan: Plan, path: str) -> list[str]:
    """The first lines of the device-local program that are about an argument or output."""
    program = plan.inquiry.analysis.program
    found = touching(program, program_lines(program, plan.sharded), path)
    rows = laid_out([replace(line, depth=0) for line in found[:_MOST_LINES]], 80 - 4)
    lines = [f"    {text}" for row in rows for text in row.splitlines()]
    return lines + ([f"    and {plural(len(found) - _MOST_LINES, 'line')} more"] if len(found) > _MOST_LINES else [])


def _reasons(plan: Plan, array: ArrayPlan) -> list[str]:
    """By dimension: its color, and which decision gave it an axis, with what the plan would take without."""
    lines = []
    spec = [*array.spec, *((),) * (len(array.shape) - len(array.spec))]
    for d, axes in enumerate(spec):
        color = array.colors[d] if array.colors else -1
        for axis in axes:
            lines.append(f"  dimension {d} (color {color}) over {axis}: {_decided(plan, color, axis)}")
        for k, choice in enumerate(plan.choices):
            if isinstance(choice, Shard) and color in choice.colors and choice.axis not in axes:
                why = _not_here(plan, array, spec, d, choice.axis)
                lines.append(
                    f"  dimension {d} (color {color}) not over {choice.axis}, as decision {k + 1} has it: {why}"
                )
    return lines


def _not_here(plan: Plan, array: ArrayPlan, spec: list[tuple[str, ...]], dim: int, axis: str) -> str:
    """Why a dimension has not the axis that its color was given."""
    for other, axes in enumerate(spec):
        if axis in axes:
            return f"dimension {other} has the axis"
    pieces = plan.mesh.sizes[plan.mesh.index(axis)]
    for own in spec[dim]:
        pieces *= plan.mesh.sizes[plan.mesh.index(own)]
    if array.shape[dim] % pieces:
        return f"{array.shape[dim]} cannot be cut into {pieces} parts"
    return "it is kept whole there"


def _decided(plan: Plan, color: int, axis: str) -> str:
    for k, choice in enumerate(plan.choices):
        pinned = isinstance(choice, Pin) and any(
            c == color and axis in (axes or ()) for c, axes in zip(choice.colors, choice.spec, strict=False)
        )
        if pinned or (isinstance(choice, Shard) and color in choice.colors and axis == choice.axis):
            without = ""
            if plan.effects:
                effect, now = plan.effects[k], plan.predicted
                fits = "" if effect.fits or not now.fits else ", which does not fit"
                without = (
                    f"; without it {seconds(effect.time_s)} instead of {seconds(now.time_s)} a step, "
                    f"{binary(effect.peak_bytes)} instead of {binary(now.peak_bytes)}{fits}"
                )
            return f"decision {k + 1}, {plan.choices[k]}{without}"
    return "along with what it is made of"


def diff_text(one: Plan, other: Plan) -> str:
    lines: list[str] = []
    if one.mesh != other.mesh:
        lines.append(f"mesh: {one.mesh} | {other.mesh}")
    if one.variant != other.variant:
        lines.append(f"variant: {one.variant} | {other.variant}")
    before, after = (list(map(str, plan.decisions)) for plan in (one, other))
    lines += [f"- {text}" for text in before if text not in after]
    lines += [f"+ {text}" for text in after if text not in before]
    theirs = {a.path: a for a in (*other.arguments, *other.outputs)}
    for a in (*one.arguments, *one.outputs):
        b = theirs.pop(a.path, None)
        if b is None or (a.shape, a.spec) != (b.shape, b.spec):
            lines.append(f"{a.path}: {spec_text(a)} | {spec_text(b) if b is not None else 'not there'}")
    lines += [f"{path}: not there | {spec_text(b)}" for path, b in theirs.items()]
    mine, yours = one.moved(), other.moved()
    for key in sorted({*mine, *yours}):
        a_bytes, b_bytes = mine.get(key, (0, 0.0))[1], yours.get(key, (0, 0.0))[1]
        if a_bytes != b_bytes:
            lines.append(f"{key[0]} over {'·'.join(key[1])}: {si(a_bytes, 'B')} | {si(b_bytes, 'B')}")
    return "\n".join(lines) + "\n" if lines else "the plans are the same\n"


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
        what = {"used": f"operand {c.index} of", "computed": "the result, as computed, of"}.get(
            c.place, "the result of"
        )
        lines.append(f"#   {c.source}: {what} {c.op} {list(c.shape)}: {_call(c.spec)}")
    return "\n".join(lines) + "\n"


def predicted_text(plan: Plan) -> str:
    """``0.412 s a step on v5e:4x4 (…), 61% of peak; 7.1 of 15.8 GiB``."""
    p = plan.predicted
    verdict = "" if p.fits else ": it does not fit"
    memory = f"{p.peak_bytes / 2**30:.2f} of {p.usable_bytes / 2**30:.2f} GiB a device{verdict}"
    return (
        f"Predicted on {p.hardware}: {seconds(p.time_s)} a step ({seconds(p.overlapped_s)} to {seconds(p.serial_s)}: compute "
        f"{seconds(p.compute_s)}, communication {seconds(p.comm_s)}), {p.utilization:.0%} of the peak rate; {memory}"
    )


def plan_text(plan: Plan, width: int = 80) -> str:
    page = Page(width)
    page.print(f"{plan.function} on {plan.mesh}")
    for words in (*plan.variant.lines(), *roles_lines(plan)):
        page.print(f"  {words}")
    for k, decision in enumerate(plan.decisions, 1):
        page.print(f"  {f'{k}.' if k <= len(plan.choices) else '  '} {decision}")
    page.print(f"\n{predicted_text(plan)}")
    page.print("\nArguments\n")
    rows = table(("path", "left"), ("sharded", "text"))
    for array in plan.arguments:
        rows.add_row(array.path, spec_text(array))
    page.print(rows)
    page.print("\nCollectives a step, one device\n")
    moved = table(("kind", "left"), ("axes", "left"), ("count", "right"), ("bytes", "right"))
    for (kind, axes), (count, nbytes) in plan.moved().items():
        moved.add_row(kind, "·".join(axes), str(count), si(nbytes, "B"))
    page.print(moved if plan.collectives else "none")
    print_origin(page, plan)
    return page.text()
