"""Baselines: the named strategies, and their combinations over the axes of a mesh.

Every axis is used for an entry of the menu, which is one strategy or several that belong together (Megatron with sequence
parallelism), or is not used. Megatron without heads is tried where an axis divides heads in part: the sequence may be the
better use of it in attention. Only one strategy that shards gradients and moments is used at a time. The strategies of a
combination are applied in the order of ``PARTS``, those of one kind in the order of the mesh.

A search starts from these combinations (its seeds), so that a plan is never worse than any of them. With three axes or more
there are thousands: axis by axis only the fastest and the smallest combinations are continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from shardwise.cost.model import Cost, CostModel
from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision, Pin, Shard, State
from shardwise.lowering.sharding import Collective, Kind
from shardwise.search.problem import Actions, Problem, decided_groups
from shardwise.tactics.named import PARTS, named
from shardwise.tactics.strategies import shards_heads_in_part
from shardwise.tactics.tactic import Context, Tactic, shard_groups

#: A strategy on an axis.
Part = tuple[str, str]
#: Strategies that share an axis.
Entry = tuple[str, ...]

MENU: Final[tuple[Entry, ...]] = tuple(
    tuple(words.split("+"))
    for words in (
        "pipeline pipeline+dp pipeline+vocabulary "
        "expert edges dp fsdp zero1 zero2 context megatron megatron+sequence megatron+vocabulary "
        "megatron+sequence+vocabulary feedforward+sequence feedforward+sequence+vocabulary vocabulary dp+vocabulary"
    ).split()
)
_SHARDED: Final = frozenset(("fsdp", "zero1", "zero2"))
#: Combinations by time, and by memory, that get a further axis, and fewer for a quick look. All entries of the menu on one axis
#: are within the first.
_WIDTH: Final = 8
_QUICK: Final = 2


@dataclass(frozen=True, slots=True)
class Baseline:
    """A combination of strategies and its cost, or the ``reason`` why it cannot be applied."""

    parts: tuple[Part, ...]
    decisions: tuple[Decision, ...] = ()
    cost: Cost | None = None
    fits: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        """Text that :func:`shardwise.plan` takes as ``tactics``, or ``replicated``."""
        axes = {part: "+".join(axis for other, axis in self.parts if other == part) for part, _ in self.parts}
        return ",".join(f"{part}:{axes[part]}" for part in axes) or "replicated"

    @property
    def tactics(self) -> tuple[Tactic, ...]:
        return tuple(named(*part) for part in self.parts)

    @property
    def applies(self) -> bool:
        return not self.reason

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller is better, as in ``Problem.rank``."""
        assert self.cost is not None
        figures = (self.cost.time_ps, self.cost.peak_blocks)
        return (0, *figures, len(self.parts)) if self.fits else (1, *figures[::-1], len(self.parts))


def baselines(context: Context, model: CostModel, menu: Sequence[Entry] = MENU) -> list[Baseline]:
    """Returns all combinations that apply, those that fit and are fast first; then those that do not apply. Of combinations
    that decide the same, it returns the one with the fewest strategies."""
    combinations = Combinations(context, context.mesh.names, menu=menu)
    every = combinations.costed(Problem(model, extra=combinations.decisions))
    return [*sorted((b for b in every if b.applies), key=lambda b: b.rank), *(b for b in every if not b.applies)]


class Combinations:
    """The combinations of strategies over some axes, on top of what is decided already. With ``only`` they are reduced to
    decisions about groups with a dimension of some arguments."""

    def __init__(
        self,
        context: Context,
        axes: Sequence[str],
        taken: Sequence[Decision] = (),
        menu: Sequence[Entry] = MENU,
        only: Sequence[int] | None = None,
    ):
        self._context, self._taken = context, tuple(taken)
        groups = () if only is None else decided_groups(context.analysis, only)
        self._only = None if only is None else {color for group in groups for color in group.colors}
        is_asked = tuple(menu) != MENU  # otherwise Megatron without heads is tried only where it may be the faster one
        menu = menu if context.stages else [entry for entry in menu if "pipeline" not in entry]
        self._axes = [axis for axis in axes if context.mesh.sizes[context.mesh.index(axis)] > 1]
        self._decided: dict[tuple[Part, ...], tuple[Decision, ...] | str] = {(): ()}
        self._alone = {
            (e, axis): self._baseline((p, axis) for p in e)
            for axis in self._axes
            for e in menu
            if is_asked or "feedforward" not in e or shards_heads_in_part(context, axis)
        }

    @property
    def decisions(self) -> list[Decision]:
        """The decisions of all strategies, for the actions of a ``Problem``."""
        return [*(d for baseline in self._alone.values() for d in baseline.decisions), *self._following]

    def seeds(self, problem: Problem, quick: bool) -> list[Actions]:
        """Returns the combinations as states of a problem, one of those that differ by an exchange of equal axes, without those
        that it cannot express."""
        every = dict.fromkeys(self._mirrored(b.parts) for b in self.costed(problem, quick) if b.applies)
        states = [state for parts in every if (state := problem.state(self._baseline(parts).decisions))]
        following = problem.state(self._following) or ()
        return states + [problem.joined(state, following) for state in ((), *states) if following]

    @cached_property
    def _following(self) -> list[Decision]:
        """Decisions by which the rest of the program follows pins that have no colors."""
        context, decisions = self._context, list[Decision]()
        for pin in (d for d in self._taken if isinstance(d, Pin) and not d.colors):
            for color, axes in zip(context.analysis.value_colors[pin.value], pin.spec, strict=False):
                for axis in (axes or ()) if color >= 0 else ():
                    decisions += shard_groups(context, [color], axis, [*self._taken, *decisions])
        return decisions

    def costed(self, problem: Problem, quick: bool = False) -> list[Baseline]:
        """Returns the combinations with their costs; those that do not apply come last. ``quick`` leaves out most."""
        width = _QUICK if quick else _WIDTH
        distinct: dict[object, Baseline] = {}
        partial = [self._cost(problem, self._baseline(()))]
        for number, axis in enumerate(self._axes):
            alone = [self._cost(problem, b) for (_, other), b in self._alone.items() if other == axis and b.applies]
            alone, before = _best(alone, width), _best(partial, width)
            if not quick:
                before += [b for b in partial if b not in before and _is_uniform(b, number)]
            extended = [
                self._baseline((*one.parts, *other.parts))
                for one in before
                for other in alone
                if len((_strategies(one) | _strategies(other)) & _SHARDED) <= 1
                # A quick look has a strategy on several axes only where it is alone there.
                and (not quick or _is_uniform_with(one, other, number) or not _strategies(one) & _strategies(other))
            ]
            partial += [self._cost(problem, baseline) for baseline in extended if baseline.applies]
        for baseline in sorted(partial, key=lambda b: len(b.parts)):
            distinct.setdefault(self._key(baseline), baseline)
        return [*distinct.values(), *(b for b in self._alone.values() if not b.applies)]

    def _cost(self, problem: Problem, baseline: Baseline) -> Baseline:
        parts = self._mirrored(baseline.parts)
        state = problem.state(self._baseline(parts).decisions)
        if state is not None:
            cost = problem.cost(state)
        else:
            cost = problem.model.evaluate(self._context.lower((*problem.base, *baseline.decisions)))
        return replace(baseline, cost=cost, fits=problem.fits(cost))

    def _mirrored(self, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        """Returns the strategies with equal axes exchanged, such that combinations that differ only in that become the same."""
        renamed: dict[str, str] = {}
        for axes in self._equal_axes:
            used = {axis: sorted(PARTS.index(part) for part, other in parts if other == axis) for axis in axes}
            renamed |= dict(zip(sorted(axes, key=lambda axis: (not used[axis], used[axis])), axes, strict=True))
        return _ordered((part, renamed[axis]) for part, axis in parts)

    @cached_property
    def _equal_axes(self) -> list[list[str]]:
        """The axes in lists: those of one list have equal costs, and no decision yet."""
        mesh, cost = self._context.mesh, self._context.cost
        pinned = any(isinstance(d, Pin) for d in self._taken)
        used = {d.axis for d in self._taken if not isinstance(d, Pin)}
        kinds: dict[object, list[str]] = {}
        for axis in self._axes:
            number = mesh.index(axis)
            kind = [mesh.sizes[number]] + [
                cost.step_s(Collective(kind, (number,), nbytes, nbytes))
                for kind in Kind
                for nbytes in (1.0, 1e9)
                if kind is not Kind.SLICE
            ]
            kinds.setdefault(axis if pinned or axis in used else tuple(kind), []).append(axis)
        return list(kinds.values())

    def _key(self, baseline: Baseline) -> object:
        """Returns a key that is equal for combinations that decide the same."""
        state = State(self._context.mesh, (*self._taken, *baseline.decisions))
        return state.order, state.kept, tuple(sorted(state.sides.items()))

    def _baseline(self, parts: Iterable[Part]) -> Baseline:
        ordered = _ordered(parts)
        decisions = self._decide(ordered)
        return Baseline(ordered, reason=decisions) if isinstance(decisions, str) else Baseline(ordered, decisions)

    def _decide(self, parts: tuple[Part, ...]) -> tuple[Decision, ...] | str:
        """Returns the decisions, or the reason why there are none."""
        if parts not in self._decided:
            before = self._decide(parts[:-1])
            self._decided[parts] = before if isinstance(before, str) else self._extended(before, parts[-1])
        return self._decided[parts]

    def _extended(self, before: tuple[Decision, ...], part: Part) -> tuple[Decision, ...] | str:
        try:
            new = named(*part).decide(self._context, [*self._taken, *before])
            if self._only is not None:
                new = [d for d in new if isinstance(d, Shard) and self._only.issuperset(d.colors)]
            decisions = (*before, *new)
            State(self._context.mesh, (*self._taken, *decisions))
        except DecisionError as error:
            return str(error)
        return decisions


def _ordered(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: PARTS.index(part[0])))


def _strategies(baseline: Baseline) -> set[str]:
    return {part for part, _ in baseline.parts}


def _is_uniform_with(one: Baseline, other: Baseline, axes: int) -> bool:
    """Returns whether a combination uses the strategies of another one, and no others, on all of this number of axes."""
    return _is_uniform(one, axes) and _strategies(one) == _strategies(other)


def _is_uniform(baseline: Baseline, axes: int) -> bool:
    """Returns whether a combination uses the same strategies on all of this number of axes."""
    entries: dict[str, list[str]] = {}
    for part, axis in baseline.parts:
        entries.setdefault(axis, []).append(part)
    return len(entries) == axes and all(entry == next(iter(entries.values())) for entry in entries.values())


def _best(partial: Sequence[Baseline], width: int) -> list[Baseline]:
    """Returns the combinations with the shortest times, and those with the smallest peaks; with and without heads."""
    if len(partial) <= 2 * width:
        return list(partial)
    costs = [(baseline, baseline.cost) for baseline in partial if baseline.cost is not None]
    by_time = sorted(costs, key=lambda pair: (pair[1].time_ps, pair[1].peak_blocks))
    by_peak = sorted(costs, key=lambda pair: (pair[1].peak_blocks, pair[1].time_ps))
    best = dict.fromkeys(_with_heads(b.parts) for b, _ in (*by_time[:width], *by_peak[:width]))
    return [b for parts in best for b in partial if _with_heads(b.parts) == parts]


def _with_heads(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns strategies with Megatron in place of that without heads: which of both is faster depends on the other axes."""
    return tuple(("megatron" if part == "feedforward" else part, axis) for part, axis in parts)
