"""A plan on one screen: what is sharded, what it takes, how it was found, what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardwise.lowering.decisions import Shard
from shardwise.report.page import Page, table
from shardwise.report.units import binary, plural, seconds, si
from shardwise.search.result import Ended

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

_MOST: Final = 5
_BAR: Final = 30
_MOST_PATHS: Final = 3


def summary_text(plan: Plan, width: int = 80) -> str:
    """The summary at a width.

    Dimensions that are sharded together are one line, with all their axes, major first.
    """
    page, p = Page(width), plan.predicted
    page.print(f"{plan.function} on {plan.mesh}: {p.hardware}")
    for words in (*plan.variant.lines(), *roles_lines(plan)):
        page.print(f"  {words}")
    page.print("")
    sharded, rest = decided(plan)
    rows = table(("over", "left"), ("sharded [by decisions]", "text"))
    for what, axes in sharded.items():
        numbers = [k for k, d in enumerate(plan.decisions, 1) if isinstance(d, Shard) and d.what == what]
        rows.add_row("·".join(axes), f"{what} [{', '.join(map(str, numbers))}]")
    short = plan.search is not None and plan.search.ended in (Ended.SECONDS, Ended.EVALUATIONS, Ended.INTERRUPTED)
    nothing = "nothing is sharded" if short else "nothing is sharded: nothing that can be cut for this mesh is worth it"
    page.print(rows if sharded else nothing)
    for words in rest:
        page.print(f"{words}")
    share = min(1.0, p.peak_bytes / p.usable_bytes)
    page.print("")
    figures = table(("", "left"), ("", "left"), ("", "text"))
    figures.show_header = False
    figures.add_row("time", seconds(p.time_s), f"{p.utilization:.0%} of the peak rate; compute {seconds(p.compute_s)}")
    hidden = p.serial_s - p.time_s
    figures.add_row("moved", seconds(p.comm_s), f"of which {seconds(hidden)} behind compute" if hidden > 0 else "")
    verdict = "" if p.fits else "  it does not fit"
    bar = "#" * round(share * _BAR) + "." * (_BAR - round(share * _BAR))
    figures.add_row("memory", binary(p.peak_bytes), f"[{bar}] of {binary(p.usable_bytes)}{verdict}")
    page.print(figures)
    if p.collectives:
        page.print("\nCollectives, the longest first; seconds and bytes of one device a step\n")
        moved = table(("kind", "left"), ("axes", "left"), ("count", "right"), ("bytes", "right"), ("time", "right"))
        for m in sorted(p.collectives, key=lambda m: -m.time_s)[:_MOST]:
            moved.add_row(m.kind, "·".join(m.axes), str(m.count), si(m.nbytes, "B"), seconds(m.time_s))
        page.print(moved)
        if len(p.collectives) > _MOST:
            page.print(f"and {plural(len(p.collectives) - _MOST, 'kind')} more")
    print_origin(page, plan)
    return page.text()


def roles_lines(plan: Plan) -> list[str]:
    """The arguments by role, in one line."""
    parts = []
    for role, paths in plan.roles.items():
        more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
        parts.append(f"{role}: {', '.join(paths[:_MOST_PATHS])}{more}")
    return ["; ".join(parts)] if parts else []


def print_origin(page: Page, plan: Plan) -> None:
    """How a plan was found, beside what, and what there is to know about it."""
    if plan.experts:
        page.print(f"\n{_usual(plan)}")
    if plan.search is not None:
        page.print(f"\nFound by {plan.search}")
        for tried in plan.search.meshes[1:4]:
            took = tried.why or (seconds(tried.time_s or 0.0) if tried.fits else "does not fit")
            page.print(f"  instead of {tried.mesh}: {took}")
    for note in plan.notes:
        page.print(f"note: {note}")


def _usual(plan: Plan) -> str:
    """The best of the strategies that everybody tries first, beside the plan."""
    best, own = plan.experts[0], plan.predicted
    first = f"Best of {plural(len(plan.experts), 'usual strategy', 'usual strategies')}: {best.name}, {seconds(best.time_s)}"
    if not best.fits:
        return f"{first} a step; does not fit with {binary(best.peak_bytes)}"
    ratio = best.time_s / own.time_s
    compared = "the same" if abs(ratio - 1) < 0.005 else f"{ratio:.2f} times as long"
    return f"{first} a step, {compared}; {binary(best.peak_bytes)}"


def decided(plan: Plan) -> tuple[dict[str, list[str]], list[str]]:
    """What is sharded, with its axes in order; and the other decisions, as text."""
    sharded: dict[str, list[str]] = {}
    for decision in plan.decisions:
        if isinstance(decision, Shard):
            sharded.setdefault(decision.what, []).append(decision.axis)
    return sharded, [str(d) for d in plan.decisions if not isinstance(d, Shard)]
