"""Monte Carlo Tree Search over decisions.

The problem: find the sequence of decisions whose state is best (``shardwise.search.problem``). Every prefix is a plan, so that
every node of the tree has a cost, and the search can be stopped at any time.

The idea. UCT (Kocsis and Szepesvári, 2006), as in Automap and TOAST, with these changes:

- sequences of decisions that give the same state are one node (transpositions);
- a node grows by one decision or by several that pay only together (``shardwise.search.steps``): a group on several axes, a
  named strategy for axes without decisions, or all that is left to shard on an axis;
- children are evaluated some at a time, first those whose decision has gained most wherever it was taken so far (all moves
  as first, Gelly and Silver 2007), more with the visits; those that change nothing are dropped;
- from the best new children random continuations are evaluated (rollouts);
- the best reward below a node is backed up, since there is no opponent: ``Q = (mean + best) / 2``;
- in turns with the tree, its best states are polished by hill climbing: decisions are removed, inserted at any place, moved, or
  replaced by others, on one axis or on several.

At the end decisions are dropped that gain almost nothing, half a percent in all, as long as no named strategy is better: each
adds collectives, with costs that the model does not have.

Rewards are in [0, 1]: above one half for states that fit, higher the faster; below for those that do not, higher the smaller
and a little higher the faster. Another goal (``shardwise.search.goal``) has other figures in these places.

Deterministic under a seed and a budget in evaluations. Where it deviates from the papers: TOAST rolls out to a terminal state
and rewards that; here every state on the way counts. Weak: a decision that has not paid anywhere yet is tried late.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shardwise.cost.model import Cost
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.run import Budget, Ended, Progress, Run, SearchResult, is_better, searched
from shardwise.search.steps import Joint, Rest, find_openings

_EXPLORE: Final = 0.15
_ROLLOUTS: Final = 3
_ROLLOUT_DEPTH: Final = 3
#: Children that are evaluated at a time.
_SOME: Final = 8
#: Rounds of the tree between two polishings, and how many of both without a new state end the search.
_ROUNDS: Final = 8
_VAIN: Final = 3
#: The share of time that dropped decisions may have gained in all; and evaluations that are reserved for dropping them.
_NOTHING: Final = 0.005
_SPARE: Final = 128
#: Neighbors that are evaluated at a time, and most of those of one climb.
_NEAR: Final = 16
_CLIMB: Final = 400


@dataclass
class _Node:
    state: Actions
    cost: Cost
    children: list[object] = field(default_factory=list)  # keys
    waiting: list[Actions] | None = None  # children that are not evaluated yet; None before the first visit
    closed: bool = False  # all states below are evaluated
    visits: int = 0
    total: float = 0.0
    best: float = 0.0

    def value(self) -> float:
        return 0.5 * (self.total / self.visits + self.best) if self.visits else self.best


class Tree:
    """A tree search in a run."""

    def __init__(self, run: Run, seed: int):
        self.run, self.problem = run, run.problem
        self.rng = random.Random(seed)
        self.nodes: dict[object, _Node] = {}
        self.polished: set[object] = set()
        self.gains: dict[Actions, tuple[float, int]] = {}
        unsharded = self.problem.cost(())
        self.scale = max(1, self.problem.goal.figure(unsharded) // self.problem.mesh.devices)
        self.openings = find_openings(self.problem)
        self.rest, self.joint = Rest(self.problem), Joint(self.problem)
        self.root = self._node((), unsharded)

    def search(self) -> Ended:
        """Polishes states and grows the tree in turns."""
        vain = 0
        while vain < _VAIN:
            before = self.run.spent
            start = self.to_polish()
            if start is not None:
                self.polish(start)
            elif self.nodes[self.root].closed:
                return Ended.EXHAUSTED
            for _ in range(_ROUNDS):
                if self.nodes[self.root].closed:
                    break
                self._iterate()
            vain = 0 if self.run.spent > before else vain + 1
        return Ended.CONVERGED

    # One round: down the tree, some new children, rollouts, and back.

    def _iterate(self) -> None:
        path = [self.root]
        while not self._widens(node := self.nodes[path[-1]]):
            open_ = [key for key in node.children if not self.nodes[key].closed]
            if not open_:  # all below were evaluated on other paths
                node.closed = not node.waiting
                if node.closed:
                    return
                break
            path.append(self._select(node, open_))
        reward = self._expand(self.nodes[path[-1]])
        for key in reversed(path):
            node = self.nodes[key]
            node.visits += 1
            node.total += reward
            node.best = max(node.best, reward)
            node.closed = node.waiting == [] and all(self.nodes[c].closed for c in node.children)

    def _widens(self, node: _Node) -> bool:
        """Returns whether a node gets more children."""
        if node.waiting is None:
            return True
        return bool(node.waiting) and len(node.children) < _SOME * math.sqrt(node.visits / 2)

    def _select(self, node: _Node, open_: list[object]) -> object:
        spread = math.log(node.visits + 1)

        def score(key: object) -> float:
            child = self.nodes[key]
            return child.value() + _EXPLORE * math.sqrt(spread / (1 + child.visits))

        return max(open_, key=score)

    def _expand(self, node: _Node) -> float:
        """Evaluates some children, and continuations of some of these; returns the best reward."""
        if node.waiting is None:
            node.waiting = self._following(node.state)
        depth = len(node.state)
        node.waiting.sort(key=lambda s: -self._gain(s[depth:]))
        some, node.waiting = node.waiting[:_SOME], node.waiting[_SOME:]
        scored = self.run.score(some)
        reward = self._reward(node.cost)
        for s in scored:
            total, count = self.gains.get(s.state[depth:], (0.0, 0))
            self.gains[s.state[depth:]] = total + (self._reward(s.cost) - reward), count + 1
        changed = [s for s in scored if s.cost != node.cost]
        changed.sort(key=lambda s: -self._reward(s.cost))
        node.children = list(dict.fromkeys([*node.children, *(self._node(s.state, s.cost) for s in changed)]))
        best = max((self._reward(s.cost) for s in changed), default=reward)
        return max(best, self._rollouts(changed))

    def _gain(self, step: Actions) -> float:
        """Returns the mean gain of a step so far; the largest possible for a step that was not tried."""
        total, count = self.gains.get(step, (0.0, 0))
        return total / count if count else 1.0

    def _following(self, state: Actions) -> list[Actions]:
        """Returns the states with one more decision, a group on several axes, an opening, or all that is left on an axis."""
        used = {self.problem.evaluator.actions[n].axis for n in state}
        states = [(*state, n) for n in self.problem.allowed(state)]
        for axes, openings in self.openings.items():
            if used.isdisjoint(axes):
                states += [(*state, *opening) for opening in openings if len(opening) > 1]
        states += [edit.state for edit in self.joint.added(state)]
        states += [(*state, *step) for step in self.rest.steps(state)]
        return list({self.problem.canonical(s): s for s in states}.values())

    def _rollouts(self, children: list[Scored]) -> float:
        """Returns the best reward of random continuations of some children; better children are drawn more often."""
        if not children:
            return 0.0
        weights = [1 / (1 + k) for k in range(len(children))]
        states = [s.state for s in self.rng.choices(children, weights, k=_ROLLOUTS)]
        best = 0.0
        for _ in range(_ROLLOUT_DEPTH):
            states = [(*s, self.rng.choice(allowed)) for s in states if (allowed := self.problem.allowed(s))]
            if not states:
                break
            best = max(best, *(self._reward(s.cost) for s in self.run.score(states)))
        return best

    # Hill climbing.

    def to_polish(self) -> Scored | None:
        """Returns the best state that was not polished yet."""
        best = self.run.best
        if self.problem.canonical(best.state) not in self.polished:
            return best
        nodes = (node for key, node in self.nodes.items() if key not in self.polished)
        node = max(nodes, key=lambda node: self._reward(node.cost), default=None)
        return Scored(node.state, node.cost) if node is not None else None

    def polish(self, start: Scored) -> None:
        """Goes from a state to better neighbors until there are none: to the first that is clearly better, so that a state that
        gains next to nothing does not hide those after it, or else to the best."""
        here, spent = start, self.run.spent
        while True:
            self.polished.add(self.problem.canonical(here.state))
            near, best = self._neighbors(here.state), here
            for k in range(0, len(near), _NEAR):
                best = min([best, *self.run.score(near[k : k + _NEAR])], key=self.problem.rank)
                if is_better(self.problem.rank(best), self.problem.rank(here)):
                    break
                if self.run.spent - spent > _CLIMB:
                    return
            if best is here:
                return
            here = best

    def _neighbors(self, state: Actions) -> list[Actions]:
        """Returns states that differ in one decision or its position, or shard what is left; the most promising come first."""
        shorter = [state[:k] + state[k + 1 :] for k in range(len(state))]
        near = [(1.0, (*state, *step)) for step in self.rest.steps(state)]
        near += [(1.0, rest) for rest in shorter]
        edits = (*self.joint.added(state), *self.joint.replaced(state))
        near += [(self._gain(edit.added), edit.state) for edit in edits]
        for k, (n, rest) in enumerate(zip(state, shorter, strict=True)):
            near += [(0.9, (*rest[:j], n, *rest[j:])) for j in range(len(state)) if j != k]
        for n in self.problem.allowed(state):
            gain = self._gain((n,))
            near += [(gain, (*state[:k], n, *state[k:])) for k in range(len(state), -1, -1)]
        for k, rest in enumerate(shorter):
            others = [n for n in self.problem.allowed(rest) if n != state[k]]
            near += [(self._gain((n,)) - 0.1, (*rest[:k], n, *rest[k:])) for n in others]
        near.sort(key=lambda pair: -pair[0])
        unique = {self.problem.canonical(s): s for _, s in reversed(near)}
        unique.pop(self.problem.canonical(state), None)
        return list(reversed(unique.values()))

    # Costs.

    def _node(self, state: Actions, cost: Cost) -> object:
        key = self.problem.canonical(state)
        if key not in self.nodes:
            self.nodes[key] = _Node(state, cost, best=self._reward(cost))
        return key

    def _reward(self, cost: Cost) -> float:
        goal = self.problem.goal
        good = 2 * self.scale / (2 * self.scale + goal.figure(cost))
        excess = goal.excess(cost, self.problem.model.usable_blocks)
        return 0.5 + 0.5 * good if excess <= 1 else 0.5 / excess * (0.8 + 0.2 * good)


def mcts(
    problem: Problem,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    tree: type[Tree] = Tree,
) -> SearchResult:
    """Searches a problem; an interrupt ends the search with the best state so far. ``tree`` may lack a part
    (``benchmarks/search/ablation.py``)."""
    budget = budget or Budget()
    spare = min(_SPARE, budget.evaluations // 10)

    def explore(run: Run) -> Ended:
        return tree(run, seed).search()

    result = searched(problem, replace(budget, evaluations=budget.evaluations - spare), progress, explore)
    if result.ended in (Ended.INTERRUPTED, Ended.NOTHING):
        return result
    try:
        return _simpler(problem, result, spare)
    except KeyboardInterrupt:
        return replace(result, ended=Ended.INTERRUPTED)


def _simpler(problem: Problem, result: SearchResult, spare: int) -> SearchResult:
    """Drops decisions that gain almost nothing, as far as the evaluations allow."""
    first, best = problem.evaluations, result.best
    ranks = [problem.rank(scored) for scored in map(Scored, problem.seeds, problem.costs(problem.seeds))]
    missed, figure, *_ = problem.rank(best)
    most = min([figure * (1 + _NOTHING), *(rank[1] for rank in ranks if rank[0] == 0)])

    def without(some: Sequence[int]) -> Scored:
        state = tuple(n for n in best.state if n not in some)
        return Scored(state, problem.cost(state))

    def good(scored: Scored) -> bool:
        return problem.rank(scored)[0] == 0 and problem.rank(scored)[1] <= most

    while not missed and problem.evaluations - first + len(best.state) <= spare:
        able = [(n, scored) for n in best.state if good(scored := without([n]))]
        able.sort(key=lambda pair: problem.rank(pair[1]))
        # As many as possible at once, the least useful first.
        count = len(able)
        while count and not good(simpler := without([n for n, _ in able[:count]])):
            count //= 2
        if not count:
            break
        best = simpler
    return replace(result, best=best, evaluations=result.evaluations + problem.evaluations - first)
