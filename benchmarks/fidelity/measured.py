"""``python -m benchmarks.fidelity.measured``: our cost model against programs that ran.

What was measured is in ``measured/``, with the profiles that ``shardwise hardware calibrate`` made of the same machines:

- ``single.jsonl``: steps on one H200 (``single.py --measure``), predicted under ``h200.toml``: time, and the peak beside the
  compiler's ``peak_memory_in_bytes``;
- ``compile8.jsonl``: plans compiled for eight H200s (``single.py --compile8``): the peak;
- ``parallel.jsonl``: planned steps on eight host devices (``host.py``): the order of the strategies of a program, by the
  fastest step of each. The plans are those that ran, made under ``planned8.toml``, the first calibration; what they take is
  predicted under ``host8.toml``, of all calibrations (``readings1.json``, ``readings2.json``). How a program is computed turns
  on the profile, and what another profile would choose is another program.

Of several lines about the same thing the last counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scipy.stats import spearmanr

from benchmarks.fidelity.cases import Case, Program
from benchmarks.fidelity.compare import Predictor, errors, ms, table
from benchmarks.fidelity.parallel import computing

FOLDER: Final = Path(__file__).parent / "measured"
#: Programs with fewer strategies have no order to speak of.
_FEWEST: Final = 4
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """A program on one device: seconds and peak, predicted and true."""

    program: str
    time_s: float
    true_s: float
    peak_bytes: int
    true_bytes: int

    @property
    def error(self) -> float:
        return abs(self.time_s / self.true_s - 1)

    @property
    def peak_error(self) -> float:
        return abs(self.peak_bytes / self.true_bytes - 1)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The peak on one of eight devices."""

    program: str
    strategy: str
    peak_bytes: int
    true_bytes: int

    @property
    def error(self) -> float:
        return abs(self.peak_bytes / self.true_bytes - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """A planned step on host devices."""

    program: str
    compute: str
    strategy: str
    mesh: str
    time_s: float
    true_s: float
    compute_s: float
    comm_s: float


def lines(file: str, folder: Path = FOLDER) -> list[Record]:
    """The latest lines that are no failures."""
    found: dict[str, Record] = {}
    path = folder / file
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record.get("memory") and "error" not in record:
            record.setdefault("compute", "bfloat16")
            found[json.dumps([record.get(k) for k in ("program", "strategy", "mesh", "compute")])] = record
    return list(found.values())


def case_of(record: Record, profile: Path, devices: int) -> Case:
    """What a line is about; without a strategy it is one device."""
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in record["options"].items()}
    places = {"itx": ("batch/tokens", 1)}
    sequence = places.get(record["zoo"], ("batch/inputs", 1))
    program = Program(record["zoo"], record["config"], tuple(options.items()), (), sequence)
    mesh = tuple((record.get("mesh") or {"x": 1}).items())
    return Case(program, record.get("strategy", "replicated"), f"{profile}:{devices}", mesh)


def single(folder: Path = FOLDER, only: str = "") -> Iterator[Step]:
    predictor = Predictor()
    for r in lines("single.jsonl", folder):
        if only in r["program"] and "median_s" in r:
            p = predictor.predict(case_of(r, folder / "h200.toml", 1))
            yield Step(r["program"], p.time_s, r["median_s"], p.peak_bytes, r["memory"]["peak_memory_in_bytes"])


def compiled8(folder: Path = FOLDER, only: str = "") -> Iterator[Compiled]:
    predictor = Predictor()
    for r in sorted(lines("compile8.jsonl", folder), key=lambda r: str(r["program"])):
        if only in r["program"]:
            p = predictor.predict(case_of(r, folder / "h200.toml", 8))
            yield Compiled(r["program"], r["strategy"], p.peak_bytes, r["memory"]["peak_memory_in_bytes"])


def runs(folder: Path = FOLDER, only: str = "") -> Iterator[Run]:
    known = [r for r in lines("parallel.jsonl", folder) if only in r["program"] and r.get("times_s")]
    for compute in sorted({r["compute"] for r in known}, reverse=True):
        predictor = Predictor()  # the programs are others in another type
        for r in sorted((r for r in known if r["compute"] == compute), key=lambda r: str(r["program"])):
            with computing(compute):
                p = predictor.predict(case_of(r, folder / "planned8.toml", 8), f"{folder / 'host8.toml'}:8")
            mesh = "x".join(map(str, r["mesh"].values()))
            yield Run(r["program"], compute, r["strategy"], mesh, p.time_s, min(r["times_s"]), p.compute_s, p.comm_s)


# Tables.


def single_tables(steps: Sequence[Step]) -> list[str]:
    head = ["program", "measured ms", "predicted ms", "ratio", "peak GB, compiled", "peak GB, predicted", "ratio"]
    body = [
        [
            s.program,
            *ms(s.true_s, s.time_s),
            f"{s.time_s / s.true_s:.2f}",
            *_gb(s.true_bytes, s.peak_bytes),
            f"{s.peak_bytes / s.true_bytes:.2f}",
        ]
        for s in steps
    ]
    (time, far), (peak, far_peak) = errors([s.error for s in steps]), errors([s.peak_error for s in steps])
    words = f"Error of time: median {time}, 90% {far}. Of the peak: median {peak}, 90% {far_peak}."
    return ["## One H200, measured", "", *table(head, body), "", words]


def compiled8_tables(found: Sequence[Compiled]) -> list[str]:
    body = [
        [c.program, c.strategy, *_gb(c.true_bytes, c.peak_bytes), f"{c.peak_bytes / c.true_bytes:.2f}"] for c in found
    ]
    median, far = errors([c.error for c in found])
    lines = ["## Compiled for eight H200s", ""]
    lines += table(["program", "strategy", "peak GB, compiled", "peak GB, predicted", "ratio"], body)
    return [*lines, "", f"Error of the peak: median {median}, 90% {far}."]


def orders(found: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """By program and type, where there are enough strategies."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for r in found:
        groups.setdefault((r.program, r.compute), []).append(r)
    return {key: rows for key, rows in groups.items() if len(rows) >= _FEWEST}


def spearman(rows: Sequence[Run]) -> float:
    return float(spearmanr([r.time_s for r in rows], [r.true_s for r in rows]).statistic)


def regret(rows: Sequence[Run]) -> float:
    """The measured time of our best over that of the best."""
    return min(rows, key=lambda r: r.time_s).true_s / min(r.true_s for r in rows)


def runs_tables(found: Sequence[Run]) -> list[str]:
    groups = orders(found)
    lines = ["## Eight host devices, measured", ""]
    body = [
        [
            program.split(":")[0],
            compute,
            str(len(rows)),
            f"{spearman(rows):.2f}",
            min(rows, key=lambda r: r.time_s).strategy,
            min(rows, key=lambda r: r.true_s).strategy,
            f"{regret(rows):.2f}",
        ]
        for (program, compute), rows in groups.items()
    ]
    lines += table(
        ["program", "computes in", "runs", "Spearman", "our best", "the best", "ours over the best, measured"], body
    )
    lines += ["", "All runs:", ""]
    head = [
        "program",
        "computes in",
        "strategy",
        "mesh",
        "measured ms",
        "predicted ms",
        "of it compute",
        "communication",
    ]
    return lines + table(
        head,
        [
            [r.program.split(":")[0], r.compute, r.strategy, r.mesh, *ms(r.true_s, r.time_s, r.compute_s, r.comm_s)]
            for (_, _), rows in groups.items()
            for r in sorted(rows, key=lambda r: r.true_s)
        ],
    )


def _gb(*sizes: float) -> list[str]:
    return [f"{size / 1e9:.2f}" for size in sizes]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity.measured", description=__doc__)
    parser.add_argument("--measured", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--only", default="", help="only programs whose label has this in it")
    given = parser.parse_args(arguments)
    where = given.measured, given.only
    tables = [
        single_tables(list(single(*where))),
        compiled8_tables(list(compiled8(*where))),
        runs_tables(list(runs(*where))),
    ]
    print("\n\n".join("\n".join(table) for table in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
