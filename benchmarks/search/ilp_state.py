"""The state nearest to the solution of the integer program.

The problem: the solution (``benchmarks.search.ilp``) says of every value how it lies, one by one; a state says it of groups of
dimensions, in order. Most solutions are no state.

The idea. Two shardings of a value *agree* on a mesh axis if both have it on the same dimension, or neither has it. Weighed with
the bytes of the value and how often it is made, that is a measure for how near a state is to the solution:

    agreement(state) = Σ_v bytes_v runs_v Σ_axis [place(storage_v, axis) = place(lies_v, axis)]        (``_Nearness``)

Decisions are taken one by one, the one that brings the most agreement first, until none brings any (``_towards``). All states
on the way are evaluated by the cost model, and the best is mended by greedy steps, a decision more or one less, as long as it
helps: what a list of decisions cannot say has its price, and copies, which the integer program does not count, may not fit.

Weak: as the integer program, with more than some thousand ops or two axes. One that finds no solution in time gives what greedy
steps from nothing do.
"""

from __future__ import annotations

from typing import Final

from benchmarks.search.ilp import ilp
from shardwise.lowering.decisions import State
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Sharding
from shardwise.search.problem import Actions, Problem
from shardwise.search.run import Budget, Ended, Run, SearchResult, searched

#: How near to its bound the integer program is solved: the cost model is not nearer to the truth.
_GAP: Final = 1e-3
#: Of the seconds; the rest is for the state.
_SHARE: Final = 0.8


def ilp_state(problem: Problem, budget: Budget) -> SearchResult:
    """The state nearest to the integer program's solution, mended."""

    def explore(run: Run) -> Ended:
        seconds = _SHARE * max(0.0, run.budget.seconds - run.seconds)
        lies = ilp(problem.model, problem.mesh, seconds, _GAP).lies
        run.score(_towards(run, lies))
        _mend(run)
        return Ended.CONVERGED if lies else Ended.SECONDS

    return searched(problem, budget, None, explore)


def _place(sharding: Sharding, axis: int) -> int | None:
    """The dimension that an axis shards."""
    return next((d for d, axes in enumerate(sharding.dims) if axis in axes), None)


class _Nearness:
    """How near states are to a solution."""

    def __init__(self, problem: Problem, lies: dict[int, Sharding]):
        self._problem = problem
        program, axes = problem.analysis.program, range(len(problem.mesh.sizes))
        runs = {v: float(program.runs[op.region]) for op in program.ops for v in op.results}
        self._wanted = [
            (v, program.values[v].nbytes * runs[v], [(a, _place(lie, a)) for a in axes]) for v, lie in lies.items()
        ]

    def agreement(self, state: Actions) -> float:
        problem = self._problem
        decided = State(problem.mesh, problem.decisions(state))
        lowered = Lowered(problem.model.structure, decided, problem.model.cost)
        total = 0.0
        for value, weight, places in self._wanted:
            stored = lowered.storage[value]
            total += weight * sum(_place(stored, a) == place for a, place in places)
        return total


def _towards(run: Run, lies: dict[int, Sharding]) -> list[Actions]:
    """States one decision longer each, the decision that brings the most agreement first."""
    problem, nearness = run.problem, _Nearness(run.problem, lies)
    states: list[Actions] = [()]
    most = nearness.agreement(())
    while lies:
        run.left()
        scored = [(nearness.agreement((*states[-1], n)), n) for n in problem.allowed(states[-1])]
        best, action = max(scored, key=lambda pair: (pair[0], -pair[1]), default=(0.0, -1))
        if best <= most:
            break
        most = best
        states.append((*states[-1], action))
    return states[1:]


def _mend(run: Run) -> None:
    """From the best state so far, the best that has one decision more or one less, as long as that helps."""
    problem = run.problem
    while True:
        before = run.best
        state = before.state
        fewer = [state[:k] + state[k + 1 :] for k in range(len(state))]
        run.score([*fewer, *((*state, n) for n in problem.allowed(state))])
        if run.best is before:
            return
