"""Shardings that users pin, and those that the program states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError, QueryError
from shardwise.hardware.mesh import MeshAxes, spec_problems
from shardwise.ir.paths import matching, near
from shardwise.ir.program import Spec
from shardwise.lowering.decisions import Pin, Shard
from shardwise.tactics.marks import Marks


def read_spec(spec: Any) -> Spec:
    """Returns the axes by dimension of a PartitionSpec, or of a tuple of axis names, tuples of them and Nones."""
    return tuple((axes,) if isinstance(axes, str) else axes if isinstance(axes, tuple) else () for axes in spec)


def make_pins(analysis: Analysis, mesh: MeshAxes, pins: Mapping[str, Any]) -> list[Pin]:
    """Returns the pins that users state, by path or by mark of inner values, and those of the shardings of arguments and of the
    program's sharding constraints. Raises one error for all problems."""
    program, marks = analysis.program, Marks(analysis.program)
    specs: dict[int, Spec] = {}
    keys: dict[int, str] = {}
    problems: list[str] = []
    for key, spec in pins.items():
        values = _values(key, marks)
        if isinstance(values, str):
            problems.append(values)
            continue
        if len({len(program.values[v].shape) for v in values}) > 1:
            shown = ", ".join(map(marks.describe, values))
            problems.append(f"{key!r} marks values of different ranks ({shown}): give each rank another name")
            continue
        for value in values:
            if _plain(specs.setdefault(value, read_spec(spec))) != _plain(read_spec(spec)):
                problems.append(f"{program.label(value)} is pinned twice, by {keys[value]!r} and by {key!r}")
            keys[value] = key
    for argument in program.arguments:
        if argument.spec is not None:
            pinned, sharded = _plain(specs.setdefault(argument.value, argument.spec)), _plain(argument.spec)
            if pinned != sharded:
                problems.append(f"{argument.path} is pinned to {pinned}, but the array is sharded {sharded}")
    for op in program.ops:
        if (spec := op.attribute("spec")) is None or op.kind.startswith("shard_map."):
            continue
        # In a backward pass JAX states the shardings of explicit types itself.
        if op.kind == "sharding_constraint" or not marks.backward[op.id]:
            specs[op.results[0]] = spec
    for value, axes in specs.items():
        v = program.values[value]
        where = v.path or f"{keys.get(value, 'the constraint')} at {program.label(value)}"
        problems += spec_problems(where, v.shape, tuple(a or () for a in axes), mesh)
    if problems:
        raise DecisionError("these pins cannot be applied:\n" + "\n".join(f"  {p}" for p in problems))
    return [Pin(value, axes, analysis.value_colors[value]) for value, axes in specs.items()]


def _values(key: str, marks: Marks) -> list[int] | str:
    """Returns the values of a key, which is an exact path, a mark, or a path written in another way; or the problem with it."""
    program = marks.program
    if key in program.paths:
        return [program.paths[key]]
    marked = marks.find(key)
    if marked:
        return marked
    try:
        paths = matching(key, *program.named_paths)
    except QueryError as error:
        return str(error)
    hint = near(key, [*program.paths, *marks.names()])
    unknown = f"no argument or output has the path {key!r}, and no inner value is marked by that name{hint}"
    return [program.paths[path] for path in paths] or unknown


def _plain(spec: Spec) -> tuple[tuple[str, ...] | None, ...]:
    """Drops trailing replicated dimensions, so that ``P("x")`` and ``P("x", None)`` are equal."""
    entries = list(spec)
    while entries and entries[-1] == ():
        entries.pop()
    return tuple(entries)


def stated_shards(analysis: Analysis, mesh: MeshAxes) -> list[Shard]:
    """Returns the decisions that the specs of the program's ``shard_map``s state, the major axes first."""
    colors: dict[tuple[int, str], dict[int, None]] = {}  # by position of the axis in its dimension, and axis
    for op in analysis.program.ops:
        if op.kind in ("shard_map.input", "shard_map.output"):
            for color, axes in zip(analysis.names.factor_colors(op.id), op.attribute("axes"), strict=False):
                for position, axis in enumerate(axes):
                    if axis in mesh.names:
                        colors.setdefault((position, axis), {})[color] = None
    return [Shard(tuple(numbers), axis) for (_, axis), numbers in sorted(colors.items())]
