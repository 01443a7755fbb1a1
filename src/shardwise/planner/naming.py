"""Names of mesh axes by what they carry: ``data``, ``fsdp``, ``model``, ``expert``, ``context``.

Axes of a mesh that was searched for get such names. On a given mesh, axes of equal size exchange what they carry so that it
agrees with their names, where that costs nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from shardwise.ir.program import Value
from shardwise.lowering.decisions import Decision, Pin, Shard
from shardwise.planner.mesh import on_axes
from shardwise.tactics.places import PathDim
from shardwise.tactics.tactic import Context

#: What an axis carries, by usual names of axes.
_USUAL: Final = {
    name: carried
    for carried, names in {
        "data": "data fsdp dp batch replica",
        "model": "model tensor tp mp",
        "expert": "expert experts ep",
        "context": "context sequence seq cp sp",
    }.items()
    for name in names.split()
}


def carried_names(context: Context, decisions: Sequence[Decision]) -> tuple[str, ...]:
    """A name for each axis of the mesh. Experts come first, then the batch, alone or with parameters, then parameters alone,
    then the sequence; an axis that shards nothing of these keeps its name."""
    colors = {name: set[int]() for name in context.mesh.names}
    for decision in decisions:
        if isinstance(decision, Shard):
            colors[decision.axis].update(decision.colors)
    batch = _colors(context, [(v.path, 0) for v in _arguments(context, "batch") if v.shape])
    params = {c for v in _arguments(context, "params") for _, c in context.colors_of(v)} - batch
    experts, sequences = (_colors(context, places) for places in (context.places.experts, context.places.sequences))
    names = []
    for axis, sharded in colors.items():
        if sharded & experts:
            names.append("expert")
        elif sharded & batch:
            names.append("fsdp" if sharded & params else "data")
        else:
            names.append("model" if sharded & params else "context" if sharded & sequences else axis)
    count = Counter(names)
    numbers = {name: iter(range(1, len(names) + 1)) for name in names}
    return tuple(f"{name}{next(numbers[name])}" if count[name] > 1 else name for name in names)


def exchanged(context: Context, decisions: Sequence[Decision]) -> Iterator[tuple[Decision, ...]]:
    """The same decisions with axes of equal size exchanged, those first that suit the names of more axes than now."""
    names, sizes = context.mesh.names, context.mesh.sizes
    if any(isinstance(d, Pin) for d in decisions):
        return
    carried = [_USUAL.get(name.rstrip("0123456789"), "") for name in carried_names(context, decisions)]

    def suited(order: Sequence[int]) -> int:
        """Axes with a usual name for what they would carry, if axis ``k`` carries what axis ``order[k]`` does."""
        return sum(_USUAL.get(name) == carried[k] for name, k in zip(names, order, strict=True))

    here = tuple(range(len(names)))
    orders = [
        o for o in itertools.permutations(here) if [sizes[k] for k in o] == list(sizes) and suited(o) > suited(here)
    ]
    for order in sorted(orders, key=lambda o: -suited(o)):
        yield on_axes(decisions, {names[old]: names[k] for k, old in enumerate(order)})


def _arguments(context: Context, role: str) -> list[Value]:
    return context.arguments(context.roles.get(role, ()))


def _colors(context: Context, places: Sequence[PathDim]) -> set[int]:
    found = (context.analysis.color_of(*place) for place in places)
    return {color.id for color in found if color is not None}
