"""The parts of the page about default settings, and about the search without parts of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.fidelity.compare import table
from benchmarks.fidelity.page import Bar
from benchmarks.search.ablation import ABLATIONS
from shardwise.search.goal import TIGHT

Row = dict[str, Any]
#: As good as the best; a difference that is listed.
NEAR: Final = 1.01
#: The search that others without strategies are compared with.
BARE: Final = "no strategies"

DEFAULT: Final = """Plans with default settings, remat and micro-batches open. *Strategy* is the best combination of named \
strategies on the plan's mesh{where}. *Long* is a search of 5,000 evaluations. Where a plan's peak might not fit by the upper \
end of its range, it is *tight*; a plan with room is preferred to a tight one, if it is at most {allowed:.0%} slower."""
EVERY: Final = " over all variants: with and without remat, in 1, 2, 4, ... micro-batches"
ABLATION: Final = """{evaluations:,} evaluations, {seeds} seeds, the median of these. The step time of the whole search, and \
how much longer it is without a part; below zero the search is better without it. *No fit*: nothing was found that fits, where \
the search with all parts has a plan that does. What is left out is described in `benchmarks/search/ablation.py`."""
ALONE: Final = """Named strategies hide what a search finds alone. Without them, and how much longer the step is without a \
further part. *Not ended*: five searches took longer than the run of all others."""
STEPS: Final = """Evaluations until the best state is within 1% of the best of the row, the median of all seeds; seeds \
themselves are not counted. *Never*: for most seeds."""


def default_part(rows: dict[str, Row]) -> tuple[list[Bar], list[str]]:
    over_strategy = {key: _over(row["default"], row["strategy"]) for key, row in rows.items()}
    over_long = {key: _over(row["default"], row["long"]) for key, row in rows.items()}
    false = [key for key, row in rows.items() if row["long"]["fits"] and not row["default"]["fits"]]
    worst = max(over_long.values())
    allowed = {key: TIGHT if preferred(row["default"], row["strategy"]) else 1e-9 for key, row in rows.items()}
    losses = [key for key, over in over_strategy.items() if over > allowed[key]]
    roomy = [key for key, over in over_strategy.items() if 1e-9 < over <= allowed[key]]
    every = all("variant" in row["strategy"] for row in rows.values() if row["strategy"])
    variants = ", at any variant" if every else ""
    bars = [
        Bar("", f"default plans worse than a named strategy{variants}", "none", _of(losses, rows), not losses),
        Bar(
            "",
            f"default plans with room that are slower than a tight strategy, by up to {TIGHT:.0%}",
            "no bar",
            _of(roomy, rows),
            None,
        ),
        Bar(
            "",
            "default plans over those of 5,000 evaluations, worst",
            "≤ 3%",
            f"{worst:.2%} of {len(rows)}",
            worst <= 0.03,
        ),
        Bar(
            "",
            "default plans that do not fit where a longer search has one that does",
            "none",
            _of(false, rows),
            not false,
        ),
    ]
    body = [
        [
            key,
            *_planned(row["default"]),
            f"{row['default']['evaluations']:,}",
            _strategy(row["strategy"]),
            f"{over_strategy[key]:+.1%}",
            _planned(row["long"])[0],
            f"{over_long[key]:+.1%}",
        ]
        for key, row in rows.items()
    ]
    head = [
        "case",
        "default",
        "mesh",
        "variant",
        "evaluations",
        "strategy",
        "default over it",
        "long",
        "default over it",
    ]
    return bars, [
        "## Default settings",
        "",
        DEFAULT.format(where=EVERY if every else "", allowed=TIGHT),
        "",
        *table(head, body),
    ]


def preferred(plan: Row, other: Row | None) -> bool:
    """Whether a plan has room where another is tight."""
    return other is not None and bool(other["tight"]) and not plan["tight"]


def _over(plan: Row, other: Row | None) -> float:
    """How much longer the step of a plan is; a plan that fits beats one that does not."""
    if other is None or (plan["fits"] and not other["fits"]):
        return -1.0
    return math.inf if other["fits"] and not plan["fits"] else plan["time_s"] / other["time_s"] - 1


def _of(some: Sequence[str], rows: dict[str, Row]) -> str:
    return f"{len(some)} of {len(rows)}"


def _planned(plan: Row) -> list[str]:
    fits = _fits(plan)
    return [f"{plan['time_s'] * 1e3:,.2f} ms{fits}", plan["mesh"], plan["variant"]]


def _strategy(row: Row | None) -> str:
    if row is None:
        return "none"
    variant = "" if row.get("variant", "as it is") == "as it is" else f", {row['variant']}"
    return f"{row['name']}{variant}: {row['time_s'] * 1e3:,.2f} ms{_fits(row)}"


def _fits(row: Row) -> str:
    return ", does not fit" if not row["fits"] else ", tight" if row["tight"] else ""


# The search without parts of it.


def ablation_part(record: Row) -> tuple[list[Bar], list[str]]:
    rows = record["rows"]
    seeds = len(rows[0]["found"]["whole"]["ranks"])
    seeded = [name for name, ablation in ABLATIONS.items() if ablation.strategies and name != "whole"]
    seeded.append(BARE)
    alone = [name for name, ablation in ABLATIONS.items() if not ablation.strategies and name != BARE]
    lines = ["## What each part is worth", "", ABLATION.format(evaluations=record["evaluations"], seeds=seeds), ""]
    lines += [*_summary(rows, "whole", seeded), "", *_losses(rows, "whole", seeded), "", ALONE, ""]
    lines += [*_summary(rows, BARE, alone), "", *_losses(rows, BARE, alone), "", STEPS, ""]
    names = ["whole", *seeded, *alone]
    lines += table(["program", *names], [[_case(row), *(_until(row, name) for name in names)] for row in rows])
    return _parts_bars(rows, seeded), lines


def _parts_bars(rows: Sequence[Row], seeded: Sequence[str]) -> list[Bar]:
    """What is wrong with the parts: those without which nothing is worse, and programs that are better without one."""
    bars = []
    for base, name in (("whole", "no tree"), ("whole", "no openings"), (BARE, f"{BARE}, no tree")):
        worse = sum((loss(row, base, name) or 0.0) > NEAR - 1 for row in rows)
        text = f"programs that are slower by 1% without a part: {name}"
        bars.append(Bar("", text, "some", f"{worse} of {len(rows)}", worse > 0))
    lost = [row for row in rows if any((loss(row, "whole", name) or 0.0) < 1 - NEAR for name in seeded)]
    text = "programs that are faster by 1% without some part"
    return [*bars, Bar("", text, "none", f"{len(lost)} of {len(rows)}", not lost)]


def _case(row: Row) -> str:
    return f"{row['program']} {row['topology']}, {'x'.join(map(str, row['mesh']))}"


def _median(found: Row) -> tuple[int, int]:
    ranks: list[tuple[int, int]] = sorted(map(tuple, found["ranks"]))
    return ranks[len(ranks) // 2]


def loss(row: Row, base: str, name: str) -> float | None:
    """How much longer a step is without a part; infinite where it does not fit, and -1 where it does, unlike the base;
    None where there is no record."""
    if row["found"][name] is None:
        return None
    (misses, figure), (whole_misses, whole) = _median(row["found"][name]), _median(row["found"][base])
    if misses == whole_misses:
        return figure / whole - 1
    return math.inf if misses > whole_misses else -1.0


def _loss_text(over: float | None) -> str:
    return "not ended" if over is None else "no fit" if over == math.inf else f"{over:+.1%}"


def _losses(rows: Sequence[Row], base: str, names: Sequence[str]) -> list[str]:
    body = []
    for row in rows:
        misses, figure = _median(row["found"][base])
        whole = f"{figure / 1e9:,.2f} ms" if not misses else f"{figure * 512 / 2**30:.1f} GiB, no fit"
        body.append([_case(row), whole, *(_loss_text(loss(row, base, name)) for name in names)])
    return table(["program", base, *names], body)


def _summary(rows: Sequence[Row], base: str, names: Sequence[str]) -> list[str]:
    body = []
    for name in names:
        able = [row for row in rows if row["found"][name] is not None]
        over = [x for row in able if (x := loss(row, base, name)) is not None]
        cpu = [sum(row["found"][name]["cpu_s"]) / sum(row["found"][base]["cpu_s"]) for row in able]
        worse, better = (sum(x > NEAR - 1 for x in over), sum(x < 1 - NEAR for x in over))
        seconds = f"{statistics.median(cpu):.1f}×, {max(cpu):.1f}×"
        body.append([name, str(worse), str(better), f"{statistics.median(over):+.1%}", _loss_text(max(over)), seconds])
    head = [
        "without",
        "worse by 1%",
        "better by 1%",
        "median",
        "worst",
        "CPU time, median and most",
    ]
    return table([head[0], *(f"{text}, programs" if "by" in text else text for text in head[1:])], body)


def _until(row: Row, name: str) -> str:
    misses, best = min(tuple(rank) for found in row["found"].values() if found for rank in found["ranks"])
    if row["found"][name] is None:
        return "not ended"
    near = misses, best * NEAR
    steps = row["found"][name]["steps"]
    first = [next((n for n, *rank in seed if tuple(rank) <= near), None) for seed in steps]
    median = sorted(math.inf if n is None else n for n in first)[len(first) // 2]
    return "never" if median == math.inf else f"{median:,.0f}"
