"""``make bench-ablation``: the search without parts of it, to see what each is worth.

Every search has the same number of evaluations, which do not depend on the machine. Parts of the search:

- *no tree*: the starts are improved by hill climbing, the best first;
- *no openings*: no named strategy is put on some axes of a state; they are starts all the same;
- *no climbing*: states are not improved, the tree grows alone;
- *no strategies*: named strategies are neither starts nor openings.

Parts of the analysis:

- *no groups*: every color is decided alone, with bits of its own;
- *no resolution*: where two dimensions of one color meet, neither is sharded;
- *automap*: the decisions of Automap (``shardwise.search.methods``), without resolution. A dimension of one argument is decided
  at a time, or one argument is kept. It has no named strategies.

Named strategies hide what a search finds alone, so that most parts are left out with them and without them.

Costs of states without resolution are those of a program in which conflicts are left whole. Their decisions, lowered under the
whole analysis, would take side 0.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.search.others import prepared, with_strategies
from benchmarks.search.parallel import in_processes
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import Analysis
from shardwise.dims.groups import find_groups
from shardwise.lowering.decisions import Decision
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.mcts import Tree, mcts
from shardwise.search.methods import Automap
from shardwise.search.problem import Problem, Scored
from shardwise.search.run import Budget, Ended, Run

FOLDER: Final = Path(__file__).parent
EVALUATIONS: Final = 1000
SEEDS: Final = 5
#: Program, topology, mesh.
CASES: Final = (
    ("t2b:2b,layers=3,batch=16,seq=1024", "v5e:2x4", (2, 4)),
    ("t2b:2b,layers=3,batch=1,seq=8192", "v5e:2x4", (2, 4)),
    ("llama3:8b,layers=2,batch=1,seq=32768,remat", "v5p:2x2x4", (4, 4)),
    ("t2b:2b,layers=2,batch=1,seq=65536,remat", "v5e:4x4", (4, 4)),
    ("mixtral:8x7b,layers=1,batch=16,seq=1024", "v5p:2x2x4", (4, 4)),
    ("mixtral:8x7b,layers=2,batch=16,seq=1024", "v5p:2x2x4", (2, 2, 4)),
    ("mlp:full,layers=4", "v5e:4x4", (4, 4)),
    ("gns:full,layers=4", "v5e:2x4", (2, 4)),
    ("itx:step,layers=8", "v5e:4x4", (4, 4)),
    ("itx:prefill,layers=2,batch=64", "h100:8", (2, 4)),
    ("vit:l16,layers=2,batch=256", "v5e:4x4", (4, 4)),
    ("t5:3b,layers=2,batch=64", "v5e:4x4", (4, 4)),
    ("ssm:2.8b,layers=2,batch=16,seq=512", "v5e:4x4", (4, 4)),
    ("gpt:2.6b,layers=24,batch=32,unrolled", "v5e:4x4", (4, 4)),
    ("t2b:2b,layers=24,batch=16,seq=1024,unrolled", "v5e:4x4", (4, 4)),
)


# Parts of the search.


class NoTree(Tree):
    """Climbs from the best state, and then from the other starts, the best first."""

    def search(self) -> Ended:
        starts = ((), *self.problem.seeds)
        for start in sorted(map(Scored, starts, self.problem.costs(starts)), key=self.problem.rank):
            self.climb(start)
        return Ended.CONVERGED


class NoOpenings(Tree):
    """Puts no named strategy on some axes of a state."""

    def __init__(self, run: Run, seed: int):
        super().__init__(run, seed)
        self.openings = {}


class NoClimbing(Tree):
    """Grows the tree alone."""

    def climb(self, start: Scored) -> Scored:
        return start


# Parts of the analysis.


def ungrouped(analysis: Analysis) -> Analysis:
    """Every color and every compatibility set is a group."""
    alone = find_groups(analysis.program, analysis.names, analysis.conflict_table, grouping=False)
    return replace(analysis, group_table=alone)


def unresolved(analysis: Analysis) -> Analysis:
    """No compatibility set can be resolved: dimensions in conflict stay whole."""
    table = analysis.conflict_table
    return replace(analysis, conflict_table=replace(table, consistent=np.zeros_like(table.consistent)))


@dataclass(frozen=True, slots=True)
class Ablation:
    """What is left in."""

    tree: type[Tree] = Tree
    strategies: bool = True
    groups: bool = True
    resolution: bool = True
    kind: type[Problem] = Problem

    def problem(
        self,
        analysis: Analysis,
        cost: HardwareCost,
        base: Sequence[Decision] = (),
        axes: Sequence[str] | None = None,
    ) -> Problem:
        """The problem with what is left in, without starts."""
        return self.kind(CostModel.of(self.analysis(analysis), cost), base, axes)

    def analysis(self, analysis: Analysis) -> Analysis:
        if not self.resolution:
            analysis = unresolved(analysis)
        return analysis if self.groups else ungrouped(analysis)

    def started(self, analysis: Analysis, cost: HardwareCost) -> Problem:
        """The problem with what is left in; it starts from named strategies, if these are left in."""
        if not self.strategies:
            return self.problem(analysis, cost)
        return with_strategies(self.analysis(analysis), cost)


ABLATIONS: Final[dict[str, Ablation]] = {
    "whole": Ablation(),
    "no tree": Ablation(NoTree),
    "no openings": Ablation(NoOpenings),
    "no climbing": Ablation(NoClimbing),
    "no groups": Ablation(groups=False),
    "no resolution": Ablation(resolution=False),
    "no strategies": Ablation(strategies=False),
    "no strategies, no tree": Ablation(NoTree, strategies=False),
    "no strategies, no climbing": Ablation(NoClimbing, strategies=False),
    "no strategies, no groups": Ablation(strategies=False, groups=False),
    "no strategies, no resolution": Ablation(strategies=False, resolution=False),
    "automap": Ablation(strategies=False, resolution=False, kind=Automap),
}


# The record.


@dataclass(frozen=True, slots=True)
class Task:
    """A program, what is left in, and the searches."""

    case: tuple[str, str, tuple[int, ...]]
    name: str
    seeds: int
    evaluations: int


def searches(task: Task) -> dict[str, Any]:
    """Returns what a search finds under every seed, and when: (evaluations, misses, picoseconds or blocks)."""
    ablation, given = ABLATIONS[task.name], prepared(*task.case)
    ranks, steps, seconds = [], [], []
    for seed in range(task.seeds):
        start = time.process_time()
        problem = ablation.started(*given)
        found = mcts(problem, Budget(math.inf, task.evaluations, math.inf), seed, tree=ablation.tree)
        ranks.append(problem.rank(found.best)[:2])
        steps.append([(step.evaluations, *problem.rank(step.best)[:2]) for step in found.log])
        seconds.append(round(time.process_time() - start, 2))
    return {"actions": len(problem.actions), "ranks": ranks, "steps": steps, "cpu_s": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="", help="only programs with this text in their name")
    parser.add_argument("--only", default="", help="only the ablation of this name")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--evaluations", type=int, default=EVALUATIONS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    tasks = [
        Task(case, name, given.seeds, given.evaluations)
        for case in reversed(CASES)  # the longest first
        for name in ABLATIONS
        if given.programs in case[0] and given.only in ("", name)
    ]
    found: dict[tuple[str, str, tuple[int, ...]], dict[str, Any]] = {}
    for task, result in in_processes(searches, tasks, given.processes):
        found.setdefault(task.case, {})[task.name] = result
        print(*task.case, task.name, result["cpu_s"], sorted(result["ranks"]), flush=True)
        rows = [
            {
                "program": case[0],
                "topology": case[1],
                "mesh": case[2],
                "found": {n: found[case].get(n) for n in ABLATIONS},
            }
            for case in CASES
            if case in found
        ]
        (given.out / "ablation.json").write_text(json.dumps({"evaluations": given.evaluations, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
