"""``python -m benchmarks.search.others PART``: the search against all states and a bound; how long plans take.

- *regret*: problems with at most a few million states are searched exhaustively, and by MCTS as ``shardwise.plan`` does, from
  named strategies at the default budget, under five seeds. ``--processes N`` runs N cases at a time;
- *ilp*: where states are too many, an integer program over the shardings of every value and the ways to compute every op
  (``benchmarks.search.ilp``). It minimizes the local costs of lowering, not the cost model's time. So the regret against its
  bound is that of MCTS when told to minimize the same costs (*seeds*). Beside it stand the plan that MCTS finds for the cost
  model against the optimum made a state (``ilp_state``), in the cost model's time (*over*), and the local costs of
  that plan above the bound (*across*), which is a distance between two measures and no regret;
- *grouping*: unrolled programs, all states with layers grouped, beside the best that is found with every layer free, where
  states are too many to try them all;
- *timing*: seconds from function to plan, tracing and constraints included, and the memory of the process.

Each writes its JSON beside this file; ``page.py`` makes a table of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.dims.analysis import Analysis
    from shardwise.lowering.local_cost import HardwareCost
    from shardwise.search.problem import Problem

FOLDER: Final = Path(__file__).parent
SEEDS: Final = range(5)
#: Program, topology, mesh.
SMALL: Final = (
    ("gpt:2.6b,layers=3,batch=32", "v5e:2x4", (8,)),
    ("t2b:2b,layers=3,batch=16,seq=1024", "v5e:2x4", (8,)),
    ("t2b:2b,layers=3,batch=16,seq=1024", "a100:8", (8,)),
    ("t2b:2b,layers=3,batch=1,seq=8192", "v5e:2x4", (8,)),
    ("mlp:full,layers=3", "v5e:2x4", (8,)),
    ("itx:step,layers=4", "v5e:2x4", (8,)),
    ("itx:prefill,layers=4,batch=8", "v5e:2x4", (8,)),
    ("mlp:full,layers=1", "v5e:2x4", (2, 4)),
    ("mlp:full,layers=1", "h100:8", (2, 4)),
    ("gpt:6.7b,layers=3,batch=32", "h100:8", (8,)),
    ("gpt:2.6b,layers=24,batch=32,unrolled", "v5e:4x4", (16,)),
    ("llama3:8b,layers=2,batch=8,seq=2048", "h100:8", (8,)),
    ("llama3:8b,layers=2,batch=1,seq=32768,remat", "v5p:2x2x2", (8,)),
    ("t2b:2b,layers=2,batch=1,seq=65536,remat", "v5e:4x4", (16,)),
    ("ssm:2.8b,layers=2,batch=16,seq=512", "v5e:2x4", (8,)),
    ("itx:decode,layers=2,generate=16", "v5e:2x4", (8,)),
)
LARGE: Final = (
    ("gpt:2.6b,layers=3,batch=32", "v5e:2x4", (2, 4)),
    ("t2b:2b,layers=3,batch=16,seq=1024", "v5e:2x4", (2, 4)),
    ("itx:step,layers=4", "v5e:2x4", (2, 4)),
    ("mlp:full,layers=3", "v5e:2x4", (2, 4)),
)
UNROLLED: Final = (
    ("gpt:2.6b,layers=2,batch=32,unrolled", "v5e:2x4", (8,)),
    ("t2b:2b,layers=2,batch=16,seq=1024,unrolled", "v5e:2x4", (8,)),
    ("itx:step,layers=2,unrolled", "v5e:2x4", (8,)),
)
#: States that a process tries at a time.
STATES: Final = 400_000
FREE: Final = 4000
LOCAL: Final = 1000
#: Target, topology, mesh, seconds that it may take.
TIMED: Final = (
    ("t2b:2b,remat", "v5e:4x4", {"data": 4, "model": 4}, 5.0),
    ("t7b:7b,remat", "v5p:2x2x4", {"data": 4, "model": 4}, 5.0),
    ("gpt:39b,unrolled,remat", "v5p:4x4x4", {"data": 16, "model": 4}, 30.0),
    ("llama3:405b,remat", "v5p:16x16x16", {"data": 256, "model": 16}, 15.0),
)

Row = dict[str, Any]


def prepared(
    target: str, topology: str, sizes: tuple[int, ...], grouping: bool = True
) -> tuple[Analysis, HardwareCost]:
    """A program's analysis, and the costs on a mesh."""
    from shardwise import zoo
    from shardwise.capture.lower import lower
    from shardwise.capture.trace import JitOptions, trace
    from shardwise.dims.analysis import analyze_program
    from shardwise.hardware.layout import place
    from shardwise.hardware.mesh import MeshAxes
    from shardwise.hardware.topology import topology as topology_of
    from shardwise.lowering.local_cost import HardwareCost

    program = zoo.parse(target)
    traced = trace(program.fn, program.args, {}, JitOptions(donate_argnums=program.donate_argnums))
    mesh = MeshAxes.of(dict(zip("abc", sizes, strict=False)))
    return analyze_program(lower(traced), grouping), HardwareCost(place(mesh, topology_of(topology)))


def with_strategies(analysis: Analysis, cost: HardwareCost) -> Problem:
    """A problem that starts from the combinations of named strategies, as ``shardwise.plan`` does."""
    from shardwise.cost.model import CostModel
    from shardwise.search.problem import Problem
    from shardwise.tactics.baselines import Combinations
    from shardwise.tactics.roles import complete_roles
    from shardwise.tactics.tactic import Context

    mesh = cost.placement.mesh
    combinations = Combinations(Context(analysis, mesh, cost, complete_roles(analysis, None)), mesh.names)
    problem = Problem(CostModel.of(analysis, cost), extra=combinations.decisions)
    problem.start_from(combinations.seeds(problem, quick=False))
    return problem


def regret(processes: int, only: str) -> Iterator[Row]:
    """Yields the cases as they end: what is recorded of them is not lost when the run is stopped."""
    from benchmarks.search.parallel import in_processes

    cases = [case for case in SMALL if only in case[0]]
    searched = dict(in_processes(searched_by_default, cases, processes))
    parts = [
        (case, part, -(-row["states"] // STATES))
        for case, row in searched.items()
        for part in range(0, row["states"], STATES)
    ]
    left = Counter(case for case, _, _ in parts)
    best: dict[Any, tuple[int, int]] = {}
    for (case, _, _), rank in in_processes(best_of_part, parts, processes):
        best[case] = min(rank, best.get(case, rank))
        left[case] -= 1
        if left[case]:
            continue
        row = searched[case] | {"best": best[case], "fits": not best[case][0]}
        for seed in row["seeds"]:
            misses, figure = seed.pop("rank")
            seed["over"] = figure / row["best"][1] - 1 if misses == row["best"][0] else None
        print(row["program"], row["topology"], row["states"], [s["over"] for s in row["seeds"]], flush=True)
        yield row


def searched_by_default(case: tuple[str, str, tuple[int, ...]]) -> Row:
    """What the default search finds under every seed."""
    from shardwise.cost.model import CostModel
    from shardwise.search.exhaustive import count_states
    from shardwise.search.mcts import mcts
    from shardwise.search.problem import Problem

    target, topology, sizes = case
    given = prepared(target, topology, sizes)
    row: Row = {"program": target, "topology": topology, "mesh": sizes, "seeds": []}
    row["states"] = count_states(Problem(CostModel.of(*given)))
    for seed in SEEDS:
        problem = with_strategies(*given)
        found = mcts(problem, seed=seed)
        rank = problem.rank(found.best)[:2]
        row["seeds"].append({"rank": rank, "evaluations": found.evaluations, "seconds": found.seconds})
    return row


def best_of_part(part: tuple[tuple[str, str, tuple[int, ...]], int, int]) -> tuple[int, int]:
    """The best of every n-th list of states, from the given state on."""
    from shardwise.cost.model import CostModel
    from shardwise.search.exhaustive import all_states
    from shardwise.search.problem import Problem, Scored

    case, first, count = part
    problem = Problem(CostModel.of(*prepared(*case)))
    ranks = (
        problem.rank(Scored(state, cost))[:2]
        for states in itertools.islice(all_states(problem), first // STATES, None, count)
        for state, cost in zip(states, problem.costs_once(states), strict=True)
    )
    return min(ranks, default=(9, 0))


def ilp() -> Iterator[Row]:
    from benchmarks.search.ilp import ilp as solve
    from benchmarks.search.ilp_state import ilp_state
    from shardwise.cost.model import CostModel
    from shardwise.search.mcts import mcts
    from shardwise.search.problem import Problem
    from shardwise.search.run import Budget

    for target, topology, sizes in LARGE:
        given = prepared(target, topology, sizes)
        problem = Problem(CostModel.of(*given))
        start = time.perf_counter()
        bound = solve(problem.model, problem.mesh, seconds=300.0)
        row: Row = {"program": target, "topology": topology, "mesh": sizes, "bound_s": bound.bound_s}
        row |= {"ilp_s": time.perf_counter() - start, "seeds": [], "over": [], "across": []}
        best = problem.rank(ilp_state(problem, Budget(seconds=300.0)).best)
        for seed in SEEDS:
            own, local = Problem(CostModel.of(*given)), local_problem(*given)
            found = mcts(own, seed=seed)
            rank = own.rank(found.best)
            row["over"].append(rank[1] / best[1] - 1 if rank[0] == best[0] else float(rank[0] - best[0]))
            row["across"].append(local.cost(found.best.state).time_ps / 1e12 / bound.bound_s - 1)
            # Its costs are no tables: as many states as the default budget has time for, in as long as that takes.
            found = mcts(local, Budget(1e9, LOCAL), seed)
            row["seeds"].append(found.best.cost.time_ps / 1e12 / bound.bound_s - 1 if found.fits else None)
        print(target, topology, row["seeds"], flush=True)
        yield row


def local_problem(analysis: Analysis, cost: HardwareCost) -> Problem:
    """A problem whose time is what the integer program minimizes."""
    from benchmarks.search.ilp import local_s
    from shardwise.cost.model import Cost, CostModel
    from shardwise.search.problem import Problem

    class Local(Problem):
        def costs_once(self, states: Sequence[Sequence[int]]) -> list[Cost]:
            seconds = [local_s(self.model, self.evaluator.lowered(tuple(state))) for state in states]
            peaks = [cost.peak_blocks for cost in super().costs_once(states)]
            return [Cost(round(s * 1e12), 0, 0, peak) for s, peak in zip(seconds, peaks, strict=True)]

    return Local(CostModel.of(analysis, cost))


def grouping() -> Iterator[Row]:
    from shardwise.cost.model import CostModel
    from shardwise.search.exhaustive import count_states, exhaustive
    from shardwise.search.mcts import mcts
    from shardwise.search.problem import Problem
    from shardwise.search.run import Budget

    for target, topology, sizes in UNROLLED:
        problem = Problem(CostModel.of(*prepared(target, topology, sizes)))
        best = exhaustive(problem, Budget(seconds=1e9, evaluations=10**9))
        row: Row = {"program": target, "topology": topology, "mesh": sizes, "states": count_states(problem)}
        row |= {"grouped": problem.rank(best.best)[:2], "actions": len(problem.actions), "free": []}
        for seed in range(3):
            free = Problem(CostModel.of(*prepared(target, topology, sizes, grouping=False)))
            row["free"].append(free.rank(mcts(free, Budget(1e9, FREE, 10**6), seed).best)[:2])
        row["free_actions"] = len(free.actions)
        print(row, flush=True)
        yield row


def timing() -> Iterator[Row]:
    """Each in a process of its own, which has imported everything before the clock starts."""
    for target, topology, mesh, limit in TIMED:
        command = [sys.executable, "-c", _TIMED, target, topology, json.dumps(mesh)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        row = json.loads(done.stdout.splitlines()[-1])
        row = {"program": target, "topology": topology, "mesh": mesh, "limit_s": limit} | row
        print(row, flush=True)
        yield row


_TIMED: Final = """
import json, resource, sys, time
import shardwise
from shardwise import zoo
target, topology, mesh = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
small = zoo.load("mlp", "tiny")
shardwise.plan(small.fn, *small.args, mesh={"x": 2}, topology="v5e:2x1", budget_s=0.1)
program = zoo.parse(target)
start = time.perf_counter()
plan = shardwise.plan(program.fn, *program.args, mesh=mesh, topology=topology, donate_argnums=program.donate_argnums,
                      allow_infeasible=True)
print(json.dumps({
    "seconds": time.perf_counter() - start, "search_s": plan.search.seconds, "evaluations": plan.search.evaluations,
    "fits": plan.predicted.fits, "time_s": plan.predicted.time_s, "peak_bytes": plan.predicted.peak_bytes,
    "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"ilp": ilp, "grouping": grouping, "timing": timing}
    parser.add_argument("part", choices=("regret", *parts))
    parser.add_argument("--only", default="", help="only programs with this text in their name (regret)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args()
    rows: list[Row] = []
    for row in regret(given.processes, given.only) if given.part == "regret" else parts[given.part]():
        rows.append(row)
        (given.out / f"{given.part}.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
