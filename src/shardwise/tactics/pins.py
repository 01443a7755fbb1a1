"""Pins: shardings a person insists on. All problems with them are found and said at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from shardwise.cost.decisions import Pin
from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError
from shardwise.hardware.mesh import MeshAxes, spec_problems
from shardwise.ir.program import Spec


def read_spec(given: Any) -> Spec:
    """A PartitionSpec, or a tuple of axis names, tuples of them and Nones, as axes by dimension."""

    def axes(entry: Any) -> tuple[str, ...]:
        return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()

    return tuple(axes(entry) for entry in given)


def make_pins(analysis: Analysis, mesh: MeshAxes, given: Mapping[str, Any]) -> list[Pin]:
    """Pins of arguments and outputs by path, of arguments by the shardings they have, and of values by the constraints that
    the program states itself."""
    program = analysis.program
    wanted: dict[int, Spec] = {}
    problems: list[str] = []
    for path, spec in given.items():
        if path not in program.paths:
            near = difflib.get_close_matches(path, program.paths, n=3, cutoff=0.4)
            problems.append(
                f"no argument or output has the path {path!r}" + (f"; did you mean {', '.join(near)}?" if near else "")
            )
        else:
            wanted[program.paths[path]] = read_spec(spec)
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
        problems += spec_problems(v.path or f"the constraint at {program.label(value)}", v.shape, closed, mesh)
    if problems:
        raise DecisionError("the pins cannot be carried out:\n" + "\n".join(f"  {p}" for p in problems))
    return [Pin(value, spec, _colors(analysis, value)) for value, spec in wanted.items()]


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
