"""A plan as one HTML page that needs nothing else. A view is a template under ``templates/tabs`` and a row in ``TABS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwise.report.charts import memory_area, search_front, search_steps
from shardwise.report.color_drawing import drawn_colors
from shardwise.report.data import report_data
from shardwise.report.units import binary, change, plural, seconds, si

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Tab:
    """A view: its template's name, its title, and whether there is anything to show."""

    name: str
    title: str
    shown: Callable[[dict[str, Any]], bool] = lambda data: True


TABS: Final = (
    Tab("summary", "Summary"),
    Tab("plan", "Plan"),
    Tab("program", "Program"),
    Tab("local", "Device program", lambda data: data["program"] is not None),
    Tab("memory", "Memory"),
    Tab("time", "Time"),
    Tab("mesh", "Mesh"),
    Tab("colors", "Colors", lambda data: data["colors"] is not None),
    Tab("search", "Search", lambda data: data["search"] is not None),
    Tab("decisions", "Decisions", lambda data: bool(data["effects"])),
    Tab("experts", "Experts", lambda data: bool(data["experts"])),
)


def page_html(plan: Plan) -> str:
    """The page. Every text of the plan is escaped, in the markup and in the data."""
    data = report_data(plan)
    tabs = [tab for tab in TABS if tab.shown(data)]
    text = environment().get_template("page.html").render(data=data, tabs=tabs)
    # A path may hold half a surrogate pair, which no file can.
    return text.encode("utf-8", "replace").decode("utf-8")


def environment() -> Environment:
    """Templates that escape every text, with figures as people read them."""
    made = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    made.filters |= {
        "seconds": seconds,
        "si": si,
        "binary": binary,
        "axes": "·".join,
        "plural": plural,
        "share": _share,
        "change": change,
    }
    made.globals |= {
        "seconds": seconds,
        "binary": binary,
        "memory_area": memory_area,
        "search_steps": search_steps,
        "search_front": search_front,
        "drawn_colors": drawn_colors,
    }
    return made


def _share(part: float, whole: float) -> float:
    """Percent, for the length of a bar."""
    return round(100 * min(1.0, part / whole), 2) if whole else 0.0
