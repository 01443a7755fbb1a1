"""An operation as its rule sees it, and the builder with which rules are written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.ir.rule import Factor, Kind, Rule, Window, check_rule

Shape = tuple[int, ...]
#: A dimension of a tensor: (tensor number, operands first and then results; dimension).
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operation as its rule sees it.

    ``operands`` and ``results`` are shapes; ``dtypes`` the dtype names of the operands; ``params`` the front
    end's parameters of the primitive. Tensors are numbered: operands first, then results.

    >>> call = OpCall("dot_general", {}, ((8, 4), (4, 6)), ((8, 6),))
    >>> call.out(), call.shape(2)
    (2, (8, 6))
    """

    kind: str
    params: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ()

    @property
    def key(self) -> Hashable:
        """Equal for equal calls; None if a parameter cannot be hashed."""
        key = (self.kind, self.operands, self.results, self.dtypes, tuple(self.params.values()))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def out(self, number: int = 0) -> int:
        """The tensor number of a result."""
        return len(self.operands) + number

    def shape(self, tensor: int) -> Shape:
        """The shape of a tensor by number."""
        return (self.operands + self.results)[tensor]


class RuleBuilder:
    """Collects the factors of an op, major ones first, and builds the checked rule. ``out`` is the number of the first result.

    >>> b = RuleBuilder(OpCall("dot_general", {}, ((8, 4), (4, 6)), ((8, 6),)))
    >>> b.add([(0, 0), (b.out, 0)]); b.add([(1, 1), (b.out, 1)]); b.reduce([(0, 1), (1, 0)], "sum")
    >>> print(b.build())
    (i,k),(k,j)->(i,j); sum k
    """

    def __init__(self, call: OpCall):
        self.call = call
        self.params, self.operands, self.results = call.params, call.operands, call.results
        self.shapes = call.operands + call.results
        self.out = len(call.operands)
        self.outs = range(self.out, len(self.shapes))
        self.tensors = range(len(self.shapes))
        self._factors: list[Factor] = []
        self._windows: list[Window] = []
        self._dims: list[list[list[int]]] = [[[] for _ in shape] for shape in self.shapes]

    def add(
        self,
        places: Iterable[Place],
        size: int | None = None,
        kind: Kind | None = None,
        reducer: str = "",
        reason: str = "",
        windows: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """Adds one factor at these places, except those of size one, which broadcast. Without ``kind`` it is parallel, or free
        if it is in results only."""
        placed = [(t, d) for t, d in places if self.shapes[t][d] > 1]
        size = size if size is not None else max((self.shapes[t][d] for t, d in placed), default=1)
        if size <= 1 or not placed:
            return
        present = {t for t, _ in placed}
        in_operands, in_results = min(present) < self.out, max(present) >= self.out
        if kind is None:
            kind = Kind.PARALLEL if in_operands else Kind.FREE
        if kind is Kind.HALO and not (in_operands and in_results):
            kind, reason = Kind.BLOCKED, reason or "the other side of the window has size one"
        index = len(self._factors)
        self._factors.append(Factor(size, kind, reducer, reason))
        if kind is not Kind.BLOCKED:
            self._windows += [Window(index, **w) for w in windows if {w["of"], w["by"]} <= present]
        for t, d in placed:
            self._dims[t][d].append(index)

    def reduce(self, places: Iterable[Place], reducer: str, size: int | None = None) -> None:
        self.add(places, size, Kind.REDUCTION, reducer)

    def block(self, places: Iterable[Place], reason: str, size: int | None = None) -> None:
        self.add(places, size, Kind.BLOCKED, reason=reason)

    def block_apart(self, places: Iterable[Place], reason: str) -> None:
        """Blocks each place with a separate factor: the dimensions are unrelated."""
        for place in places:
            self.block([place], reason)

    def block_rest(self, reason: str) -> None:
        """Blocks each dimension that has no factor yet, with separate factors."""
        self.block_apart([(t, d) for t in self.tensors for d, dim in enumerate(self._dims[t]) if not dim], reason)

    def build(self) -> Rule:
        tensors = tuple(tuple(tuple(dim) for dim in tensor) for tensor in self._dims)
        rule = Rule(tuple(self._factors), tensors[: self.out], tensors[self.out :], tuple(self._windows))
        check_rule(rule, self.operands, self.results)
        return rule


def build_rule(function: Callable[[RuleBuilder], None], call: OpCall) -> Rule:
    """Returns the rule that a function adds to a builder."""
    b = RuleBuilder(call)
    function(b)
    return b.build()


def pointwise(b: RuleBuilder, blocked: Mapping[int, str] = MappingProxyType({})) -> None:
    """Each position of the results depends on the same position of the operands. Size one broadcasts. The dimensions of
    ``blocked``, by reason, are blocked, and unrelated where their sizes differ."""
    shape = b.results[0] if b.results else max(b.operands, key=len, default=())
    ranked = [t for t in b.tensors if len(b.shapes[t]) == len(shape)]
    for d in range(len(shape)):
        if d not in blocked:
            b.add((t, d) for t in ranked)
            continue
        for size in dict.fromkeys(b.shapes[t][d] for t in ranked):
            b.block([(t, d) for t in ranked if b.shapes[t][d] == size], blocked[d])


@functools.cache
def identity(shape: Shape, results: int = 1, operands: int = 1) -> Rule:
    """Returns the elementwise rule of some operands and results of one shape."""
    return build_rule(pointwise, OpCall("identity", {}, (shape,) * operands, (shape,) * results))


def passing(b: RuleBuilder) -> None:
    """Each operand is the result of the same number; without operands every position of the results is independent."""
    for r, shape in enumerate(b.results):
        for d in range(len(shape)):
            b.add([*([(r, d)] if b.operands else []), (b.out + r, d)])


def opaque(call: OpCall, reason: str) -> Rule:
    """Returns the safe rule: every dimension is blocked and related to no other."""
    return build_rule(lambda b: b.block_rest(reason), call)
