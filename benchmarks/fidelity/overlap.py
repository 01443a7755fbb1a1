"""Which shares of a plan's collectives hide behind compute: ours fitted to what the TPU compiler's schedules put there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from benchmarks.fidelity.cases import SEARCH, SERIAL
from benchmarks.fidelity.compare import Times, by_topology, ms, table

#: How often programs are drawn for the range of the shares that hide, and the percentiles of it.
_DRAWS: Final = 300
_LIKELY: Final = (10, 90)
Shares = npt.NDArray[np.float64]


def overlap_tables(found: Sequence[Times]) -> list[str]:
    """Which shares of our seconds give, in sum, what the compiler hides; of experts' plans, as those that were searched were
    searched under such shares. Each case counts by its hidden seconds over its time."""
    lines = ["## Overlap", ""]
    lines += [
        "Seconds of collectives that the compiler's schedule puts beside compute, as shares of a plan's gathers whose operand "
        "is ready early and of its reduce-scatters whose result is used late (`hidden.all-gather` and `hidden.reduce-scatter` "
        f"in a profile): a least-squares fit, and between which shares {_LIKELY[1] - _LIKELY[0]}% of the fits to programs "
        "drawn at random lie. Experts' plans only.",
        "",
    ]
    body = []
    for name, rows in by_topology([r for r in found if r.case.strategy not in (SEARCH, SERIAL)]):
        if name == "all" or not sum(r.gathering_s for r in rows):
            continue
        sums = sum(r.gathering_s for r in rows), sum(r.scattering_s for r in rows), sum(r.true_hidden_s for r in rows)
        shares, likely = _hidden_shares(rows), _likely_shares(rows)
        words = [f"{share:.2f} ({low:.2f} to {high:.2f})" for share, low, high in zip(shares, *likely, strict=True)]
        body.append([name, str(len(rows)), *ms(*sums), *words])
    head = [
        "topology",
        "cases",
        "gathers ms",
        "reduce-scatters ms",
        "hidden ms",
        "share of gathers",
        "of reduce-scatters",
    ]
    return lines + table(head, body)


def _hidden_shares(rows: Sequence[Times]) -> Shares:
    weight = np.array([1 / r.true_total_s for r in rows])
    ours = np.array([[r.gathering_s, r.scattering_s] for r in rows])
    found: Shares = nnls(ours * weight[:, None], np.array([r.true_hidden_s for r in rows]) * weight)[0]
    return found


def _likely_shares(rows: Sequence[Times]) -> Shares:
    """The ends of the range of fits to as many programs as there are, drawn with replacement."""
    programs = {
        label: [r for r in rows if r.case.program.label == label] for label in {r.case.program.label for r in rows}
    }
    names, draw = sorted(programs), np.random.default_rng(0)
    fits = [_hidden_shares([r for n in draw.choice(names, len(names)) for r in programs[n]]) for _ in range(_DRAWS)]
    found: Shares = np.percentile(fits, _LIKELY, axis=0)
    return found
