"""A verification as text: predicted and compiled bytes side by side, and how far the numbers agree."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from shardwise.report.inspection import _table
from shardwise.report.units import plural, si

if TYPE_CHECKING:
    from shardwise.verification.verify import Verification


def verification_text(found: Verification, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, emoji=False, markup=False)
    compiled = found.compiled
    console.print(f"{found.plan.function} on {found.plan.mesh}, compiled for {compiled.backend}")
    if compiled.out_of_memory is not None:
        console.print(f"does not fit: {compiled.out_of_memory}")
        return out.getvalue()
    console.print()
    table = _table(("kind", "left"), ("axes", "left"), ("predicted", "right"), ("compiled", "right"))
    for row in found.rows:
        table.add_row(row.kind, "·".join(row.axes), si(row.predicted_bytes, "B"), si(row.compiled_bytes, "B"))
    console.print(table if found.rows else "no collectives, as predicted")
    console.print(f"\n{found.matched:.1%} of bytes as predicted")
    if compiled.memory is not None:
        console.print(f"peak memory {si(compiled.memory.peak_bytes, 'B')} a device")
    if found.differences is not None:
        wrong = [d for d in found.differences if not d.explained]
        console.print(
            f"{len(found.differences) - len(wrong)} of {plural(len(found.differences), 'output')} as in the plain run, "
            "up to rounding"
        )
        for d in sorted(wrong, key=lambda d: -d.relative)[:8]:
            console.print(
                f"  {d.path} differs by {d.relative:.1e} of its largest value (rounding: {d.sensitivity:.1e})"
            )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"
