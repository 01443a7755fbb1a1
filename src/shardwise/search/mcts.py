"""Monte Carlo Tree Search over decisions.

The problem: find the sequence of decisions whose state is best (``shardwise.search.problem``). Every prefix is a plan, so that
every node of the tree has a cost, and the search can be stopped at any time.

The idea. UCT (Kocsis and Szepesvári, 2006), as in Automap and TOAST, over steps that are larger than one decision:

- the edges of the root are the named strategies, from which the search starts, beside those that every node has;
- an edge adds one decision, or several that pay only together: a group on several axes, a named strategy for axes without
  decisions, or all that is left to shard on an axis (``shardwise.search.steps``);
- the first visit of a node is a climb: its state is changed as long as that helps (``shardwise.search.neighbors``). Where it
  ends is an edge of the root, so that the tree goes on from there, too. The best strategy comes first, then the unsharded
  state, since strategies may all be far from what suits a program;
- sequences of decisions that give the same state are one node (transpositions);
- edges are evaluated some at a time, first those whose decisions have gained most wherever they were added so far, in the tree
  and in climbs (all moves as first, Gelly and Silver 2007), more with the visits; those that change nothing are dropped;
- from the best new nodes random continuations are evaluated (rollouts);
- the best reward of a visit is backed up, since there is no opponent: ``Q = (mean + best) / 2``, scaled to the values of the
  edges beside it, which often differ by little.

With memory as the goal climbs go by exact peaks, since many small differences make a large one, there is more patience, and at
the end the fastest of the states whose peaks count as equal is looked for.

At the end decisions are dropped that gain almost nothing, half a percent in all, as long as no named strategy is better: each
adds collectives, with costs that the model does not have.

Rewards are in [0, 1]: above one half for states that fit, higher the faster; below for those that do not, higher the smaller
and a little higher the faster. Another goal (``shardwise.search.goal``) has other figures in these places.

Deterministic under a seed and a budget in evaluations. Where it deviates from the papers: TOAST rolls out to a terminal state
and rewards that; here every state on the way counts, and a climb stands where a rollout would. Weak: a decision that has not
paid anywhere yet is tried late.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from shardwise.cost.model import Cost
from shardwise.search.neighbors import Neighbors
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.run import Budget, Ended, Progress, Run, SearchResult, Stop, is_better, searched
from shardwise.search.steps import Joint, Rest, find_openings

#: The weight of what is unknown in UCT; values of the edges of a node are scaled to [0, 1].
_EXPLORE: Final = 1.0
_ROLLOUTS: Final = 3
_ROLLOUT_DEPTH: Final = 3
#: Edges that are evaluated at a time, and edges for the square root of half of the visits.
_SOME: Final = 8
_WIDTH: Final = 4
#: Rounds without a new state that end the search.
_VAIN: Final = 200
#: The share of time that dropped decisions may have gained in all; and evaluations that are reserved for dropping them.
_NOTHING: Final = 0.005
_SPARE: Final = 128
#: Neighbors that are evaluated at a time, and most of those of one climb.
_NEAR: Final = 16
_CLIMB: Final = 400
#: Evaluations for finding a faster state of the smallest memory.
_FASTER: Final = 1200


@dataclass
class _Node:
    state: Actions
    cost: Cost
    best: float  # the reward of the state, or the best of a visit
    children: list[object] = field(default_factory=list)  # keys
    widened: int = 0  # children that the tree has added
    waiting: list[Actions] | None = None  # children that are not evaluated yet; None before they are listed
    climbed: bool = False
    closed: bool = False  # all states below are evaluated
    visits: int = 0
    total: float = 0.0

    def value(self) -> float:
        return 0.5 * (self.total / self.visits + self.best) if self.visits else self.best

    @property
    def widens(self) -> bool:
        """Whether a visit adds children."""
        return self.waiting is None or (bool(self.waiting) and self.widened < _WIDTH * math.sqrt(self.visits / 2))


class Tree:
    """A tree search in a run."""

    def __init__(self, run: Run, seed: int):
        self.run, self.problem = run, run.problem
        self.rng = random.Random(seed)
        self.nodes: dict[object, _Node] = {}
        self.climbed: set[object] = set()  # states from which a climb was made, or that one passed
        self.gains: dict[Actions, tuple[float, int]] = {}
        unsharded = self.problem.cost(())
        self.scale = max(1, self.problem.goal.figure(unsharded) // self.problem.mesh.devices)
        self.openings = find_openings(self.problem)
        self.rest, self.joint = Rest(self.problem), Joint(self.problem)
        self.neighbors = Neighbors(self.problem, self.joint, self.rest)
        self.root = self._node(Scored((), unsharded))
        seeds = map(Scored, self.problem.seeds, self.problem.costs(self.problem.seeds))
        self._grow(self.nodes[self.root], seeds)

    def search(self) -> Ended:
        """Climbs from the best start, and then visits nodes until all states were evaluated, or no visit evaluates a new one.
        The first visit is that of the root."""
        self.climb(self.run.best)
        vain = 0
        while vain < _VAIN:
            if self.nodes[self.root].closed:
                return Ended.EXHAUSTED
            before = self.run.spent
            self._visit()
            vain = 0 if self.run.spent > before else vain + 1
        return Ended.CONVERGED

    # One visit: down the tree, a climb or some new children, and back.

    def _visit(self) -> None:
        path = [self.root]
        while (reward := self._reward_at(self.nodes[path[-1]])) is None:
            node = self.nodes[path[-1]]
            open_ = [key for key in node.children if not self.nodes[key].closed and key not in path]
            if not open_:  # all below were evaluated on other paths
                reward = node.best if not node.waiting else self._expand(node)
                break
            path.append(self._select(node, open_))
        for key in reversed(path):
            node = self.nodes[key]
            node.visits += 1
            node.total += reward
            node.best = max(node.best, reward)
            node.closed = node.climbed and node.waiting == [] and all(self.nodes[c].closed for c in node.children)

    def _reward_at(self, node: _Node) -> float | None:
        """Returns the reward of a visit that ends at a node; None if it goes on below."""
        if not node.climbed:
            node.climbed = True
            return self._reward(self.climb(Scored(node.state, node.cost)).cost)
        return self._expand(node) if node.widens else None

    def _select(self, node: _Node, open_: list[object]) -> object:
        values = {key: self.nodes[key].value() for key in open_}
        least, spread = min(values.values()), max(values.values()) - min(values.values())
        unknown = math.log(node.visits + 1)

        def score(key: object) -> float:
            value = (values[key] - least) / spread if spread else 1.0
            return value + _EXPLORE * math.sqrt(unknown / (1 + self.nodes[key].visits))

        return max(open_, key=score)

    def _expand(self, node: _Node) -> float:
        """Evaluates some children, and continuations of some of these; returns the best reward."""
        if node.waiting is None:
            node.waiting = self._following(node.state)
        depth = len(node.state)
        node.waiting.sort(key=lambda s: -self.gain(s[depth:]))
        some, node.waiting = node.waiting[:_SOME], node.waiting[_SOME:]
        scored = self.run.score(some)
        for s in scored:
            self._learn(s.state[depth:], node.cost, s.cost)
        changed = [s for s in scored if s.cost != node.cost]
        changed.sort(key=lambda s: -self._reward(s.cost))
        node.widened += len(changed)
        self._grow(node, changed)
        best = max((self._reward(s.cost) for s in changed), default=self._reward(node.cost))
        return max(best, self._rollouts(changed))

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

    def climb(self, start: Scored) -> Scored:
        """Goes from a state to better neighbors until there are none, or until another climb was there: to the first that is
        clearly better, so that a state that gains next to nothing does not hide those after it, or else to the best. Returns
        where it ends, which becomes an edge of the root."""
        here, spent = start, self.run.spent
        while (key := self.problem.canonical(here.state)) not in self.climbed:
            self.climbed.add(key)
            best = self._better(here, self._exact, spent + _CLIMB)
            if best is here:
                break
            here = best
        if here is not start:
            self._grow(self.nodes[self.root], [here])
        return here

    def hasten(self) -> Ended:
        """Climbs from the fastest state that is as small as the smallest to faster ones."""
        problem = self.problem
        if (fastest := _fastest_of_smallest(problem)) is None:
            return Ended.CONVERGED
        most = _most_blocks(problem)

        def rank(scored: Scored) -> tuple[int, ...]:
            good = not problem.rank(scored)[0] and scored.cost.peak_blocks <= most
            return not good, scored.cost.time_ps, len(scored.state)

        here, faster = None, fastest
        while faster is not here:
            here, faster = faster, self._better(faster, rank)
        return Ended.CONVERGED

    def _better(self, here: Scored, rank: Callable[[Scored], tuple[int, ...]], until: float = math.inf) -> Scored:
        """Returns the first neighbor that is clearly better, else the best of those that the evaluations allow."""
        best, near = here, self.neighbors.of(here.state, self.gain)
        for k in range(0, len(near), _NEAR):
            some = near[k : k + _NEAR]
            scored = self.run.score([neighbor.state for neighbor in some])
            for neighbor, s in zip(some, scored, strict=True):
                if neighbor.added:
                    self._learn(neighbor.added, here.cost, s.cost)
            best = min([best, *scored], key=rank)
            if is_better(rank(best), rank(here)) or self.run.spent > until:
                break
        return best

    def _exact(self, scored: Scored) -> tuple[int, ...]:
        return self.problem.rank(scored, exact=True)

    # What is known.

    def gain(self, step: Actions) -> float:
        """Returns the mean gain of a step so far; the largest possible for a step that was not tried."""
        total, count = self.gains.get(step, (0.0, 0))
        return total / count if count else 1.0

    def _learn(self, step: Actions, before: Cost, after: Cost) -> None:
        total, count = self.gains.get(step, (0.0, 0))
        self.gains[step] = total + self._reward(after) - self._reward(before), count + 1

    def _grow(self, node: _Node, children: Iterable[Scored]) -> None:
        """Adds children to a node."""
        keys = dict.fromkeys([*node.children, *map(self._node, children)])
        node.children = [key for key in keys if self.nodes[key] is not node]

    def _node(self, scored: Scored) -> object:
        key = self.problem.canonical(scored.state)
        if key not in self.nodes:
            self.nodes[key] = _Node(scored.state, scored.cost, self._reward(scored.cost))
        return key

    def _reward(self, cost: Cost) -> float:
        goal = self.problem.goal
        good = 2 * self.scale / (2 * self.scale + goal.figure(cost, exact=True))
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
    faster = min(_FASTER, budget.evaluations // 10) if problem.goal.memory else 0

    def explore(run: Run) -> Ended:
        searching = tree(run, seed)
        ended = _until_stop(searching.search)
        if faster and ended in (Ended.CONVERGED, Ended.EVALUATIONS):
            run.extend(faster)
            _until_stop(searching.hasten)
        return ended

    result = searched(problem, replace(budget, evaluations=budget.evaluations - spare - faster), progress, explore)
    if problem.goal.memory:
        result = replace(result, best=_fastest_of_smallest(problem) or result.best)
    if result.ended in (Ended.INTERRUPTED, Ended.NOTHING):
        return result
    try:
        return _simpler(problem, result, spare)
    except KeyboardInterrupt:
        return replace(result, ended=Ended.INTERRUPTED)


def _most_blocks(problem: Problem) -> int:
    """Returns the largest peak that equals the smallest of those that were found."""
    return problem.goal.most_blocks((s.cost for s in problem.front), problem.model.usable_blocks)


def _fastest_of_smallest(problem: Problem) -> Scored | None:
    """Returns the fastest of the states whose peaks equal the smallest; None if no state fits."""
    most = _most_blocks(problem)
    small = [s for s in problem.front if s.cost.peak_blocks <= most and not problem.rank(s)[0]]
    return min(small, key=lambda s: s.cost.time_ps, default=None)


def _until_stop(part: Callable[[], Ended]) -> Ended:
    """Runs a part of a search; returns why it ended, or why the search stopped."""
    try:
        return part()
    except Stop as stop:
        return stop.why


def _simpler(problem: Problem, result: SearchResult, spare: int) -> SearchResult:
    """Drops decisions that gain almost nothing, as far as the evaluations allow."""
    first, best = problem.evaluations, result.best
    ranks = [problem.rank(scored) for scored in map(Scored, problem.seeds, problem.costs(problem.seeds))]
    missed, figure, *_ = problem.rank(best)
    most = min([figure * (1 + _NOTHING), *(rank[1] for rank in ranks if rank[0] == 0)])

    def without(some: Sequence[int]) -> Scored:
        state = tuple(n for n in best.state if n not in some)
        return Scored(state, problem.cost(state))

    limits = best.cost.time_ps * (1 + _NOTHING), _most_blocks(problem)

    def good(scored: Scored) -> bool:
        if problem.goal.memory:
            gains_nothing = scored.cost.time_ps <= limits[0] and scored.cost.peak_blocks <= limits[1]
        else:
            gains_nothing = problem.rank(scored)[1] <= most
        return problem.rank(scored)[0] == 0 and gains_nothing

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
