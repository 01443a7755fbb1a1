"""The parts of the page about default settings, and about the search without parts of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.fidelity.compare import table
from benchmarks.fidelity.page import Bar
from benchmarks.search.ablation import ABLATIONS

Row = dict[str, Any]
#: As good as the best; a difference that is listed.
NEAR: Final = 1.01

DEFAULT: Final = """Plans with default settings, remat and micro-batches open, made while two further processes kept the \
machine busy. *Strategy* is the best combination of named strategies on the plan's mesh over all variants: with and without \
remat, in 1, 2, 4, ... micro-batches. *Long* is a search of 5,000 evaluations."""
ABLATION: Final = """{evaluations:,} evaluations, {seeds} seeds, the median of these. The step time of the whole search, and \
how much longer it is without a part; below zero the search is better without it. *No fit*: nothing was found that fits, where \
the whole search has a plan that does. What is left out is described in `benchmarks/search/ablation.py`."""
ALONE: Final = """Named strategies hide what a search finds alone. The same without them, also over the whole search:"""
STEPS: Final = """Evaluations until the best state is within 1% of the best of the row, the median of all seeds; seeds \
themselves are not counted. *Never*: for most seeds."""


def default_part(rows: dict[str, Row]) -> tuple[list[Bar], list[str]]:
    over_strategy = {key: _over(row["default"], row["strategy"]) for key, row in rows.items()}
    over_long = {key: _over(row["default"], row["long"]) for key, row in rows.items()}
    false = [key for key, row in rows.items() if row["long"]["fits"] and not row["default"]["fits"]]
    worst = max(over_long.values())
    losses = [key for key, over in over_strategy.items() if over > 1e-9]
    bars = [
        Bar("", "default plans worse than a named strategy, at any variant", "none", _of(losses, rows), not losses),
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
    return bars, ["## Default settings", "", DEFAULT, "", *table(head, body)]


def _over(plan: Row, other: Row | None) -> float:
    """How much longer the step of a plan is; a plan that fits beats one that does not."""
    if other is None or (plan["fits"] and not other["fits"]):
        return -1.0
    return float("inf") if other["fits"] and not plan["fits"] else plan["time_s"] / other["time_s"] - 1


def _of(some: Sequence[str], rows: dict[str, Row]) -> str:
    return f"{len(some)} of {len(rows)}"


def _planned(plan: Row) -> list[str]:
    fits = "" if plan["fits"] else ", does not fit"
    return [f"{plan['time_s'] * 1e3:,.2f} ms{fits}", plan["mesh"], plan["variant"]]


def _strategy(row: Row | None) -> str:
    if row is None:
        return "none"
    variant = "" if row["variant"] == "as it is" else f", {row['variant']}"
    return f"{row['name']}{variant}: {row['time_s'] * 1e3:,.2f} ms{'' if row['fits'] else ', does not fit'}"


# The search without parts of it.


def ablation_part(record: Row) -> tuple[list[Bar], list[str]]:
    rows = record["rows"]
    seeds = len(rows[0]["found"]["whole"]["ranks"])
    seeded = [name for name, ablation in ABLATIONS.items() if ablation.strategies and name != "whole"]
    alone = [name for name, ablation in ABLATIONS.items() if not ablation.strategies]
    lines = ["## What each part is worth", "", ABLATION.format(evaluations=record["evaluations"], seeds=seeds), ""]
    lines += _losses(rows, seeded)
    lines += ["", ALONE, "", *_losses(rows, alone), "", *_summary(rows, [*seeded, *alone]), "", STEPS, ""]
    names = ["whole", *seeded, *alone]
    lines += table(["program", *names], [[_case(row), *(_until(row, name) for name in names)] for row in rows])
    return [], lines


def _case(row: Row) -> str:
    return f"{row['program']} {row['topology']}, {'x'.join(map(str, row['mesh']))}"


def _median(found: Row) -> tuple[int, int]:
    ranks: list[tuple[int, int]] = sorted(map(tuple, found["ranks"]))
    return ranks[len(ranks) // 2]


def loss(row: Row, name: str) -> float | None:
    """How much longer a step is without a part; None where it does not fit, and -1 where it does, unlike the whole search."""
    (misses, figure), (whole_misses, whole) = _median(row["found"][name]), _median(row["found"]["whole"])
    if misses == whole_misses:
        return figure / whole - 1
    return None if misses > whole_misses else -1.0


def _losses(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    body = []
    for row in rows:
        misses, figure = _median(row["found"]["whole"])
        whole = f"{figure / 1e9:,.2f} ms" if not misses else f"{figure * 512 / 2**30:.1f} GiB, no fit"
        each = (loss(row, name) for name in names)
        body.append([_case(row), whole, *("no fit" if over is None else f"{over:+.1%}" for over in each)])
    return table(["program", "whole", *names], body)


def _summary(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    body = []
    for name in names:
        over = [float("inf") if (x := loss(row, name)) is None else x for row in rows]
        cpu = [sum(row["found"][name]["cpu_s"]) / sum(row["found"]["whole"]["cpu_s"]) for row in rows]
        worse, better = (sum(x > NEAR - 1 for x in over), sum(x < 1 - NEAR for x in over))
        worst = "no fit" if max(over) == float("inf") else f"{max(over):+.1%}"
        seconds = f"{statistics.median(cpu):.1f}×, {max(cpu):.1f}×"
        body.append([name, str(worse), str(better), f"{statistics.median(over):+.1%}", worst, seconds])
    head = [
        "without",
        "worse by 1%",
        "better by 1%",
        "median",
        "worst",
        "CPU time over the whole search, median and most",
    ]
    return table([head[0], *(f"{text}, programs" if "by" in text else text for text in head[1:])], body)


def _until(row: Row, name: str) -> str:
    misses, best = min(tuple(rank) for found in row["found"].values() for rank in found["ranks"])
    near = misses, best * NEAR
    steps = row["found"][name]["steps"]
    first = [next((n for n, *rank in seed if tuple(rank) <= near), None) for seed in steps]
    median = sorted(float("inf") if n is None else n for n in first)[len(first) // 2]
    return "never" if median == float("inf") else f"{median:,.0f}"
