"""Named strategies and plans side by side, the best first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from shardwise.report.page import Page, table
from shardwise.report.units import binary, plural, seconds

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan
    from shardwise.tactics.baselines import Baseline

_MOST: Final = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A named strategy (``baseline``) or a ``plan``, and its prediction. The name of a strategy can be given as ``tactics``."""

    kind: str
    name: str
    time_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int
    fits: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits by step time, then the rest by peak memory."""
        return not self.fits, self.time_s if self.fits else self.peak_bytes


def baseline_row(baseline: Baseline) -> Row:
    cost = baseline.cost
    assert cost is not None
    times = cost.time_s, cost.compute_ps * 1e-12, cost.comm_ps * 1e-12
    return Row("baseline", baseline.name, *times, cost.peak_bytes, baseline.fits)


def plan_row(name: str, plan: Plan, mesh: str) -> Row:
    """The name says the mesh where that is not the one that strategies are compared on."""
    p = plan.predicted
    other = [f"on {plan.mesh}"] if str(plan.mesh) != mesh else []
    name = ", ".join([f"plan {name}", *other, *plan.variant.lines()])
    return Row("plan", name, p.time_s, p.compute_s, p.comm_s, p.peak_bytes, p.fits)


@dataclass(frozen=True)
class Comparison:
    """The rows that were compared, and the strategies that do not apply, with the reason; see :func:`shardwise.compare`."""

    function: str
    mesh: str
    hardware: str
    usable_bytes: int
    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def ranked(self) -> list[Row]:
        """The rows, the best first; of equals, plans come before strategies."""
        return sorted(self.rows, key=lambda row: row.rank)

    def __str__(self) -> str:
        return comparison_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows: the same text as a terminal."""
        printer.text(str(self))

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data, the best first."""
        return {
            "schema": 1,
            "function": self.function,
            "mesh": self.mesh,
            "hardware": self.hardware,
            "usable_bytes": self.usable_bytes,
            "rows": [asdict(row) for row in self.ranked],
            "refused": [{"name": name, "reason": reason} for name, reason in self.refused],
        }


def comparison_text(compared: Comparison, width: int = 80, every: bool = False) -> str:
    """One line per row. Only the first strategies are listed unless ``every``, but all plans."""
    page = Page(width)
    page.print(
        f"{compared.function} on {compared.mesh}: {compared.hardware}, {binary(compared.usable_bytes)} a device\n"
    )
    ranked = compared.ranked
    shown = [row for k, row in enumerate(ranked) if every or k < _MOST or row.kind == "plan"]
    cells = []
    for row in shown:
        times = (seconds(t) for t in (row.time_s, row.compute_s, row.comm_s))
        cells.append([*times, binary(row.peak_bytes), "yes" if row.fits else "no", row.name])
    page.print(table([">step time", ">compute", ">communication", ">memory", "fits", "*strategy or plan"], cells))
    if len(shown) < len(ranked):
        page.print(f"\nand {plural(len(ranked) - len(shown), 'combination')} more: --all or .ranked")
    if compared.refused and every:
        page.print("\nNot possible\n" + "\n".join(f"  {name}: {reason}" for name, reason in compared.refused))
    elif compared.refused:
        page.print(f"\n{plural(len(compared.refused), 'combination')} not possible: --all or .refused says why")
    return page.text()
