"""A plan as one HTML page that needs no network, and pages of text as HTML for a notebook. A view is a template under
``templates/tabs`` and a row in ``TABS``."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise.plans.plan import Plan
from shardwise.report.data import report_data
from shardwise.report.page import Page
from shardwise.report.units import binary, change, plural, seconds, si

#: In a notebook a table with more rows is folded away, and no more than these are put into a cell.
_FOLDED: Final = 12
_MOST: Final = 100
#: The box of a chart, which a style sheet stretches.
_WIDTH: Final = 1000
_HEIGHT: Final = 300
#: Below this share of the limit a curve would be flat under it: then it is drawn without the limit.
_FLAT: Final = 0.1


class Tab(NamedTuple):
    """A view: the name of its template, its title, and the key of the data without which it is not shown."""

    name: str
    title: str
    needs: str = "schema"


TABS: Final = (
    Tab("summary", "Summary"),
    Tab("plan", "Plan"),
    Tab("program", "Program"),
    Tab("local", "Device program", "program"),
    Tab("memory", "Memory"),
    Tab("time", "Time"),
    Tab("mesh", "Mesh"),
    Tab("search", "Search", "search"),
    Tab("schedule", "Schedule", "schedule"),
    Tab("decisions", "Decisions", "effects"),
    Tab("baselines", "Strategies", "baselines"),
)


def page_html(plan: Plan) -> str:
    """Returns the page of a plan. All text of the plan is escaped, in the markup and in the data."""
    data = report_data(plan)
    return _rendered("page.html", data=data, tabs=[tab for tab in TABS if data[tab.needs]])


def notebook_html(page: Page) -> str:
    """Returns a page of text as HTML that brings its style and takes the colors of the notebook."""
    return _rendered("notebook.html", items=page.items, folded=_FOLDED, most=_MOST)


def _rendered(template: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    environment.filters |= {f.__name__: f for f in (seconds, si, binary, plural, change)} | {
        "axes": "·".join,
        "share": _share,
    }
    environment.globals |= {f.__name__: f for f in (seconds, binary, memory_area)}
    # A path may hold half a surrogate pair, which no file can.
    return environment.get_template(template).render(values).encode("utf-8", "replace").decode("utf-8")


def _share(part: float, total: float) -> float:
    """Percent, for the length of a bar."""
    return round(100 * min(1.0, part / total), 2) if total else 0.0


def memory_area(curve: dict[str, Any], limit: int) -> dict[str, Any]:
    """Memory over the program: the filled curve, the height of the limit where that is in the picture, and the peak."""
    most: list[int] = curve["bytes"]
    peak = max(most)
    shown = peak >= _FLAT * limit
    top = 1.05 * max(peak, limit if shown else 0, 1)
    step = _WIDTH / len(most)
    corners = [f"L{k * step:.1f} {_HEIGHT * (1 - b / top):.1f}H{(k + 1) * step:.1f}" for k, b in enumerate(most)]
    return {
        "path": f"M0 {_HEIGHT}{''.join(corners)}V{_HEIGHT}Z",
        "top_bytes": top,
        "limit_y": _HEIGHT * (1 - limit / top) if shown else None,
        "peak_x": (most.index(peak) + 0.5) * step,
        "peak_y": _HEIGHT * (1 - peak / top),
    }
