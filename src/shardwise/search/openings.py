"""Good lists of decisions for one mesh axis alone: what a search over several axes is put together from.

Problem: with two axes there are as many states as pairs of states of one axis, and most of them are poor. People do not search
pairs either: they choose a strategy for an axis (data parallelism here, Megatron there) and combine.

Idea. A beam search over the decisions of one axis, the others idle, keeps at every depth the fastest states and the smallest,
and goes on with the decisions that helped some state at the depth before. Of all states seen, those that nothing beats in both
time and memory are openings, thinned to a few. Costs of one axis are cheap: there are few sub-states, so that the evaluator
knows most of them already.

Axes of one size on like links have the same openings, which are only renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardwise.cost.decisions import Decision, Keep
from shardwise.cost.sharding import Collective, Kind
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.run import Run

#: States that are continued at every depth, by time and by memory each; actions that are tried on them; openings of an axis.
_WIDTH: Final = 3
_TRIED: Final = 8
_DEPTH: Final = 8
_MOST: Final = 8


def openings(run: Run) -> dict[int, list[Actions]]:
    """By axis: lists of actions on it, the fastest first."""
    problem = run.problem
    found: dict[int, list[Actions]] = {}
    leaders: dict[object, int] = {}
    for axis in range(len(problem.mesh.sizes)):
        own = _actions(problem, axis)
        if not own:
            continue
        leader = leaders.setdefault(_looks(problem, axis, own), axis)
        if leader == axis:
            found[axis] = _front(problem, _beam(run, list(own.values())))
        else:
            renamed = {n: own[key] for key, n in _actions(problem, leader).items()}
            found[axis] = [tuple(renamed[n] for n in state) for state in found[leader]]
    return found


def _actions(problem: Problem, axis: int) -> dict[object, int]:
    """The actions on an axis, by what they do on it."""
    actions = enumerate(problem.evaluator.actions)
    return {_named(a.decision): n for n, a in actions if a.axis == axis}


def _named(decision: Decision) -> object:
    if isinstance(decision, Keep):
        return decision.values
    return getattr(decision, "colors", ()), getattr(decision, "sides", ())


def _looks(problem: Problem, axis: int, actions: dict[object, int]) -> object:
    """Equal for axes that cost the same."""
    cost, count = problem.model.cost, problem.mesh.sizes[axis]
    links = tuple(
        cost.step_s(Collective(kind, (axis,), nbytes, nbytes))
        for kind in Kind
        for nbytes in (1.0, 1e9)
        if kind is not Kind.SLICE
    )
    base = tuple(d for d in problem.base if getattr(d, "axis", None) == problem.mesh.names[axis])
    return count, links, frozenset(actions), base


def _beam(run: Run, actions: Sequence[int]) -> list[Scored]:
    """At every depth some actions only: those that made most states faster or smaller one step before."""
    problem = run.problem
    frontier = [Scored((), problem.cost(()))]
    found: dict[object, Scored] = {problem.canonical(()): frontier[0]}
    for _ in range(_DEPTH):
        steps: dict[object, tuple[Scored, int]] = {}
        for scored in frontier:
            allowed = set(problem.allowed(scored.state))
            for n in actions:
                if n in allowed:
                    steps.setdefault(problem.canonical((*scored.state, n)), (scored, n))
        new = [key for key in steps if key not in found]
        made = run.score([(*before.state, n) for before, n in map(steps.__getitem__, new)])
        least = [min(key(s) for s in found.values()) for key in (_time, _peak)]
        found.update(zip(new, made, strict=True))
        if least == [min(key(s) for s in found.values()) for key in (_time, _peak)]:
            break
        frontier = _some(made, _WIDTH)
        gains: dict[int, list[tuple[int, int]]] = {}
        for key, s in zip(new, made, strict=True):
            before, n = steps[key]
            gains.setdefault(n, []).append((_time(s) - _time(before), _peak(s) - _peak(before)))
        most = {n: [min(gain) for gain in zip(*own, strict=True)] for n, own in gains.items()}
        ranked = [sorted(most, key=lambda n: most[n][0]), sorted(most, key=lambda n: most[n][1])]
        actions = list(dict.fromkeys(n for both in zip(*ranked, strict=True) for n in both))[:_TRIED]
    return list(found.values())


def _some(made: Sequence[Scored], width: int) -> list[Scored]:
    by_time = sorted(made, key=lambda s: (_time(s), _peak(s)))
    by_peak = sorted(made, key=lambda s: (_peak(s), _time(s)))
    return list({s.state: s for s in (*by_time[:width], *by_peak[:width])}.values())


def _time(scored: Scored) -> int:
    return scored.cost.time_ps


def _peak(scored: Scored) -> int:
    return scored.cost.peak_blocks


def _front(problem: Problem, found: Sequence[Scored]) -> list[Actions]:
    """States that none beats in time and memory, the fastest first; of many, some from all along the front."""
    front: list[Scored] = []
    for s in sorted(found, key=lambda s: (s.cost.time_ps, s.cost.peak_blocks, len(s.state))):
        if not front or s.cost.peak_blocks < front[-1].cost.peak_blocks:
            front.append(s)
    if len(front) > _MOST:
        front = [front[round(k * (len(front) - 1) / (_MOST - 1))] for k in range(_MOST)]
    return [s.state for s in front]
