"""What a rule is computed from: an operation's name, parameters, shapes and dtypes. And the builder that rules use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.ir.rule import Factor, Kind, Rule, Window, check_rule

Shape = tuple[int, ...]
#: A dimension of a tensor: (tensor number, operands first and then results; dimension).
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class OpCall:
    """One operation as its rule sees it.

    ``operands`` and ``results`` are shapes; ``dtypes`` the dtype names of the operands; ``params`` the front
    end's parameters of the primitive. Tensors are counted through: operands, then results.

    >>> call = OpCall("dot_general", {}, ((8, 4), (4, 6)), ((8, 6),))
    >>> call.out(), call.shape(2)
    (2, (8, 6))
    """

    kind: str
    params: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ()

    def out(self, number: int = 0) -> int:
        """The tensor number of a result."""
        return len(self.operands) + number

    def shape(self, tensor: int) -> Shape:
        """The shape of a tensor by number."""
        return (self.operands + self.results)[tensor]


class RuleBuilder:
    """Collects factors of an op, major ones first, and builds the checked rule.

    >>> call = OpCall("dot_general", {}, ((8, 4), (4, 6)), ((8, 6),))
    >>> b = RuleBuilder(call)
    >>> b.add([(0, 0), (2, 0)]); b.add([(1, 1), (2, 1)]); b.reduce([(0, 1), (1, 0)], "sum")
    >>> print(b.build())
    (i,k),(k,j)->(i,j); sum k
    """

    def __init__(self, call: OpCall):
        self.call = call
        self._factors: list[Factor] = []
        self._windows: list[Window] = []
        self._tensors: list[list[list[int]]] = [[[] for _ in shape] for shape in call.operands + call.results]

    def add(
        self,
        places: Iterable[Place],
        size: int | None = None,
        kind: Kind | None = None,
        reducer: str = "",
        reason: str = "",
        windows: Sequence[Mapping[str, int]] = (),
    ) -> None:
        """Adds one factor at these places. Places of size one are passed over (they broadcast), and a factor that is left
        with no place, or is of size one, is none. Without ``kind`` it is parallel, or free if only in results."""
        placed = [(t, d) for t, d in places if self.call.shape(t)[d] > 1]
        size = size if size is not None else max((self.call.shape(t)[d] for t, d in placed), default=1)
        if size <= 1 or not placed:
            return
        n = len(self.call.operands)
        if kind is None:
            kind = Kind.PARALLEL if any(t < n for t, _ in placed) else Kind.FREE
        if kind is Kind.HALO and not (any(t < n for t, _ in placed) and any(t >= n for t, _ in placed)):
            kind, reason = Kind.BLOCKED, reason or "the other side of the window has size one"
        index = len(self._factors)
        self._factors.append(Factor(size, kind, reducer, reason))
        present = {t for t, _ in placed}
        self._windows += [
            Window(index, **w) for w in windows if {w["of"], w["by"]} <= present and kind is not Kind.BLOCKED
        ]
        for t, d in placed:
            self._tensors[t][d].append(index)

    def reduce(self, places: Iterable[Place], reducer: str, size: int | None = None) -> None:
        self.add(places, size, Kind.REDUCTION, reducer)

    def block(self, places: Iterable[Place], reason: str, size: int | None = None) -> None:
        self.add(places, size, Kind.BLOCKED, reason=reason)

    def block_apart(self, places: Iterable[Place], reason: str) -> None:
        """Blocks each place with a factor of its own: the dimensions have nothing to do with one another."""
        for place in places:
            self.block([place], reason)

    def build(self) -> Rule:
        n = len(self.call.operands)
        tensors = tuple(tuple(tuple(dim) for dim in tensor) for tensor in self._tensors)
        rule = Rule(tuple(self._factors), tensors[:n], tensors[n:], tuple(self._windows))
        check_rule(rule, self.call.operands, self.call.results)
        return rule


def pointwise(call: OpCall) -> Rule:
    """Same position in, same position out. Operands of rank zero and dimensions of size one broadcast."""
    b = RuleBuilder(call)
    shape = call.results[0] if call.results else max(call.operands, key=len, default=())
    ranked = [t for t in range(len(call.operands) + len(call.results)) if len(call.shape(t)) == len(shape)]
    for d in range(len(shape)):
        b.add((t, d) for t in ranked)
    return b.build()


def passing(call: OpCall) -> Rule:
    """Each operand is the result of the same number, unchanged; without operands every position is made on its own."""
    b = RuleBuilder(call)
    for r, shape in enumerate(call.results):
        for d in range(len(shape)):
            b.add([*([(r, d)] if call.operands else []), (call.out(r), d)])
    return b.build()


def opaque(call: OpCall, reason: str) -> Rule:
    """The safe rule: every dimension whole, none tied to another."""
    b = RuleBuilder(call)
    for t in range(len(call.operands) + len(call.results)):
        b.block_apart(((t, d) for d in range(len(call.shape(t)))), reason)
    return b.build()
