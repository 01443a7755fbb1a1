"""Names, identities and colors: the named-dimension analysis (TOAST, section on named dimensions).

Problem. Which dimensions of a program's arrays must be sharded alike?

Idea. Every dimension of every definition of a value has a name, and so has every dimension of every use. Two relations
tie names together: ``I``, inside one op, names that hold the same factor; and ``M``, from a value's definition to its
uses, where a reshard could be placed. A *color* is a class of ``I ∪ M``.

How it is stored. The classes of ``I`` alone are exactly the pairs (op, factor): they are the *nodes* here, numbered op by
op. A name is then only a way to say (op, operand, dimension), and ``M`` is an array of edges between nodes. Colors are
the connected components.

Deviations. Dimensions of size one have no name: nothing can be decided about them. A merged dimension is known by its
major factor only. The trip dimensions of all tensors that one loop slices or stacks are one factor of that loop, although
each tensor has a link op of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

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
    # The relation M, one row an edge: definition node, use node, and through which dimension of which value.
    edge_definition: IntArray
    edge_use: IntArray
    edge_value: IntArray
    edge_dim: IntArray
    # Where values are defined, one row a dimension that has a factor.
    member_value: IntArray
    member_dim: IntArray
    member_node: IntArray
    member_size: IntArray
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
    starts = first_node.tolist()

    definition: list[tuple[int, ...]] = [()] * len(program.values)
    member_value: list[int] = []
    member_dim: list[int] = []
    member_node: list[int] = []
    member_size: list[int] = []
    for op in program.ops:
        if op.rule is None:
            continue
        start = starts[op.id]
        for v, majors in zip(op.results, op.rule.result_majors, strict=True):
            nodes = tuple(start + m if m >= 0 else -1 for m in majors)
            definition[v] = nodes
            shape = program.values[v].shape
            for d, n in enumerate(nodes):
                if n >= 0:
                    member_value.append(v)
                    member_dim.append(d)
                    member_node.append(n)
                    member_size.append(shape[d])

    edges: list[tuple[int, int, int, int]] = []
    trips: dict[int, int] = {}
    trip_edges: list[tuple[int, int]] = []
    splittable: list[bool] = []
    trip_nodes: list[int] = []
    for op in program.ops:
        if op.rule is None:
            continue
        start = starts[op.id]
        splittable.extend(op.rule.splittable)
        for v, majors in zip(op.operands, op.rule.operand_majors, strict=True):
            if v >= 0:
                nodes = definition[v]
                edges += [(nodes[d], start + m, v, d) for d, m in enumerate(majors) if m >= 0]
        if op.rule.trip >= 0:
            node = start + op.rule.trip
            trip_nodes.append(node)
            trip_edges.append((trips.setdefault(op.attribute("owner"), node), node))

    table = np.array(edges, dtype=np.int64).reshape(-1, 4)
    trip_table = np.array(trip_edges, dtype=np.int64).reshape(-1, 2)
    rows = np.concatenate([table[:, 0], trip_table[:, 0]])
    columns = np.concatenate([table[:, 1], trip_table[:, 1]])
    color_count, color = _components(count, rows, columns)
    trip = np.zeros(count, dtype=bool)
    trip[trip_nodes] = True
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
        member_value=np.array(member_value, dtype=np.int64),
        member_dim=np.array(member_dim, dtype=np.int64),
        member_node=np.array(member_node, dtype=np.int64),
        member_size=np.array(member_size, dtype=np.int64),
        color=color,
        color_count=color_count,
    )


def _components(count: int, rows: IntArray, columns: IntArray) -> tuple[int, IntArray]:
    """Connected components, numbered by their first node so that the numbering is stable."""
    if not count:
        return 0, np.zeros(0, dtype=np.int64)
    graph = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(count, count))
    number, labels = connected_components(graph, directed=False)
    _, first = np.unique(labels, return_index=True)
    order = np.empty(number, dtype=np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(number)
    return int(number), order[labels]
