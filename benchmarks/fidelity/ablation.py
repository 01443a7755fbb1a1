"""``python -m benchmarks.fidelity.ablation``: what each special term of the cost model for TPUs is worth.

Every recorded case of ``corpus.jsonl`` is predicted again without one term at a time. The table has the median error and the
mean absolute logarithm of predicted over compiled, of the step time or of the peak memory, for the fit set and the test set, of
which nothing else is printed. A term that improves neither set should go. Needs the corpus environment, as ``corpus`` does.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from benchmarks.fidelity import corpus
from shardwise.cost import compute, kernels, layouts, memory, model
from shardwise.cost.compute import _Sizes
from shardwise.cost.memory import Lifetimes
from shardwise.cost.model import CostModel
from shardwise.lowering.local_cost import HardwareCost
from shardwise.planner.inquiry import Inquiry

Patch = Callable[[], Any]
#: By term the figure that it is about, and what takes it out.
TERMS: Final[dict[str, tuple[str, Patch]]] = {
    "values stay in on-chip memory": ("s", lambda: mock.patch.object(_Sizes, "stays", lambda *_: False)),
    "elements shift inside of tiles": ("s", lambda: mock.patch.object(compute, "SHIFT", 0)),
    "lookups of windows are loops": ("s", lambda: mock.patch.object(compute, "KERNELS", 0)),
    "tiles pad registers": ("s", lambda: mock.patch.object(layouts.Layouts, "in_registers", lambda *_: 1.0)),
    "rows narrower than a register": ("s", lambda: mock.patch.object(layouts, "narrow_rows", lambda *_: 1.0)),
    "products read transposed": ("s", lambda: mock.patch.object(kernels, "_transposed", lambda *_: iter(()))),
    "results copied to donated arguments": ("s", lambda: mock.patch.object(kernels, "_returned", lambda *_: iter(()))),
    "lookups copy to row-major order": ("s", lambda: mock.patch.object(model, "lookup_copies", lambda *_: iter(()))),
    "the same, memory": ("bytes", lambda: mock.patch.object(model, "lookup_copies", lambda *_: iter(()))),
    "minor dimensions of products": ("bytes", lambda: mock.patch.object(layouts, "_minor", lambda _: {})),
    "outputs in another order": ("bytes", lambda: mock.patch.object(model, "reordered_outputs", lambda _: {})),
    "stacks converted before loops": ("bytes", lambda: mock.patch.object(Lifetimes, "_narrowed", lambda _: {})),
    "temporaries in on-chip memory": ("bytes", lambda: mock.patch.object(model, "on_chip_blocks", lambda _: 0)),
    "gaps in the heap": ("bytes", lambda: mock.patch.object(memory, "GAPS", 1 << 40)),
}
Case = tuple[dict[str, Any], Any, Any, Any]


def cases() -> Iterator[Case]:
    """By recorded case the record, the analyzed program, the placement and the decisions."""
    every = {p.name: p for p in corpus.every_program()}
    for row in corpus.load().values():
        if "memory" in row and row["strategy"] != corpus.BY_XLA:
            program = every[row["program"]]
            with contextlib.suppress(Exception):  # corpus.compare says why
                plan = corpus.predicted(program.build(**program.full), row)
                yield row, plan.asked.analysis, plan.asked.cost.placement, plan.decisions


def ratios(case: Case) -> dict[str, float]:
    """Predicted over compiled, without ("") and with each term taken out."""
    row, analysis, placement, decisions = case
    found = {}
    for name, (figure, patch) in {
        "": ("s", contextlib.nullcontext),
        " ": ("bytes", contextlib.nullcontext),
        **TERMS,
    }.items():
        with patch():
            settled = Inquiry(CostModel.of(analysis, HardwareCost(placement))).settle(decisions)
        plan = SimpleNamespace(mesh=placement.mesh, predicted=settled.predicted)
        found[name] = corpus._ratio(corpus.figures(plan, row), figure)
    return found


def table(by_split: dict[str, list[dict[str, float]]]) -> str:
    """A row for each term: the median error and the mean absolute logarithm, of the fit set and of the test set."""

    def cells(name: str) -> str:
        texts = []
        for split in ("fit", "test"):
            good = [r[name] for r in by_split[split] if r[name] > 0]
            median = statistics.median(abs(r - 1) for r in good)
            texts += [f"{median:.1%}", f"{statistics.mean(abs(math.log(r)) for r in good):.3f}"]
        return " | ".join(texts)

    lines = ["| without | of | fit: median | mean log | test: median | mean log |", "|---|---|---:|---:|---:|---:|"]
    names = {"s": "time", "bytes": "memory"}
    lines += [f"| nothing | time | {cells('')} |", f"| nothing | memory | {cells(' ')} |"]
    lines += [f"| {name} | {names[figure]} | {cells(name)} |" for name, (figure, _) in TERMS.items()]
    return "\n".join(lines)


def main(found: Iterator[Case]) -> int:
    by_split: dict[str, list[dict[str, float]]] = {"fit": [], "test": []}
    for case in found:
        by_split[case[0]["split"]].append(ratios(case))
    print(table(by_split))
    return 0


if __name__ == "__main__":
    sys.exit(main(cases()))
