"""``make bench-search``: what was recorded of the search, on one page, ``docs/benchmarks/search.md``.

Nothing is searched here; ``run.py`` and ``others.py`` record, and so does ``benchmarks/fidelity/truth.py`` for what XLA makes
of found plans.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.cases import SEARCH, SERIAL, Case
from benchmarks.fidelity.compare import exposed_s, has_cycles, moved_s, ms, recorded, table
from benchmarks.fidelity.page import Bar
from benchmarks.fidelity.truth import TRUTH
from benchmarks.fidelity.truth import load as load_truth
from benchmarks.search.others import FOLDER, FREE
from benchmarks.search.parts import ablation_part, default_part
from benchmarks.search.run import MESHES, PROGRAMS, Record, load
from shardwise import __version__
from shardwise.hardware.layout import Placement, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology

PAGE: Final = Path(__file__).parents[2] / "docs" / "benchmarks" / "search.md"
Row = dict[str, Any]

INTRO: Final = """How good the plans of `shardwise.plan` are, by the cost model ([how true it is](fidelity.md)): beside \
the best of all states, and without parts of the search; then with default settings beside longer searches and named \
strategies, and what XLA makes of them."""
EARLIER: Final = """The records below were made with earlier versions of the search, which did not change a group on several \
axes at once. Seconds are of a machine with two cores."""

EXPERTS: Final = """Every program of the zoo at full size on five topologies, with a mesh of two axes. Experts are data \
parallelism, FSDP, ZeRO-1 and 2, Megatron with and without sequence parallelism, vocabulary, context, expert and edge \
sharding, alone and combined over the axes. The search starts from them, so that it is never worse. Where nothing fits at \
full size, layers are rematerialized, then the batch is cut to a quarter until something does. A ratio above one says how \
many times faster the found plan is. *Least* is what the program computes on one device over the number of devices; an \
expert within a tenth of it is bound by arithmetic, and nothing could be faster by a tenth. The search was worked on with \
these programs in view."""


def read(part: str) -> Any:
    return json.loads((FOLDER / f"{part}.json").read_text())


REGRET: Final = """The default search from the named strategies, as `shardwise.plan` runs it, beside the best of all states of \
the problem. Below zero, a decision of a named strategy is none of the actions of the search."""
GROUPING: Final = f"""The best of all states where the layers of an unrolled program are decided together, beside what the \
search finds in {FREE:,} evaluations where each is decided alone, three seeds. With layers free there are more states than can \
be tried, so that this is the best known, not the optimum."""
BOUND: Final = """The integer program minimizes local costs, of ops and reshards one by one with nothing fused; every \
value may have any sharding and every op any candidate, whether decisions could say so or not. First the regret in \
local costs: the same search, with these costs as its objective, above the bound that no plan can beat. Then two \
comparisons of different measures. The time, in the cost model, of the plan found for the cost model over that of the \
state nearest to the integer program's optimum, with what that leaves open decided greedily \
(`benchmarks/search/ilp_state.py`): below zero the found plan is faster. And the local costs of the plan found for the \
cost model above the bound, which is no regret, since it was found for another measure: it says how far apart the two \
are."""
COMPILED: Final = """The compiler's cycles, and its collectives over the same links, in two readings. As the compiler \
schedules them, where what runs between a collective's start and its end hides it, which is what plans are made for: the \
profile's shares were fitted to the schedules of experts' plans ([Overlap](fidelity.md)). And one after another, for which \
plans were searched under the same profile with nothing hidden as well; the last columns hold the first plans against that \
reading."""


def bar(number: str, what: str, wanted: str, found: str, met: bool | None) -> Bar:
    return Bar(number, what, wanted, found, met)


# Experts.


def expert_part(records: Sequence[Record]) -> tuple[list[Bar], list[str]]:
    able = [r for r in records if r.found_fits or r.expert_fits]
    lost = [r for r in able if not r.found_fits]
    worse = [r for r in able if r.expert_fits and r.found_fits and r.ratio < 0.99]
    better = [r for r in able if r.found_fits and (not r.expert_fits or r.ratio >= 1.1)]
    room = [r for r in able if not r.arithmetic]
    share = len(better) / len(room) if room else 0.0
    bars = [
        bar("1", "found plans that fit, where any does", "all", f"{len(able) - len(lost)} of {len(able)}", not lost),
        bar("1", "cases in which an expert is better by 1%", "none", f"{len(worse)} of {len(able)}", not worse),
        bar(
            "1",
            "better than all experts by 10%, where these are not bound by arithmetic",
            "≥ 25%",
            f"{len(better)} of {len(room)} ({share:.0%}), of all {len(able)}: {len(better) / max(1, len(able)):.0%}",
            share >= 0.25,
        ),
    ]
    body = [
        [
            r.program,
            r.topology,
            ", ".join(f"{k} {v}" if v is not True else k for k, v in r.options.items()) or "as it is",
            *ms(r.found_s),
            "yes" if r.found_fits else "no",
            *ms(r.expert_s),
            ("" if r.expert_fits else "(does not fit) ") + r.expert,
            f"{r.ratio:.2f}" if r.found_fits and r.expert_fits else "-",
            *ms(r.least_s),
        ]
        for r in records
    ]
    longer = [r for r in records if r.evaluations > 1000]
    budgets = f"Searches had 1,000 evaluations; those of {len(longer)} cases had 2,000."
    lines = ["## Against experts", "", EXPERTS, "", budgets, ""]
    lines += table(
        ["program", "devices", "variant", "found ms", "fits", "expert ms", "best expert", "ratio", "least ms"], body
    )
    wanted = len(PROGRAMS) * len(MESHES)
    if len(records) < wanted:
        lines += ["", f"Recorded so far: {len(records)} of {wanted} cases."]
    none = [r for r in records if not (r.found_fits or r.expert_fits)]
    if none:
        lines += [
            "",
            f"In {len(none)} of {len(records)} cases nothing fits, whatever the batch: the model is too large.",
        ]
    return bars, lines


# XLA.


def compiled_part() -> tuple[list[Bar], list[str]]:
    """Found plans beside the experts of the same program, both compiled for v5e:4x4."""

    def seconds(case: Case, record: Row, moving: Callable[[Row, Placement], float]) -> float:
        placed = place(MeshAxes.of(dict(case.mesh)), topology(case.topology))
        return float(record["cycles"]["total"] / placed.topology.profile.clock_hz + moving(record, placed))

    groups: dict[str, dict[str, tuple[Case, Row]]] = {}
    for case, record in recorded(load_truth(TRUTH), serial=True):
        if case.topology == "v5e:4x4":
            groups.setdefault(case.program.label, {}).setdefault(case.strategy, (case, record))
    body, refused = [], 0
    readings = {
        "as scheduled": (SEARCH, exposed_s),
        "one after another, planned so": (SERIAL, moved_s),
        "one after another, planned for the scheduler": (SEARCH, moved_s),
    }
    ratios: dict[str, list[float]] = {what: [] for what in readings}
    for label, rows in groups.items():
        made = {name for name in (SEARCH, SERIAL) if name in rows}
        if SEARCH not in made:
            continue
        refused += sum("oom" in rows[name][1] for name in made)
        able = {name: pair for name, pair in rows.items() if has_cycles(pair[1]) and "oom" not in pair[1]}
        experts = [name for name in able if name not in made]
        if SEARCH not in able or len(experts) < 3:
            continue
        line = [label, str(len(experts))]
        for what, (own, moving) in readings.items():
            if own not in able:
                line += ["-"] * 4
                continue
            timed = {name: seconds(*able[name], moving) for name in (own, *experts)}
            best = min(experts, key=timed.__getitem__)
            ratios[what].append(timed[best] / timed[own])
            line += [*ms(timed[own]), *ms(timed[best]), best, f"{ratios[what][-1]:.2f}"]
        body.append(line)
    count = len(body)
    bars = [bar("2", "found plans compiled, with three experts or more", "≥ 12", str(count), count >= 12)]
    for what, found in ratios.items():
        good, all_of = sum(r >= 0.995 for r in found), len(found)
        name = f"as fast as the best expert compiled, collectives {what}"
        judged = readings[what][0] == SEARCH  # what a user gets
        met = good >= 0.9 * all_of and all_of >= 12 if judged else None
        bars.append(bar("2", name, "≥ 90%" if judged else "no bar", f"{good} of {all_of}", met))
    bars.append(bar("2", "found plans that XLA refuses for memory", "none", str(refused), not refused))
    lines = ["## Compiled by XLA for v5e:4x4", "", COMPILED, ""]
    heads = [[f"{what}: found ms", "expert ms", "best expert", "ratio"] for what in readings]
    lines += table(["program", "experts", *(head for own in heads for head in own)], body)
    return bars, lines


# All states, bounds, ablations, seconds.


def regret_part() -> tuple[list[Bar], list[str]]:
    rows = read("regret")
    over = [seed["over"] for row in rows for seed in row["seeds"]]
    known = [o for o in over if o is not None]
    bars = []
    if over:
        worst, median = max(known), statistics.median(known)
        all_fit = len(known) == len(over)
        bars = [
            bar("3", "regret against all states, median", "≤ 1%", f"{median:.2%} of {len(over)} runs", median <= 0.01),
            bar("3", "regret against all states, worst", "≤ 3%", f"{worst:.2%}", worst <= 0.03 and all_fit),
        ]
    lines = ["## Against all states", "", REGRET, ""]
    lines += table(
        ["program", "devices", "mesh", "states", "fits", "regret of five seeds", "evaluations", "seconds"],
        [
            [
                row["program"],
                row["topology"],
                _mesh(row),
                f"{row['states']:,}",
                "yes" if row["fits"] else "no",
                " ".join("other" if s["over"] is None else f"{s['over']:.2%}" for s in row["seeds"]),
                f"{statistics.median(s['evaluations'] for s in row['seeds']):,.0f}",
                f"{statistics.median(s['seconds'] for s in row['seeds']):.1f}",
            ]
            for row in rows
        ],
    )
    return bars, lines


def bound_part() -> tuple[list[Bar], list[str]]:
    bounds = read("ilp")
    bars = [
        *_over("regret against the integer program's bound, in its currency", bounds, "seeds"),
        *_over("against the integer program's optimum as a plan, in the cost model", bounds, "over"),
    ]
    lines = ["## Against an integer program", "", BOUND, ""]
    columns = {
        "above the bound, each seed": "seeds",
        "over the optimum as a plan": "over",
        "for the cost model, above the bound": "across",
    }
    lines += table(
        ["program", "devices", "mesh", *columns, "solved in s"],
        [
            [
                r["program"],
                r["topology"],
                _mesh(r),
                *(" ".join("does not fit" if s is None else f"{s:.1%}" for s in r[key]) for key in columns.values()),
                f"{r['ilp_s']:.0f}",
            ]
            for r in bounds
        ],
    )
    return bars, lines


def _over(what: str, rows: Sequence[Row], key: str) -> list[Bar]:
    """The bars of a regret, over all seeds of all rows; a seed that found nothing that fits misses both."""
    found = [math.inf if s is None else s for row in rows for s in row[key]]
    median, worst = statistics.median(found), max(found)
    return [
        bar("3", f"{what}, median", "≤ 1%", f"{median:.2%} of {len(found)} runs", median <= 0.01),
        bar("3", f"{what}, worst", "≤ 5%", f"{worst:.2%}", worst <= 0.05),
    ]


def grouping_part() -> tuple[list[Bar], list[str]]:
    rows = read("grouping")
    if not rows:
        return [], []
    losses = [row["grouped"][1] / min(row["free"])[1] - 1 for row in rows]
    found = f"{max(losses):.2%} of {len(rows)} programs"
    bars = [bar("7", "lost by grouping, against the best known", "≤ 1%", found, max(losses) <= 0.01)]
    lines = ["## What grouping costs", "", GROUPING, ""]
    body = [
        [
            f"{row['program']} {row['topology']}",
            f"{row['states']:,}",
            _ranks([row["grouped"]]),
            str(row["actions"]),
            _ranks(row["free"]),
            str(row["free_actions"]),
            f"{loss:.2%}",
        ]
        for row, loss in zip(rows, losses, strict=True)
    ]
    lines += table(["program", "states", "grouped ms", "actions", "free ms", "actions", "lost"], body)
    return bars, lines


def _ranks(ranks: Iterable[Sequence[int]]) -> str:
    return " ".join(f"{value / 1e9:.2f}" if not over else f"({value * 512 / 2**30:.1f} GiB)" for over, value in ranks)


def timing_part() -> tuple[list[Bar], list[str]]:
    rows = read("timing")
    bars = [
        bar(
            "4",
            f"{r['program']} on {r['topology']}",
            f"≤ {r['limit_s']:.0f} s",
            f"{r['seconds']:.1f} s",
            r["seconds"] <= r["limit_s"],
        )
        for r in rows
    ]
    if rows:
        most = max(r["process_bytes"] for r in rows)
        bars.append(bar("4", "memory of the process", "≤ 2 GB", f"{most / 1e9:.2f} GB", most <= 2e9))
    lines = ["## From function to plan", "", "Tracing, search and constraints, default budget.", ""]
    lines += table(
        ["program", "devices", "mesh", "seconds", "of search", "evaluations", "fits", "predicted step", "process GB"],
        [
            [
                r["program"],
                r["topology"],
                "x".join(map(str, r["mesh"].values())),
                f"{r['seconds']:.1f}",
                f"{r['search_s']:.1f}",
                f"{r['evaluations']:,}",
                "yes" if r["fits"] else "no",
                f"{r['time_s'] * 1e3:,.0f} ms",
                f"{r['process_bytes'] / 1e9:.2f}",
            ]
            for r in rows
        ],
    )
    return bars, lines


def _mesh(row: Row) -> str:
    return "x".join(map(str, row["mesh"]))


def make() -> str:
    parts = [default_part(read("default")), regret_part(), expert_part(load()), ablation_part(read("ablation"))]
    earlier = [
        compiled_part(),
        bound_part(),
        timing_part(),
        grouping_part(),
    ]
    lines = ["# The search, measured", "", INTRO, ""]
    lines += [f"Made by `make bench-search`, shardwise {__version__}.", "", *_bars(parts)]
    for _, own in parts:
        lines += ["", *own]
    lines += ["", "## Earlier records", "", EARLIER, "", *_bars(earlier)]
    for _, own in earlier:
        lines += ["", *(f"#{line}" if line.startswith("## ") else line for line in own)]
    return "\n".join(lines) + "\n"


def _bars(parts: Sequence[tuple[list[Bar], list[str]]]) -> list[str]:
    rows = [[b.what, b.wanted, b.found, b.verdict] for bars, _ in parts for b in bars]
    return table(["what", "wanted", "found", ""], rows)


def main() -> int:
    PAGE.write_text(make())
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
