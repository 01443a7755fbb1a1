"""Why two dimensions have one color: the shortest chain of merges between them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shardwise.dims.names import Names
from shardwise.errors import QueryError
from shardwise.ir.paths import find_path
from shardwise.ir.program import Program
from shardwise.ir.rule import letter
from shardwise.ir.traits import BORDERS


@dataclass(frozen=True, slots=True)
class Step:
    """One op on the way: it holds both dimensions in one factor."""

    op: str
    rule: str
    factor: str
    source: str
    through: str

    def __str__(self) -> str:
        return f"{self.op} at {self.source} holds both in factor {self.factor} of {self.rule}"


@dataclass(frozen=True, slots=True)
class Chain:
    """``steps`` is empty where the two dimensions are not tied, or are the same."""

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


def place_node(program: Program, names: Names, path: str, dim: int) -> int | None:
    """The node that defines a dimension of an argument or output; None for a dimension of size one."""
    path = path if path in program.paths else find_path(path, *program.named_paths)
    value = program.values[program.paths[path]]
    rank = len(value.shape)
    if not -rank <= dim < rank:
        raise QueryError(f"{path} has shape {list(value.shape)}: there is no dimension {dim}")
    rows = np.flatnonzero((names.member_value == value.id) & (names.member_dim == dim % rank))
    return int(names.member_node[rows[0]]) if len(rows) else None


def find_chain(program: Program, names: Names, a: tuple[str, int], b: tuple[str, int]) -> Chain:
    start, end = place_node(program, names, *a), place_node(program, names, *b)
    labels = f"{a[0]}[{a[1]}]", f"{b[0]}[{b[1]}]"
    if start is None or end is None or names.color[start] != names.color[end]:
        return Chain(*labels, False, ())
    path = _shortest_path(names, start, end)
    steps = []
    for k, (node, _) in enumerate(path):
        op = program.ops[int(names.node_op[node])]
        if op.kind in BORDERS and k in (0, len(path) - 1):
            continue
        assert op.rule is not None
        edge = path[k + 1][1] if k + 1 < len(path) else -1
        last = k + 1 >= len(path) or (
            k + 2 == len(path) and program.ops[int(names.node_op[end])].kind in ("argument", "output")
        )
        through = (
            "" if last or edge < 0 else f"{program.label(int(names.edge_value[edge]))}[{int(names.edge_dim[edge])}]"
        )
        steps.append(
            Step(op.kind, str(op.rule), letter(int(names.node_factor[node])), str(program.source_of(op)), through)
        )
    return Chain(*labels, True, tuple(steps))


def _shortest_path(names: Names, start: int, end: int) -> list[tuple[int, int]]:
    """Nodes from start to end, each with the edge it was reached by. Trip dimensions of one loop are neighbors."""
    inside = names.color == names.color[start]
    chosen = np.flatnonzero(inside[names.edge_definition])
    neighbors: dict[int, list[tuple[int, int]]] = {}
    for edge in chosen.tolist():
        n, m = int(names.edge_definition[edge]), int(names.edge_use[edge])
        neighbors.setdefault(n, []).append((m, edge))
        neighbors.setdefault(m, []).append((n, edge))
    trips = np.flatnonzero(names.trip & inside).tolist()
    for n in trips:
        neighbors.setdefault(n, []).extend((m, -1) for m in trips if m != n)
    came: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = deque([start])
    while queue and end not in came:
        node = queue.popleft()
        for other, edge in neighbors.get(node, ()):
            if other not in came:
                came[other] = (node, edge)
                queue.append(other)
    path = [(end, came[end][1])]
    while path[-1][0] != start:
        previous = came[path[-1][0]][0]
        path.append((previous, came[previous][1]))
    return path[::-1]
