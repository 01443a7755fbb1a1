"""Openings: good lists of decisions for one mesh axis, and for all of them, from which a search over several axes starts.

The problem: with two axes there are as many states as pairs of states of one axis, and most of them are poor. People choose a
strategy for each axis (data parallelism here, Megatron there) and combine them.

The idea. A beam search over the decisions of one axis keeps the fastest states and the smallest of every depth, and goes on
with the decisions that helped some state at the depth before. The openings are the Pareto front of time and memory over all
its states, thinned to a few. Most of them start with the decision that the fastest starts with, so a second, narrow beam goes
without that: two axes often want two strategies, one of which is second best alone. States of one axis are cheap to evaluate.

Axes of one size on equal links have the same openings, renamed. Openings of all axes are each opening of an axis with each of
the others, and those of a beam in which the axes act together, for strategies that need many devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from shardwise.lowering.sharding import Axes, Collective, Kind
from shardwise.search.problem import Actions, Problem, Scored
from shardwise.search.run import Run

#: States that are continued at every depth, by time and by memory each; actions that are tried on them; most openings.
_WIDTH: Final = 3
_TRIED: Final = 8
_DEPTH: Final = 8
_MOST: Final = 8


def find_openings(run: Run) -> dict[Axes, list[Actions]]:
    """By axis, and for all axes together: lists of actions on them, the fastest first."""
    problem = run.problem
    openings: dict[Axes, list[Actions]] = {}
    leaders: dict[object, int] = {}
    by_axis = {axis: a for axis in range(len(problem.mesh.sizes)) if (a := _actions(problem, axis))}
    for axis, actions in by_axis.items():
        leader = leaders.setdefault(_cost_key(problem, axis, actions), axis)
        if leader == axis:
            openings[axis,] = _strategies(run, [(n,) for n in actions.values()])
        else:
            renamed = {n: actions[key] for key, n in by_axis[leader].items()}
            openings[axis,] = [tuple(renamed[n] for n in state) for state in openings[leader,]]
    if len(by_axis) > 1:
        first, *others = by_axis.values()
        shared = [key for key in first if all(key in actions for actions in others)]
        together = [tuple(actions[key] for actions in by_axis.values()) for key in shared]
        scored = [*_beam(run, together, _WIDTH), *_combined(run, [openings[axis,] for axis in by_axis]), *_seeds(run)]
        openings[tuple(by_axis)] = _front(scored, _MOST)
    return openings


def _seeds(run: Run) -> list[Scored]:
    return [Scored(seed, run.problem.cost(seed)) for seed in run.problem.seeds]


def _actions(problem: Problem, axis: int) -> dict[object, int]:
    """The actions on an axis, by their decision without the axis."""
    actions = ((n, problem.evaluator.actions[n]) for n in problem.actions)
    return {replace(a.decision, axis=""): n for n, a in actions if a.axis == axis}


def _cost_key(problem: Problem, axis: int, actions: dict[object, int]) -> object:
    """Equal for axes on which the same actions cost the same."""
    cost = problem.model.cost
    links = tuple(
        cost.step_s(Collective(kind, (axis,), nbytes, nbytes))
        for kind in Kind
        for nbytes in (1.0, 1e9)
        if kind is not Kind.SLICE
    )
    base = tuple(d for d in problem.base if getattr(d, "axis", None) == problem.mesh.names[axis])
    return problem.mesh.sizes[axis], links, frozenset(actions), base


def _strategies(run: Run, steps: Sequence[Actions]) -> list[Actions]:
    """The front of a beam, and the fastest of a narrow one without the step that leads it."""
    front = _front(_beam(run, steps, _WIDTH), _MOST - 1)
    others = [step for step in steps if front[0][: len(step)] != step]
    return [*front, *_front(_beam(run, others, 1), 1)] if 0 < len(others) < len(steps) else front


def _combined(run: Run, openings: Sequence[Sequence[Actions]]) -> list[Scored]:
    """Every opening of an axis with every one of the next; of three axes or more, with the best of those before."""
    combined = [Scored((), run.problem.cost(()))]
    for k, lists in enumerate(openings):
        before = combined if k < 2 else _some(combined, _WIDTH)
        combined = run.score([(*scored.state, *opening) for scored in before for opening in lists])
    return combined


def _beam(run: Run, steps: Sequence[Actions], width: int) -> list[Scored]:
    """All states of a beam search. At every depth those steps are tried that made most states faster or smaller one step
    before."""
    problem = run.problem
    frontier = [Scored((), problem.cost(()))]
    seen: dict[object, Scored] = {problem.canonical(()): frontier[0]}
    for _ in range(_DEPTH):
        new: dict[object, tuple[Scored, Actions]] = {}
        for parent in frontier:
            allowed = set(problem.allowed(parent.state))
            for step in steps:
                if allowed.issuperset(step):
                    key = problem.canonical((*parent.state, *step))
                    if key not in seen:
                        new.setdefault(key, (parent, step))
        scored = run.score([(*parent.state, *step) for parent, step in new.values()])
        least = _least(seen.values())
        seen.update(zip(new, scored, strict=True))
        if least == _least(seen.values()):
            break
        frontier = _some(scored, width)
        gains: dict[Actions, list[tuple[int, int]]] = {}
        for s, (parent, step) in zip(scored, new.values(), strict=True):
            gains.setdefault(step, []).append((_time(s) - _time(parent), _peak(s) - _peak(parent)))
        most = {step: [min(gain) for gain in zip(*pairs, strict=True)] for step, pairs in gains.items()}
        ranked = [sorted(most, key=lambda step: most[step][k]) for k in range(2)]
        steps = list(dict.fromkeys(step for both in zip(*ranked, strict=True) for step in both))[:_TRIED]
    return list(seen.values())


def _least(scored: Iterable[Scored]) -> tuple[int, int]:
    times, peaks = zip(*((_time(s), _peak(s)) for s in scored), strict=True)
    return min(times), min(peaks)


def _some(scored: Sequence[Scored], width: int) -> list[Scored]:
    """The fastest states and the smallest."""
    by_time = sorted(scored, key=lambda s: (_time(s), _peak(s)))
    by_peak = sorted(scored, key=lambda s: (_peak(s), _time(s)))
    return list({s.state: s for s in (*by_time[:width], *by_peak[:width])}.values())


def _time(scored: Scored) -> int:
    return scored.cost.time_ps


def _peak(scored: Scored) -> int:
    return scored.cost.peak_blocks


def _front(scored: Sequence[Scored], most: int) -> list[Actions]:
    """The states of the Pareto front, the fastest first; of many, some from all along it."""
    front: list[Scored] = []
    for s in sorted(scored, key=lambda s: (_time(s), _peak(s), len(s.state))):
        if not front or _peak(s) < _peak(front[-1]):
            front.append(s)
    if len(front) > most:
        front = [front[round(k * (len(front) - 1) / max(1, most - 1))] for k in range(most)]
    return [s.state for s in front]
