"""Finds the dimensions to which strategies apply, by structure alone: sequences, vocabularies, experts, edges.

- A *sequence* is a dimension of the batch or of a cache, other than the first of the batch and those that loops run over, that
  no product with a parameter makes or contracts: tokens of a text, rows and columns of an image, positions of a cache.
- A *vocabulary* is a dimension of a parameter that a gather looks into, or along which a gather looks into what a product with
  the parameter makes, as a loss does with logits. Tables of less than a thousandth of all parameters do not count, nor do
  experts.
- *Experts* are a dimension of a parameter by which rows choose their matrix (``tactics.experts``), other than the stages of a
  pipeline. Those with the most bytes of parameters come first.
- *Edges* are the first dimension of batch arguments by which another's first dimension, that of the nodes, is looked into.

Weak: a frozen table of positions looks like a vocabulary. Experts that contain attention are no experts, and those that a loop
visits one by one have no dimension to shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import HEAVY, Value
from shardwise.ir.rule import Kind
from shardwise.ir.traits import STAGES
from shardwise.lowering.storage import views
from shardwise.tactics.experts import expert_colors

#: A dimension of an argument: (path, dimension).
PathDim = tuple[str, int]
_SHARE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Places:
    """One place of each group of dimensions. Sequences with more FLOPs come first."""

    sequences: tuple[PathDim, ...] = ()
    vocabularies: tuple[PathDim, ...] = ()
    experts: tuple[PathDim, ...] = ()
    edges: tuple[PathDim, ...] = ()


def stage_colors(analysis: Analysis) -> list[int]:
    """Returns the colors of the stages of a program's pipelines, which a name marks."""
    marked = (op.results[0] for op in analysis.program.ops if op.kind == "name" and op.attribute("name") == STAGES)
    return sorted({color for v in marked for color in analysis.value_colors[v] if color >= 0})


def find_places(
    analysis: Analysis, batch: Sequence[Value], params: Sequence[Value], cache: Sequence[Value] = ()
) -> Places:
    """Returns the places of a program with this batch, these parameters and this cache."""
    program = analysis.program
    weights = views(program, (v.id for v in params))
    multiplied: set[int] = set()  # colors of parameters in products
    looked_up: set[int] = set()
    edges: set[int] = set()
    loops, stages = set(analysis.names.color[analysis.names.trip].tolist()), set(stage_colors(analysis))
    first = {next((c for c in analysis.value_colors[v.id] if c not in loops), -1) for v in batch}
    experts = expert_colors(analysis, params, weights) - stages
    for op in program.ops:
        if op.rule is None or not (op.unit in HEAVY or op.kind == "gather"):
            continue
        color = analysis.names.factor_colors(op.id)
        operands = [{color[f] for dim in dims for f in dim} for dims in op.rule.operands]
        if op.unit in HEAVY:
            multiplied.update(*(colors for v, colors in zip(op.operands, operands, strict=True) if v in weights))
            continue
        indexed = {c for c, f in zip(color, op.rule.factors, strict=True) if f.kind is Kind.INDEXED}
        if indexed & first:
            edges |= (operands[1] & first) - indexed
        else:
            looked_up |= indexed & operands[0]

    def places(values: Sequence[Value], wanted: Callable[[int, int], bool]) -> tuple[PathDim, ...]:
        """Returns one place of each group that has a wanted dimension."""
        groups: dict[int, PathDim] = {}
        for value in values:
            for d, c in _colors(analysis, value):
                if wanted(d, c):
                    groups.setdefault(analysis.colors[c].group, (value.path, d))
        return tuple(groups.values())

    def flops(place: PathDim) -> float:
        color = analysis.color_of(*place)
        return 0.0 if color is None else color.flops

    def nbytes(place: PathDim) -> int:
        color = analysis.color_of(*place)
        group = analysis.groups[analysis.colors[color.id].group].colors if color else ()
        return sum(v.nbytes for v in params if not set(group).isdisjoint(analysis.value_colors[v.id]))

    least = _SHARE * sum(v.nbytes for v in params)
    sequences = places([*batch, *cache], lambda d, c: c not in multiplied | first | loops)
    return Places(
        tuple(sorted(sequences, key=lambda place: -flops(place))),
        places([v for v in params if v.nbytes >= least], lambda d, c: c in looked_up - experts),
        tuple(sorted(places(params, lambda d, c: c in experts), key=lambda place: -nbytes(place))),
        places(batch, lambda d, c: d == 0 and c in edges),
    )


def _colors(analysis: Analysis, value: Value) -> list[tuple[int, int]]:
    """Returns (dimension, color) of a value's dimensions that matter."""
    colors = enumerate(analysis.value_colors[value.id])
    return [(d, c) for d, c in colors if c >= 0 and analysis.colors[c].matters]
