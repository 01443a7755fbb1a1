"""Simple search methods: greedy, beam, random.

``beam`` keeps the best few states of every depth, one of those with equal costs. ``greedy`` keeps one, and ends when the next
is not better. ``random`` draws states.

Weak: neither of the first two takes a decision that pays only with another that is not among the best of its depth.
"""

from __future__ import annotations

from random import Random
from typing import Final

from shardwise.cost.model import Cost
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.result import Ended
from shardwise.search.run import Run, method

#: States of one depth that a beam keeps, and depths without an improvement after which it ends.
_WIDTH: Final = 8
_IDLE: Final = 2
#: The longest random state; and states that are drawn at a time, which count as one expansion for the budget's patience.
_DEPTH: Final = 8
_DRAWN: Final = 64


@method
def greedy(run: Run, seed: int) -> Ended:
    """Takes the best next action until nothing improves. The seed is not used."""
    return _continue(run, width=1, patience=1)


@method
def beam(run: Run, seed: int) -> Ended:
    """Continues the best states of every depth, until two depths bring nothing better. The seed is not used."""
    return _continue(run, _WIDTH, _IDLE)


def _continue(run: Run, width: int, patience: int) -> Ended:
    kept, idle = [run.best], 0
    while kept and idle < patience:
        before = run.best
        kept = _longer(run, kept)[:width]
        idle = idle + 1 if run.best is before else 0
    return Ended.CONVERGED


def _longer(run: Run, kept: list[Scored]) -> list[Scored]:
    """Returns the states that are one action longer, the best first, and one of those with equal costs."""
    problem = run.problem
    states: dict[object, Actions] = {}
    for scored in kept:
        for n in problem.allowed(scored.state):
            state = (*scored.state, n)
            states.setdefault(problem.canonical(state), state)
    unchanged = {scored.cost for scored in kept}
    best: dict[Cost, Scored] = {}
    for scored in sorted(run.score(list(states.values())), key=problem.rank):
        if scored.cost not in unchanged:
            best.setdefault(scored.cost, scored)
    return list(best.values())


@method
def random(run: Run, seed: int) -> Ended:
    """Draws states of one action or more; all lengths have the same probability."""
    rng, idle = Random(seed), 0
    while idle < run.budget.patience:
        before = run.best
        run.score([_drawn(run.problem, rng) for _ in range(_DRAWN)])
        idle = idle + 1 if run.best is before else 0
    return Ended.CONVERGED


def _drawn(problem: Problem, rng: Random) -> Actions:
    state: Actions = ()
    for _ in range(rng.randint(1, _DEPTH)):
        allowed = problem.allowed(state)
        if not allowed:
            break
        state = (*state, rng.choice(allowed))
    return state
