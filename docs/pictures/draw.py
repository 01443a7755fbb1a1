"""Draws the pictures of docs/analysis.md from what the analysis of ``attention`` says: ``python docs/pictures/draw.py``.

Nothing in them is placed by hand but rows and columns: cells, letters, colors, sides and collectives are read from
``shardwise.analyze`` and from the lowered states of the two resolutions. A test compares the files with what is drawn.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from html import escape
from pathlib import Path

from attention import ARGUMENTS, attention

import shardwise
from shardwise.dims.analysis import Analysis
from shardwise.hardware.layout import place
from shardwise.hardware.topology import topology
from shardwise.ir.program import Op
from shardwise.ir.rule import letter
from shardwise.lowering.decisions import Shard, State
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, lower_state
from shardwise.lowering.sharding import Kind as Move

FOLDER = Path(__file__).parent
WIDTH = 480
CELL, HEIGHT, GAP = 46, 28, 20
DEVICES = 4
#: Fills by color number; the text on them is dark on every page.
FILLS = ("#f2b66d", "#9cc5ea", "#a9d6a0", "#d9b3e6")
FIRST, SECOND = "#f2b66d", "#f28d8d"

STYLE = """
text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24; }
.page { fill: #ffffff; stroke: #d0d7de; }
.note { font: 13px system-ui, sans-serif; fill: #57606a; }
.cell { stroke: #57606a; stroke-width: 1; }
.whole { fill: #ffffff; }
.on { fill: #1b1f24; }
.identity { stroke: #0b6bcb; stroke-width: 2; fill: none; }
.map { stroke: #bf5af2; stroke-width: 2; fill: none; stroke-dasharray: 5 4; }
.ring { fill: none; stroke: #cf222e; stroke-width: 3; }
.move { font: 600 13px system-ui, sans-serif; fill: #cf222e; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #161b22; stroke: #30363d; }
  .note { fill: #9da7b3; }
  .cell { stroke: #8b949e; }
  .whole { fill: #161b22; }
  .on { fill: #1b1f24; }
  .identity { stroke: #58a6ff; }
  .map { stroke: #d2a8ff; }
  .ring { stroke: #ff7b72; }
  .move { fill: #ff7b72; }
}
"""


def source_lines() -> tuple[dict[int, str], dict[int, str]]:
    """By line of the file: the variable that is assigned, and the code."""
    lines, start = inspect.getsourcelines(attention)
    tree = ast.parse("".join(lines))
    names = {start + n.lineno - 1: n.targets[0].id for n in ast.walk(tree) if isinstance(n, ast.Assign)}  # type: ignore[attr-defined]
    return names, {start + k: line.strip() for k, line in enumerate(lines)}


class Shown:
    """The analysis with the names a person would use."""

    def __init__(self) -> None:
        self.analysis: Analysis = shardwise.analyze(attention, *ARGUMENTS)
        program = self.analysis.program
        self.names, self.code = source_lines()
        self.ops = [op for op in program.schedule if op.kind not in ("argument", "output")]
        self.called = {v.id: v.path for v in program.values if v.path}
        for op in self.ops:
            self.called.update(dict.fromkeys(op.results, self.names[self.line(op)]))

    def line(self, op: Op) -> int:
        return int(str(self.analysis.program.source_of(op)).rpartition(":")[2])

    def node(self, op: Op, factor: int) -> int:
        return int(self.analysis.names.first_node[op.id]) + factor

    def color(self, op: Op, factor: int) -> int:
        return int(self.analysis.names.color[self.node(op, factor)])


@dataclass(frozen=True)
class Cell:
    """A dimension of an operand or result of an op, drawn at (x, y)."""

    op: Op
    tensor: int
    dim: int
    factor: int
    x: float
    y: float


def cells(shown: Shown, op: Op, left: float, top: float) -> tuple[list[Cell], list[str]]:
    """The cells of an op's tensors side by side, and the marks between and above them."""
    assert op.rule is not None
    tensors = [
        *zip(op.operands, op.rule.operand_majors, strict=True),
        *zip(op.results, op.rule.result_majors, strict=True),
    ]
    found: list[Cell] = []
    marks: list[str] = []
    x = left
    for number, (value, majors) in enumerate(tensors):
        if number == len(op.operands):
            marks.append(text(x + GAP / 2 - 4, top + 19, "→", "middle"))
            x += GAP + 12
        shape = shown.analysis.program.values[value].shape
        marks.append(text(x, top - 5, shown.called[value], cls="note"))
        for dim, factor in enumerate(majors):
            found.append(Cell(op, number, dim, factor, x, top))
            if factor < 0:
                marks.append(box(x, top, "#d0d7de") + text(x + CELL / 2, top + 19, str(shape[dim]), "middle", "on"))
            x += CELL
        x += GAP
    return found, marks


def text(x: float, y: float, content: str, anchor: str = "start", cls: str = "") -> str:
    mark = f' class="{cls}"' if cls else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{mark}>{escape(content)}</text>'


def box(x: float, y: float, fill: str = "", cls: str = "") -> str:
    paint = f' fill="{fill}"' if fill else ""
    return f'<rect class="cell {cls}" x="{x:g}" y="{y:g}" width="{CELL}" height="{HEIGHT}"{paint}/>'


def ring(x: float, y: float) -> str:
    return f'<rect class="ring" x="{x - 3:g}" y="{y - 3:g}" width="{CELL + 6}" height="{HEIGHT + 6}" rx="5"/>'


def page(title: str, height: float, marks: list[str]) -> str:
    body = "\n".join(marks)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>\n{body}\n</svg>\n'
    )


def draw_names(shown: Shown) -> str:
    """Two products: a name for every dimension of every use and definition, I inside an op, M between them."""
    first = next(op for op in shown.ops if shown.called[op.results[0]] == "q")
    second = next(op for op in shown.ops if shown.called[op.results[0]] == "s")
    marks: list[str] = []
    drawn: list[Cell] = []
    count = 0
    for op, top in ((first, 62.0), (second, 246.0)):
        marks.append(text(WIDTH - 20, top - 30, shown.code[shown.line(op)], "end"))
        own, more = cells(shown, op, 60, top)
        marks += more
        for cell in own:
            count += 1
            marks.append(box(cell.x, cell.y, cls="whole") + text(cell.x + CELL / 2, cell.y + 19, f"n{count}", "middle"))
        drawn += own
        level = 0
        for factor in dict.fromkeys(c.factor for c in own):
            ends = [c.x + CELL / 2 + 5 * (level - 1) for c in own if c.factor == factor]
            bottom, depth = top + HEIGHT, top + HEIGHT + 12 + 12 * level
            ends.sort()
            legs = "".join(f"M{x:g} {bottom:g}V{depth:g}" for x in ends)
            marks.append(f'<path class="identity" d="{legs}M{ends[0]:g} {depth:g}H{ends[-1]:g}"/>')
            assert op.rule is not None
            marks.append(text(ends[-1] + 8, depth + 4, letter(factor), cls="note"))
            level += 1
    made = [c for c in drawn if c.op is first and c.tensor == len(first.operands)]
    at = second.operands.index(first.results[0])
    for a, b in zip(made, (c for c in drawn if c.op is second and c.tensor == at), strict=True):
        x, y = a.x + CELL / 2 + 12, a.y + HEIGHT
        u, v = b.x + CELL / 2, b.y - 1
        marks.append(f'<path class="map" d="M{x:g} {y:g}C{x:g} {y + 90:g} {u:g} {v - 70:g} {u:g} {v:g}"/>')
    marks.append(
        '<path class="identity" d="M20 352H50"/>' + text(58, 356, "I: one factor of one operation", cls="note")
    )
    marks.append('<path class="map" d="M270 352H300"/>' + text(308, 356, "M: definition to use", cls="note"))
    return page("Names of the dimensions of two products, and what ties them", 374, marks)


def draw_colors(shown: Shown) -> str:
    """Every op with its cells filled by color."""
    marks: list[str] = []
    top = 52.0
    for op in shown.ops:
        marks.append(text(20, top - 26, shown.code[shown.line(op)] if _new_line(shown, op) else op.kind, cls=""))
        own, more = cells(shown, op, 60, top)
        marks += more
        for cell in own:
            if cell.factor >= 0:
                marks.append(box(cell.x, cell.y, FILLS[shown.color(op, cell.factor)]))
                marks.append(text(cell.x + CELL / 2, cell.y + 19, letter(cell.factor), "middle", "on"))
        top += 74
    top -= 22
    for color in shown.analysis.colors:
        places = ", ".join(str(p) for p in color.places)
        marks.append(f'<rect class="cell" x="20" y="{top:g}" width="18" height="18" fill="{FILLS[color.id]}"/>')
        marks.append(text(46, top + 14, f"size {color.size}: {places}", cls="note"))
        top += 26
    return page("Every operation, its dimensions filled by color", top + 8, marks)


def _new_line(shown: Shown, op: Op) -> bool:
    return next(o for o in shown.ops if shown.line(o) == shown.line(op)) is op


def draw_conflicts(shown: Shown) -> str:
    """The ops with a conflict, and the two sides of its family."""
    (family,) = shown.analysis.compatibility_sets
    by_op = {c.op: c for c in family.conflicts}
    marks: list[str] = []
    top = 52.0
    for op in shown.ops:
        conflict = by_op.get(op.id)
        if conflict is None:
            continue
        marks.append(text(20, top - 26, shown.code[shown.line(op)]))
        own, more = cells(shown, op, 60, top)
        marks += more
        sides = {conflict.first: FIRST, conflict.second: SECOND}
        for cell in own:
            if cell.factor < 0:
                continue
            fill = sides.get(cell.factor, "")
            marks.append(box(cell.x, cell.y, fill, "" if fill else "whole"))
            marks.append(text(cell.x + CELL / 2, cell.y + 19, letter(cell.factor), "middle", "on" if fill else ""))
        top += 74
    top -= 22
    for fill, places, which in ((FIRST, family.first, "first"), (SECOND, family.second, "second")):
        listed = ", ".join(f"{shown.called[p.value]}[{p.dim}]" for p in places)
        marks.append(f'<rect class="cell" x="20" y="{top:g}" width="18" height="18" fill="{fill}"/>')
        marks.append(text(46, top + 14, f"{which} side: {listed}", cls="note"))
        top += 26
    return page("The conflicts of attention, and the two sides of their family", top + 8, marks)


def lowered(shown: Shown, side: int) -> Lowered:
    """The sequence sharded over four devices, its conflicts resolved to one side."""
    (group,) = (g for g in shown.analysis.groups if g.bits)
    hardware = HardwareCost(place({"x": DEVICES}, topology(f"{DEVICES} v5e")))
    decision = Shard(group.colors, "x", tuple((bit, side) for bit in group.bits))
    state = lower_state(shown.analysis, State(hardware.placement.mesh, (decision,)), hardware)
    state.lower_all()
    return state


def draw_resolution(shown: Shown, side: int) -> str:
    """Every op as it computes if one side keeps the axis, and what moves for it."""
    state = lowered(shown, side)
    (family,) = shown.analysis.compatibility_sets
    inside = {c.op for c in family.conflicts}
    fill = (FIRST, SECOND)[side]
    marks: list[str] = []
    top = 52.0
    for op in shown.ops:
        moves = [r for r in state.reshards if r.op == op.id]
        if op.id not in inside and not moves:
            continue
        marks.append(text(20, top - 26, shown.code[shown.line(op)]))
        own, more = cells(shown, op, 60, top)
        marks += more
        for cell in own:
            if cell.factor < 0:
                continue
            on = bool(state.computes[op.id].assigned[cell.factor])
            marks.append(box(cell.x, cell.y, fill if on else "", "" if on else "whole"))
            marks.append(text(cell.x + CELL / 2, cell.y + 19, letter(cell.factor), "middle", "on" if on else ""))
        listed = [
            f"{step.kind.value} of {shown.called[r.value]}"
            for r in moves
            for step in r.steps
            if step.kind is not Move.SLICE
        ]
        if listed:
            marks.append(text(60, top + HEIGHT + 18, ", ".join(listed), cls="move"))
            top += 20
        top += 74
    name = ("first", "second")[side]
    marks.append(f'<rect class="cell" x="20" y="{top - 26:g}" width="18" height="18" fill="{fill}"/>')
    marks.append(text(46, top - 12, f"computed in {DEVICES} parts: the {name} side keeps the axis", cls="note"))
    return page(f"Attention with the {name} side of its conflicts sharded", top + 8, marks)


def pictures() -> dict[str, str]:
    """The pictures by file name."""
    shown = Shown()
    return {
        "names.svg": draw_names(shown),
        "colors.svg": draw_colors(shown),
        "conflicts.svg": draw_conflicts(shown),
        "queries.svg": draw_resolution(shown, 0),
        "keys.svg": draw_resolution(shown, 1),
    }


if __name__ == "__main__":
    for name, drawing in pictures().items():
        (FOLDER / name).write_text(drawing)
