"""A compiled program as data (JSON) and as text: its collectives by kind and mesh axes, its memory, its estimates."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.table import Table

from shardwise.verification.collectives import Collective, Form

if TYPE_CHECKING:
    from shardwise.verification.compiled import Compiled

SCHEMA: Final = 1
_WIDTH: Final = 80


@dataclass(frozen=True, slots=True)
class Total:
    """Collectives of one kind over the same axes.

    ``count`` and ``nbytes`` are those of the text, where a loop body stands once; ``runs`` and ``run_bytes`` are those of one
    call of the program. Bytes are those of one device, the larger side of every value moved.
    """

    kind: str
    axes: tuple[str, ...] | None
    count: int
    nbytes: int
    runs: int
    run_bytes: int


def totals(found: Iterable[Collective]) -> tuple[Total, ...]:
    """Totals of the collectives as the compiler wrote them, most bytes first."""
    return _totals((c.kind, c.axes, c.nbytes, c.runs) for c in found)


def logical_totals(found: Iterable[Collective]) -> tuple[Total, ...]:
    """Totals of the values moved, as a plan would name them: every part of a combined collective counts, a
    reduce-scatter in disguise is one, and 16-bit values that were widened have 16 bits."""
    return _totals((t.kind, t.axes, t.nbytes, t.runs) for c in found for t in c.transfers())


def _totals(rows: Iterable[tuple[str, tuple[str, ...] | None, int, int]]) -> tuple[Total, ...]:
    sums: dict[tuple[str, tuple[str, ...] | None], Total] = {}
    for kind, axes, nbytes, runs in rows:
        old = sums.get((kind, axes), Total(kind, axes, 0, 0, 0, 0))
        sums[kind, axes] = Total(
            kind, axes, old.count + 1, old.nbytes + nbytes, old.runs + runs, old.run_bytes + nbytes * runs
        )
    return tuple(sorted(sums.values(), key=lambda t: (-t.run_bytes, t.kind, t.axes or ())))


def compiled_json(compiled: Compiled) -> dict[str, Any]:
    """Everything but the program's text, as plain data in a stable order."""
    memory, refused = compiled.memory, compiled.out_of_memory
    return {
        "schema": SCHEMA,
        "backend": compiled.backend,
        "mesh": dict(zip(compiled.mesh.names, compiled.mesh.sizes, strict=True)),
        "fits": compiled.fits,
        "out_of_memory": refused
        and {
            "message": refused.message,
            "needed_bytes": refused.needed_bytes,
            "available_bytes": refused.available_bytes,
        },
        "memory": memory
        and {
            "peak_bytes": memory.peak_bytes,
            "temp_bytes": memory.temp_bytes,
            "argument_bytes": memory.argument_bytes,
            "output_bytes": memory.output_bytes,
            "alias_bytes": memory.alias_bytes,
        },
        "flops": compiled.flops,
        "estimated_cycles": compiled.estimated_cycles,
        "loops_of_unknown_trips": compiled.loops_of_unknown_trips,
        "totals": [_total_json(t) for t in totals(compiled.collectives)],
        "logical_totals": [_total_json(t) for t in logical_totals(compiled.collectives)],
        "collectives": [collective_json(c) for c in compiled.collectives],
    }


def _total_json(total: Total) -> dict[str, Any]:
    return {
        "kind": total.kind,
        "axes": None if total.axes is None else list(total.axes),
        "count": total.count,
        "bytes": total.nbytes,
        "runs": total.runs,
        "run_bytes": total.run_bytes,
    }


def collective_json(c: Collective) -> dict[str, Any]:
    """One collective as plain data."""
    return {
        "name": c.name,
        "kind": c.kind,
        "form": c.form.value,
        "axes": None if c.axes is None else list(c.axes),
        "group_size": c.group_size,
        "dtype": c.dtype,
        "reduction": c.reduction,
        "bytes_in": c.bytes_in,
        "bytes_out": c.bytes_out,
        "runs": c.runs,
        "loop": c.loop and {"op_name": c.loop.op_name, "trips": c.loop.trips},
        "branch": c.branch,
        "source": {"file": c.source[0], "line": c.source[1]},
        "op_name": c.op_name,
        "parts": [
            {
                "dtype": p.dtype,
                "dims": list(p.dims),
                "bytes_in": p.bytes_in,
                "bytes_out": p.bytes_out,
                "logical_dtype": p.logical_dtype,
                "scattered": p.scattered,
                "merged": list(p.merged),
                "absorbed": p.absorbed,
                "joined": p.joined,
            }
            for p in c.parts
        ],
    }


def compiled_text(compiled: Compiled, width: int = _WIDTH, most: int = 12) -> str:
    """A compiled program as text for a terminal; of its collectives the ``most`` that move the most bytes."""
    out = io.StringIO()
    # Without force_jupyter and color_system, Rich writes escape codes in a notebook.
    console = Console(
        file=out, width=width, highlight=False, emoji=False, markup=False, force_jupyter=False, color_system=None
    )
    console.print(f"Compiled for {compiled.backend}, mesh {compiled.mesh}")
    if compiled.out_of_memory is not None:
        refused = compiled.out_of_memory
        if refused.needed_bytes:
            console.print(f"Out of memory: needs {refused.needed_bytes:,} B of {refused.available_bytes:,} B a device")
        console.print(f"XLA says: {refused.message}")
        return _trimmed(out)
    _figures(console, compiled)
    console.print()
    if not compiled.collectives:
        console.print("No collectives: the devices do not talk to each other.")
        return _trimmed(out)
    moved = sum(t.run_bytes for t in totals(compiled.collectives))
    console.print(f"Collectives: {len(compiled.collectives):,} in the program, {moved:,} B moved in a run")
    console.print()
    _print_totals(console, totals(compiled.collectives))
    _disguises(console, compiled.collectives)
    console.print()
    _largest(console, compiled.collectives, most)
    return _trimmed(out)


def _trimmed(out: io.StringIO) -> str:
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _figures(console: Console, compiled: Compiled) -> None:
    if compiled.memory is not None:
        m = compiled.memory
        console.print(f"Memory a device: peak {m.peak_bytes:,} B; arguments {m.argument_bytes:,} B")
    parts = [f"{compiled.flops:.3g} FLOP a device, loop bodies once"] * bool(compiled.flops)
    parts += [f"{compiled.estimated_cycles:,} cycles estimated"] * bool(compiled.estimated_cycles)
    if parts:
        console.print("; ".join(parts))
    if compiled.loops_of_unknown_trips:
        console.print(f"Loops of unknown length, counted as one trip: {compiled.loops_of_unknown_trips}")


def _axes(axes: tuple[str, ...] | None) -> str:
    return "other" if axes is None else " ".join(axes) or "none"


def _print_totals(console: Console, rows: Sequence[Total]) -> None:
    table = _table(("kind", "left"), ("axes", "left"), ("ops", "right"), ("runs", "right"), ("bytes in a run", "right"))
    for t in rows:
        table.add_row(t.kind, _axes(t.axes), f"{t.count:,}", f"{t.runs:,}", f"{t.run_bytes:,}")
    console.print(table)


def _disguises(console: Console, found: Sequence[Collective]) -> None:
    """What the compiler wrote differently from how a plan would name it."""
    parts = sum(len(c.parts) for c in found)
    notes = [f"combined: {len(found):,} collectives move {parts:,} values"] * (parts > len(found))
    sliced = sum(c.reduce_scatter_in_disguise for c in found)
    notes += [f"all-reduces that are sliced at once, really reduce-scatters: {sliced:,}"] * bool(sliced)
    wide = sum(p.dtype != p.logical_dtype for c in found for p in c.parts)
    merged = sum(p.absorbed for c in found for p in c.parts)
    notes += [f"reduced over one axis after another: {merged:,}"] * bool(merged)
    joined = sum(p.joined for c in found for p in c.parts)
    notes += [f"reduced apart though only added up: {joined:,}"] * bool(joined)
    notes += [f"values widened before they move: {wide:,}"] * bool(wide)
    for form, text in ((Form.WINDOWED, "windowed products"), (Form.PIECES, "drawn out over fusions")):
        count = sum(c.form is form for c in found)
        notes += [f"{text}: {count:,}"] * bool(count)
    if notes:
        console.print()
    for note in notes:
        console.print(note[0].upper() + note[1:])


def _largest(console: Console, found: Sequence[Collective], most: int) -> None:
    rows = sorted(found, key=lambda c: -c.nbytes * c.runs)
    table = _table(
        ("kind", "left"), ("axes", "left"), ("runs", "right"), ("bytes", "right"), ("type", "left"), ("source", "text")
    )
    for c in rows[:most]:
        file, line = c.source
        where = f"{file.rsplit('/', 1)[-1]}:{line}" if file else c.op_name.rsplit("/", 1)[-1]
        table.add_row(c.kind, _axes(c.axes), f"{c.runs:,}", f"{c.nbytes:,}", c.dtype, where)
    console.print(table)
    if len(rows) > most:
        console.print(f"\nNot shown: {len(rows) - most:,} smaller")


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for title, justify in columns:
        last = justify == "text"
        side: Any = "left" if last else justify
        table.add_column(title, justify=side, no_wrap=not last, overflow="fold")
    return table
