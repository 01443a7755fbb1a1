"""A plan as text: its summary, its arguments and outputs one by one, and the plan as code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from shardwise.cost.predict import Moved
from shardwise.cost.uncertainty import is_tight
from shardwise.ir.paths import collapsed
from shardwise.lowering.decisions import Keep, Pin, Shard
from shardwise.plans.evidence import Correction
from shardwise.plans.parts import ArrayPlan, Spec
from shardwise.plans.plan import Plan
from shardwise.report.page import Page
from shardwise.report.program_text import laid_out, touching
from shardwise.search.run import Ended
from shardwise.spmd.text import program_lines
from shardwise.units import binary, listed, plural, seconds

#: Lines of the device-local program that are shown for one argument or output.
_MOST_LINES: Final = 12
#: Collectives and paths of a role that the summary lists.
_MOST: Final = 5
_MOST_PATHS: Final = 3
#: The width of a bar.
_BAR: Final = 30


def dims(array: ArrayPlan) -> Spec:
    """Returns the mesh axes of every dimension: a spec may leave out the last ones."""
    return (*array.spec, *((),) * (len(array.shape) - len(array.spec)))


def spec_text(array: ArrayPlan) -> str:
    """``float32[2048, 16384/model]``: the size of each dimension, and the axes that shard it."""
    sizes = [f"{s}/{'·'.join(axes)}" if axes else str(s) for s, axes in zip(array.shape, dims(array), strict=True)]
    return f"{array.dtype}[{', '.join(sizes)}]{' in host memory' * array.host}"


def axes_text(spec: Spec) -> str:
    """
    >>> axes_text((("data", "model"), ()))
    '[data·model, -]'
    """
    return f"[{', '.join('·'.join(axes) or '-' for axes in spec)}]"


def shards(plan: Plan, axes: Iterable[str]) -> int:
    return math.prod(plan.mesh.shape[axis] for axis in axes)


def spec_call(spec: Spec) -> str:
    """Returns ``P(None, "model")``."""
    names = [[literal(axis) for axis in axes] for axes in spec]
    entries = [axes[0] if len(axes) == 1 else f"({', '.join(axes)})" if axes else "None" for axes in names]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"


def literal(text: str) -> str:
    """
    >>> print(literal("w/up"), literal("it's"))
    "w/up" "it's"
    """
    shown = repr(text)
    return shown if "'" in text or '"' in text else f'"{shown[1:-1]}"'


def explain_text(plan: Plan, array: ArrayPlan) -> str:
    """See :meth:`Plan.explain`."""
    path, count = array.path, shards(plan, (axis for axes in array.spec for axis in axes))
    lines = [f"{path}  {spec_text(array)}", f"  {spec_call(array.spec)}, {plural(count, 'shard')}"]
    if path in plan.variant.batch:
        parts = plan.variant.microbatches
        lines.append(f"  cut into {parts} micro-batches of {plural(array.shape[0] // parts, 'example')}")
    lines += [f"  note: {note}" for note in plan.notes if note.startswith(f"{path}[")]
    lines += _reasons(plan, array)
    collectives = [c for c in plan.collectives if c.value == path or c.value.startswith(f"{path} as ")]
    causes = Counter[str]()
    for c in collectives:
        size = f"{binary(c.nbytes)}{f' × {c.times:g}' if c.times != 1 else ''}{c.value.removeprefix(path)}"
        causes[f"  {c.kind} over {'·'.join(c.axes)}, {size}, for {c.op} at {c.source}"] += 1
    lines += [f"{text}{f', {times} times' if times > 1 else ''}" for text, times in causes.items()]
    if not collectives:
        lines.append("  no collectives, neither for it nor for a cast or another view of it")
    if plan.evidence is not None:
        lines.append(f"  {evidence_lines(plan)[0]}")
    if plan.asked is not None:
        lines += ["  in the device-local program:", *_local_lines(plan, path)]
    return "\n".join(lines) + "\n"


def _local_lines(plan: Plan, path: str) -> list[str]:
    """Returns the first lines of the device-local program that are about an argument or output."""
    program = plan.inquiry.analysis.program
    about = touching(program, program_lines(program, plan.sharded), path)
    rows = laid_out([replace(line, depth=0) for line in about[:_MOST_LINES]], 80 - 4)
    lines = [f"    {text}" for row in rows for text in row.splitlines()]
    return lines + ([f"    and {plural(len(about) - _MOST_LINES, 'line')} more"] if len(about) > _MOST_LINES else [])


def _reasons(plan: Plan, array: ArrayPlan) -> list[str]:
    """For each dimension, the decision behind each of its axes, and why it does not have an axis of its color."""
    lines = []
    for d, axes in enumerate(dims(array)):
        color = array.colors[d] if array.colors else -1
        lines += [f"  dimension {d} (color {color}) over {axis}: {_decided(plan, color, axis)}" for axis in axes]
        for k, choice in enumerate(plan.choices, 1):
            if isinstance(choice, Shard) and color in choice.colors and choice.axis not in axes:
                why = _not_here(plan, array, d, choice.axis)
                lines.append(f"  dimension {d} (color {color}) not over {choice.axis} as in decision {k}: {why}")
    return lines


def _not_here(plan: Plan, array: ArrayPlan, dim: int, axis: str) -> str:
    """Returns why a dimension does not have an axis of its color."""
    spec = dims(array)
    for other, axes in enumerate(spec):
        if axis in axes:
            return f"dimension {other} has the axis"
    parts = shards(plan, (axis, *spec[dim]))
    return f"{array.shape[dim]} cannot be cut into {parts} parts" if array.shape[dim] % parts else "replicated on it"


def _decided(plan: Plan, color: int, axis: str) -> str:
    return decision_of(plan, color, axis) or "follows from its operands"


def decision_of(plan: Plan, color: int, axis: str) -> str:
    """Returns the decision that gave a color an axis, and the cost of the plan without it; nothing if there is none."""
    for k, choice in enumerate(plan.choices):
        pinned = isinstance(choice, Pin) and any(
            c == color and axis in (axes or ()) for c, axes in zip(choice.colors, choice.spec, strict=False)
        )
        if pinned or (isinstance(choice, Shard) and color in choice.colors and axis == choice.axis):
            text = f"decision {k + 1}, {choice}"
            if not plan.effects:
                return text
            effect, now = plan.effects[k], plan.predicted
            fits = "" if effect.fits or not now.fits else ", which does not fit"
            return (
                f"{text}; without it a step takes {seconds(effect.time_s)} instead of {seconds(now.time_s)}, and "
                f"the peak is {binary(effect.peak_bytes)} instead of {binary(now.peak_bytes)}{fits}"
            )
    return ""


def variant_lines(plan: Plan) -> list[str]:
    """Returns what the plan's variant does, and beside a pipeline the best plan without one."""
    tried = plan.search.variants if plan.search is not None and plan.variant.stages > 1 else ()
    plain = [(t.time_s, t.variant) for t in tried if t.stages == 1 and t.fits and t.time_s is not None]
    beside = [f"without a pipeline the best plan takes {seconds(min(plain)[0])}: {min(plain)[1]}"] if plain else []
    return [*plan.variant.lines(), *beside]


def plan_page(plan: Plan, width: int = 80, every: bool = False) -> Page:
    """Returns the summary of a plan; ``every`` lists all arguments and collectives too."""
    page, p = Page(width, plan.mesh.names), plan.predicted
    page.print(f"{plan.function} on {plan.mesh}: {p.hardware}\n")
    _print_verdict(page, plan)
    for line in (*variant_lines(plan), *_roles(plan)):
        page.print(f"{line[:1].upper()}{line[1:]}")
    page.print()
    sharded, rest = decided(plan)
    short = plan.search is not None and plan.search.ended in (Ended.SECONDS, Ended.EVALUATIONS, Ended.INTERRUPTED)
    nothing = "nothing is sharded" if short else "nothing is sharded: no dimension is worth sharding on this mesh"
    if sharded:
        rows = [[numbers, "·".join(axes), what] for numbers, axes, what in sharded]
        page.table(["decision", "over", "*dimensions that are sharded together"], rows)
    else:
        page.print(nothing)
    for line in rest:
        page.print(line)
    page.print()
    page.table(["", "", "*"], figures(plan, every))
    if every:
        used = _used(plan)
        titles = ["path", "*sharded", "*used by"][: 3 if used else 2]
        arguments = collapsed((a.path, spec_text(a), used.get(a.path, "")) for a in plan.arguments)
        page.table(titles, [row[: len(titles)] for row in arguments], "Arguments")
    if p.collectives:
        longest = sorted(p.collectives, key=lambda m: -m.time_s)[: None if every else _MOST]
        cells = [[m.kind, "·".join(m.axes), str(m.count), binary(m.nbytes), seconds(m.time_s)] for m in longest]
        if others := [m for m in p.collectives if m not in longest]:
            sums = (
                str(sum(m.count for m in others)),
                binary(sum(m.nbytes for m in others)),
                seconds(sum(m.time_s for m in others)),
            )
            cells.append([f"{len(others)} others", "", *sums])
        heading = "Collectives, the longest first; bytes and time per device and step"
        page.table(["kind", "axes", ">count", ">bytes", ">time"], cells, heading)
    if plan.schedule:
        heading = "After each tactic, with the collectives and bytes that it adds or removes"
        page.table(["*tactic", ">step time", ">peak memory", "*collectives"], schedule_rows(plan, every), heading)
    _print_origin(page, plan)
    return page


def _print_verdict(page: Page, plan: Plan) -> None:
    """Prints the verdict, the plan beside the best named strategies, and what stands out."""
    found, p = plan.verdict, plan.predicted
    page.print(found.headline, strong=True)
    for line in found.lines[1:]:
        page.print(line)
    if found.baselines:
        rows = [["this plan", seconds(p.time_s), binary(p.peak_bytes), _fits(p.peak_bytes, p.usable_bytes)]]
        for row in found.baselines:
            name = row.name.replace(",", ", ") + (f",\n  {row.variant}" if row.variant else "")
            rows.append([name, seconds(row.time_s), binary(row.peak_bytes), _fits(row.peak_bytes, p.usable_bytes)])
        many = plural(len(plan.baselines), "named strategy", "named strategies")
        heading = f"Beside the best of {many}, as --tactics or tactics= takes them"
        page.table(["*plan or strategy", ">step time", ">peak memory", ""], rows, heading)
    page.print()
    for line in plan.insights:
        page.print(f"- {line}")
    page.print()


def _fits(peak_bytes: int, usable_bytes: int) -> str:
    return "does not fit" if peak_bytes > usable_bytes else "tight" if is_tight(peak_bytes, usable_bytes) else ""


def _used(plan: Plan) -> dict[str, str]:
    """For items of a list, whose path says little, the module or the line that uses them first."""
    if plan.asked is None:
        return {}
    program, texts = plan.asked.analysis.program, {}
    for argument in program.arguments:
        uses = program.uses[argument.value] if argument.path.rpartition("/")[2].isdigit() else ()
        if uses:
            source = program.source_of(program.ops[uses[0][0]])
            texts[argument.path] = source.module or str(source)
    return texts


def schedule_rows(plan: Plan, every: bool = False) -> list[list[str]]:
    """For each tactic of a plan the step time, the peak memory, and the collectives that it adds or removes."""
    rows: list[list[str]] = []
    before: tuple[Moved, ...] = ()
    for applied in plan.schedule:
        changes = _changes(before, applied.collectives)
        if len(changes) > _MOST and not every:
            changes[_MOST - 1 :] = [f"and {len(changes) - _MOST + 1} more"]
        peak = binary(applied.peak_bytes) + ("" if applied.fits else " (over)")
        rows.append([applied.tactic, seconds(applied.time_s), peak, "\n".join(changes)])
        before = applied.collectives
    return rows


def _changes(before: Iterable[Moved], after: Iterable[Moved]) -> list[str]:
    """The collectives that were added or removed, with the change in bytes, the largest first."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for times, moved in ((-1, before), (1, after)):
        for m in moved:
            counts[m.kind, m.axes] += times * m.count
            nbytes[m.kind, m.axes] += times * round(m.nbytes)
    lines = []
    for kind, axes in sorted((key for key in nbytes if counts[key] or nbytes[key]), key=lambda key: -abs(nbytes[key])):
        count, change = counts[kind, axes], nbytes[kind, axes]
        number, sign = f"{count:+d} " if count else "", "-" if change < 0 else "+"
        lines.append(f"{number}{kind} {'·'.join(axes)} {sign}{binary(abs(change))}")
    return lines


def figures(plan: Plan, bounds: bool = False) -> list[list[str]]:
    """Step time, communication and memory: name, figure, and what the figure consists of."""
    p = plan.predicted
    done = round(min(1.0, p.peak_bytes / p.usable_bytes) * _BAR)
    verdict = "  tight" if is_tight(p.peak_bytes, p.usable_bytes) else "" if p.fits else "  it does not fit"
    overlapped, exposed = seconds(max(0.0, p.serial_s - p.time_s)), seconds(max(0.0, p.time_s - p.compute_s))
    rows = [
        ["step time", seconds(p.time_s), f"{p.utilization:.0%} MFU; compute {seconds(p.compute_s)}"],
        ["communication", seconds(p.comm_s), f"{overlapped} overlapped, {exposed} exposed" if p.comm_s else ""],
        ["peak memory", binary(p.peak_bytes), f"[{'#' * done:.<{_BAR}}] of {binary(p.usable_bytes)}{verdict}"],
    ]
    limits = f"step time if all communication is overlapped; {seconds(p.serial_s)} if none is"
    return [*rows, ["bounds", seconds(p.overlapped_s), limits]] if bounds else rows


def _roles(plan: Plan) -> list[str]:
    """Returns the arguments by role, in one line."""
    parts = []
    for role, paths in plan.roles.items():
        shown = [path for (path,) in collapsed((path,) for path in paths)]
        parts.append(f"{role}: {listed(shown, _MOST_PATHS)}")
    return [f"Roles: {'; '.join(parts)}"] if parts else []


def evidence_lines(plan: Plan) -> list[str]:
    """Returns what judged a plan, its verdict and those on the other finalists; for a plan without, that it is a prediction."""
    if plan.evidence is None:
        return ["Times and memory are predictions; shardwise tune compiles the best few plans."]
    judged, lines = plan.evidence.judged, list[str]()
    memory = "" if judged.peak_bytes is None else f", peak memory {binary(judged.peak_bytes)}"
    lines.append(f"Judged by {plan.evidence.judge}: step time {seconds(judged.time_s or 0.0)}{memory}")
    for number, tried in enumerate(plan.evidence.tried):
        verdict = tried.judged.refused or tried.judged.detail
        if tried.judged.usable:
            verdict = seconds(tried.judged.time_s or 0.0)
        chosen = " (chosen)" if number == plan.evidence.chosen else ""
        lines.append(f"  {tried.text}: predicted {seconds(tried.predicted_s)}, {verdict}{chosen}")
    found = plan.evidence.correction
    if found != Correction():
        lines.append(
            f"Learned for this program: compute × {found.compute:.2f}, memory × {found.memory:.2f} of what is predicted"
        )
    options = [f"{name}={value}" for name, value in plan.compiler_options.items()]
    return lines + ([f"Compiler options: {', '.join(options)}"] if options else [])


def _print_origin(page: Page, plan: Plan) -> None:
    page.print("\n" + "\n".join(evidence_lines(plan)))
    if plan.search is not None:
        page.print(f"\nFound by {plan.search}")
        if plan.search.ended in (Ended.SECONDS, Ended.EVALUATIONS):
            more = 2 * max(100, plan.search.evaluations)
            page.print(f"  it may still improve: --evaluations {more} (budget_evals={more}) searches longer")
        others = [
            f"{tried.mesh}: {tried.why or (seconds(tried.time_s or 0.0) if tried.fits else 'does not fit')}"
            for tried in plan.search.meshes[1:4]
        ]
        if others:
            page.print(f"Other meshes: {'; '.join(others)}")
    for note in plan.notes:
        page.print(f"note: {note}")


def decided(plan: Plan) -> tuple[list[tuple[str, list[str], str]], list[str]]:
    """Returns what is sharded: the numbers of the decisions, the axes in order, and the dimensions; and the other decisions as
    text."""
    sharded: dict[tuple[int, ...], list[tuple[int, Shard]]] = {}
    for k, decision in enumerate(plan.decisions, 1):
        if isinstance(decision, Shard):
            sharded.setdefault(decision.colors, []).append((k, decision))
    rows = [
        (", ".join(str(k) for k, _ in some), [d.axis for _, d in some], some[0][1].what) for some in sharded.values()
    ]
    kept: dict[tuple[str, str], list[str]] = {}
    for decision in plan.decisions:
        if isinstance(decision, Keep):
            kept.setdefault((decision.what, decision.why), []).append(decision.axis)
    rest = [str(Keep((), " and ".join(axes), what, why)) for (what, why), axes in kept.items()]
    return rows, [*rest, *(str(d) for d in plan.decisions if isinstance(d, Pin))]
