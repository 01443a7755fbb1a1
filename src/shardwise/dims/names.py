"""Names, identities and colors: the named-dimension analysis (TOAST, section on named dimensions).

Problem. Which dimensions of a program's arrays must be sharded alike?

Idea. Every dimension of every definition of a value has a name, and so has every dimension of every use. Two relations
connect names: ``I``, inside one op, names with the same factor; and ``M``, from a value's definition to its uses, where a
reshard could be placed. A *color* is a class of ``I ∪ M``.

How it is stored. The classes of ``I`` alone are exactly the pairs (op, factor): they are the *nodes* here, numbered op by
op. ``M`` is an array of edges between nodes. Colors are the connected components.

Deviations. Dimensions of size one have no name: nothing can be decided about them. A merged dimension is represented by its
major factor only. The trip dimensions of all tensors that one loop slices or stacks are one factor of that loop, although
each tensor has its own link op.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.ir.program import Program

IntArray = np.ndarray


@dataclass(frozen=True)
class Names:
    """The node graph of a program. Arrays are indexed by node unless said otherwise."""

    first_node: IntArray  # by op: its factor 0; an op without factors has an empty range
    node_op: IntArray
    node_factor: IntArray
    splittable: IntArray  # can a mesh axis compute this factor in parts?
    trip: IntArray  # is it the trip dimension of a loop?
    # The relation M by edge: definition node, use node, and through which dimension of which value.
    edge_definition: IntArray
    edge_use: IntArray
    edge_value: IntArray
    edge_dim: IntArray
    # Where values are defined, by dimension that has a factor.
    member_value: IntArray
    member_dim: IntArray
    member_node: IntArray
    color: IntArray
    color_count: int

    def factor_colors(self, op: int) -> list[int]:
        """Returns the colors of an op's factors."""
        colors: list[int] = self.color[self.first_node[op] : self.first_node[op + 1]].tolist()
        return colors


def build_names(program: Program) -> Names:
    """Numbers the nodes of ``program`` and finds its colors."""
    factor_counts = [len(op.rule.factors) if op.rule is not None else 0 for op in program.ops]
    first_node = np.concatenate([[0], np.cumsum(factor_counts, dtype=np.int64)]).astype(np.int64)
    count = int(first_node[-1])
    ruled = [(op, op.rule, start) for op, start in zip(program.ops, first_node.tolist(), strict=False) if op.rule]

    definition: list[tuple[int, ...]] = [()] * len(program.values)
    members: list[tuple[int, int, int]] = []
    for op, rule, start in ruled:
        for v, majors in zip(op.results, rule.result_majors, strict=True):
            definition[v] = tuple(start + m for m in majors)
            members += [(v, d, start + m) for d, m in enumerate(majors) if m >= 0]

    edges: list[tuple[int, int, int, int]] = []
    splittable: list[bool] = []
    first_trips: dict[int, int] = {}
    trip_edges: list[tuple[int, int]] = []
    for op, rule, start in ruled:
        splittable += rule.splittable
        for v, majors in zip(op.operands, rule.operand_majors, strict=True):
            if v >= 0:
                nodes = definition[v]
                edges += [(nodes[d], start + m, v, d) for d, m in enumerate(majors) if m >= 0]
        if rule.trip >= 0:
            node = start + rule.trip
            trip_edges.append((first_trips.setdefault(op.attribute("owner"), node), node))

    table = np.array(edges, dtype=np.int64).reshape(-1, 4)
    member_table = np.array(members, dtype=np.int64).reshape(-1, 3)
    trip_table = np.array(trip_edges, dtype=np.int64).reshape(-1, 2)
    color = components(count, np.concatenate([table[:, :2], trip_table]))
    trip = np.zeros(count, dtype=bool)
    trip[trip_table[:, 1]] = True
    node_op = np.repeat(np.arange(len(program.ops)), factor_counts)
    return Names(
        first_node=first_node,
        node_op=node_op,
        node_factor=np.arange(count) - first_node[node_op],
        splittable=np.array(splittable, dtype=bool),
        trip=trip,
        edge_definition=table[:, 0],
        edge_use=table[:, 1],
        edge_value=table[:, 2],
        edge_dim=table[:, 3],
        member_value=member_table[:, 0],
        member_dim=member_table[:, 1],
        member_node=member_table[:, 2],
        color=color,
        color_count=int(color.max(initial=-1)) + 1,
    )


def components(count: int, edges: IntArray) -> IntArray:
    """Returns the number of each node's connected component; components are numbered by their first node.

    Every root is hooked to the smallest root that an edge leads to, and paths are halved, until all edges are inside of a
    component. SciPy has the same, and takes a quarter of a second to import.
    """
    root = np.arange(count)
    a, b = edges[:, 0], edges[:, 1]
    while (apart := root[a] != root[b]).any():
        a, b = a[apart], b[apart]
        np.minimum.at(root, np.maximum(root[a], root[b]), np.minimum(root[a], root[b]))
        while ((next_root := root[root]) != root).any():
            root = next_root
    return numbered(root)[0]


def numbered(labels: IntArray) -> tuple[IntArray, IntArray]:
    """Returns the labels renumbered in order of first occurrence, and where each occurs first."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[inverse], np.sort(first)
