"""Why two dimensions have one color: the shortest chain of ops between them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from shardwise.dims.names import Names
from shardwise.errors import QueryError
from shardwise.ir.paths import find_path
from shardwise.ir.program import Program
from shardwise.ir.rule import letter


@dataclass(frozen=True, slots=True)
class Step:
    """One op of a chain: both dimensions are one factor in it. ``through`` is the dimension that connects it to the next."""

    op: str
    rule: str
    factor: str
    source: str
    through: str

    def __str__(self) -> str:
        return f"{self.op} at {self.source} holds both in factor {self.factor} of {self.rule}"


@dataclass(frozen=True, slots=True)
class Chain:
    """The ops that tie two dimensions. ``steps`` is empty where they are not tied, or are the same."""

    start: str
    end: str
    tied: bool
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        if not self.tied:
            return f"{self.start} and {self.end} have different colors: nothing ties them"
        lines = [self.start]
        for step in self.steps:
            lines.append(f"  {step}")
            if step.through:
                lines.append(f"  → {step.through}")
        return "\n".join([*lines, f"  → {self.end}"])


def find_place(program: Program, path: str, dim: int) -> tuple[int, int]:
    """Returns the value of an argument or output, and a dimension of it that is not negative."""
    path = path if path in program.paths else find_path(path, *program.named_paths)
    value = program.values[program.paths[path]]
    rank = len(value.shape)
    if not -rank <= dim < rank:
        raise QueryError(f"{path} has shape {list(value.shape)}: there is no dimension {dim}")
    return value.id, dim % rank


def _place_node(program: Program, names: Names, path: str, dim: int) -> int | None:
    """Returns the node that defines a dimension of an argument or output; None for a dimension of size one."""
    value, dim = find_place(program, path, dim)
    rows = np.flatnonzero((names.member_value == value) & (names.member_dim == dim))
    return int(names.member_node[rows[0]]) if len(rows) else None


def find_chain(program: Program, names: Names, a: tuple[str, int], b: tuple[str, int]) -> Chain:
    start, end = _place_node(program, names, *a), _place_node(program, names, *b)
    labels = f"{a[0]}[{a[1]}]", f"{b[0]}[{b[1]}]"
    if start is None or end is None or names.color[start] != names.color[end]:
        return Chain(*labels, False, ())
    steps = []
    path = _shortest_path(names, start, end)[1:]  # without the argument or output that it starts at
    for (node, _), (following, edge) in itertools.pairwise(path):
        op = program.ops[int(names.node_op[node])]
        through = ""
        if following != end and edge >= 0:
            through = f"{program.label(int(names.edge_value[edge]))}[{int(names.edge_dim[edge])}]"
        factor = letter(int(names.node_factor[node]))
        steps.append(Step(op.kind, str(op.rule), factor, str(program.source_of(op)), through))
    return Chain(*labels, True, tuple(steps))


def _shortest_path(names: Names, start: int, end: int) -> list[tuple[int, int]]:
    """Returns nodes from start to end, each with the edge to it. Trip dimensions of one loop are neighbors (edge -1)."""
    inside = names.color == names.color[start]
    neighbors: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in np.flatnonzero(inside[names.edge_definition]).tolist():
        n, m = int(names.edge_definition[edge]), int(names.edge_use[edge])
        neighbors[n].append((m, edge))
        neighbors[m].append((n, edge))
    trips = np.flatnonzero(names.trip & inside).tolist()
    for n in trips:
        neighbors[n] += [(m, -1) for m in trips if m != n]
    reached_from: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = [start]
    for node in queue:  # which grows
        for other, edge in neighbors[node]:
            if other not in reached_from:
                reached_from[other] = (node, edge)
                queue.append(other)
    path = []
    while end >= 0:
        previous, edge = reached_from[end]
        path.append((end, edge))
        end = previous
    return path[::-1]
