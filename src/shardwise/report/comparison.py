"""Strategies and plans beside each other, the best first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from shardwise.report.page import Page, table
from shardwise.report.units import binary, plural, seconds
from shardwise.report.wrapping import wrapped

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan
    from shardwise.tactics.experts import Expert

_MOST: Final = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy (``expert``) or a saved ``plan``, and what it is predicted to take."""

    kind: str
    name: str
    time_s: float
    compute_s: float
    comm_s: float
    peak_bytes: int
    fits: bool

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits by time, then the rest by what it needs."""
        return not self.fits, self.time_s if self.fits else self.peak_bytes


def expert_row(expert: Expert) -> Row:
    cost = expert.cost
    assert cost is not None
    figures = (cost.time_s, cost.compute_ps * 1e-12, cost.comm_ps * 1e-12, cost.peak_bytes)
    return Row("expert", expert.name, *figures, expert.fits)


def plan_row(name: str, plan: Plan, mesh: str) -> Row:
    """The mesh is named where it is not the one that strategies are compared on."""
    p = plan.predicted
    other = [f"on {plan.mesh}"] if str(plan.mesh) != mesh else []
    words = ", ".join([f"plan {name}", *other, *plan.variant.lines()])
    return Row("plan", words, p.time_s, p.compute_s, p.comm_s, p.peak_bytes, p.fits)


@dataclass(frozen=True)
class Comparison:
    """All that was compared, and what does not apply, with the reason. Made by :func:`shardwise.compare`."""

    function: str
    mesh: str
    hardware: str
    usable_bytes: int
    rows: tuple[Row, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def ranked(self) -> list[Row]:
        """The best first; of equals plans before strategies, as they came."""
        return sorted(self.rows, key=lambda row: row.rank)

    def __str__(self) -> str:
        return comparison_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What a notebook shows: the same text as a terminal."""
        printer.text(str(self))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data, the best first."""
        return {
            "schema": 1,
            "function": self.function,
            "mesh": self.mesh,
            "hardware": self.hardware,
            "usable_bytes": self.usable_bytes,
            "rows": [asdict(row) for row in self.ranked],
            "refused": [{"name": name, "reason": reason} for name, reason in self.refused],
        }


def comparison_text(
    compared: Comparison,
    width: int = 80,
    every: bool = False,
    hints: tuple[str, str] = ("ranked has them", "refused says why"),
) -> str:
    """A line each. Strategies after the first few are left out, plans never are; ``hints`` say where the others are, and where
    the reasons of those that are not possible."""
    page = Page(width)
    page.print(
        f"{compared.function} on {compared.mesh}: {compared.hardware}, {binary(compared.usable_bytes)} a device\n"
    )
    ranked = compared.ranked
    shown = [row for k, row in enumerate(ranked) if every or k < _MOST or row.kind == "plan"]
    rows = table(
        ("time", "right"),
        ("compute", "right"),
        ("moved", "right"),
        ("memory", "right"),
        ("fits", "left"),
        ("strategy or plan", "text"),
    )
    for row in shown:
        times = (seconds(t) for t in (row.time_s, row.compute_s, row.comm_s))
        rows.add_row(*times, binary(row.peak_bytes), "yes" if row.fits else "no", row.name)
    page.print(rows)
    if len(shown) < len(ranked):
        page.print(f"\nand {plural(len(ranked) - len(shown), 'combination')} more: {hints[0]}")
    if compared.refused and every:
        page.print("\nNot possible")
        page.print(wrapped("\n".join(f"  {name}: {reason}" for name, reason in compared.refused), width).rstrip())
    elif compared.refused:
        page.print(f"\n{plural(len(compared.refused), 'combination')} not possible: {hints[1]}")
    return page.text()
