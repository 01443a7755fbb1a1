"""Names of mesh axes by what they carry: ``data``, ``fsdp``, ``model``, ``expert``, ``context``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.ir.program import Value
from shardwise.lowering.decisions import Decision, Shard
from shardwise.tactics.places import PathDim
from shardwise.tactics.tactic import Context


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


def _arguments(context: Context, role: str) -> list[Value]:
    return context.arguments(context.roles.get(role, ()))


def _colors(context: Context, places: Sequence[PathDim]) -> set[int]:
    found = (context.analysis.color_of(*place) for place in places)
    return {color.id for color in found if color is not None}
