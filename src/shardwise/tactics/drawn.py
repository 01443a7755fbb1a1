"""Finds examples that no argument has: minibatches of shuffled examples, samples of a replay buffer, generated noise.

The problem. Where examples are chosen inside of the program, by a permutation, random numbers or a loop's counter, no dimension
of an argument is that of the examples in products: a minibatch has a color that no argument has.

The idea. Colors are followed from the first dimensions of arguments to the rows that are drawn from them:

- by a lookup whose indices do not depend on arrays among the arguments (as tokens, which look into a vocabulary, do);
- as a slice;
- as the part of a dimension that one trip of a loop has, where it is split for the loop.

Rows that are written into such an argument by the same kind of indices belong to it, too. Strategies that shard the batch also
need the rows themselves: what gradients of parameters are summed over, and no argument has. Among them are generated examples,
and tokens in the slots of experts or sorted by expert.

Weak: samples that are drawn by priorities are taken for lookups of tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.dims.replaced import depends_on
from shardwise.ir.program import HEAVY
from shardwise.ir.rule import Kind

_SLICES: Final = ("dynamic_slice", "slice")


def drawn_rows(analysis: Analysis) -> dict[int, set[int]]:
    """Returns, by color of rows that are drawn from arguments and multiplied, the leading colors of these arguments and of what
    is written into them."""
    trips = set(analysis.names.color[analysis.names.trip].tolist())
    drawn, written = _moved_rows(analysis, trips)
    multiplied = {c for op in analysis.program.ops if op.unit in HEAVY for c in analysis.names.factor_colors(op.id)}
    inside = trips.union(*(analysis.value_colors[a.value] for a in analysis.program.arguments))
    sources: dict[int, set[int]] = {}
    for start in {c for c in analysis.leading_colors.values() if c >= 0}:
        reached, left = {start}, [start]
        while left:
            new = drawn.get(left.pop(), set()) - reached
            reached |= new
            left += new
        for color in (reached & multiplied) - inside:
            sources.setdefault(color, set()).update((start, *written.get(start, ())))
    return sources


def summed_rows(analysis: Analysis, batch: Collection[int]) -> list[int]:
    """Returns colors that no argument has, over which gradients of parameters are summed, but not over the batch's as well:
    rows that are drawn from arguments, generated from random numbers, or sorted by expert."""
    program, colors = analysis.program, analysis.value_colors
    inside = {c for a in program.arguments for c in colors[a.value]}
    inside.update(batch, analysis.names.color[analysis.names.trip].tolist())
    returned = {c for v in analysis.replaced_by for c in colors[v]}
    rows: dict[int, None] = {}
    for op in program.ops:
        made = {c for v in op.results for c in colors[v] if c >= 0}
        if op.unit not in HEAVY or op.rule is None or not made or not made <= returned:
            continue
        color = analysis.names.factor_colors(op.id)
        summed = [color[f] for dim in op.rule.operands[0] for f in dim if op.rule.factors[f].kind is Kind.REDUCTION]
        new = [c for c in summed if c not in inside]
        if new and not set(batch) & set(color):
            rows[new[0]] = None
    return list(rows)


def _moved_rows(analysis: Analysis, trips: set[int]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Returns, by color of a dimension, the colors of rows that are drawn from it, and of rows that are written into it."""
    program, drawn, written = analysis.program, dict[int, set[int]](), dict[int, set[int]]()
    depends = depends_on(program)
    arrays = 0
    for k, a in enumerate(program.arguments):
        arrays |= any(c >= 0 and analysis.colors[c].matters for c in analysis.value_colors[a.value]) << k
    for op in program.ops:
        if op.rule is None:
            continue
        color, operands = analysis.names.factor_colors(op.id), op.rule.operands
        if op.kind in ("gather", "scatter") and not depends.get(op.operands[1], 0) & arrays:
            by = {color[f] for dim in operands[1] for f in dim} - {color[f] for dim in operands[0] for f in dim}
            for c, f in zip(color, op.rule.factors, strict=True):
                if f.kind is Kind.INDEXED:
                    (drawn if op.kind == "gather" else written).setdefault(c, set()).update(by)
        elif op.kind in _SLICES:
            for dim, result in zip(operands[0], op.rule.results[0], strict=True):
                if dim and result and dim != result:
                    drawn.setdefault(color[dim[0]], set()).add(color[result[0]])
        elif op.kind == "reshape":
            for major, *minor in (dim for dim in operands[0] if dim):
                if minor and color[major] in trips:
                    drawn.setdefault(color[major], set()).add(color[minor[0]])
    return drawn, written
