"""An analysis as data (JSON) and as text: what can be sharded, where it is ambiguous, what is opaque."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from shardwise.dims.analysis import Analysis, CompatibilitySet, Place
from shardwise.ir.paths import collapsed
from shardwise.ir.program import Op, Origin, Program
from shardwise.report.page import Page
from shardwise.units import binary, plural, si


def analysis_json(analysis: Analysis) -> dict[str, Any]:
    """Everything ``shardwise inspect`` shows, as plain data in a stable order."""
    program = analysis.program
    return {
        "schema": 1,
        "program": _program_data(program),
        "counts": {
            "colors": len(analysis.colors),
            "colors_that_matter": sum(c.matters for c in analysis.colors),
            "groups_that_matter": sum(g.matters for g in analysis.groups),
            "conflicts": len(analysis.conflicts),
            "compatibility_sets": len(analysis.compatibility_sets),
            "bits": analysis.bits,
            "opaque_ops": len(analysis.opaque_ops),
        },
        "groups": [asdict(group) for group in analysis.groups],
        "colors": [asdict(color) for color in analysis.colors],
        "compatibility_sets": [
            {
                "id": s.id,
                "color": s.color,
                "bit": s.bit,
                "flipped": s.flipped,
                "consistent": s.consistent,
                "conflicts": len(s.conflicts),
                "lines": _conflict_lines(analysis, s),
            }
            for s in analysis.compatibility_sets
        ],
        "opaque_ops": [
            {"kind": op.kind, "source": str(program.source_of(op)), "reason": op.opaque} for op in analysis.opaque_ops
        ],
    }


def _program_data(program: Program) -> dict[str, Any]:
    """Returns the size of a program. Its loops are those that are left after dead code is gone."""
    loops = [r for r in program.regions if r.kind.endswith(".body") and r.owner >= 0]
    return {
        "name": program.name,
        "ops": len(program.ops),
        "values": len(program.values),
        "loops": len(loops),
        "loops_of_unknown_trips": sum(not r.trips_known for r in loops),
        "arguments": len(program.arguments),
        "outputs": len(program.outputs),
        "argument_bytes": sum(program.values[a.value].nbytes for a in program.arguments),
        "flops": float(sum(op.flops * program.runs[op.region] for op in program.ops)),
    }


def _conflict_lines(analysis: Analysis, family: CompatibilitySet) -> list[str]:
    """Returns the source lines of a family's conflicts, most frequent first."""
    program = analysis.program
    counts = Counter(str(program.source_of(program.ops[c.op])) for c in family.conflicts)
    counts.pop("?", None)
    return sorted(counts, key=lambda line: (-counts[line], line))


def analysis_page(analysis: Analysis, width: int = 80, everything: bool = False) -> Page:
    """Returns the analysis for a terminal of ``width`` columns; ``everything`` includes groups that do not matter."""
    page, data = Page(width), _program_data(analysis.program)
    arguments = f"{plural(data['arguments'], 'argument')} of {binary(data['argument_bytes'])}"
    page.print(f"{data['name']}: {plural(data['ops'], 'op')}, {si(data['flops'], 'FLOP')}, {arguments}")
    if unknown := data["loops_of_unknown_trips"]:
        page.print(f"{plural(unknown, 'loop')} of unknown length counted as one trip")
    _print_groups(page, analysis, everything)
    _print_conflicts(page, analysis)
    _print_opaque(page, analysis)
    return page


def _print_groups(page: Page, analysis: Analysis, everything: bool) -> None:
    shown = [g for g in analysis.groups if g.matters or everything]
    if not shown:
        page.print("\nNothing to shard: no dimension is larger than one and computable in parts.")
        return
    colors = sum(c.matters for c in analysis.colors)
    heading = f"What can be sharded: {plural(len(shown), 'group')} of {plural(colors, 'color')} that matter"
    rows = []
    for g in sorted(shown, key=lambda g: (-g.flops, -g.nbytes, g.id)):
        size = "–".join(f"{s:,}" for s in dict.fromkeys((min(g.sizes), max(g.sizes))))
        count = f" ×{len(g.colors)}" if len(g.colors) > 1 else ""
        where = _where(analysis, g.places, page.width - 42)
        rows.append([f"{g.id}{count}", size, f"{g.values:,}", binary(g.nbytes), si(g.flops), where])
    page.table([">group", ">size", ">values", ">bytes", ">FLOP", "*where"], rows, heading)
    if hidden := [g for g in analysis.groups if g not in shown]:
        loops = sum(analysis.colors[g.colors[0]].loop for g in hidden)
        parts = [plural(loops, "loop dimension")] * bool(loops)
        parts += [plural(len(hidden) - loops, "group") + " that every op needs replicated"] * (len(hidden) > loops)
        page.print(f"\nNot shown: {', '.join(parts)}")


def _where(analysis: Analysis, places: tuple[Place, ...], width: int, most: int = 3) -> str:
    """Returns the first few arguments, or outputs where there are none, one per line; a long path loses its beginning."""
    values = analysis.program.values
    arguments = [(str(p),) for p in places if values[p.value].origin is Origin.ARGUMENT]
    names = [name for (name,) in collapsed(arguments or [(str(p),) for p in places])]
    more = f" +{len(names) - most}" if len(names) > most else ""
    room = [width] * (most - 1) + [width - len(more)]
    lines = [name if len(name) <= w else "…" + name[1 - w :] for name, w in zip(names, room, strict=False)]
    return "\n".join(lines) + more or "(inner values only)"


def _print_conflicts(page: Page, analysis: Analysis) -> None:
    families: dict[int, list[CompatibilitySet]] = {}
    for s in analysis.compatibility_sets:
        families.setdefault(s.bit, []).append(s)
    if not families:
        page.print("\nNo conflicts: every color can be sharded without a choice.")
        return
    count = f"{plural(len(analysis.conflicts), 'place')} in {plural(len(families), 'family', 'families')}"
    rows = []
    for bit, sets in families.items():
        lines = _conflict_lines(analysis, sets[0])
        text = " ".join(lines[:4]) + (f" +{len(lines) - 4}" if len(lines) > 4 else "")
        if not sets[0].consistent:
            text = "(no consistent side, replicated) " + text
        places = sum(len(s.conflicts) for s in sets)
        rows.append([str(bit), str(analysis.colors[sets[0].color].group), str(len(sets)), str(places), text])
    heading = f"Conflicts: {count}, {plural(analysis.bits, 'bit')} to decide"
    page.table([">bit", ">group", ">sets", ">places", "*source lines"], rows, heading)


def _print_opaque(page: Page, analysis: Analysis) -> None:
    if not analysis.opaque_ops:
        page.print("\nNo opaque ops: every operation has a rule.")
        return
    kinds: dict[str, list[Op]] = {}
    for op in analysis.opaque_ops:
        kernel = op.attribute("kernel")
        kinds.setdefault(f"{op.kind}:{kernel}" if kernel else op.kind, []).append(op)
    source = analysis.program.source_of
    rows = [[kind, str(len(ops)), str(source(ops[0])), ops[0].opaque] for kind, ops in kinds.items()]
    heading = f"Opaque: {plural(len(analysis.opaque_ops), 'op')} whose arrays must be replicated"
    page.table(["kind", ">count", "first at", "*why"], rows, heading)
