"""What the program itself states of shardings, before any tactic."""

from __future__ import annotations

from shardwise.dims.analysis import Analysis
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import Shard


def stated_shards(analysis: Analysis, mesh: MeshAxes) -> list[Shard]:
    """What the specs of the program's ``shard_map``s ask for: their dimensions' colors on their axes, the major axes first."""
    program, names = analysis.program, analysis.names
    found: dict[tuple[int, str], dict[int, None]] = {}  # by place of the axis in a dimension, and axis: colors
    for op in program.ops:
        if op.kind not in ("shard_map.input", "shard_map.output"):
            continue
        start = int(names.first_node[op.id])
        for factor, axes in enumerate(op.attribute("axes")):
            for place, axis in enumerate(axes):
                if axis in mesh.names:
                    found.setdefault((place, axis), {})[int(names.color[start + factor])] = None
    return [Shard(tuple(colors), axis) for (_, axis), colors in sorted(found.items())]
