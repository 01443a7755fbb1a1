"""What a rule of the lowering reads is what the dependency graph says: every reading is recorded and looked up there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from shardwise import zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.dims.analysis import analyze_program
from shardwise.evaluator.evaluator import Evaluator
from shardwise.hardware.mesh import MeshAxes
from shardwise.lowering.decisions import State
from shardwise.lowering.lowered import Lowered
from tests.evaluator.test_evaluator import build, random_state


class Recorder(Sequence[Any]):
    """The results of a rule, by value or op. Adds the node of every result that is read to ``read``."""

    def __init__(self, results: Sequence[Any], nodes: Sequence[int], read: set[int]):
        self._results, self._nodes, self._read = results, nodes, read

    def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        self._read.add(self._nodes[index])
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)


def undeclared(evaluator: Evaluator, state: tuple[int, ...]) -> list[str]:
    """The nodes that read something that their edges do not name."""
    graph, lowered = evaluator.dependencies, evaluator.lowered(state)
    decisions = (*evaluator.space.base, *(evaluator.actions[n].decision for n in state))
    wrong = []
    for node in graph.nodes:
        read: set[int] = set()
        again = Lowered(lowered.structure, State(lowered.mesh, decisions), lowered.cost, lowered.memo)
        again.storage = Recorder(lowered.storage, graph.stored, read)  # type: ignore[assignment]
        again.actual = Recorder(lowered.actual, graph.actual, read)  # type: ignore[assignment]
        again.computes = Recorder(lowered.computes, graph.computes, read)  # type: ignore[assignment]
        rule = {"stored": again.stored, "computes": again.choose, "actual": again.actual_sharding}[node.kind]
        rule(node.index)
        missing = read - {*node.wide_reads, -1}
        if missing:
            wrong.append(f"{node.kind} {node.index} reads {[graph.nodes[n] for n in sorted(missing)]}")
    return wrong


@pytest.mark.parametrize("name", ["gpt", "mixtral", "gns"])
def test_rules_read_what_the_graph_names(name: str) -> None:
    program = zoo.load(name, "tiny")
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, JitOptions())))
    rng = random.Random(3)
    evaluator = build(analysis, MeshAxes.of({"x": 2, "y": 4}), rng)
    for _ in range(2):
        assert not undeclared(evaluator, random_state(evaluator, rng))


def test_a_reading_that_is_not_named_is_found() -> None:
    program = zoo.load("gpt", "tiny")
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, JitOptions())))
    evaluator = build(analysis, MeshAxes.of({"x": 2, "y": 4}), random.Random(3))
    for node in evaluator.dependencies.nodes:
        object.__setattr__(node, "wide_reads", node.wide_reads[1:])
    assert undeclared(evaluator, (0,))
