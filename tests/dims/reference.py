"""The named-dimension analysis once more, written from sections 3 and 4 of the design alone: slow and plain.

A name is a tuple: ``("def", value, dim)`` where a value is made, ``("use", op, operand, dim)`` where it is read, and
``("factor", op, factor)`` for the factor itself. ``I`` ties the names of one op that hold one factor, ``M`` a definition to
its uses. Everything is dictionaries and sets; nothing is shared with ``shardwise.dims``.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from shardwise.ir.program import Op, Program
from shardwise.ir.rule import Kind

Factor = tuple[int, int]  # an op and one of its factors
Pair = tuple[Factor, Factor]


class Classes:
    """Union-find."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def find(self, x: Hashable) -> Hashable:
        self.parent.setdefault(x, x)
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def union(self, x: Hashable, y: Hashable) -> None:
        self.parent[self.find(x)] = self.find(y)


@dataclass(frozen=True)
class Reference:
    """``colors`` by factor; ``conflicts`` as unordered pairs in the order (smaller, larger); ``families`` as sets of
    ordered pairs, one orientation each, with whether the family is consistent."""

    colors: dict[Factor, Hashable]
    conflicts: frozenset[Pair]
    families: tuple[tuple[frozenset[Pair], bool], ...]


def analyze_by_definition(program: Program) -> Reference:
    identities, links = _relations(program)
    names = Classes()
    for a, b in [*identities, *links]:
        names.union(a, b)
    ruled = [op for op in program.ops if op.rule is not None]
    factors = [(op.id, f) for op in ruled for f in range(len(op.rule.factors))]
    colors = {(op, f): names.find(("factor", op, f)) for op, f in factors}
    conflicts = frozenset(
        ((op.id, f), (op.id, g)) for op in ruled for f, g in _rivals(op) if colors[op.id, f] == colors[op.id, g]
    )
    return Reference(colors, conflicts, tuple(_families(conflicts, _neighbors(identities, links))))


def _relations(program: Program) -> tuple[list[tuple[Hashable, Hashable]], list[tuple[Hashable, Hashable]]]:
    """``I`` and ``M``. The trip dimensions of what one loop slices and stacks are one factor of that loop."""
    identities: list[tuple[Hashable, Hashable]] = []
    links: list[tuple[Hashable, Hashable]] = []
    for op in program.ops:
        if op.rule is None:
            continue
        for k, (value, tensor) in enumerate(zip(op.operands, op.rule.operands, strict=True)):
            for d, dim in enumerate(tensor):
                if dim and value >= 0:
                    identities.append((("use", op.id, k, d), ("factor", op.id, dim[0])))
                    links.append((("def", value, d), ("use", op.id, k, d)))
        for value, tensor in zip(op.results, op.rule.results, strict=True):
            identities += [(("def", value, d), ("factor", op.id, dim[0])) for d, dim in enumerate(tensor) if dim]
    for op in program.ops:
        trips = [
            ("factor", k, f)
            for k in op.links
            for f, factor in enumerate(program.ops[k].rule.factors)
            if factor.reason == "the trips of a loop run one after another"
        ]
        identities += [(trips[0], other) for other in trips[1:]]
    return identities, links


def _rivals(op: Op) -> Iterable[tuple[int, int]]:
    """Factors that are dimensions of one value, and factors that could each be computed in parts."""
    rule = op.rule
    minor = {f for tensor in rule.operands + rule.results for dim in tensor for f in dim[1:]}
    for f, g in itertools.combinations(range(len(rule.factors)), 2):
        together = any(
            {f, g} <= {dim[0] for dim in tensor if dim} for tensor in itertools.chain(rule.operands, rule.results)
        )
        in_parts = all(rule.factors[x].kind is not Kind.BLOCKED and x not in minor for x in (f, g))
        if together or in_parts:
            yield f, g


def _neighbors(
    identities: list[tuple[Hashable, Hashable]], links: list[tuple[Hashable, Hashable]]
) -> dict[Factor, set[Factor]]:
    """For every factor those that are the same under ``I``, itself included, or are tied to it by one step of ``M``."""
    same = Classes()
    for a, b in identities:
        same.union(a, b)
    members: defaultdict[Hashable, set[Factor]] = defaultdict(set)
    for name in [x for x in same.parent if x[0] == "factor"]:
        members[same.find(name)].add((name[1], name[2]))
    found: defaultdict[Factor, set[Factor]] = defaultdict(set)
    for mates in members.values():
        for factor in mates:
            found[factor] |= mates
    for a, b in links:
        here, there = members[same.find(a)], members[same.find(b)]
        for factor in here:
            found[factor] |= there
        for factor in there:
            found[factor] |= here
    return found


def _families(
    conflicts: frozenset[Pair], neighbors: dict[Factor, set[Factor]]
) -> Iterable[tuple[frozenset[Pair], bool]]:
    """Classes of ordered pairs under boxes; of a class and its mirror image one is given."""
    ordered = conflicts | {(q, p) for p, q in conflicts}
    boxes = Classes()
    for p, q in ordered:
        for r, s in itertools.product(neighbors.get(p, {p}), neighbors.get(q, {q})):
            if (r, s) in ordered:
                boxes.union((p, q), (r, s))
    classes: defaultdict[Hashable, set[Pair]] = defaultdict(set)
    for pair in sorted(ordered):
        classes[boxes.find(pair)].add(pair)
    done: set[Pair] = set()
    for members in classes.values():
        if not members & done:
            done |= {(q, p) for p, q in members}
            yield frozenset(members), not any((q, p) in members for p, q in members)
