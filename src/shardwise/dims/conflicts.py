"""Conflicts and compatibility sets.

Problem. One mesh axis cannot shard two dimensions of a value, or two factors of an op. Where two such have one color,
sharding that color is ambiguous: a *conflict*. Self-attention's scores ``[B,H,S,S]`` are the canonical one.

Idea. Conflicts come in families that must be decided the same way. Two conflicts ``(p,q)`` and ``(r,s)`` belong together
when ``p–r`` and ``q–s`` are both linked, by ``I`` or by ``M`` (a "box"). Classes of *ordered* pairs under this relation
are the compatibility sets, so that each has an orientation and a mirror image; a set and its mirror are one set and one
bit: which side keeps the axis. A set that meets its own mirror has no consistent side and stays unsharded.

How it is stored. The ordered pairs of conflict ``c`` are ``2c`` (as found, p < q) and ``2c+1`` (mirrored). Nodes are
classes of ``I``, so a box is two edges of ``M`` between the same two ops that both connect conflicts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from shardwise.dims.names import IntArray, Names
from shardwise.ir.program import Program


@dataclass(frozen=True)
class ConflictTable:
    """Conflicts by number: an op and two of its nodes; the compatibility set, and whether ``(p, q)`` is along the set's
    orientation or against it."""

    op: IntArray
    p: IntArray
    q: IntArray
    set: IntArray
    mirrored: IntArray
    consistent: IntArray  # by set
    # All pairs that one axis cannot shard at once, conflicts or not: needed for grouping.
    rival_p: IntArray
    rival_q: IntArray


def find_conflicts(program: Program, names: Names) -> ConflictTable:
    """Finds all conflicts and sorts them into compatibility sets."""
    rival_p, rival_q = _rivals(program, names)
    clash = names.color[rival_p] == names.color[rival_q]
    p, q = rival_p[clash], rival_q[clash]
    sets, mirrored, consistent = _compatibility_sets(names, p, q)
    return ConflictTable(names.node_op[p], p, q, sets, mirrored, consistent, rival_p, rival_q)


def _rivals(program: Program, names: Names) -> tuple[IntArray, IntArray]:
    tables: dict[int, IntArray] = {}
    parts = []
    for op in program.ops:
        rule = op.rule
        if rule is None or not rule.rivals:
            continue
        table = tables.get(id(rule))
        if table is None:
            table = tables[id(rule)] = np.array(rule.rivals, dtype=np.int64)
        parts.append(table + names.first_node[op.id])
    pairs = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
    return pairs[:, 0], pairs[:, 1]


def _compatibility_sets(names: Names, p: IntArray, q: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    count = len(p)
    if not count:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty.astype(bool), empty.astype(bool)
    boxes = _boxes(names, p, q)
    rows = np.concatenate([boxes[:, 0], boxes[:, 0] ^ 1])
    columns = np.concatenate([boxes[:, 1], boxes[:, 1] ^ 1])
    graph = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(2 * count, 2 * count))
    _, labels = connected_components(graph, directed=False)
    forward, backward = labels[0::2], labels[1::2]
    # A set is the pair {component, mirror}; it is numbered by its first conflict, which also fixes its orientation.
    key = np.minimum(forward, backward)
    _, first, sets = np.unique(key, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    sets = order[sets]
    first = np.sort(first)
    mirrored = forward != forward[first][sets]
    consistent = forward[first] != backward[first]
    return sets, mirrored, consistent


def _boxes(names: Names, p: IntArray, q: IntArray) -> IntArray:
    """Pairs of ordered conflicts that belong together."""
    number = {}
    for c, (a, b) in enumerate(zip(p.tolist(), q.tolist(), strict=True)):
        number[a, b] = 2 * c
        number[b, a] = 2 * c + 1
    involved = np.zeros(len(names.color), dtype=bool)
    involved[p] = involved[q] = True
    chosen = involved[names.edge_definition] & involved[names.edge_use]
    between: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    starts, ends = names.edge_definition[chosen], names.edge_use[chosen]
    ops = names.node_op[starts].tolist(), names.node_op[ends].tolist()
    for a, b, n, m in zip(*ops, starts.tolist(), ends.tolist(), strict=True):
        between[(a, b) if a <= b else (b, a)].add((n, m) if a <= b else (m, n))
    boxes = []
    for edges in between.values():
        ordered = sorted(edges)
        for k, (n1, m1) in enumerate(ordered):
            for n2, m2 in ordered[k + 1 :]:
                if (n1, n2) in number and (m1, m2) in number:
                    boxes.append((number[n1, n2], number[m1, m2]))
    return np.array(boxes, dtype=np.int64).reshape(-1, 2)
