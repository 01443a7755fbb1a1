"""What differs between two plans: data first, then words.

Two plans are the same if they do the same on the same devices. How they were found, and by which versions, is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.plans.codec import encode
from shardwise.report.page import Page, table
from shardwise.report.plan_text import spec_text
from shardwise.report.units import binary, seconds
from shardwise.report.wrapping import wrapped

if TYPE_CHECKING:
    from shardwise.plans.plan import ArrayPlan, Plan


@dataclass(frozen=True)
class Difference:
    """Two plans, the first and the second as ``one`` and ``other``."""

    one: Plan
    other: Plan

    @property
    def facts(self) -> tuple[tuple[str, str, str], ...]:
        """What the plans are about, where it differs: (what, of one, of the other)."""
        pairs = (
            ("function", self.one.function, self.other.function),
            ("program", self.one.fingerprint[:12], self.other.fingerprint[:12]),
            ("devices", self.one.predicted.hardware, self.other.predicted.hardware),
            ("placement", "; ".join(self.one.placement), "; ".join(self.other.placement)),
            ("device order", _some(self.one.device_order), _some(self.other.device_order)),
            ("donated", _donated(self.one, self.other), _donated(self.other, self.one)),
        )
        return tuple(pair for pair in pairs if pair[1] != pair[2])

    @property
    def computed(self) -> int:
        """How many ops the two plans compute on other axes."""
        mine, yours = (list(zip(p.sharded.factors, p.sharded.passed, strict=True)) for p in (self.one, self.other))
        return sum(a != b for a, b in zip(mine, yours, strict=False)) + abs(len(mine) - len(yours))

    @property
    def arrays(self) -> tuple[tuple[str, ArrayPlan | None, ArrayPlan | None], ...]:
        """Arguments and outputs whose shape, type or sharding is not the same, by path."""
        mine, yours = ({a.path: a for a in (*p.arguments, *p.outputs)} for p in (self.one, self.other))
        pairs = ((path, mine.get(path), yours.get(path)) for path in {**mine, **yours})
        return tuple((path, a, b) for path, a, b in pairs if (a and spec_text(a)) != (b and spec_text(b)))

    @property
    def same(self) -> bool:
        def done(plan: Plan) -> tuple[object, ...]:
            p = plan.predicted
            figures = (p.time_s, p.compute_s, p.comm_s, p.peak_bytes, p.usable_bytes)
            return plan.mesh, plan.variant, _texts(plan), plan.device_order, plan.moved(), figures

        return done(self.one) == done(self.other) and not (self.facts or self.arrays or self.computed)

    def to_json(self) -> dict[str, Any]:
        def figures(plan: Plan) -> dict[str, Any]:
            p = plan.predicted
            return {
                "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
                "variant": encode(plan.variant),
                "time_s": p.time_s,
                "compute_s": p.compute_s,
                "comm_s": p.comm_s,
                "peak_bytes": p.peak_bytes,
                "fits": p.fits,
                "moved": [
                    {"kind": kind, "axes": list(axes), "count": count, "bytes": nbytes}
                    for (kind, axes), (count, nbytes) in plan.moved().items()
                ],
            }

        one, other = self.one, self.other
        return {
            "schema": 1,
            "same": self.same,
            "one": figures(one),
            "other": figures(other),
            "facts": [{"what": what, "one": a, "other": b} for what, a, b in self.facts],
            "decisions": {
                "one": [text for text in _texts(one) if text not in _texts(other)],
                "other": [text for text in _texts(other) if text not in _texts(one)],
            },
            "arrays": [
                {"path": path, "one": a and spec_text(a), "other": b and spec_text(b)} for path, a, b in self.arrays
            ],
            "computed": self.computed,
        }


def _texts(plan: Plan) -> list[str]:
    return list(map(str, plan.decisions))


def difference(one: Plan, other: Plan) -> Difference:
    """What differs between two plans."""
    return Difference(one, other)


def difference_text(found: Difference, one: str, other: str, width: int = 80) -> str:
    """The figures of both beside each other, then what ``Plan.diff`` says: ``one | other``, or - and +."""
    if found.same:
        return "the plans are the same\n"
    page = Page(width)
    page.print(f"{one} | {other}\n")
    rows = table(("", "left"), ("one", "right"), ("other", "right"), ("", "text"))
    rows.show_header = False
    a, b = found.one.predicted, found.other.predicted
    for what, x, y in (
        ("time", a.time_s, b.time_s),
        ("compute", a.compute_s, b.compute_s),
        ("moved", a.comm_s, b.comm_s),
    ):
        rows.add_row(what, seconds(x), seconds(y), _change(x, y))
    memory = (f"{binary(p.peak_bytes)}{'' if p.fits else ', too much'}" for p in (a, b))
    rows.add_row("memory", *memory, _change(a.peak_bytes, b.peak_bytes))
    page.print(rows)
    lines = [f"{what}: {x} | {y}" for what, x, y in found.facts]
    if found.computed:
        lines.append(f"ops computed on other axes: {found.computed:,}")
    words = found.one.diff(found.other)
    if words != found.one.diff(found.one):
        lines += words.splitlines()
    return page.text() + ("\n" + wrapped("\n".join(lines), width) if lines else "")


def _some(order: tuple[int, ...]) -> str:
    """
    >>> _some((0, 2, 1, 3)), _some(tuple(range(16)))
    ('0 2 1 3', '0 1 2 3 4 5 6 7 …')
    """
    return " ".join([*map(str, order[:8]), *(["…"] if len(order) > 8 else [])])


def _donated(plan: Plan, other: Plan) -> str:
    """What one plan donates and the other does not."""
    theirs = {a.path for a in other.arguments if a.donated}
    own = [a.path for a in plan.arguments if a.donated and a.path not in theirs]
    return f"{own[0]}{f' and {len(own) - 1} more' if own[1:] else ''}" if own else "nothing that the other does not"


def _change(before: float, after: float) -> str:
    """
    >>> _change(2.0, 2.5), _change(2.0, 2.0), _change(0, 1)
    ('+25.0%', '', '')
    """
    return "" if before == after or not before else f"{after / before - 1:+.1%}"
