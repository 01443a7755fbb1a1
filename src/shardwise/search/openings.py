"""Good lists of decisions for one mesh axis, and for all of them: what a search over several axes is put together from.

Problem: with two axes there are as many states as pairs of states of one axis, and most of them are poor. People do not search
pairs either: they choose a strategy for an axis (data parallelism here, Megatron there) and combine.

Idea. A beam search over the decisions of one axis, the others idle, keeps at every depth the fastest states and the smallest,
and goes on with the decisions that helped some state at the depth before. Of all states seen, those that nothing beats in both
time and memory are openings, thinned to a few. The decision that leads the fastest of them leads most, so a second, narrow
beam goes without it: two axes often want two strategies of which one alone is second best. Costs of one axis are cheap: there
are few sub-states, so that the evaluator knows most of them already.

Axes of one size on like links have the same openings, which are only renamed. Openings of all axes at once are each opening of
an axis with each of the others, and a beam in which the axes act together: strategies that want many devices are seen only so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shardwise.lowering.decisions import Decision, Keep
from shardwise.lowering.sharding import Axes, Collective, Kind
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.run import Run

#: States that are continued at every depth, by time and by memory each; actions that are tried on them; openings at most.
_WIDTH: Final = 3
_TRIED: Final = 8
_DEPTH: Final = 8
_MOST: Final = 8


def openings(run: Run) -> dict[Axes, list[Actions]]:
    """By axis, and for all axes together: lists of actions on them, the fastest first."""
    problem = run.problem
    found: dict[Axes, list[Actions]] = {}
    leaders: dict[object, int] = {}
    by_axis = {axis: own for axis in range(len(problem.mesh.sizes)) if (own := _actions(problem, axis))}
    for axis, own in by_axis.items():
        leader = leaders.setdefault(_looks(problem, axis, own), axis)
        if leader == axis:
            found[axis,] = _strategies(run, [(n,) for n in own.values()])
        else:
            renamed = {n: own[key] for key, n in by_axis[leader].items()}
            found[axis,] = [tuple(renamed[n] for n in state) for state in found[leader,]]
    if len(by_axis) > 1:
        shared = [key for key in next(iter(by_axis.values())) if all(key in own for own in by_axis.values())]
        together = [tuple(own[key] for own in by_axis.values()) for key in shared]
        made = [*_beam(run, together, _WIDTH), *_combined(run, [found[axis,] for axis in by_axis])]
        found[tuple(by_axis)] = _front(made, _MOST)
    return found


def _actions(problem: Problem, axis: int) -> dict[object, int]:
    """The actions on an axis, by what they do on it."""
    actions = ((n, problem.evaluator.actions[n]) for n in problem.actions)
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


def _strategies(run: Run, steps: Sequence[Actions]) -> list[Actions]:
    """The front of a beam, and the fastest of a narrow one without the step that leads it."""
    front = _front(_beam(run, steps, _WIDTH), _MOST - 1)
    others = [step for step in steps if front[0][: len(step)] != step]
    return [*front, *_front(_beam(run, others, 1), 1)] if 0 < len(others) < len(steps) else front


def _combined(run: Run, openings: Sequence[Sequence[Actions]]) -> list[Scored]:
    """Every opening of an axis with every one of the next; of three axes or more, with the best of those before."""
    made = [Scored((), run.problem.cost(()))]
    for k, own in enumerate(openings):
        before = made if k < 2 else _some(made, _WIDTH)
        made = run.score([(*scored.state, *opening) for scored in before for opening in own])
    return made


def _beam(run: Run, steps: Sequence[Actions], width: int) -> list[Scored]:
    """At every depth some steps only: those that made most states faster or smaller one step before."""
    problem = run.problem
    frontier = [Scored((), problem.cost(()))]
    found: dict[object, Scored] = {problem.canonical(()): frontier[0]}
    for _ in range(_DEPTH):
        ways: dict[object, tuple[Scored, Actions]] = {}
        for scored in frontier:
            allowed = set(problem.allowed(scored.state))
            for step in steps:
                if allowed.issuperset(step):
                    ways.setdefault(problem.canonical((*scored.state, *step)), (scored, step))
        new = [key for key in ways if key not in found]
        made = run.score([(*before.state, *step) for before, step in map(ways.__getitem__, new)])
        least = [min(key(s) for s in found.values()) for key in (_time, _peak)]
        found.update(zip(new, made, strict=True))
        if least == [min(key(s) for s in found.values()) for key in (_time, _peak)]:
            break
        frontier = _some(made, width)
        gains: dict[Actions, list[tuple[int, int]]] = {}
        for key, s in zip(new, made, strict=True):
            before, step = ways[key]
            gains.setdefault(step, []).append((_time(s) - _time(before), _peak(s) - _peak(before)))
        most = {step: [min(gain) for gain in zip(*own, strict=True)] for step, own in gains.items()}
        ranked = [sorted(most, key=lambda step: most[step][k]) for k in range(2)]
        steps = list(dict.fromkeys(step for both in zip(*ranked, strict=True) for step in both))[:_TRIED]
    return list(found.values())


def _some(made: Sequence[Scored], width: int) -> list[Scored]:
    by_time = sorted(made, key=lambda s: (_time(s), _peak(s)))
    by_peak = sorted(made, key=lambda s: (_peak(s), _time(s)))
    return list({s.state: s for s in (*by_time[:width], *by_peak[:width])}.values())


def _time(scored: Scored) -> int:
    return scored.cost.time_ps


def _peak(scored: Scored) -> int:
    return scored.cost.peak_blocks


def _front(found: Sequence[Scored], most: int) -> list[Actions]:
    """States that none beats in time and memory, the fastest first; of many, some from all along the front."""
    front: list[Scored] = []
    for s in sorted(found, key=lambda s: (s.cost.time_ps, s.cost.peak_blocks, len(s.state))):
        if not front or s.cost.peak_blocks < front[-1].cost.peak_blocks:
            front.append(s)
    if len(front) > most:
        front = [front[round(k * (len(front) - 1) / max(1, most - 1))] for k in range(most)]
    return [s.state for s in front]
