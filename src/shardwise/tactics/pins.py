"""Pins: shardings a person insists on. All problems with them are found and said at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError, QueryError
from shardwise.hardware.mesh import MeshAxes, spec_problems
from shardwise.ir.paths import matching, near
from shardwise.ir.program import Spec
from shardwise.lowering.decisions import Pin
from shardwise.tactics.marks import Marks


def read_spec(given: Any) -> Spec:
    """A PartitionSpec, or a tuple of axis names, tuples of them and Nones, as axes by dimension."""

    def axes(entry: Any) -> tuple[str, ...]:
        return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()

    return tuple(axes(entry) for entry in given)


def make_pins(analysis: Analysis, mesh: MeshAxes, given: Mapping[str, Any]) -> list[Pin]:
    """Pins of arguments and outputs by path, of inner values by the names they are marked with, of arguments by the shardings
    they have, and of values by the constraints that the program states itself."""
    program, marks = analysis.program, Marks(analysis.program)
    wanted: dict[int, Spec] = {}
    marked: dict[int, str] = {}
    problems: list[str] = []
    for key, spec in given.items():
        found = _values(key, marks)
        if isinstance(found, str):
            problems.append(found)
            continue
        if len({len(program.values[v].shape) for v in found}) > 1:
            shown = ", ".join(map(marks.describe, found))
            problems.append(f"{key!r} marks values of different ranks ({shown}): give them names of their own")
            continue
        for value in found:
            if _plain(wanted.setdefault(value, read_spec(spec))) != _plain(read_spec(spec)):
                problems.append(f"{program.label(value)} is pinned twice, by {marked[value]!r} and by {key!r}")
            marked[value] = key
    for argument in program.arguments:
        if argument.spec is None:
            continue
        spec = wanted.setdefault(argument.value, argument.spec)
        if _plain(spec) != _plain(argument.spec):
            problems.append(
                f"{argument.path} is pinned to {_plain(spec)}, but the array is sharded {_plain(argument.spec)}"
            )
    for op in program.ops:
        if op.kind == "sharding_constraint" and op.attribute("spec") is not None:
            wanted[op.results[0]] = op.attribute("spec")
    for value, spec in wanted.items():
        v = program.values[value]
        closed = tuple(axes or () for axes in spec)
        where = f"{marked.get(value, 'the constraint')} at {program.label(value)}"
        problems += spec_problems(v.path or where, v.shape, closed, mesh)
    if problems:
        raise DecisionError("the pins cannot be carried out:\n" + "\n".join(f"  {p}" for p in problems))
    return [Pin(value, spec, _colors(analysis, value)) for value, spec in wanted.items()]


def _values(key: str, marks: Marks) -> list[int] | str:
    """The values that a key means: an exact path, a mark, or another way to write a path; or why it means none."""
    program = marks.program
    if key in program.paths:
        return [program.paths[key]]
    found = marks.find(key)
    if found:
        return found
    try:
        paths = matching(key, *program.named_paths)
    except QueryError as error:
        return str(error)
    hint = near(key, [*program.paths, *marks.names()])
    unknown = f"no argument or output has the path {key!r}, and no inner value is marked by that name{hint}"
    return [program.paths[path] for path in paths] or unknown


def _plain(spec: Spec) -> tuple[tuple[str, ...] | None, ...]:
    """Without trailing whole dimensions, so that ``P("x")`` and ``P("x", None)`` are one."""
    entries = list(spec)
    while entries and entries[-1] == ():
        entries.pop()
    return tuple(entries)


def _colors(analysis: Analysis, value: int) -> tuple[int, ...]:
    op, result = analysis.program.definitions[value]
    rule = analysis.program.ops[op].rule
    assert rule is not None
    start = int(analysis.names.first_node[op])
    return tuple(int(analysis.names.color[start + m]) if m >= 0 else -1 for m in rule.result_majors[result])
