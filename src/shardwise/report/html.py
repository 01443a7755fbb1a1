"""A plan as one HTML page that needs no network, and pages of text as HTML for a notebook. A view is a template under
``templates/tabs``, a name in ``TABS``, and often a script."""

from __future__ import annotations

import datetime
from typing import Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from shardwise.plans.plan import Plan
from shardwise.report.colors import AXIS_COLORS, axis_spans
from shardwise.report.data import report_data
from shardwise.report.page import Page
from shardwise.units import binary, change, count, plural, seconds

#: In a notebook a table with more rows is folded away, and no more than these are put into a cell.
_FOLDED: Final = 12
_MOST: Final = 100


class Tab(NamedTuple):
    """A view: the name of its template, and its title."""

    name: str
    title: str


TABS: Final = tuple(
    Tab(name, name.capitalize()) for name in "overview model sharding timeline memory compare code advanced".split()
)
_SCRIPTS: Final = "model arrays mesh collectives timeline memory compare roofline code listing".split()


def page_html(plan: Plan, command: str = "", title: str = "") -> str:
    """Returns the page of a plan, which a command made. All text of the plan is escaped, in the markup and in the data."""
    about = {"date": datetime.date.today().isoformat(), "command": command, "title": title or plan.function}
    return _rendered("page.html", data=report_data(plan), tabs=TABS, scripts=_SCRIPTS, **about)


def notebook_html(page: Page) -> str:
    """Returns a page of text as HTML that brings its style and takes the colors of the notebook."""
    return _rendered("notebook.html", items=page.items, axes=page.axes, folded=_FOLDED, most=_MOST)


def _rendered(template: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("shardwise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "separators": (",", ":")}
    environment.filters |= {f.__name__: f for f in (seconds, binary, plural, change, count)} | {
        "axes": "·".join,
        "share": _share,
        "painted": _painted,
    }
    environment.globals |= {"seconds": seconds, "binary": binary, "axis_colors": AXIS_COLORS}
    # A path may hold half a surrogate pair, which no file can.
    return environment.get_template(template).render(values).encode("utf-8", "replace").decode("utf-8")


def _painted(text: str, axes: tuple[str, ...]) -> Markup:
    """Returns text with the names of mesh axes in their colors."""
    shown, done = Markup(), 0
    for begin, end, axis in axis_spans(text, axes):
        color = AXIS_COLORS[axis % len(AXIS_COLORS)]
        shown += Markup(escape(text[done:begin])) + Markup('<span style="border-bottom:3px solid {}">{}</span>').format(
            color, text[begin:end]
        )
        done = end
    return shown + escape(text[done:])


def _share(part: float, total: float) -> float:
    """Percent, for the length of a bar."""
    return round(100 * min(1.0, part / total), 2) if total else 0.0
