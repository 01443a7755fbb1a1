"""All search methods by name; the simple ones, and the decisions of Automap, are here.

``beam`` keeps the best few states of every depth, one of those with equal costs. ``greedy`` keeps one, and ends when the next
is not better. ``random`` draws states. Weak: neither of the first two takes a decision that pays only with another that is not
among the best of its depth.

Automap (Schaarschmidt et al., 2021; Alabed et al., 2022, within PartIR) searches by MCTS over arguments: an action shards one
dimension of one argument on one axis, and the rest of the program follows by propagation; or it keeps an argument whole
("atomic"); or it infers shardings of the arguments that are left ("infer-rest"). There are no named strategies, no groups of
equal layers, and no resolution of conflicts. Here a dimension is its color, which is what propagation reaches; "infer-rest" is
a step of ``shardwise.search.steps``; and the tree is ``shardwise.search.mcts`` with its climbing, without seeds. Where it
deviates: a conflict inside a color, which Automap leaves unsharded, takes its first side, unless the analysis has no
resolutions (``benchmarks/search/ablation.py``). Weak, as Automap is: each layer of an unrolled program is decided separately.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import ClassVar, Final

from shardwise.cost.model import Cost
from shardwise.dims.analysis import Group
from shardwise.dims.groups import find_groups
from shardwise.search.exhaustive import exhaustive
from shardwise.search.mcts import mcts
from shardwise.search.problem import Actions, Problem, Scored, decided_groups, kept_alone
from shardwise.search.run import Ended, Method, Run, method

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


class Automap(Problem):
    """Decides on the dimensions of arguments one by one."""

    seeded: ClassVar = False

    def _groups(self, only: Collection[int] | None) -> list[Group]:
        analysis = self.analysis
        colors = find_groups(analysis.program, analysis.names, analysis.conflict_table, grouping=False)
        arguments = {a.value for a in analysis.program.arguments} if only is None else only
        alone = decided_groups(replace(analysis, group_table=colors), arguments)
        return [replace(group, bits=()) for group in alone]

    def _keep_sets(self, only: Collection[int] | None) -> tuple[tuple[int, ...], ...]:
        replaced, others = kept_alone(self.analysis, only)
        return (*replaced, *others)


METHODS: Final[dict[str, Method]] = {
    "mcts": mcts,
    "greedy": greedy,
    "beam": beam,
    "random": random,
    "exhaustive": exhaustive,
    "automap": mcts,
}
PROBLEMS: Final[dict[str, type[Problem]]] = {"automap": Automap}
