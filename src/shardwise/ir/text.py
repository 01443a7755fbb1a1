"""The stable text form of a program."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.ir.program import Op, Program


def format_program(program: Program, sources: bool = False) -> str:
    """Returns one line per op: ``%3:f32[8,2] = dot_general %0 %1  (i,k),(k,j)->(i,j); sum k``. Bodies are indented."""
    lines = [f"program {program.name}"]
    lines += _region(program, 0, "  ", sources)
    lines.append("return " + " ".join(f"%{v}" for v in program.outputs))
    return "\n".join(lines)


def _region(program: Program, region: int, indent: str, sources: bool) -> Iterator[str]:
    linked = {k for op in program.ops for k in op.links}
    for k in program.regions[region].ops:
        if k in linked:
            continue
        op = program.ops[k]
        yield indent + _op(program, op, sources)
        for link in op.links:
            yield indent + "  " + _op(program, program.ops[link], sources)
        for inner in op.regions:
            r = program.regions[inner]
            trips = f" x{r.trips}" if r.trips != 1 else "" if r.trips_known else " x?"
            yield f"{indent}  {r.kind}{trips}:"
            yield from _region(program, inner, indent + "    ", sources)


def _op(program: Program, op: Op, sources: bool) -> str:
    values = [program.values[v] for v in op.results] if op.rule is not None else []
    results = " ".join(f"%{v.id}:{v.type_text}" for v in values)
    operands = " ".join(f"%{v}" if v >= 0 else "lit" for v in op.operands)
    text = f"{results} = {op.kind}" if results else op.kind
    path = next((v.path for v in values if v.path), "")
    text += f" {operands}" if operands else ""
    text += f" '{path}'" if path else ""
    text += f"  {op.rule}" if op.rule is not None and op.rule.factors else ""
    return text + (f"  # {program.source_of(op)}" if sources else "")
