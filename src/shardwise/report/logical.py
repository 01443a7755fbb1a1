"""A plan's specs as rules from logical axes to mesh axes, as Flax (``logical_to_mesh_axes``) and MaxText have them.

Rules apply in their order, and one whose mesh axes an array uses already is skipped: a name may have several, such as a width
that is sharded on two axes, and on one of them in the embedding, whose vocabulary has the other. With the names of a model
there may be no rules that give the whole plan: those of more elements count, and the other arrays are listed.
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
    """``rules`` in the form that Flax takes; ``names``: the logical axes of arguments by path, None where a dimension needs
    none; ``others``: arguments that these rules do not shard as planned, in words."""

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
    if names is not None:
        return _rules(arrays, _checked(arrays, names))
    rules = _rules(arrays, _generated(plan, apart=False))
    return rules if not rules.others else _rules(arrays, _generated(plan, apart=True))


def _rules(arrays: Mapping[str, ArrayPlan], names_of: dict[str, Names]) -> Rules:
    elements: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for path, axis_names in names_of.items():
        for name, axes in zip(axis_names, dims(arrays[path]), strict=True):
            if name is not None:
                elements[name][axes] += math.prod(arrays[path].shape)
    rules: list[tuple[str, tuple[str, ...]]] = []
    # Names with one sharding come first: those with several give way to them.
    for name, counts in sorted(elements.items(), key=lambda item: len(item[1])):
        for axes in sorted(counts, key=lambda axes: (-counts[axes], axes)):
            rules.append((name, axes))
            if not axes:  # always possible, so that nothing comes after it
                break
    others = [
        f"{path} is {axes_text(dims(arrays[path]))}, the rules make it {axes_text(spec)}"
        for path, axis_names in names_of.items()
        if (spec := _applied(axis_names, rules)) != dims(arrays[path])
    ]
    return Rules(
        tuple((name, axes[0] if len(axes) == 1 else axes or None) for name, axes in rules), names_of, tuple(others)
    )


def _applied(names: Names, rules: Sequence[tuple[str, tuple[str, ...]]]) -> Spec:
    """Returns the spec that the rules give an array."""
    spec: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for name, axes in rules:
        if name in names and name not in spec and not used & set(axes):
            spec[name] = axes
            used.update(axes)
    return tuple(
        spec.get(name, ()) if name is not None and name not in names[:d] else () for d, name in enumerate(names)
    )


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


def _generated(plan: Plan, apart: bool) -> dict[str, Names]:
    """Returns a name for each color that is sharded: what the dimension is, or its place in the largest argument. ``apart``:
    one for each of its shardings."""
    names: dict[tuple[int, tuple[str, ...]], str] = {}
    used: Counter[str] = Counter()
    words = dimension_names(plan)
    for array in sorted(plan.arguments, key=lambda a: -math.prod(a.shape)):
        for key in _keys(array, apart):
            if key is not None and key not in names:
                base = re.sub(r"\W+", "_", words[key[0]].rpartition("/")[2]).strip("_") or "axis"
                used[base] += 1
                names[key] = base if used[base] == 1 else f"{base}_{used[base]}"
    return {a.path: tuple(None if k is None else names[k] for k in _keys(a, apart)) for a in plan.arguments}


def _keys(array: ArrayPlan, apart: bool) -> list[tuple[int, tuple[str, ...]] | None]:
    colors = array.colors or (-1,) * len(array.shape)
    pairs = zip(colors, dims(array), strict=True)
    return [(c, axes if apart else ()) if c >= 0 and axes else None for c, axes in pairs]
