"""An analysis as data (JSON) and as text: what can be sharded, where it is ambiguous, what is opaque."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from shardwise.ir.program import Origin
from shardwise.report.page import Page, table
from shardwise.report.units import plural, si

if TYPE_CHECKING:
    from shardwise.dims.analysis import Analysis, CompatibilitySet, Place
    from shardwise.ir.program import Region

SCHEMA: Final = 1
_WIDTH: Final = 80


def analysis_json(analysis: Analysis) -> dict[str, Any]:
    """Everything ``shardwise inspect`` knows, as plain data in a stable order."""
    program = analysis.program
    return {
        "schema": SCHEMA,
        "program": {
            "name": program.name,
            "ops": len(program.ops),
            "values": len(program.values),
            "loops": len(_loops(analysis)),
            "loops_of_unknown_trips": sum(not r.trips_known for r in _loops(analysis)),
            "arguments": len(program.arguments),
            "outputs": len(program.outputs),
            "argument_bytes": sum(program.values[a.value].nbytes for a in program.arguments),
            "flops": total_flops(analysis),
        },
        "counts": {
            "colors": len(analysis.colors),
            "colors_that_matter": sum(c.matters for c in analysis.colors),
            "groups_that_matter": sum(g.matters for g in analysis.groups),
            "conflicts": len(analysis.conflicts),
            "compatibility_sets": len(analysis.compatibility_sets),
            "bits": analysis.bits,
            "opaque_ops": len(analysis.opaque_ops),
        },
        "groups": [
            {
                "id": g.id,
                "matters": g.matters,
                "sizes": list(g.sizes),
                "colors": list(g.colors),
                "bits": list(g.bits),
                "values": g.values,
                "bytes": g.nbytes,
                "flops": g.flops,
            }
            for g in analysis.groups
        ],
        "colors": [
            {
                "id": c.id,
                "group": c.group,
                "matters": c.matters,
                "loop": c.loop,
                "sizes": list(c.sizes),
                "values": c.values,
                "bytes": c.nbytes,
                "flops": c.flops,
                "places": [{"path": p.label, "dim": p.dim} for p in c.places],
            }
            for c in analysis.colors
        ],
        "compatibility_sets": [
            {
                "id": s.id,
                "color": s.color,
                "bit": s.bit,
                "flipped": s.flipped,
                "consistent": s.consistent,
                "conflicts": len(s.conflicts),
                "lines": conflict_lines(analysis, s),
            }
            for s in analysis.compatibility_sets
        ],
        "opaque_ops": [
            {"kind": op.kind, "source": str(program.source_of(op)), "reason": op.opaque} for op in analysis.opaque_ops
        ],
    }


def _loops(analysis: Analysis) -> list[Region]:
    """The bodies of the loops that are left after dead code is gone."""
    return [r for r in analysis.program.regions if r.kind.endswith(".body") and r.owner >= 0]


def total_flops(analysis: Analysis) -> float:
    program = analysis.program
    return float(sum(op.flops * program.runs[op.region] for op in program.ops))


def conflict_lines(analysis: Analysis, family: CompatibilitySet) -> list[str]:
    """The source lines of a family's conflicts, most frequent first."""
    program = analysis.program
    counts = Counter(str(program.source_of(program.ops[c.op])) for c in family.conflicts)
    counts.pop("?", None)
    return [line for line, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def analysis_text(analysis: Analysis, width: int = _WIDTH, everything: bool = False) -> str:
    """The analysis as text for a terminal of ``width`` columns; ``everything`` lists what does not matter too."""
    page = Page(width)
    program = analysis.program
    held = sum(program.values[a.value].nbytes for a in program.arguments)
    page.print(
        f"{program.name}: {plural(len(program.ops), 'op')}, {si(total_flops(analysis), 'FLOP')}, "
        f"{plural(len(program.arguments), 'argument')} of {si(held, 'B')}"
    )
    unknown = sum(not r.trips_known for r in _loops(analysis))
    if unknown:
        page.print(f"{plural(unknown, 'loop')} of unknown length counted as one trip")
    _groups(page, analysis, everything)
    _conflicts(page, analysis)
    _opaque(page, analysis)
    return page.text()


def _groups(page: Page, analysis: Analysis, everything: bool) -> None:
    shown = [g for g in analysis.groups if g.matters or everything]
    shown.sort(key=lambda g: (-g.flops, -g.nbytes, g.id))
    colors = sum(c.matters for c in analysis.colors)
    page.print()
    if not shown:
        page.print("Nothing to shard: no dimension is larger than one and computable in parts.")
        return
    page.print(f"What can be sharded: {plural(len(shown), 'group')} of {plural(colors, 'color')} that matter")
    page.print()
    rows = table(
        ("group", "right"),
        ("size", "right"),
        ("values", "right"),
        ("bytes", "right"),
        ("FLOP", "right"),
        ("where", "text"),
    )
    for g in shown:
        size = f"{g.size:,}" + ("…" if len(g.sizes) > 1 else "")
        count = f" ×{len(g.colors)}" if len(g.colors) > 1 else ""
        where = _where(analysis, g.places, page.width - 42)
        rows.add_row(f"{g.id}{count}", size, f"{g.values:,}", si(g.nbytes, "B"), si(g.flops), where)
    page.print(rows)
    hidden = [g for g in analysis.groups if g not in shown]
    if hidden:
        loops = sum(analysis.colors[g.colors[0]].loop for g in hidden)
        parts = [plural(loops, "loop dimension")] * bool(loops)
        parts += [plural(len(hidden) - loops, "group") + " that every op needs whole"] * (len(hidden) > loops)
        page.print(f"\nNot shown: {', '.join(parts)}")


def named_places(analysis: Analysis, places: tuple[Place, ...]) -> list[str]:
    """Those of arguments; of outputs where there are none."""
    arguments = [str(p) for p in places if analysis.program.values[p.value].origin is Origin.ARGUMENT]
    return arguments or [str(p) for p in places]


def _where(analysis: Analysis, places: tuple[Place, ...], width: int, most: int = 3) -> str:
    """The first few arguments, one a line; a long path loses its beginning, which says least."""
    named = named_places(analysis, places)
    if not named:
        return "(inner values only)"
    more = f" +{len(named) - most}" if len(named) > most else ""
    room = [width] * (most - 1) + [width - len(more)]
    lines = [name if len(name) <= w else "…" + name[1 - w :] for name, w in zip(named, room, strict=False)]
    return "\n".join(lines) + more


def _conflicts(page: Page, analysis: Analysis) -> None:
    page.print()
    families: dict[int, list[CompatibilitySet]] = {}
    for s in analysis.compatibility_sets:
        families.setdefault(s.bit, []).append(s)
    if not families:
        page.print("No conflicts: every color can be sharded without a choice.")
        return
    page.print(
        f"Conflicts: {plural(len(analysis.conflicts), 'place')} in {plural(len(families), 'family', 'families')}, "
        f"{plural(analysis.bits, 'bit')} to decide"
    )
    page.print()
    rows = table(("bit", "right"), ("group", "right"), ("sets", "right"), ("places", "right"), ("source lines", "text"))
    for bit, sets in families.items():
        lines = conflict_lines(analysis, sets[0])
        text = " ".join(lines[:4]) + (f" +{len(lines) - 4}" if len(lines) > 4 else "")
        if not sets[0].consistent:
            text = "(no consistent side, kept whole) " + text
        group = analysis.colors[sets[0].color].group
        rows.add_row(str(bit), str(group), str(len(sets)), str(sum(len(s.conflicts) for s in sets)), text)
    page.print(rows)


def _opaque(page: Page, analysis: Analysis) -> None:
    page.print()
    if not analysis.opaque_ops:
        page.print("No opaque ops: every operation has a rule.")
        return
    page.print(f"Opaque: {plural(len(analysis.opaque_ops), 'op')} whose arrays must be whole")
    page.print()
    rows = table(("kind", "left"), ("count", "right"), ("first at", "left"), ("why", "text"))
    kinds: dict[str, list[Any]] = {}
    for op in analysis.opaque_ops:
        kernel = op.attribute("kernel")
        kinds.setdefault(f"{op.kind}:{kernel}" if kernel else op.kind, []).append(op)
    for kind, ops in kinds.items():
        rows.add_row(kind, str(len(ops)), str(analysis.program.source_of(ops[0])), ops[0].opaque)
    page.print(rows)
