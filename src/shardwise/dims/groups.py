"""Groups: repeated structure takes one decision.

Problem. Forty-eight unrolled layers have forty-eight hidden dimensions, which should be decided together.

Idea. A color is described by its occurrences: the multiset of (op kind, rule at its sizes, which factor). Colors with the same
argument shapes whose occurrences mostly agree are one group. Compatibility sets are grouped in the same way, by the ordered
pairs of occurrences they consist of. Names and paths are not used.

Deviations. (1) Agreement, not equality: the first layer may have no gradient of its input and the last another cotangent, so
that a hash of all occurrences would distinguish them from the others. ``AGREEMENT`` is the share of occurrences that must be
common (Jaccard, on multisets). (2) Members of a group may meet in an op: all widths of a plain deep MLP are alike, and
each layer has two of them. One axis cannot shard both, so such a group is split into as few parts as a greedy coloring in
program order needs (for a chain: odd and even, which is Megatron's alternation).

Weakness. Two kinds of layer with the same parameter shapes and mostly the same ops are decided together.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from shardwise.dims.conflicts import ConflictTable
from shardwise.dims.names import IntArray, Names
from shardwise.ir.program import Origin, Program

AGREEMENT: Final = 2 / 3

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True)
class GroupTable:
    """``group`` by color; ``bit`` by compatibility set, and whether the set's orientation is against that of its bit."""

    group: IntArray
    group_count: int
    bit: IntArray
    flipped: IntArray


def find_groups(program: Program, names: Names, conflicts: ConflictTable, grouping: bool = True) -> GroupTable:
    """Groups colors and compatibility sets of like structure; without ``grouping`` each is its own group."""
    if not grouping:
        sets = len(conflicts.consistent)
        return GroupTable(np.arange(names.color_count), names.color_count, np.arange(sets), np.zeros(sets, dtype=bool))
    occurrence = _occurrences(program, names)
    kind = _color_kinds(program, names, occurrence)
    group = _split_meeting(names, conflicts, kind)
    bit, flipped = _set_groups(names, conflicts, occurrence, group)
    return GroupTable(group, int(group.max(initial=-1)) + 1, bit, flipped)


def agreement(a: Counter[_T], b: Counter[_T]) -> float:
    """Returns the Jaccard similarity of two multisets: the common part over the union.

    >>> agreement(Counter("aab"), Counter("abc"))
    0.5
    """
    common = (a & b).total()
    union = a.total() + b.total() - common
    return common / union if union else 1.0


def _occurrences(program: Program, names: Names) -> IntArray:
    """Returns, by node, a number for (op kind, rule at its sizes, factor). Offsets of windows do not count."""
    by_rule: dict[tuple[str, int], int] = {}
    by_content: dict[object, int] = {}
    bases = [0] * len(program.ops)
    total = 0
    for op in program.ops:
        if op.rule is None:
            continue
        key = (op.kind, id(op.rule))
        if key not in by_rule:
            content = (op.kind, op.rule.factors, op.rule.operands, op.rule.results)
            by_rule[key] = by_content.setdefault(content, total)
            total += len(op.rule.factors)
        bases[op.id] = by_rule[key]
    by_node: IntArray = np.array(bases, dtype=np.int64)[names.node_op] + names.node_factor
    return by_node


def _clustered(items: Iterable[tuple[Hashable, Sequence[Counter[_T]]]]) -> tuple[list[int], list[int]]:
    """Clusters items by (key, readings). Returns, by item, its cluster and the reading that agrees best with the first."""
    leaders: defaultdict[Hashable, list[tuple[int, Counter[_T]]]] = defaultdict(list)
    clusters: list[int] = []
    chosen: list[int] = []
    count = 0
    for key, readings in items:
        scores = ((cluster, [agreement(r, leader) for r in readings]) for cluster, leader in leaders[key])
        cluster, best = next((c, s) for c, s in itertools.chain(scores, [(count, [1.0])]) if max(s) >= AGREEMENT)
        if cluster == count:
            leaders[key].append((count, readings[0]))
            count += 1
        clusters.append(cluster)
        chosen.append(best.index(max(best)))
    return clusters, chosen


def _color_kinds(program: Program, names: Names, occurrence: IntArray) -> list[int]:
    """Returns, by color, the number of its kind: colors with the same argument dimensions and agreeing occurrences."""
    arguments: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(names.color_count)]
    member_color = names.color[names.member_node].tolist()
    for color, v, d in zip(member_color, names.member_value.tolist(), names.member_dim.tolist(), strict=True):
        value = program.values[v]
        if value.origin is Origin.ARGUMENT:
            arguments[color].append((value.shape, d))
    occurrences = [Counter[int]() for _ in arguments]
    for color, number in zip(names.color.tolist(), occurrence.tolist(), strict=True):
        occurrences[color][number] += 1
    return _clustered((tuple(sorted(a)), [o]) for a, o in zip(arguments, occurrences, strict=True))[0]


def _split_meeting(names: Names, conflicts: ConflictTable, kind: list[int]) -> IntArray:
    """Returns groups by color: kinds, split so that no two members meet in an op."""
    kinds = np.array(kind, dtype=np.int64)
    a, b = names.color[conflicts.rival_p], names.color[conflicts.rival_q]
    meeting = (a != b) & (kinds[a] == kinds[b])
    neighbors: defaultdict[int, set[int]] = defaultdict(set)
    for x, y in zip(a[meeting].tolist(), b[meeting].tolist(), strict=True):
        neighbors[x].add(y)
        neighbors[y].add(x)
    part: dict[int, int] = {}
    for color in sorted(neighbors):
        taken = {part[other] for other in neighbors[color] if other in part}
        part[color] = next(k for k in range(len(taken) + 1) if k not in taken)
    numbers: dict[tuple[int, int], int] = {}
    groups = [numbers.setdefault((kind[c], part.get(c, 0)), len(numbers)) for c in range(names.color_count)]
    return np.array(groups, dtype=np.int64)


def _set_groups(
    names: Names, conflicts: ConflictTable, occurrence: IntArray, group: IntArray
) -> tuple[IntArray, IntArray]:
    """Returns the bit of each compatibility set, and whether its orientation is against the bit's."""
    sets = len(conflicts.consistent)
    first, second = conflicts.first, conflicts.second
    readings = [Counter[tuple[int, int]]() for _ in range(sets)]
    color = [0] * sets
    rows = (conflicts.set, occurrence[first], occurrence[second], names.color[first])
    for s, a, b, c in zip(*(row.tolist() for row in rows), strict=True):
        readings[s][a, b] += 1
        color[s] = c
    mirrors = [Counter({(b, a): n for (a, b), n in straight.items()}) for straight in readings]
    keys = zip(group[color].tolist(), conflicts.consistent.tolist(), strict=True)
    bits, flipped = _clustered(zip(keys, zip(readings, mirrors, strict=True), strict=True))
    return np.array(bits, dtype=np.int64), np.array(flipped, dtype=bool)
