"""A lowered state as text: every op as it computes, every reshard beside the op that needs it, with source lines."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.ir.program import Op, Value
from shardwise.ir.rule import letter
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.sharding import Kind, Sharding


def format_lowered(lowered: Lowered) -> str:
    """One line an op: ``%2:float32[32/data,4] = dot_general %1 %0  i/data  # file.py:3``, with reshards around it."""
    by_op: dict[int, list[Reshard]] = {}
    for reshard in lowered.reshards:
        by_op.setdefault(reshard.op, []).append(reshard)
    lines = [f"{lowered.program.name} on {lowered.state.mesh}"]
    for op in lowered.program.schedule:
        if op.rule is None:
            continue
        moves = by_op.get(op.id, [])
        lines += [line for r in moves if r.operand >= 0 for line in _moves(lowered, r)]
        lines.append("  " + _op(lowered, op))
        lines += [line for r in moves if r.operand < 0 for line in _moves(lowered, r)]
    return "\n".join(lines)


def _typed(lowered: Lowered, value: Value, sharding: Sharding) -> str:
    names = lowered.state.mesh.names
    dims = [
        f"{size}/{'·'.join(names[a] for a in axes)}" if axes else str(size)
        for size, axes in zip(value.shape, sharding.dims, strict=True)
    ]
    partial = "".join(f" partial {names[a]}" for a in sharding.partial)
    return f"{value.dtype}[{','.join(dims)}]{partial}"


def _op(lowered: Lowered, op: Op) -> str:
    program, names = lowered.program, lowered.state.mesh.names
    results = " ".join(f"%{v}:{_typed(lowered, program.values[v], lowered.actual[v])}" for v in op.results)
    operands = "".join(f" %{v}" if v >= 0 else " lit" for v in op.operands)
    factors = [
        f"{letter(f)}/{'·'.join(names[a] for a in axes)}" for f, axes in enumerate(lowered.factors[op.id]) if axes
    ]
    path = next((f" '{program.values[v].path}'" for v in op.results if program.values[v].path), "")
    trips = program.trips[op.region]
    times = f"  x{trips:g}" if trips != 1 else ""
    chosen = f"  {' '.join(factors)}" if factors else ""
    return f"{results} = {op.kind}{operands}{path}{chosen}{times}  # {program.source_of(op)}"


def _moves(lowered: Lowered, reshard: Reshard) -> Iterator[str]:
    names = lowered.state.mesh.names
    value = lowered.program.values[reshard.value]
    source, target = (_typed(lowered, value, s) for s in (reshard.source, reshard.target))
    for step in reshard.steps:
        if step.kind is Kind.SLICE:
            continue
        axes = "·".join(names[a] for a in step.axes)
        yield f"    {step.kind.value} {axes} %{value.id} {source} -> {target}, {step.nbytes:,.0f} bytes"
