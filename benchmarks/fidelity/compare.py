"""``python -m benchmarks.fidelity.compare [--time] [--memory]``: our cost model against what the TPU compiler says.

Every recorded case (``truth.py``) is decided again, without compiling, and predicted as ``plan.predicted`` is. Compared are

- compute: seconds of all kernels with the compiler's estimated cycles over the clock;
- time, to rank the strategies of a program: compute plus every collective, one after another. On both sides a collective
  costs what ``shardwise.hardware.collectives`` says of the same links: of ours those of the plan, of the compiler's those that
  stand in the compiled program, with their bytes and how often they run. Nothing is hidden on either side, since the
  compiler gives no figure for a collective and so none for what is left of it;
- memory: the predicted peak with the bytes that the compiler allocates, and the verdict whether the program fits. These are
  its ``memory_analysis`` (``peak_memory_in_bytes``) and the gaps in its heap; of a program that does not fit, what it says is
  needed.

Ranks are compared where a program has at least four strategies with cycles on a topology. ``--compact FILE`` writes what is
needed of a collector's file into ``truth.jsonl``, a line a case. ``page.py`` has the whole page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scipy.stats import spearmanr

from benchmarks.fidelity.cases import SERIAL, Case, Program, cases
from benchmarks.fidelity.truth import TRUTH, Record, load
from shardwise.hardware.layout import Placement, place
from shardwise.hardware.topology import topology
from shardwise.verification.step_time import NO_CYCLES, Transfer, step_time

if TYPE_CHECKING:
    from shardwise.cost.predict import Predicted

_FEWEST: Final = 4
_WORST: Final = 12
CLOSE: Final = 1.05
SURE: Final = 1.1  # a program over its memory by this factor must never be said to fit
#: How many of the largest arrays and kernels are kept in the repository.
_KEPT: Final = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a case, ours and the compiler's."""

    case: Case
    compute_s: float
    moving_s: float
    true_compute_s: float
    true_moving_s: float
    #: What of the moving may hide by our reckoning (early gathers, late reduce-scatters), and what the compiler puts beside
    #: compute.
    gathering_s: float = 0.0
    scattering_s: float = 0.0
    true_hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.moving_s

    @property
    def true_total_s(self) -> float:
        return self.true_compute_s + self.true_moving_s

    @property
    def error(self) -> float:
        return abs(self.compute_s / self.true_compute_s - 1)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a case on one device, ours and the compiler's, and what there is."""

    case: Case
    peak_bytes: int
    true_bytes: int
    true_peak_bytes: int
    usable_bytes: int
    refused: bool

    @property
    def error(self) -> float:
        return abs(self.peak_bytes / self.true_bytes - 1)

    @property
    def peak_error(self) -> float:
        """Against the compiler's peak, gaps left out."""
        return abs(self.peak_bytes / self.true_peak_bytes - 1)

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.usable_bytes

    @property
    def surely_refused(self) -> bool:
        return self.refused and self.true_bytes > SURE * self.usable_bytes


class Predictor:
    """Predicts cases without compiling; what a program has once is worked out once."""

    def __init__(self) -> None:
        self._program: Program | None = None

    def _load(self, program: Program) -> None:
        from shardwise.capture.lower import lower
        from shardwise.capture.trace import JitOptions, trace
        from shardwise.dims.analysis import analyze_program

        if program == self._program:
            return
        loaded = program.load()
        traced = trace(loaded.fn, loaded.args, {}, JitOptions(donate_argnums=loaded.donate_argnums))
        self.analysis = analyze_program(lower(traced))
        self._program = program

    def predict(self, case: Case, under: str = "") -> Predicted:
        """What ``shardwise.plan`` would predict, which would also choose constraints; or what that plan takes ``under`` another
        topology."""
        from shardwise.cost.model import CostModel
        from shardwise.cost.predict import predict
        from shardwise.hardware.mesh import MeshAxes
        from shardwise.lowering.decisions import State
        from shardwise.lowering.local_cost import HardwareCost
        from shardwise.lowering.lowered import lower_state
        from shardwise.lowering.small import keep_small
        from shardwise.lowering.structure import Structure
        from shardwise.tactics.tactic import Context, decide

        self._load(case.program)
        mesh = MeshAxes.of(dict(case.mesh))
        cost = HardwareCost(place(mesh, topology(case.topology)))
        roles: dict[str, tuple[str, ...]] = {"batch": ("batch",), "params": ("params",)}
        decisions = decide(Context(self.analysis, mesh, cost, roles), case.tactics())
        small = keep_small(Structure(self.analysis), cost, mesh)
        lowered = lower_state(self.analysis, State(mesh, (*decisions, *small)), cost)
        if under:
            cost = HardwareCost(place(mesh, topology(under)))
        return predict(CostModel(lowered.structure, cost), lowered)


def times(case: Case, predicted: Predicted, record: Record) -> Times:
    """A prediction beside the compiler's cycles and collectives."""
    from shardwise.hardware.mesh import MeshAxes

    placement = place(MeshAxes.of(dict(case.mesh)), topology(case.topology))
    profile = placement.topology.profile
    true_s, moving_s = record["cycles"]["total"] / profile.clock_hz, moved_s(record, placement)
    hidden = moving_s - exposed_s(record, placement)
    gathers, scatters = (
        sum(r.overlapped_s / profile.hidden_share(r.kind) for r in predicted.rows if r.overlapped_s and r.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    )
    return Times(case, predicted.compute_s, predicted.comm_s, true_s, moving_s, gathers, scatters, hidden)


def memory(case: Case, predicted: Predicted, record: Record) -> Memory:
    """A prediction beside the compiler's buffers."""
    refused, known = "oom" in record, record["memory"]
    needed = record["oom"]["needed"] if refused else 0
    true_bytes = needed or known["allocated"]
    return Memory(case, predicted.peak_bytes, true_bytes, known["peak"], predicted.usable_bytes, refused)


def moved_s(record: Record, placement: Placement) -> float:
    """Seconds of the collectives of a compiled program, one after another, on the links of a placement."""
    return step_time(0, _transfers(record), placement).comm_s


def exposed_s(record: Record, placement: Placement) -> float:
    """What of them is left beside compute as the compiler schedules it."""
    return step_time(record["cycles"]["total"], _transfers(record), placement).exposed_s


def _transfers(record: Record) -> Iterator[Transfer]:
    for row in record["collectives"]:
        # Of a row that stands for many small collectives ``parts`` is their number.
        runs = row["parts"] if row.get("op_name") == "smaller" else row["runs"]
        axes = None if row["axes"] is None else tuple(row["axes"])
        beside = row.get("beside", 0) * row["runs"]
        one = Transfer("hop" if row.get("hop") else row["kind"], axes, runs, row["bytes"] * row["runs"], beside)
        yield from [one] * row["count"]


def recorded(truth: dict[str, Record], only: str = "", serial: bool = False) -> Iterator[tuple[Case, Record]]:
    """Cases that were compiled, programs together; with ``serial`` also plans that were made with nothing hidden."""
    for case in sorted(cases(), key=lambda c: (c.program.label, c.topology)):
        record = truth.get(case.key)
        if case.strategy == SERIAL and not serial:
            continue
        if record is not None and "memory" in record and only in case.key:
            yield case, record


def has_cycles(record: Record) -> bool:
    return bool(record.get("cycles")) and record["cycles"]["total"] < NO_CYCLES


# Tables.


def time_tables(found: Sequence[Times]) -> list[str]:
    lines = ["## Compute", ""]
    lines += table(
        ["topology", "cases", "error, median", "error, 90%", "predicted / true, median"],
        [
            [name, str(len(rows)), *errors([r.error for r in rows]), f"{_ratio(rows):.2f}"]
            for name, rows in by_topology(found)
        ],
    )
    groups = rankings(found)
    lines += ["", "## Strategies", "", "Compute and all communication, one after another.", ""]
    body = [[name, topology, str(len(rows)), *_ranking(rows)] for (name, topology), rows in groups.items()]
    head = ["program", "topology", "strategies", "Spearman", "our best", "the compiler's best", "ours over its best"]
    lines += table(head, body)
    if groups:
        ranks = [spearman(rows) for rows in groups.values()]
        close = [regret(rows) <= CLOSE for rows in groups.values()]
        share = f"{sum(close)} of {len(close)} ({sum(close) / len(close):.0%})"
        lines += ["", f"Spearman, median: {statistics.median(ranks):.2f}. Best within 5%: {share}."]
    worst = sorted(found, key=lambda r: -r.error)[:_WORST]
    lines += ["", "Farthest off in compute:", ""]
    head = ["case", "predicted ms", "true ms", "ratio", "moving ms, ours", "moving ms, compiled"]
    lines += table(
        head,
        [
            [
                r.case.key,
                *ms(r.compute_s, r.true_compute_s),
                f"{r.compute_s / r.true_compute_s:.2f}",
                *ms(r.moving_s, r.true_moving_s),
            ]
            for r in worst
        ],
    )
    return lines


def memory_tables(found: Sequence[Memory]) -> list[str]:
    lines = ["## Memory", ""]
    body = []
    for name, rows in by_topology(found):
        agree = sum(r.fits != r.refused for r in rows)
        sure = [r for r in rows if r.surely_refused]
        wrong = sum(r.fits for r in sure)
        both = *errors([r.error for r in rows]), *errors([r.peak_error for r in rows])
        body.append([name, str(len(rows)), *both, f"{agree} of {len(rows)}", f"{wrong} of {len(sure)}"])
    head = [
        "topology", "cases", "error, median", "error, 90%", "without gaps, median", "without gaps, 90%", "same verdict",
        "said to fit, over by 10% or more",
    ]  # fmt: skip
    lines += table(head, body)
    worst = sorted(found, key=lambda r: -r.error)[:_WORST]
    lines += ["", "Farthest off:", ""]
    lines += table(
        ["case", "predicted GB", "true GB", "ratio", "refused"],
        [
            [
                r.case.key,
                f"{r.peak_bytes / 1e9:.2f}",
                f"{r.true_bytes / 1e9:.2f}",
                f"{r.peak_bytes / r.true_bytes:.2f}",
                "yes" if r.refused else "",
            ]
            for r in worst
        ],
    )
    return lines


def spearman(rows: Sequence[Times]) -> float:
    return float(spearmanr([r.total_s for r in rows], [r.true_total_s for r in rows]).statistic)


def regret(rows: Sequence[Times]) -> float:
    """The true time of our best strategy over that of the truly best."""
    return min(rows, key=lambda r: r.total_s).true_total_s / min(r.true_total_s for r in rows)


def _ranking(rows: Sequence[Times]) -> list[str]:
    ours, best = min(rows, key=lambda r: r.total_s), min(rows, key=lambda r: r.true_total_s)
    return [f"{spearman(rows):.2f}", ours.case.strategy, best.case.strategy, f"{regret(rows):.2f}"]


def rankings(found: Iterable[Times]) -> dict[tuple[str, str], list[Times]]:
    """By program and topology, where there are enough strategies; of several meshes the first."""
    groups: dict[tuple[str, str], dict[str, Times]] = {}
    for r in found:
        groups.setdefault((r.case.program.label, r.case.topology), {}).setdefault(r.case.strategy, r)
    return {key: list(rows.values()) for key, rows in groups.items() if len(rows) >= _FEWEST}


def by_topology(found: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    names = dict.fromkeys(r.case.topology for r in found)
    for name in names:
        yield name, [r for r in found if r.case.topology == name]
    if len(names) > 1:
        yield "all", list(found)


def middle(errors: Sequence[float]) -> float:
    return statistics.median(errors)


def high(errors: Sequence[float]) -> float:
    """The 90th percentile."""
    return sorted(errors)[round(0.9 * (len(errors) - 1))]


def errors(found: Sequence[float]) -> tuple[str, str]:
    return f"{middle(found):.1%}", f"{high(found):.1%}"


def _ratio(rows: Sequence[Times]) -> float:
    return statistics.median(r.compute_s / r.true_compute_s for r in rows)


def ms(*seconds: float) -> list[str]:
    return [f"{s * 1e3:.2f}" for s in seconds]


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]


def compact(truth: dict[str, Record]) -> Iterator[Record]:
    """What is read of the records of cases that there are, and a little more for the eye, in order of their keys."""
    for key in sorted(c.key for c in cases() if c.key in truth):
        record = {k: v for k, v in truth[key].items() if k not in ("plan_s", "constraints", "loops", "unknown_trips")}
        if "live" in record:
            record["live"] = {**record["live"], "largest": record["live"]["largest"][:_KEPT]}
        if record.get("cycles"):
            record["cycles"] = {**record["cycles"], "largest": record["cycles"]["largest"][:_KEPT]}
        if "collectives" in record:
            record["collectives"] = list(merged(record["collectives"]))
        yield record


def merged(rows: Iterable[Record]) -> Iterator[Record]:
    """Collectives that cost the same are one row."""
    found: dict[str, Record] = {}
    for row in rows:
        kept = {k: row[k] for k in ("kind", "axes", "bytes", "runs", "parts", "count")}
        if row.get("beside"):
            kept["beside"] = row["beside"]
        if row.get("hop"):
            kept["hop"] = True
        if row.get("op_name") == "smaller":
            kept["op_name"] = "smaller"
        known = found.setdefault(json.dumps(kept | {"count": 0}), kept | {"count": 0})
        known["count"] += row["count"]
    yield from found.values()


def compared(
    known: Iterable[tuple[Case, Record]], time: bool = True, peak: bool = True
) -> tuple[list[Times], list[Memory]]:
    """Recorded cases, predicted."""
    predictor, timed, held = Predictor(), [], []
    for case, record in known:
        if peak or has_cycles(record):
            predicted = predictor.predict(case)
            timed += [times(case, predicted, record)] if time and has_cycles(record) else []
            held += [memory(case, predicted, record)] if peak else []
    return timed, held


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.compare", description=__doc__)
    parser.add_argument("--truth", type=Path, default=TRUTH)
    parser.add_argument("--only", default="", help="only cases whose key has this in it")
    parser.add_argument("--time", action="store_true", help="compute and time (both tables if neither is named)")
    parser.add_argument("--memory", action="store_true", help="peak memory")
    parser.add_argument("--compact", type=Path, metavar="FILE.jsonl", help="write what is needed of it to --truth")
    given = parser.parse_args(arguments)
    if given.compact:
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in compact(load(given.compact))]
        given.truth.write_text("".join(lines))
        print(f"{len(lines)} cases of {given.compact} in {given.truth}")
        return 0
    known = recorded(load(given.truth), given.only)
    timed, held = compared(known, given.time or not given.memory, given.memory or not given.time)
    tables = [*(time_tables(timed) if timed else []), "", *(memory_tables(held) if held else [])]
    print("\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
