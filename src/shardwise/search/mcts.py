"""Monte Carlo Tree Search over decisions (design, section 8).

The problem: a sequence of decisions whose state is best (``shardwise.search.problem``). Every prefix is a plan, so that every
node of the tree has a cost of its own, and the search can be stopped at any time.

The idea. UCT (Kocsis and Szepesvári, 2006), as in Automap and TOAST, with what is known here:

- a state that is reached in several ways is one node (transpositions);
- a node is expanded once: all its children are evaluated in one batch, those that change nothing are dropped;
- from the best new children random continuations are evaluated (rollouts), so that decisions that pay only together are met;
- what is backed up is the best reward seen below, since nobody plays against us: ``Q = (mean + best) / 2``;
- of many children only the most promising are looked into at first, more with the visits (progressive widening);
- at the end the best state is polished: decisions that are not needed go, and orders and sides are tried the other way.

Rewards lie in [0, 1]: above one half for states that fit, more the faster; below for those that do not, more the smaller.

Deterministic under a seed and a budget in evaluations. Where it deviates from the papers: TOAST rolls out to a terminal state
and rewards that; here every state on the way counts. Weak: the widening trusts the cost of a child alone.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from shardwise.cost.model import Cost
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.result import Budget, Ended, Found, Improvement, Progress

_EXPLORE = 0.15
_ROLLOUTS = 6
_ROLLOUT_DEPTH = 4


@dataclass
class _Node:
    state: Actions
    cost: Cost
    children: list[object] = field(default_factory=list)  # keys, the best cost first
    expanded: bool = False
    closed: bool = False  # all below is known
    visits: int = 0
    total: float = 0.0
    best: float = 0.0

    def value(self) -> float:
        return 0.5 * (self.total / self.visits + self.best) if self.visits else self.best


class _Stop(Exception):
    def __init__(self, why: Ended):
        self.why = why


class _Search:
    def __init__(self, problem: Problem, budget: Budget, seed: int, progress: Progress | None):
        self.problem, self.budget, self.progress = problem, budget, progress
        self.rng = random.Random(seed)
        self.start = time.perf_counter()
        self.first = problem.evaluations
        self.nodes: dict[object, _Node] = {}
        self.log: list[Improvement] = []
        self.idle = 0
        unsharded = problem.cost(())
        self.scale_ps = max(1, unsharded.compute_ps // problem.mesh.devices)
        self.best = Scored((), unsharded)
        self._improved(self.best)
        self.root = self._node((), unsharded)

    def run(self) -> Found:
        ended = Ended.NOTHING if not self.problem.actions else Ended.CONVERGED
        try:
            while self.problem.actions:
                if self.nodes[self.root].closed:
                    raise _Stop(Ended.EXHAUSTED)
                if self.idle >= self.budget.patience:
                    raise _Stop(Ended.CONVERGED)
                self._check()
                self._iterate()
        except _Stop as stop:
            ended = stop.why
        except KeyboardInterrupt:
            ended = Ended.INTERRUPTED
        if ended is not Ended.INTERRUPTED:
            self._polish()
        seconds = time.perf_counter() - self.start
        fits = self.problem.fits(self.best.cost)
        return Found(self.best, fits, ended, seconds, self._spent(), tuple(self.log))

    def _spent(self) -> int:
        return self.problem.evaluations - self.first

    def _check(self) -> None:
        if time.perf_counter() - self.start > self.budget.seconds:
            raise _Stop(Ended.SECONDS)
        if self._spent() >= self.budget.evaluations:
            raise _Stop(Ended.EVALUATIONS)

    # One round: down the tree, one expansion, rollouts, and back.

    def _iterate(self) -> None:
        path = [self.root]
        while (node := self.nodes[path[-1]]).expanded:
            open_ = [key for key in node.children if not self.nodes[key].closed]
            if not open_:  # all below became known on other ways
                node.closed = True
                return
            path.append(self._select(node, open_))
        before = self.best
        reward = self._expand(self.nodes[path[-1]])
        self.idle = 0 if self.best is not before else self.idle + 1
        for key in reversed(path):
            node = self.nodes[key]
            node.visits += 1
            node.total += reward
            node.best = max(node.best, reward)
            node.closed = node.expanded and all(self.nodes[c].closed for c in node.children)

    def _select(self, node: _Node, open_: list[object]) -> object:
        width = max(3, math.ceil(2 * math.sqrt(node.visits)))
        spread = math.log(node.visits + 1)

        def score(key: object) -> float:
            child = self.nodes[key]
            return child.value() + _EXPLORE * math.sqrt(spread / (1 + child.visits))

        return max(open_[:width], key=score)

    def _expand(self, node: _Node) -> float:
        """Evaluates all children, and continuations of some; gives the best reward."""
        states = [(*node.state, n) for n in self.problem.allowed(node.state)]
        scored = self._scored(states)
        changed = [s for s in scored if s.cost != node.cost]
        changed.sort(key=self.problem.rank)
        node.children = list(dict.fromkeys(self._node(s.state, s.cost) for s in changed))
        node.expanded = True
        node.closed = not node.children
        best = max((self._reward(s.cost) for s in changed), default=self._reward(node.cost))
        return max(best, self._rollouts(changed))

    def _rollouts(self, children: list[Scored]) -> float:
        """Random continuations of children, the better the likelier, step by step in batches."""
        if not children:
            return 0.0
        weights = [1 / (1 + k) for k in range(len(children))]
        states = [s.state for s in self.rng.choices(children, weights, k=_ROLLOUTS)]
        best = 0.0
        for _ in range(_ROLLOUT_DEPTH):
            following = []
            for state in states:
                allowed = self.problem.allowed(state)
                if allowed:
                    following.append((*state, self.rng.choice(allowed)))
            if not following:
                break
            best = max(best, *(self._reward(s.cost) for s in self._scored(following)))
            states = following
        return best

    def _polish(self) -> None:
        """Leaves out what is not needed, and tries orders and other ways to say the same: until nothing is better."""
        while True:
            before = self.best
            state = before.state
            tried = [state[:k] + state[k + 1 :] for k in range(len(state))]
            tried += [(*state[:k], state[k + 1], state[k], *state[k + 2 :]) for k in range(len(state) - 1)]
            for k in range(len(state)):
                rest = state[:k] + state[k + 1 :]
                tried += [(*state[:k], n, *state[k + 1 :]) for n in self.problem.allowed(rest) if n != state[k]]
            self._scored(tried)
            if self.best is before:
                return

    # Costs.

    def _node(self, state: Actions, cost: Cost) -> object:
        key = self.problem.canonical(state)
        if key not in self.nodes:
            self.nodes[key] = _Node(state, cost, best=self._reward(cost))
        return key

    def _scored(self, states: list[Actions]) -> list[Scored]:
        found = [Scored(s, c) for s, c in zip(states, self.problem.costs(states), strict=True)]
        if found:
            best = min(found, key=self.problem.rank)
            if self.problem.rank(best) < self.problem.rank(self.best):
                self._improved(best)
        return found

    def _improved(self, best: Scored) -> None:
        self.best = best
        made = Improvement(time.perf_counter() - self.start, self._spent(), best)
        self.log.append(made)
        if self.progress is not None:
            self.progress(made, min(1.0, made.seconds / self.budget.seconds if self.budget.seconds else 1.0))

    def _reward(self, cost: Cost) -> float:
        if self.problem.fits(cost):
            return 0.5 + 0.5 * 2 * self.scale_ps / (2 * self.scale_ps + cost.time_ps)
        return 0.5 * self.problem.model.usable_blocks / cost.peak_blocks


def mcts(problem: Problem, budget: Budget | None = None, seed: int = 0, progress: Progress | None = None) -> Found:
    """Searches a problem; the best state so far on interrupt."""
    return _Search(problem, budget or Budget(), seed, progress).run()
