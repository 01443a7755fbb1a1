"""Plans and analyses as a notebook shows them: fragments that bring their style, take the notebook's colors, and say what the
terminal says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardwise.report.html import environment
from shardwise.report.inspection import conflict_lines, named_places, total_flops
from shardwise.report.plan_text import spec_text
from shardwise.report.summary import decided

if TYPE_CHECKING:
    from shardwise.dims.analysis import Analysis
    from shardwise.plans.plan import Plan

#: Rows of a table: a cell is no place for thousands.
_MOST: Final = 100
_MOST_GROUPS: Final = 30


def plan_html(plan: Plan) -> str:
    """A plan's figures, what is sharded, and its arguments and collectives folded away."""
    sharded, rest = decided(plan)
    return _rendered(
        "notebook/plan.html",
        plan=plan,
        p=plan.predicted,
        sharded=sharded,
        rest=[*plan.variant.lines(), *rest],
        arguments=[(a.path, spec_text(a)) for a in plan.arguments[:_MOST]],
        collectives=sorted(plan.predicted.collectives, key=lambda m: -m.time_s),
    )


def analysis_html(analysis: Analysis) -> str:
    """What can be sharded, where that is ambiguous, and what is opaque."""
    program = analysis.program
    groups = sorted((g for g in analysis.groups if g.matters), key=lambda g: (-g.flops, -g.nbytes, g.id))
    families: dict[int, list[tuple[int, int, bool, list[str]]]] = {}
    for s in analysis.compatibility_sets:
        group = analysis.colors[s.color].group
        known = families.get(s.bit)
        lines = known[0][3] if known else conflict_lines(analysis, s)
        families.setdefault(s.bit, []).append((group, len(s.conflicts), s.consistent, lines))
    return _rendered(
        "notebook/analysis.html",
        analysis=analysis,
        program=program,
        flops=total_flops(analysis),
        held=sum(program.values[a.value].nbytes for a in program.arguments),
        colors=sum(c.matters for c in analysis.colors),
        groups=[(g, named_places(analysis, g.places)) for g in groups[:_MOST_GROUPS]],
        more=max(0, len(groups) - _MOST_GROUPS),
        families=[
            (bit, own[0][0], len(own), sum(n for _, n, _, _ in own), own[0][2], own[0][3])
            for bit, own in families.items()
        ],
    )


def _rendered(name: str, **shown: object) -> str:
    text = environment().get_template(name).render(shown)
    # A path may hold half a surrogate pair, which no notebook can.
    return text.encode("utf-8", "replace").decode("utf-8")
