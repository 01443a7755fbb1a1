"""Inner values that are marked by name, so that they can be pinned.

``checkpoint_name(x, "name")`` marks one value, wherever the program has it: in every layer, in a loop's body, recomputed in a
backward pass. ``jax.named_call(f, name="name")`` marks the results of ``f``. JAX only keeps the name stacks of ops, so the
results are the values that an op under the name computes and an op not under it uses, other than cotangents.

Weak: results are numbered in the order in which they are computed, which need not be the order in which ``f`` returns them.
Calls under one name that follow each other directly are one call. ``checkpoint_name`` has neither weakness.
"""

from __future__ import annotations

import itertools
import re
from functools import cached_property

from shardwise.ir.program import Op, Program
from shardwise.ir.traits import REMATERIALIZED


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
