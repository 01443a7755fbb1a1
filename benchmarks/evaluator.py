"""``make bench-evaluator``: how fast a search evaluates states, and that the evaluator agrees with the specification.

The default search (``mcts``) runs on v5e:4x4, mesh 4 x 4, for a number of evaluations, all of states that are new. Seconds are
those of the process. The table is printed and written to docs/benchmarks/evaluator.md.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Final

from shardwise import __version__, zoo
from shardwise.capture.lower import lower
from shardwise.capture.trace import JitOptions, trace
from shardwise.cost.model import CostModel
from shardwise.dims.analysis import analyze_program
from shardwise.hardware.layout import place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import topology
from shardwise.lowering.local_cost import HardwareCost
from shardwise.search.mcts import mcts
from shardwise.search.problem import Problem
from shardwise.search.run import Budget

TABLE: Final = Path(__file__).parent.parent / "docs" / "benchmarks" / "evaluator.md"
TARGETS: Final = ("t7b", "mixtral", "llama3:405b", "gpt:39b,scan=False")
EVALUATIONS: Final = 1000
CHECKS: Final = 3


def measure(target: str) -> tuple[str, bool]:
    """A row of the table, and whether the evaluator agrees with the specification."""
    program = zoo.parse(target)
    options = JitOptions(donate_argnums=program.donate_argnums)
    analysis = analyze_program(lower(trace(program.fn, program.args, {}, options)))
    start = time.process_time()
    cost = HardwareCost(place(MeshAxes.of({"data": 4, "model": 4}), topology("v5e:4x4")))
    problem = Problem(CostModel.of(analysis, cost))
    build_s = time.process_time() - start
    start = time.process_time()
    found = mcts(problem, Budget(seconds=1e9, evaluations=EVALUATIONS))
    rate = problem.evaluations / (time.process_time() - start)
    states = [found.best.state[:k] for k in range(len(found.best.state), 0, -1)][:CHECKS]
    start = time.process_time()
    plain = [problem.model.evaluate(problem.evaluator.lowered(state)) for state in states]
    plain_ms = (time.process_time() - start) / len(states) * 1e3
    equal = problem.evaluator.evaluate(states) == plain
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    nodes = len(problem.evaluator.dependencies.nodes)
    row = (
        f"| {target} | {len(analysis.program.ops):,} | {nodes:,} | {build_s:.2f} s | {problem.evaluations:,} | {rate:,.0f} "
        f"| {plain_ms:,.0f} ms | {'yes' if equal else 'NO'} | {memory:.1f} GiB |"
    )
    print(row, flush=True)
    return row, equal


def main() -> int:
    rows, well = zip(*(measure(target) for target in TARGETS), strict=True)
    where = f"{platform.machine()}, {os.cpu_count()} cores (one is used), Python {platform.python_version()}"
    text = f"""# Evaluating states

`make bench-evaluator` on {where}, Shardwise {__version__}.
The default search on v5e:4x4, mesh 4 × 4, for {EVALUATIONS:,} evaluations; all states are new. *Nodes* are the results that a
lowering consists of, equal ones counted once. *Rate* is states per CPU second, with the search itself. *Plain*: one state by
the specification. *Equal*: to the picosecond and to the block. What limits the rate are local situations that never occurred
before, which Python computes.

| program | ops | nodes | build | states | rate | plain | equal | process |
|---|---|---|---|---|---|---|---|---|
"""
    TABLE.write_text(text + "\n".join(rows) + "\n")
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
