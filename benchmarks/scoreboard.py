"""``python -m benchmarks.scoreboard``: found plans and named strategies, compiled by one judge.

The judge is XLA's TPU compiler for v5e:4x4, without a TPU: compute is its estimate of cycles, collectives are timed by our link
formulas, those beside compute only as far as they last longer. All device-local programs of a program were planned and compiled
by ``python -m benchmarks.fidelity.corpus record``, which keeps what the compiler said in ``fidelity/corpus.jsonl``.

A strategy that the compiler refuses for memory cannot win. A program counts if the found plan and at least one named strategy
were compiled to the end, or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.compare import exposed_s
from benchmarks.fidelity.corpus import BY_XLA, SEARCH, TOPOLOGY, load

PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks" / "scoreboard.md"
PICTURE: Final = Path(__file__).parents[1] / "docs" / "benchmarks" / "scoreboard.svg"
#: The picture: its width, that of the names, the height of a bar, and the ticks of its logarithmic scale.
_WIDTH: Final = 860
_NAMES: Final = 190
_HIGH: Final = 20
_TICKS: Final = (0.5, 1, 2, 4, 8, 16)
#: Times closer than this are equal.
EQUAL: Final = 1.01
HEAD: Final = f"""# Scoreboard

Written by `make bench-scoreboard` from what `python -m benchmarks.fidelity.corpus record` compiled: programs of other
packages and of the zoo, planned for {TOPOLOGY} with default settings and compiled to the end by XLA's TPU compiler
without a TPU. Compute is the compiler's estimate of cycles; collectives are timed by our link formulas, those that the
schedule puts beside compute only as far as they last longer. *named* is the strategy that the cost model ranks first on
the found mesh; *fsdp* and *dp* are over all 16 chips. All are compiled as device-local programs, rematerialized where
nothing else fits. "refused" is a program that exceeds the memory. Nothing was fitted to the test set.
"""


@dataclass(frozen=True, slots=True)
class Score:
    """The compiled seconds of the strategies of a program; infinite for those that the compiler refused."""

    program: str
    split: str
    times_s: dict[str, float]

    @property
    def baseline(self) -> str:
        """The fastest named strategy."""
        return min((name for name in self.times_s if name != SEARCH), key=self.times_s.__getitem__)

    @property
    def gain(self) -> float:
        """How many times faster the found plan is than the fastest named strategy."""
        found, best = self.times_s[SEARCH], self.times_s[self.baseline]
        return 1.0 if found == best else best / found

    @property
    def refused(self) -> bool:
        return math.isinf(self.times_s[SEARCH])


def scores() -> list[Score]:
    """Scores of the recorded programs, the largest losses first."""
    by_program: dict[str, list[dict[str, Any]]] = {}
    for row in load().values():
        if "cycles" in row or "oom" in row:
            by_program.setdefault(row["program"], []).append(row)
    found = []
    for program, rows in by_program.items():
        times = {row["strategy"]: compiled_s(row) for row in rows if row["strategy"] != BY_XLA}
        if SEARCH in times and len(times) > 1:
            found.append(Score(program, rows[0]["split"], times))
    return sorted(found, key=lambda s: s.gain)


def compiled_s(row: dict[str, Any]) -> float:
    """The step time of a record by the judge."""
    from shardwise.hardware.layout import place
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.hardware.topology import topology

    if "oom" in row:
        return math.inf
    placement = place(MeshAxes.of(row["mesh"]), topology(TOPOLOGY))
    return row["cycles"]["total"] / placement.topology.profile.clock_hz + exposed_s(row, placement)


def summary(found: Sequence[Score]) -> str:
    """One sentence about a set of programs."""
    kept = sum(s.gain >= 1 / EQUAL and not s.refused for s in found)
    finite = [s.gain for s in found if 0 < s.gain < math.inf]
    mean = math.exp(sum(map(math.log, finite)) / len(finite))
    rescued = sum(math.isinf(s.gain) for s in found)
    return (
        f"{len(found)} programs: the found plan is at least as fast as the fastest named strategy (within 1%) in {kept} "
        f"({kept / len(found):.0%}), {mean:.2f} times as fast in the geometric mean; {rescued} fit by the found plan alone, "
        f"{sum(s.refused for s in found)} found plans are refused."
    )


def page(found: Sequence[Score]) -> str:
    lines = [HEAD, "![The test set as bars](scoreboard.svg)", ""]
    for split, title in (("test", "Test set"), ("fit", "Fit set and zoo")):
        some = [s for s in found if s.split == split]
        if some:
            lines += [f"## {title}", "", summary(some), "", *_table(some), ""]
    return "\n".join(lines).rstrip() + "\n"


def _table(found: Iterable[Score]) -> list[str]:
    strategies = [SEARCH, "named", "fsdp", "dp"]
    lines = ["| program | " + " | ".join(f"{s} ms" for s in strategies) + " | gain |", "|---|" + "---:|" * 5]
    for score in found:
        cells = [_ms(score.times_s.get(s)) for s in strategies]
        lines.append(f"| {score.program} | {' | '.join(cells)} | {_gain(score)} |")
    return lines


def _ms(time_s: float | None) -> str:
    if time_s is None:
        return ""
    return "refused" if math.isinf(time_s) else f"{time_s * 1e3:.3g}" if time_s < 0.1 else f"{time_s * 1e3:,.0f}"


def _gain(score: Score) -> str:
    return "fits" if math.isinf(score.gain) else "refused" if score.refused else f"{score.gain:.2f}"


def picture(found: Sequence[Score]) -> str:
    """The gains of some programs as bars on a logarithmic scale, from 1: what is slower goes to the left."""
    low, high = math.log(_TICKS[0]), math.log(_TICKS[-1] * 1.35)

    def x(gain: float) -> float:
        return round(_NAMES + (_WIDTH - _NAMES - 12) * (math.log(gain) - low) / (high - low), 1)

    height = 64 + _HIGH * len(found)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="12" y="20" font-size="14" font-weight="bold">Times as fast as the fastest named strategy, by XLA\'s TPU '
        "compiler for v5e:4x4</text>",
    ]
    for tick in _TICKS:
        lines.append(f'<line x1="{x(tick)}" x2="{x(tick)}" y1="32" y2="{height - 22}" stroke="#dcd9d3"/>')
        lines.append(f'<text x="{x(tick)}" y="{height - 8}" text-anchor="middle" fill="#59626b">{tick:g}×</text>')
    for row, score in enumerate(sorted(found, key=lambda s: (s.refused, -s.gain))):
        y = 38 + _HIGH * row
        lines.append(
            f'<text x="{_NAMES - 8}" y="{y + 11}" text-anchor="end" fill="#1f2429">{escape(score.program)}</text>'
        )
        if score.refused:
            lines.append(f'<text x="{x(1) + 6}" y="{y + 11}" fill="#a92b20">refused for memory</text>')
            continue
        ends = sorted((x(1), x(max(score.gain, _TICKS[0]))))
        color = "#a92b20" if score.gain < 1 / EQUAL else "#2b5f8f" if score.gain > EQUAL else "#9aa5af"
        lines.append(
            f'<rect x="{ends[0]}" y="{y}" width="{max(2.0, round(ends[1] - ends[0], 1))}" height="14" fill="{color}"/>'
        )
        lines.append(f'<text x="{ends[1] + 6}" y="{y + 11}" fill="#1f2429">{score.gain:.2f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    found = scores()
    PAGE.write_text(page(found))
    PICTURE.write_text(picture([s for s in found if s.split == "test"]))
    for split in ("test", "fit"):
        print(f"{split}: {summary([s for s in found if s.split == split])}")


if __name__ == "__main__":
    main()
