"""A plan on a page: what is sharded, its step time and memory, its collectives, and how it was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardwise.lowering.decisions import Shard
from shardwise.report.page import Page, table
from shardwise.report.plan_text import spec_text
from shardwise.report.units import binary, plural, seconds, si
from shardwise.search.result import Ended

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

_MOST: Final = 5
_BAR: Final = 30
_MOST_PATHS: Final = 3


def plan_page(plan: Plan, width: int = 80, every: bool = False) -> Page:
    """The summary of a plan; ``every`` lists all arguments and collectives too."""
    page, p = Page(width), plan.predicted
    page.print(f"{plan.function} on {plan.mesh}: {p.hardware}")
    for line in (*plan.variant.lines(), *_roles(plan)):
        page.print(f"  {line}")
    page.print()
    sharded, rest = decided(plan)
    short = plan.search is not None and plan.search.ended in (Ended.SECONDS, Ended.EVALUATIONS, Ended.INTERRUPTED)
    nothing = "nothing is sharded" if short else "nothing is sharded: no dimension is worth sharding on this mesh"
    rows = [["·".join(axes), f"{what} {_numbers(plan, what)}"] for what, axes in sharded.items()]
    page.print(table(["over", "*sharded [by decisions]"], rows) if rows else nothing)
    for line in rest:
        page.print(line)
    page.print()
    page.print(table(["", "", "*"], figures(plan, every)))
    if every:
        page.print("\nArguments\n")
        page.print(table(["path", "*sharded"], [[a.path, spec_text(a)] for a in plan.arguments]))
    if p.collectives:
        page.print("\nCollectives, the longest first; bytes and time per device and step\n")
        longest = sorted(p.collectives, key=lambda m: -m.time_s)[: None if every else _MOST]
        cells = [[m.kind, "·".join(m.axes), str(m.count), si(m.nbytes, "B"), seconds(m.time_s)] for m in longest]
        page.print(table(["kind", "axes", ">count", ">bytes", ">time"], cells))
        if len(p.collectives) > len(longest):
            page.print(f"and {plural(len(p.collectives) - len(longest), 'kind')} more")
    _print_origin(page, plan)
    return page


def figures(plan: Plan, bounds: bool = False) -> list[list[str]]:
    """Step time, communication and memory: name, figure, and what the figure consists of."""
    p = plan.predicted
    done = round(min(1.0, p.peak_bytes / p.usable_bytes) * _BAR)
    verdict = "" if p.fits else "  it does not fit"
    overlapped, exposed = seconds(max(0.0, p.serial_s - p.time_s)), seconds(max(0.0, p.time_s - p.compute_s))
    rows = [
        ["step time", seconds(p.time_s), f"{p.utilization:.0%} MFU; compute {seconds(p.compute_s)}"],
        ["communication", seconds(p.comm_s), f"{overlapped} overlapped, {exposed} exposed" if p.comm_s else ""],
        ["peak memory", binary(p.peak_bytes), f"[{'#' * done:.<{_BAR}}] of {binary(p.usable_bytes)}{verdict}"],
    ]
    limits = f"step time if all communication is overlapped; {seconds(p.serial_s)} if none is"
    return [*rows, ["bounds", seconds(p.overlapped_s), limits]] if bounds else rows


def _numbers(plan: Plan, what: str) -> str:
    return str([k for k, d in enumerate(plan.decisions, 1) if isinstance(d, Shard) and d.what == what])


def _roles(plan: Plan) -> list[str]:
    """The arguments by role, in one line."""
    parts = []
    for role, paths in plan.roles.items():
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        parts.append(f"{role}: {', '.join(paths[:_MOST_PATHS])}{more}")
    return ["; ".join(parts)] if parts else []


def _print_origin(page: Page, plan: Plan) -> None:
    if plan.experts:
        best = plan.experts[0]
        page.print(
            f"\nBest of {plural(len(plan.experts), 'named strategy', 'named strategies')}: {best.name}, step time "
            f"{seconds(best.time_s)} ({best.time_s / plan.predicted.time_s:.2f}×), peak memory {binary(best.peak_bytes)}"
            f"{'' if best.fits else ', which does not fit'}"
        )
    if plan.search is not None:
        page.print(f"\nFound by {plan.search}")
        for tried in plan.search.meshes[1:4]:
            outcome = tried.why or (seconds(tried.time_s or 0.0) if tried.fits else "does not fit")
            page.print(f"  instead of {tried.mesh}: {outcome}")
    for note in plan.notes:
        page.print(f"note: {note}")


def decided(plan: Plan) -> tuple[dict[str, list[str]], list[str]]:
    """What is sharded, with its axes in order; and the other decisions as text."""
    sharded: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if isinstance(decision, Shard):
            sharded.setdefault(decision.what, []).append(decision.axis)
    return sharded, [str(d) for d in plan.decisions if not isinstance(d, Shard)]
