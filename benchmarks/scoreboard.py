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
from pathlib import Path
from typing import Any, Final

from benchmarks.fidelity.compare import exposed_s
from benchmarks.fidelity.corpus import BY_XLA, SEARCH, TOPOLOGY, load

PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks" / "scoreboard.md"
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
    lines = [HEAD]
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


def main() -> None:
    found = scores()
    PAGE.write_text(page(found))
    for split in ("test", "fit"):
        print(f"{split}: {summary([s for s in found if s.split == split])}")


if __name__ == "__main__":
    main()
