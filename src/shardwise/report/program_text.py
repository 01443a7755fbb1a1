"""The device-local program as text: one line for each op and each collective, in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from shardwise.ir.program import Program
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.storage import views
from shardwise.report.page import Page
from shardwise.spmd.text import MOVING, Line, program_lines, totals
from shardwise.units import binary

#: Below this width a collective has its bytes where other lines have their source.
_WIDE: Final = 100
#: Shares of the width that the columns of names and types may take; names of arguments and outputs may be longer.
_NAMES: Final = 0.14
_PATHS: Final = 0.5
_TYPES: Final = 0.26
_BORDERS: Final = ("argument", "output")

_LEGEND: Final = (
    "Lines with > communicate, with the bytes that one device moves. f32[16·data,512] is this device's block, 16 × 512, of an "
    "array whose first dimension is sharded over data; where it is partial over model, the array is the sum of such blocks "
    "along model. %7.a is %7 in another sharding, w[i] what one trip of a loop reads of w, _ a scalar in the source."
)


def program_text(program: Program, sharded: ShardedProgram, width: int = 120) -> str:
    """Returns the ops of one device, line by line, and the collectives of a step by kind and axes."""
    lines, page = program_lines(program, sharded), Page(width)
    title = f"{program.name} on {sharded.mesh}, one device of {sharded.mesh.devices}"
    head = [title, "", *textwrap.wrap(_LEGEND, width)]
    moved = totals(lines).items()
    cells = [[kind, "·".join(axes), str(count), binary(nbytes)] for (kind, axes), (count, nbytes) in moved]
    page.print("Collectives of one device in a step\n")
    if cells:
        page.table(["kind", "axes", ">count", ">bytes"], cells)
    else:
        page.print("none")
    rows, arguments = laid_out(lines, width), sum(line.kind == "argument" for line in lines)
    return "\n".join([*head, "", *rows[:arguments], "", *rows[arguments:], "", page.text()])


def program_data(program: Program, sharded: ShardedProgram) -> dict[str, Any]:
    """Returns the lines as plain data, and the collectives of a step by kind and axes."""
    lines = program_lines(program, sharded)
    moved = [
        {"kind": kind, "axes": list(axes), "count": count, "nbytes": nbytes}
        for (kind, axes), (count, nbytes) in totals(lines).items()
    ]
    return {"lines": [asdict(line) for line in lines], "collectives": moved}


def listing_data(program: Program, sharded: ShardedProgram, most: int, width: int = 140) -> dict[str, Any]:
    """Returns what a page shows: the kind and the text of the first lines, and whether there are more."""
    lines = program_lines(program, sharded, most + 1)
    shown = lines[:most]
    rows = [{"kind": x.kind, "text": text} for x, text in zip(shown, laid_out(shown, width), strict=True)]
    return {"lines": rows, "complete": len(lines) <= most}


def touching(program: Program, lines: Sequence[Line], path: str) -> list[Line]:
    """Returns the lines about an argument or output, or about casts and other views of it."""
    value = program.paths[path]
    op = program.ops[program.definitions[value][0]]
    about = views(program, (value, *(v for v in op.operands if v >= 0)))
    return [line for line in lines if about.intersection(line.values)]


def laid_out(lines: Sequence[Line], width: int) -> list[str]:
    """Returns the lines in columns: name, type, expression, bytes, source. A line that is too long has no columns; where that
    is not enough its expression is below."""
    sources = max((len(line.source) for line in lines), default=0)
    sizes = max((len(_size(line)) for line in lines), default=0)
    borders = _columns([line for line in lines if line.kind in _BORDERS], _PATHS * width, width)
    others = _columns([line for line in lines if line.kind not in _BORDERS], _NAMES * width, _TYPES * width)
    rows = []
    for line in lines:
        end = f" {line.source:<{sources}}" if line.source else ""
        if line.kind in MOVING:
            end = f" {_size(line):>{sizes}}  {line.source:<{sources}}" if width >= _WIDE else f" {_size(line)}"
        rows.append(_row(line, end, borders if line.kind in _BORDERS else others, width - len(end)))
    return rows


def _size(line: Line) -> str:
    """``16.00 KiB ×4``: what a collective moves each time, and how often."""
    runs = line.times * line.count
    times = f" ×{runs:g}" if runs != 1 else ""
    return f"{binary(line.nbytes)}{times}" if line.kind in MOVING else ""


def _label(line: Line) -> str:
    """Mark, indentation and name; an argument or output that is named by number has its path beside that."""
    path = f" {line.about}" if line.kind in _BORDERS and line.about else ""
    return f"{'>' if line.kind in MOVING else ' '} {'  ' * line.depth}{line.name}{path}"


def _columns(lines: Sequence[Line], label: float, type_: float) -> tuple[int, int]:
    """Returns the widths of the longest labels and types that are within the limits."""
    named = [line for line in lines if line.name]
    labels = [n for line in named if (n := len(_label(line))) <= label]
    return max(labels, default=0), max((n for line in named if (n := len(line.type)) <= type_), default=0)


def _row(line: Line, end: str, columns: tuple[int, int], room: int) -> str:
    label, equals = _label(line), "= " if line.name and line.expression else ""
    left = f"{label:<{columns[0]}}  {line.type:<{columns[1]}}  " if line.name else label
    compact = f"{label} {line.type} " if line.name else label
    about = line.about if line.kind not in _BORDERS else ""
    notes = [[n for n in texts if n] for texts in ((line.note, about), (line.note,))]
    rights = [equals + line.expression + (f"  # {'; '.join(texts)}" if texts else "") for texts in notes]
    for text in (left + rights[0], left + rights[1], compact + rights[1]):
        if len(text.rstrip()) <= room:
            return f"{text.rstrip():<{room}}{end}".rstrip()
    indent = " " * (2 * line.depth + 6)
    below = textwrap.wrap(
        rights[1], room, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
    *above, last = [compact.rstrip(), *below]
    return "\n".join([*above, f"{last:<{room}}{end}"]).rstrip()
