"""What differs between two plans, between a plan and the answer to a what-if question, and between a plan and the compiled
program.

Two plans are the same if they do the same on the same devices. The search and the versions that made them do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shardwise.cost.predict import Predicted
from shardwise.ir.paths import collapsed
from shardwise.plans.codec import encode
from shardwise.plans.plan import Plan
from shardwise.report.page import Page
from shardwise.report.plan_text import axes_text, spec_text
from shardwise.units import binary, listed, plural, seconds

if TYPE_CHECKING:
    from shardwise.planner.what_if import WhatIf
    from shardwise.verification.verify import Verification

_MOST: Final = 8


def difference_data(one: Plan, other: Plan) -> dict[str, Any]:
    """Returns the figures of both plans, and everything that differs."""
    plans = one, other
    figures, decisions = [_figures(plan) for plan in plans], [list(map(str, plan.decisions)) for plan in plans]
    arrays = [{a.path: spec_text(a) for a in (*plan.arguments, *plan.outputs)} for plan in plans]
    moved = [
        {f"{kind} over {'·'.join(axes)}": nbytes for (kind, axes), (_, nbytes) in plan.moved().items()}
        for plan in plans
    ]
    computed = [list(zip(plan.sharded.factors, plan.sharded.passed, strict=True)) for plan in plans]
    data: dict[str, Any] = {
        "facts": _rows("what", _facts(one, other), _facts(other, one)),
        "decisions": {
            "one": [text for text in decisions[0] if text not in decisions[1]],
            "other": [text for text in decisions[1] if text not in decisions[0]],
        },
        "arrays": _rows("path", *arrays),
        "moved": _rows("what", *moved),
        "computed": sum(a != b for a, b in zip(*computed, strict=False)) + abs(len(computed[0]) - len(computed[1])),
    }
    differs = any(data[key] for key in ("facts", "arrays", "moved", "computed")) or decisions[0] != decisions[1]
    same = not differs and figures[0] == figures[1] and one.device_order == other.device_order
    return {"schema": 1, "same": same, "one": figures[0], "other": figures[1], **data}


def _figures(plan: Plan) -> dict[str, Any]:
    keys = ("time_s", "compute_s", "comm_s", "peak_bytes", "usable_bytes", "fits")
    predicted = {key: getattr(plan.predicted, key) for key in keys}
    return {"mesh": plan.mesh.shape, "variant": encode(plan.variant), **predicted}


def _facts(plan: Plan, other: Plan) -> dict[str, str]:
    donated = {a.path for a in other.arguments if a.donated}
    more = [a.path for a in plan.arguments if a.donated and a.path not in donated]
    order = plan.device_order
    return {
        "function": plan.function,
        "program": plan.fingerprint[:12],
        "devices": plan.predicted.hardware,
        "placement": "; ".join(plan.placement),
        "device order": f"{' '.join(map(str, order[:8]))}{' …' if len(order) > 8 else ''}",
        "donated": listed(more, most=1) or "nothing more",
        "mesh": str(plan.mesh),
        "variant": str(plan.variant),
    }


def _rows(name: str, one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the keys whose values differ, with both values."""
    keys = [key for key in one | other if one.get(key) != other.get(key)]
    return [{name: key, "one": one.get(key), "other": other.get(key)} for key in keys]


def difference_lines(data: dict[str, Any]) -> list[str]:
    """Returns what differs, one line each: ``what: one | other``, and decisions with - and +."""
    lines = [f"{row['what']}: {row['one']} | {row['other']}" for row in data["facts"]]
    lines += [f"- {text}" for text in data["decisions"]["one"]]
    lines += [f"+ {text}" for text in data["decisions"]["other"]]
    arrays = collapsed((row["path"], row["one"] or "not there", row["other"] or "not there") for row in data["arrays"])
    lines += [f"{path}: {one} | {other}" for path, one, other in arrays]
    lines += [f"{row['what']}: {binary(row['one'] or 0)} | {binary(row['other'] or 0)}" for row in data["moved"]]
    return lines + ([f"ops computed on other axes: {data['computed']:,}"] if data["computed"] else [])


def diff_text(one: Plan, other: Plan) -> str:
    """See :meth:`Plan.diff`."""
    lines = difference_lines(difference_data(one, other))
    return "\n".join(lines or ["the plans are the same"]) + "\n"


def difference_text(one: Plan, other: Plan, names: tuple[str, str], width: int = 80) -> str:
    """Returns the figures of two plans, then what differs."""
    data = difference_data(one, other)
    if data["same"]:
        return "the plans are the same\n"
    page = Page(width)
    page.print(f"{names[0]} | {names[1]}\n")
    _print_figures(page, "one", one.predicted, "other", other.predicted)
    page.print("\n" + "\n".join(difference_lines(data)))
    return page.text()


def _print_figures(page: Page, first: str, before: Predicted, second: str, after: Predicted) -> None:
    """Step time, compute, communication and memory of two predictions, with the change."""
    figures = (
        ("step time", "time_s", seconds),
        ("compute", "compute_s", seconds),
        ("communication", "comm_s", seconds),
        ("peak memory", "peak_bytes", binary),
    )
    rows = []
    for name, key, unit in figures:
        x, y = getattr(before, key), getattr(after, key)
        rows.append([name, unit(x), unit(y), f"{y / x - 1:+.1%}" if x and x != y else ""])
    rows.append(["fits", *("yes" if p.fits else "no" for p in (before, after)), ""])
    page.table(["", f">{first}", f">{second}", ">change"], rows)


def what_if_text(asked: WhatIf, width: int = 80) -> str:
    """Returns the figures before and after, why they differ, and which arrays change their sharding."""
    page = Page(width)
    for line in asked.changes or ("nothing changes: the plan has these decisions already",):
        page.print(line)
    page.print()
    _print_figures(page, "before", asked.before, "after", asked.after)
    for title, causes, unit in (("Time", asked.times, seconds), ("Bytes at the peak", asked.memory, binary)):
        rows = [[unit(cause.before), unit(cause.after), cause.what] for cause in causes]
        _print_first(page, f"{title}, by what changes most", [">before", ">after", "*"], rows)
    arrays = collapsed((spec.path, axes_text(spec.before), axes_text(spec.after)) for spec in asked.specs)
    _print_first(page, "Arrays with another sharding", ["*path", "before", "after"], arrays)
    return page.text()


def _print_first(page: Page, heading: str, titles: list[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        page.table(titles, rows[:_MOST], heading)
    if len(rows) > _MOST:
        page.print(f"and {plural(len(rows) - _MOST, 'smaller change')}")


def verification_text(verified: Verification, width: int = 80) -> str:
    """Predicted and compiled bytes side by side, and how far the results agree."""
    page, compiled, predicted = Page(width), verified.compiled, verified.plan.predicted
    page.print(f"{verified.plan.function} on {verified.plan.mesh}, compiled for {compiled.backend}")
    if not compiled.fits:
        page.print(f"does not fit: {compiled.out_of_memory}")
        return page.text()
    rows = [[r.kind, "·".join(r.axes), binary(r.predicted_bytes), binary(r.compiled_bytes)] for r in verified.rows]
    page.print()
    if rows:
        page.table(["kind", "axes", ">predicted", ">compiled"], rows)
    else:
        page.print("no collectives, as predicted")
    page.print(f"\n{verified.matched:.1%} of bytes as predicted")
    if compiled.memory is not None:
        expected = f"{binary(predicted.peak_bytes)} predicted for {predicted.hardware}"
        page.print(f"peak memory {binary(compiled.memory.peak_bytes)} per device; {expected}")
    if verified.differences is None:
        page.print("compiled, not run: results are compared on host devices, for arguments that are arrays")
        return page.text()
    wrong = sorted((d for d in verified.differences if not d.explained), key=lambda d: -d.relative)
    equal = len(verified.differences) - len(wrong)
    page.print(f"{equal} of {plural(len(verified.differences), 'output')} as in the plain run, up to rounding")
    for d in wrong[:8]:
        page.print(f"  {d.path} differs by {d.relative:.1e} of its largest value (rounding: {d.sensitivity:.1e})")
    return page.text()
