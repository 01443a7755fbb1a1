"""Conflicts and compatibility sets.

Problem. One mesh axis cannot shard two dimensions of a value, or two factors of an op. Where two of them have one color,
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

from shardwise.dims.names import IntArray, Names, components, numbered
from shardwise.ir.program import Program


@dataclass(frozen=True)
class ConflictTable:
    """Conflicts by number: two nodes of an op, in the orientation of the set, and the set."""

    first: IntArray
    second: IntArray
    set: IntArray
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
    return ConflictTable(
        np.where(mirrored, q, p), np.where(mirrored, p, q), sets, consistent, rival_p=rival_p, rival_q=rival_q
    )


def _rivals(program: Program, names: Names) -> tuple[IntArray, IntArray]:
    tables: dict[int, IntArray] = {}
    parts = [np.zeros((0, 2), dtype=np.int64)]
    for op, start in zip(program.ops, names.first_node.tolist(), strict=False):
        if op.rule is not None and op.rule.rivals:
            table = tables.get(id(op.rule))
            if table is None:
                table = tables[id(op.rule)] = np.array(op.rule.rivals, dtype=np.int64)
            parts.append(table + start)
    pairs = np.concatenate(parts)
    return pairs[:, 0], pairs[:, 1]


def _compatibility_sets(names: Names, p: IntArray, q: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    boxes = _boxes(names, p, q)
    labels = components(2 * len(p), np.concatenate([boxes, boxes ^ 1]))
    forward, backward = labels[0::2], labels[1::2]
    # A set is the pair {component, mirror}; it is numbered by its first conflict, which also fixes its orientation.
    sets, first = numbered(np.minimum(forward, backward))
    return sets, forward != forward[first][sets], forward[first] != backward[first]


def _boxes(names: Names, p: IntArray, q: IntArray) -> IntArray:
    """Returns pairs of ordered conflicts that belong together."""
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
