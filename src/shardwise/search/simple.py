"""The plain methods that a search has to beat: greedy, beam, random.

``greedy`` takes the best next action until none is better. ``beam`` keeps the best few states of every depth; of states that
cost the same one is kept, or the ways to say one thing would fill the beam. ``random`` draws states.

All are deterministic under a seed and a budget in evaluations. Weak: neither of the first two takes a decision that pays only
with another that is not among the best of its depth.
"""

from __future__ import annotations

from random import Random
from typing import Final

from shardwise.cost.model import Cost
from shardwise.search.budget import Budget
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.result import Ended, Found, Progress
from shardwise.search.run import Run, searched

WIDTH: Final = 8
DEPTH: Final = 8
#: Depths without an improvement after which a beam ends.
_IDLE: Final = 2
#: States that are drawn at a time; they count as one expansion for the budget's patience.
_DRAWN: Final = 64


def greedy(problem: Problem, budget: Budget | None = None, seed: int = 0, progress: Progress | None = None) -> Found:
    """The best next action until nothing improves. There is no chance in it: the seed is not used."""

    def explore(run: Run) -> Ended:
        while True:
            before = run.best
            run.score([(*before.state, n) for n in problem.allowed(before.state)])
            if run.best is before:
                return Ended.CONVERGED

    return searched(problem, budget, progress, explore)


def beam(
    problem: Problem,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    width: int = WIDTH,
) -> Found:
    """The best ``width`` states of every depth are continued, until two depths bring nothing better. The seed is not used."""

    def explore(run: Run) -> Ended:
        kept, idle = [run.best], 0
        while kept and idle < _IDLE:
            before = run.best
            kept = _continued(run, kept, width)
            idle = idle + 1 if run.best is before else 0
        return Ended.CONVERGED

    return searched(problem, budget, progress, explore)


def _continued(run: Run, kept: list[Scored], width: int) -> list[Scored]:
    """The best states that are one action longer, of those that cost the same the first."""
    problem = run.problem
    states: dict[object, Actions] = {}
    for scored in kept:
        for n in problem.allowed(scored.state):
            state = (*scored.state, n)
            states.setdefault(problem.canonical(state), state)
    without: set[Cost] = {scored.cost for scored in kept}  # an action that changes nothing leads nowhere
    best: dict[Cost, Scored] = {}
    for scored in sorted(run.score(list(states.values())), key=problem.rank):
        if scored.cost not in without:
            best.setdefault(scored.cost, scored)
    return list(best.values())[:width]


def random(
    problem: Problem,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    depth: int = DEPTH,
) -> Found:
    """Random states of one to ``depth`` actions, every length as likely as every other."""

    def explore(run: Run) -> Ended:
        rng, idle = Random(seed), 0
        while idle < run.budget.patience:
            before = run.best
            run.score([_drawn(problem, rng, depth) for _ in range(_DRAWN)])
            idle = idle + 1 if run.best is before else 0
        return Ended.CONVERGED

    return searched(problem, budget, progress, explore)


def _drawn(problem: Problem, rng: Random, depth: int) -> Actions:
    state: Actions = ()
    for _ in range(rng.randint(1, depth)):
        allowed = problem.allowed(state)
        if not allowed:
            break
        state = (*state, rng.choice(allowed))
    return state
