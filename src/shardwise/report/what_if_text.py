"""A plan beside what it would be with some changes, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardwise.report.page import Page, table
from shardwise.report.units import binary, plural, seconds
from shardwise.report.wrapping import wrapped

if TYPE_CHECKING:
    from shardwise.planner.what_if import WhatIf
    from shardwise.plans.plan import Spec

_MOST: Final = 8


def what_if_text(asked: WhatIf, width: int = 80) -> str:
    """The figures before and after, what makes the difference, and which arrays are sharded otherwise."""
    page = Page(width)
    for change in asked.changes or ("nothing changes: it is decided so already",):
        page.print(wrapped(change, width).rstrip())
    before, after = asked.before, asked.after
    rows = table(("", "left"), ("before", "right"), ("after", "right"), ("change", "right"))
    for name, key in (
        ("time a step", "time_s"),
        ("compute", "compute_s"),
        ("communication", "comm_s"),
    ):
        was, now = getattr(before, key), getattr(after, key)
        rows.add_row(name, seconds(was), seconds(now), f"{now / was - 1:+.1%}" if was else "")
    was, now = before.peak_bytes, after.peak_bytes
    rows.add_row("peak memory", binary(was), binary(now), f"{now / was - 1:+.1%}" if was else "")
    rows.add_row("fits", *("yes" if p.fits else "no" for p in (before, after)), "")
    page.print("")
    page.print(rows)
    for title, causes, unit in (("Seconds", asked.times, seconds), ("Bytes at the peak", asked.memory, binary)):
        if not causes:
            continue
        page.print(f"\n{title}, by what changes most\n")
        rows = table(("before", "right"), ("after", "right"), ("", "text"))
        for cause in causes[:_MOST]:
            rows.add_row(unit(cause.before), unit(cause.after), cause.what)
        page.print(rows)
        if len(causes) > _MOST:
            page.print(f"and {plural(len(causes) - _MOST, 'smaller change')}")
    if asked.specs:
        page.print("\nSharded otherwise\n")
        rows = table(("path", "text"), ("before", "left"), ("after", "left"))
        for spec in asked.specs[:_MOST]:
            rows.add_row(spec.path, _dims(spec.before), _dims(spec.after))
        page.print(rows)
        if len(asked.specs) > _MOST:
            page.print(f"and {len(asked.specs) - _MOST} more")
    return page.text()


def _dims(spec: Spec) -> str:
    return f"[{', '.join('·'.join(axes) or '-' for axes in spec)}]"
