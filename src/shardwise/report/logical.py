"""A plan's specs as rules from logical axes to mesh axes, as Flax (``logical_to_mesh_axes``) and MaxText have them.

A rule gives all dimensions of one name the same mesh axes. With the names of a model a plan may shard a name in two ways: the
one of more elements becomes the rule, and the other arrays are listed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError, QueryError
from shardwise.ir.paths import find_paths
from shardwise.plans.parts import ArrayPlan, Spec
from shardwise.plans.plan import Plan
from shardwise.report.plan_text import axes_text, dims
from shardwise.report.verdict import dimension_names

#: What a logical axis is mapped to: no mesh axis, one, or several.
Mapped = str | tuple[str, ...] | None
Names = tuple[str | None, ...]


@dataclass(frozen=True)
class Rules:
    """``rules`` in the form that Flax takes; ``names``: the logical axes of arguments by path; ``others``: arguments that these
    rules do not shard as planned, in words."""

    rules: tuple[tuple[str, Mapped], ...]
    names: dict[str, Names]
    others: tuple[str, ...]

    def __str__(self) -> str:
        lines = ["rules = (", *(f"    {rule!r}," for rule in self.rules), ")", "names = {"]
        lines += [f"    {path!r}: {names!r}," for path, names in self.names.items()]
        lines += ["}", *(f"# not as planned: {in_comment(text)}" for text in self.others)]
        return "\n".join(lines) + "\n"


def in_comment(text: str) -> str:
    """Returns text that stays in its comment.

    >>> in_comment("a\\nb\\0")
    'a b?'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def logical_rules(plan: Plan, names: Mapping[str, Sequence[str | None]] | None) -> Rules:
    """See :meth:`Plan.rules`."""
    arrays = {a.path: a for a in plan.arguments}
    names_of = _generated(plan) if names is None else _checked(arrays, names)
    elements: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for path, axis_names in names_of.items():
        for name, axes in zip(axis_names, dims(arrays[path]), strict=True):
            if name is not None:
                elements[name][axes] += math.prod(arrays[path].shape)
    chosen = {name: max(counts, key=lambda axes: (counts[axes], axes)) for name, counts in elements.items()}
    others = [
        f"{path} is {axes_text(dims(arrays[path]))}, the rules make it {axes_text(spec)}"
        for path, axis_names in names_of.items()
        if (spec := _applied(axis_names, chosen)) != dims(arrays[path])
    ]
    rules = tuple((name, axes[0] if len(axes) == 1 else axes or None) for name, axes in chosen.items())
    return Rules(rules, names_of, tuple(others))


def _applied(names: Names, rules: Mapping[str, tuple[str, ...]]) -> Spec:
    """Returns the spec that the rules give an array; a mesh axis goes to the first dimension that may have it."""
    used: set[str] = set()
    spec = []
    for name in names:
        axes = rules[name] if name is not None and not used & set(rules[name]) else ()
        used.update(axes)
        spec.append(axes)
    return tuple(spec)


def _checked(arrays: Mapping[str, ArrayPlan], names: Mapping[str, Sequence[str | None]]) -> dict[str, Names]:
    problems = []
    names_of: dict[str, Names] = {}
    for pattern, axis_names in names.items():
        try:
            paths = find_paths(pattern, arrays, what="argument")
        except QueryError as error:
            problems.append(str(error))
            continue
        for path in paths:
            names_of[path], rank = tuple(axis_names), len(arrays[path].shape)
            if len(axis_names) != rank:
                problems.append(f"{path} has {rank} dimensions, and {len(axis_names)} names are given")
    if problems:
        raise PlanError("\n".join(problems))
    return names_of


def _generated(plan: Plan) -> dict[str, Names]:
    """Returns a name for each color and each of its shardings: what the dimension is, or a place in the largest argument."""
    names: dict[tuple[int, tuple[str, ...]], str] = {}
    used: Counter[str] = Counter()
    words = dimension_names(plan)
    for array in sorted(plan.arguments, key=lambda a: -math.prod(a.shape)):
        for key in _keys(array):
            if key is not None and key not in names:
                base = re.sub(r"\W+", "_", words[key[0]].rpartition("/")[2]).strip("_") or "axis"
                used[base] += 1
                names[key] = base if used[base] == 1 else f"{base}_{used[base]}"
    return {a.path: tuple(None if k is None else names[k] for k in _keys(a)) for a in plan.arguments}


def _keys(array: ArrayPlan) -> list[tuple[int, tuple[str, ...]] | None]:
    colors = array.colors or (-1,) * len(array.shape)
    return [None if c < 0 else (c, axes) for c, axes in zip(colors, dims(array), strict=True)]
