"""A plan's specs as rules from logical axes to mesh axes, as Flax (``logical_to_mesh_axes``) and MaxText have them.

A rule gives all dimensions of one name the same mesh axes. Where a model has names already, a name may need two shardings in a
plan: the one of more bytes becomes the rule, and the others are listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError, QueryError
from shardwise.ir.paths import find_paths
from shardwise.plans.plan import ArrayPlan, Plan

#: What a logical axis is mapped to: no mesh axis, one, or several.
Mapped = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Rules:
    """``rules`` in the form that Flax takes; ``names``: the logical axes of arguments by path; ``others``: what these rules do
    not give as planned, in words."""

    rules: tuple[tuple[str, Mapped], ...]
    names: dict[str, tuple[str | None, ...]]
    others: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["rules = (", *(f"    {rule!r}," for rule in self.rules), ")", "names = {"]
        lines += [f"    {path!r}: {own!r}," for path, own in self.names.items()]
        lines += ["}", *(f"# not as planned: {text}" for text in self.others)]
        return "\n".join(lines) + "\n"


def logical_rules(plan: Plan, names: Mapping[str, Sequence[str | None]] | None) -> Rules:
    """See :meth:`Plan.rules`."""
    given = _made_up(plan) if names is None else _checked(plan, names)
    arrays = {a.path: a for a in plan.arguments if a.path in given}
    wanted: dict[str, dict[tuple[str, ...], int]] = {}  # by name and mesh axes: bytes
    for path, own in given.items():
        for name, axes in zip(own, _dims(arrays[path]), strict=True):
            if name is not None:
                weights = wanted.setdefault(name, {})
                weights[axes] = weights.get(axes, 0) + math.prod(arrays[path].shape)
    chosen = {name: max(weights, key=lambda axes: (weights[axes], axes)) for name, weights in wanted.items()}
    others = [
        f"{path} is {_words(_dims(arrays[path]))}, the rules make it {_words(made)}"
        for path, own in given.items()
        if (made := _applied(own, chosen)) != _dims(arrays[path])
    ]
    rules = tuple((name, axes[0] if len(axes) == 1 else axes or None) for name, axes in chosen.items())
    return Rules(rules, given, tuple(others))


def _dims(array: ArrayPlan) -> tuple[tuple[str, ...], ...]:
    return (*array.spec, *((),) * (len(array.shape) - len(array.spec)))


def _words(dims: tuple[tuple[str, ...], ...]) -> str:
    return f"[{', '.join('·'.join(axes) or '-' for axes in dims)}]"


def _applied(names: Sequence[str | None], rules: Mapping[str, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """What the rules make of an array; a mesh axis is given once, to the first dimension that may have it."""
    used: set[str] = set()
    made = []
    for name in names:
        axes = rules[name] if name is not None else ()
        axes = () if used & set(axes) else axes
        used.update(axes)
        made.append(axes)
    return tuple(made)


def _checked(plan: Plan, names: Mapping[str, Sequence[str | None]]) -> dict[str, tuple[str | None, ...]]:
    problems = []
    arguments = {a.path: a for a in plan.arguments}
    found: dict[str, tuple[str | None, ...]] = {}
    for asked, own in names.items():
        try:
            paths = find_paths(asked, arguments, what="argument")
        except QueryError as error:
            problems.append(str(error))
            continue
        for path in paths:
            found[path], rank = tuple(own), len(arguments[path].shape)
            if len(own) != rank:
                problems.append(f"{path} has {rank} dimensions, and {len(own)} names are given")
    if problems:
        raise PlanError("\n".join(problems))
    return found


def _made_up(plan: Plan) -> dict[str, tuple[str | None, ...]]:
    """A name for each color and each way in which the plan shards it, after the largest argument that has it."""
    found: dict[tuple[int, tuple[str, ...]], str] = {}
    taken: dict[str, int] = {}
    for array in sorted(plan.arguments, key=lambda a: -math.prod(a.shape)):
        for d, key in enumerate(_keys(array)):
            if key is not None and key not in found:
                base = f"{re.split(r'[/.]', array.path)[-1]}_{d}"
                taken[base] = count = taken.get(base, 0) + 1
                found[key] = base if count == 1 else f"{base}_{count}"
    return {a.path: tuple(None if k is None else found[k] for k in _keys(a)) for a in plan.arguments}


def _keys(array: ArrayPlan) -> list[tuple[int, tuple[str, ...]] | None]:
    colors = array.colors or (-1,) * len(array.shape)
    return [None if c < 0 else (c, axes) for c, axes in zip(colors, _dims(array), strict=True)]
