"""A verification as text: predicted and compiled bytes side by side, and how far the numbers agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.report.page import Page, table
from shardwise.report.units import plural, si

if TYPE_CHECKING:
    from shardwise.verification.verify import Verification


def verification_text(found: Verification, width: int = 80) -> str:
    page = Page(width)
    compiled = found.compiled
    page.print(f"{found.plan.function} on {found.plan.mesh}, compiled for {compiled.backend}")
    if not compiled.fits:
        page.print(f"does not fit: {compiled.out_of_memory}")
        return page.text()
    page.print()
    rows = table(("kind", "left"), ("axes", "left"), ("predicted", "right"), ("compiled", "right"))
    for row in found.rows:
        rows.add_row(row.kind, "·".join(row.axes), si(row.predicted_bytes, "B"), si(row.compiled_bytes, "B"))
    page.print(rows if found.rows else "no collectives, as predicted")
    page.print(f"\n{found.matched:.1%} of bytes as predicted")
    if compiled.memory is not None:
        predicted = found.plan.predicted
        expected = f"{si(predicted.peak_bytes, 'B')} predicted for {predicted.hardware}"
        page.print(f"peak memory {si(compiled.memory.peak_bytes, 'B')} a device; {expected}")
    if found.differences is None:
        page.print("compiled, not run: numbers are compared on host devices, for arguments that are arrays")
    else:
        wrong = [d for d in found.differences if not d.explained]
        page.print(
            f"{len(found.differences) - len(wrong)} of {plural(len(found.differences), 'output')} as in the plain run, "
            "up to rounding"
        )
        for d in sorted(wrong, key=lambda d: -d.relative)[:8]:
            page.print(f"  {d.path} differs by {d.relative:.1e} of its largest value (rounding: {d.sensitivity:.1e})")
    return page.text()
