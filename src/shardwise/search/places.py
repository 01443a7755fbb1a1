"""Where strategies find what they are about, by structure alone: sequences, vocabularies, experts, edges.

- A *sequence* is a dimension of the batch, other than the first, that no product with a parameter makes or contracts: tokens of
  a text, rows and columns of an image.
- A *vocabulary* is a dimension of a parameter that a gather looks into. Tables of less than a thousandth of all parameters do
  not count.
- *Experts* are a dimension of a parameter that a product has in both operands and in its result, or that a ragged product
  looks into.
- *Edges* are the first dimension of batch arguments by which another's first dimension, that of the nodes, is looked into.

Weak: a frozen table of positions looks like a vocabulary, and a batch of independent heads like experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.dims.analysis import Analysis
from shardwise.ir.program import HEAVY, Op, Value
from shardwise.ir.rule import Kind
from shardwise.lowering.storage import views

#: A dimension of an argument: (path, dimension).
PathDim = tuple[str, int]
_SHARE: Final = 1e-3
_PRODUCTS: Final = ("dot_general", "ragged_dot", "ragged_dot_general")


@dataclass(frozen=True, slots=True)
class Places:
    """One place of each group of dimensions; of sequences those with more work first."""

    sequences: tuple[PathDim, ...] = ()
    vocabularies: tuple[PathDim, ...] = ()
    experts: tuple[PathDim, ...] = ()
    edges: tuple[PathDim, ...] = ()


def find_places(analysis: Analysis, batch: Sequence[Value], params: Sequence[Value]) -> Places:
    """The places of a program whose batch and parameters are known."""
    program = analysis.program
    weights = views(program, (v.id for v in params))
    held: set[int] = set()  # by products with parameters
    looked_up: set[int] = set()
    batched: set[int] = set()
    edges: set[int] = set()
    first = {c for v in batch for d, c in _colors(analysis, v) if d == 0}
    for op in program.ops:
        if op.rule is None:
            continue
        own = _Op(analysis, op)
        weighty = [t for t, v in enumerate(op.operands) if v in weights]
        if op.unit in HEAVY and weighty:
            colors = set().union(*(own.operand(t) for t in weighty))
            held |= colors
            if op.kind in _PRODUCTS:
                others = set().union(*(own.operand(t) for t in range(len(op.operands)) if t not in weighty))
                batched |= colors & others & own.results() | colors & own.indexed()
        if op.kind == "gather":
            if op.operands[0] in weights:
                looked_up |= own.indexed() & own.operand(0)
            elif own.indexed() & first:
                edges |= (own.operand(1) & first) - own.indexed()
    total = sum(v.nbytes for v in params)
    tables = [v for v in params if v.nbytes >= _SHARE * total]
    sequences = _places(analysis, batch, lambda d, c: d > 0 and c not in held | first)
    sequences.sort(key=lambda place: -_flops(analysis, place))
    return Places(
        tuple(sequences),
        tuple(_places(analysis, tables, lambda d, c: c in looked_up)),
        tuple(_places(analysis, params, lambda d, c: c in batched)),
        tuple(_places(analysis, batch, lambda d, c: d == 0 and c in edges)),
    )


class _Op:
    """The colors of an op's factors."""

    def __init__(self, analysis: Analysis, op: Op):
        names = analysis.names
        assert op.rule is not None
        self.rule = op.rule
        self.color = names.color[names.first_node[op.id] : names.first_node[op.id + 1]].tolist()

    def operand(self, number: int) -> set[int]:
        return {self.color[f] for dim in self.rule.operands[number] for f in dim}

    def results(self) -> set[int]:
        return {self.color[f] for tensor in self.rule.results for dim in tensor for f in dim}

    def indexed(self) -> set[int]:
        return {c for c, f in zip(self.color, self.rule.factors, strict=True) if f.kind is Kind.INDEXED}


def _colors(analysis: Analysis, value: Value) -> list[tuple[int, int]]:
    """(dimension, color) of an argument's dimensions that matter."""
    colors = [(d, analysis.color_of(value.path, d)) for d in range(len(value.shape))]
    return [(d, c.id) for d, c in colors if c is not None and c.matters]


def _places(analysis: Analysis, values: Sequence[Value], wanted: Callable[[int, int], bool]) -> list[PathDim]:
    """One place of each group that has a wanted dimension."""
    found: dict[int, PathDim] = {}
    for value in values:
        for d, c in _colors(analysis, value):
            if wanted(d, c):
                found.setdefault(analysis.colors[c].group, (value.path, d))
    return list(found.values())


def _flops(analysis: Analysis, place: PathDim) -> float:
    color = analysis.color_of(*place)
    return 0.0 if color is None else color.flops
