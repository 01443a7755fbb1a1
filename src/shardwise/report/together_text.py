"""Plans of several programs as text: their step times together and alone, and the layout of what they share."""

from __future__ import annotations

from shardwise.ir.paths import collapsed
from shardwise.ir.program import Spec
from shardwise.plans.together import Together
from shardwise.report.page import Page
from shardwise.report.plan_text import axes_text
from shardwise.units import binary, listed, seconds


def together_page(together: Together, width: int = 80) -> Page:
    """The summary of plans that share arrays."""
    page, first = Page(width), next(iter(together.values()))
    page.print(f"{', '.join(together)} on {first.mesh}: {first.predicted.hardware}")
    page.print(
        f"weighted step time {seconds(together.time_s)}; {seconds(together.alone_s)} with the best plan of each program alone\n"
    )
    rows = []
    for name, plan in together.items():
        alone, weight = together.alone[name], f"{together.weights[name]:g}"
        other = f" on {alone.mesh}" if alone.mesh.sizes != plan.mesh.sizes else ""
        times = seconds(plan.predicted.time_s), f"{seconds(alone.predicted.time_s)}{other}"
        rows.append([name, weight, *times, binary(plan.predicted.peak_bytes)])
    page.table(["program", ">weight", ">step time", ">alone", ">peak memory"], rows)
    page.print()
    by_spec: dict[Spec, list[tuple[str]]] = {}
    for path, spec in together.shared.items():
        by_spec.setdefault(spec, []).append((path,))
    cells = []
    for spec, paths in by_spec.items():
        shown = listed([path for (path,) in collapsed(paths)], most=3)
        cells.append([axes_text(tuple(axes or () for axes in spec)), shown])
    page.table(["over", "*shared"], cells)
    return page
