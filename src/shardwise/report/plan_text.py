"""A plan as text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.report.inspection import _table
from shardwise.report.units import plural, si

if TYPE_CHECKING:
    from shardwise.plans.plan import ArrayPlan, Plan


def spec_text(array: ArrayPlan) -> str:
    """``float32[2048, 16384/model]``: each dimension's size, and the axes it is cut over."""
    spec = [*array.spec, *((),) * (len(array.shape) - len(array.spec))]
    dims = [f"{s}/{'·'.join(axes)}" if axes else str(s) for s, axes in zip(array.shape, spec, strict=True)]
    return f"{array.dtype}[{', '.join(dims)}]"


def plan_text(plan: Plan, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, emoji=False, markup=False)
    console.print(f"{plan.function} on {plan.mesh}")
    for words in plan.decisions:
        console.print(f"  {words}")
    console.print("\nArguments\n")
    table = _table(("path", "left"), ("sharded", "text"))
    for array in plan.arguments:
        table.add_row(array.path, spec_text(array))
    console.print(table)
    console.print(f"\n{plural(len(plan.constraints), 'constraint')} inside the program")
    for c in plan.constraints:
        dims = ", ".join("·".join(axes) or "-" for axes in c.spec)
        where = f"{c.op} at {c.source}" + (f", operand {c.operand}" if c.operand >= 0 else "")
        console.print(f"  {where}: [{dims}]")
    console.print("\nCollectives a step, one device\n")
    moved = _table(("kind", "left"), ("axes", "left"), ("count", "right"), ("bytes", "right"))
    for (kind, axes), (count, nbytes) in plan.moved().items():
        moved.add_row(kind, "·".join(axes), str(count), si(nbytes, "B"))
    console.print(moved if plan.collectives else "none")
    for note in plan.notes:
        console.print(f"note: {note}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
