"""Shardings that users pin, and those that the program states.

Inner values can be pinned where they are marked by name. ``checkpoint_name(x, "name")`` marks one value, wherever the program
has it: in every layer, in a loop's body, recomputed in a backward pass. ``jax.named_call(f, name="name")`` marks the results of
``f``. JAX only keeps the name stacks of ops, so the results are the values that an op under the name computes and an op not
under it uses, other than cotangents.

Weak: results are numbered in the order in which they are computed, which need not be the order in which ``f`` returns them.
Calls under one name that follow each other directly are one call. ``checkpoint_name`` has neither weakness.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from shardwise.dims.analysis import Analysis
from shardwise.errors import DecisionError, QueryError
from shardwise.hardware.mesh import MeshAxes, spec_problems
from shardwise.ir.paths import matching, near
from shardwise.ir.program import Op, Program, Spec
from shardwise.ir.traits import REMATERIALIZED
from shardwise.lowering.decisions import Pin, Shard


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
        # A spec for the arrays of a tree is checked with each of them, below.
        inner = not all(program.values[v].path for v in values)
        if inner and any(read_spec(spec)) and len({len(program.values[v].shape) for v in values}) > 1:
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


class Marks:
    """The marks of a program."""

    def __init__(self, program: Program):
        self.program = program

    def find(self, key: str) -> list[int] | str:
        """Returns the values that ``name`` marks, or ``name/0`` for the first result of a call; or why it marks none."""
        if key in self.points:
            return self.points[key]
        name, _, number = key.rpartition("/") if re.fullmatch(r".+/\d+", key) else (key, "", "")
        calls = self.calls(name)
        if not calls:
            return ""
        most = max(calls, key=len)
        if not number and len(most) > 1:
            shown = ", ".join(f"{name}/{k} is {self.describe(v)}" for k, v in enumerate(most))
            return f"{name!r} has {len(most)} results, pin them by number: {shown}"
        k = int(number or 0)
        if k >= len(most):
            return f"{name!r} has no result number {number}: the last is {name}/{len(most) - 1}"
        return [values[k] for values in calls if k < len(values)]

    def names(self) -> list[str]:
        """Returns all names that :meth:`find` accepts, for suggestions."""
        under = sorted({part for stack in self._stacks for part in stack.split("/") if part})
        calls = {name: max(self.calls(name), key=len, default=()) for name in under}
        numbered = [f"{name}/{k}" for name, values in calls.items() if len(values) > 1 for k in range(len(values))]
        return [*self.points, *(name for name, values in calls.items() if len(values) == 1), *numbered]

    def describe(self, value: int) -> str:
        return f"{self.program.values[value].type_text} {self.program.label(value)}"

    @cached_property
    def points(self) -> dict[str, list[int]]:
        """By ``checkpoint_name``: the values it marks."""
        points: dict[str, list[int]] = {}
        for op in self.program.ops:
            if op.kind == "name":
                points.setdefault(op.attribute("name"), []).append(op.results[0])
        return points

    def calls(self, name: str) -> list[list[int]]:
        """Returns the results of every ``named_call`` of this name."""
        program = self.program
        calls: list[list[int]] = []
        for region in program.regions:
            if region.owner >= 0 and self._under(program.ops[region.owner], name):
                continue  # values of a loop inside the call leave it as results of the loop
            ops = [op for op in map(program.ops.__getitem__, region.ops) if not _crosses(op)]
            for inside, run in itertools.groupby(ops, lambda op: self._under(op, name) and not self.backward[op.id]):
                if inside:
                    calls.append([v for op in run for v in op.results if v >= 0 and self._leaves(v, name)])
        return [values for values in calls if values]

    def _leaves(self, value: int, name: str) -> bool:
        """Returns whether an op that is not under a name uses a value, possibly inside or outside of a loop."""
        seen, left = {value}, [value]
        while left:
            for op in (self.program.ops[k] for k, _ in self.program.uses[left.pop()]):
                if _crosses(op):
                    left += [v for v in op.results if v not in seen]
                    seen.update(op.results)
                elif not self._under(op, name):
                    return True
        return False

    def _under(self, op: Op, name: str) -> bool:
        return f"/{name}/" in self._stacks[op.id]

    @cached_property
    def _stacks(self) -> list[str]:
        """By op: ``/outer/inner/``, without the transformations that JAX writes around a name."""
        names = (self.program.source_of(op).names for op in self.program.ops)
        return [f"/{re.sub(r'[A-Za-z_]+[(]|[)]', '', stack)}/" for stack in names]

    @cached_property
    def backward(self) -> list[bool]:
        """By op: whether it is part of a backward pass."""
        names = (self.program.source_of(op).names for op in self.program.ops)
        return ["transpose(" in stack.rpartition(REMATERIALIZED)[2] for stack in names]


def _crosses(op: Op) -> bool:
    """Returns whether an op is a link, between a loop and its body."""
    return op.attribute("owner") is not None
