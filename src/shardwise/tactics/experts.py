"""Finds the experts of a mixture by structure.

The problem. Experts and heads of attention are both a dimension that parameters share with what they are multiplied with,
above all where they are computed under ``jax.vmap``. What tells them apart is how rows get there: they choose their experts,
and every row has all heads.

The idea. Candidates are dimensions by which rows can have different matrices:

- a product, which also contracts something, has the dimension in both operands and in its result;
- it is the groups of a ragged product (tokens that are sorted by their expert);
- a gather looks into it, and takes a matrix for each row;
- it is normalized or sorted, as a router does, and contracted together with another dimension.

Heads are taken out of them. Attention multiplies two activations that have heads in common, each with another dimension of
its own, and the result is no gradient of a parameter: it has dimensions that no parameter has. Where there are no such
products (latents that are attended to), the first product of some parameter contracts the heads, as the output projection
does. Experts are weighted and added up without a parameter, or else they are normalized by their router.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import Value
from shardwise.ir.rule import Kind
from shardwise.lowering.storage import views

_PRODUCTS: Final = ("dot_general", "ragged_dot_general")
#: Ops that compare positions along a dimension.
_CHOOSING: Final = ("argmax", "argmin", "reduce_max", "sort", "top_k")


def expert_colors(analysis: Analysis, params: Sequence[Value], weights: Collection[int]) -> set[int]:
    """Returns the colors of experts. ``weights`` are the parameters and their views."""
    program, of_params = analysis.program, {c for v in params for c in analysis.value_colors[v.id]}
    matrices, routed = _chosen_matrices(analysis, weights), _routed_colors(analysis)
    first = _contracted_first(analysis, weights)
    able = {c for c, together in first.items() if together and c in routed}
    heads = first.keys() - routed
    for op in program.ops:
        if op.kind not in _PRODUCTS or op.rule is None:
            continue
        color = analysis.names.factor_colors(op.id)
        summed = {k for k, f in enumerate(op.rule.factors) if f.kind is Kind.REDUCTION}
        one, other, sizes = (_factors(tensor) for tensor in (*op.rule.operands, ())[:3])
        shared = {color[f] for f in one & other & _factors(op.rule.results[0])}
        if any(v in weights for v in op.operands[:2]):
            groups = {color[f] for f in other & sizes - one} if op.operands[1] in weights else set()
            able |= (shared | groups) & of_params if summed else set()
        elif summed and one - other and other - one:
            made = {c for c in analysis.value_colors[op.results[0]] if c >= 0}
            heads |= set() if made <= of_params else shared
        for v in op.operands[:2] if shared else ():
            able |= matrices.get(v, set())
    return able - heads


def _factors(tensor: Sequence[Sequence[int]]) -> set[int]:
    return {f for dim in tensor for f in dim}


def _routed_colors(analysis: Analysis) -> set[int]:
    """Returns the colors of dimensions along which positions are compared."""
    routed: set[int] = set()
    for op in analysis.program.ops:
        if op.rule is not None and op.kind in _CHOOSING:
            colors = zip(analysis.names.factor_colors(op.id), op.rule.factors, strict=True)
            routed |= {c for c, f in colors if f.kind in (Kind.REDUCTION, Kind.BLOCKED)}
    return routed


def _contracted_first(analysis: Analysis, weights: Collection[int]) -> dict[int, bool]:
    """Returns the colors that the first product of some parameter contracts, and whether it contracts others with them."""
    program, used = analysis.program, set[int]()
    contracted: dict[int, bool] = {}
    for op in program.schedule:
        if op.kind not in _PRODUCTS or op.rule is None:
            continue
        color = analysis.names.factor_colors(op.id)
        for v, tensor in zip(op.operands[:2], op.rule.operands, strict=False):
            argument = program.argument_of.get(v, v)
            if v not in weights or argument in used:
                continue
            used.add(argument)
            summed = [color[f] for f in _factors(tensor) if op.rule.factors[f].kind is Kind.REDUCTION]
            contracted |= {c: contracted.get(c, False) or len(summed) > 1 for c in summed}
    return contracted


def _chosen_matrices(analysis: Analysis, weights: Collection[int]) -> dict[int, set[int]]:
    """Returns, by value that has a matrix of a parameter for each row, the colors that a gather looks into for it."""
    chosen: dict[int, set[int]] = {}
    for op in analysis.program.ops:
        if op.rule is None or op.kind != "gather" or op.operands[0] not in weights:
            continue
        colors = zip(analysis.names.factor_colors(op.id), op.rule.factors, strict=True)
        indexed = {c for c, f in colors if f.kind is Kind.INDEXED}
        kept = _factors(op.rule.operands[0]) & _factors(op.rule.results[0])
        if len({c for f, c in enumerate(analysis.names.factor_colors(op.id)) if f in kept}) > 1:
            chosen.update((v, indexed) for v in views(analysis.program, op.results))
    return chosen
