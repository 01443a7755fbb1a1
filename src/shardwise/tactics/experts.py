"""What an expert would try: the named strategies, and their combinations over the axes of a mesh.

Every axis has an *option* of the menu, one strategy or several that belong together (Megatron with the sequence beside it), or
is not used. Only one strategy that shards gradients and moments is used at a time. The strategies of a combination are applied
in the order of ``PARTS``, those of one kind in the order of the mesh.

Every combination is a seed of a search (``search/problem.py``), so that a plan is never worse than any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.model import Cost, CostModel
from shardwise.errors import DecisionError
from shardwise.lowering.decisions import Decision, State
from shardwise.search.problem import Problem
from shardwise.tactics.named import PARTS, named
from shardwise.tactics.tactic import Context, Tactic

#: What an axis may be used for: strategies that share it.
MENU: Final = tuple(
    tuple(words.split("+"))
    for words in (
        "expert edges dp fsdp zero1 zero2 context megatron megatron+sequence megatron+vocabulary "
        "megatron+sequence+vocabulary vocabulary dp+vocabulary"
    ).split()
)
_SHARDED: Final = frozenset(("fsdp", "zero1", "zero2"))

#: A strategy on an axis.
Part = tuple[str, str]
#: Strategies that share an axis.
Option = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Expert:
    """A combination of strategies and its cost, or the ``reason`` why it cannot be applied."""

    parts: tuple[Part, ...]
    tactics: tuple[Tactic, ...] = ()
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
    def applies(self) -> bool:
        return not self.reason

    @property
    def rank(self) -> tuple[int, ...]:
        """Smaller is better, as in ``Problem.rank``."""
        assert self.cost is not None
        figures = (self.cost.time_ps, self.cost.peak_blocks)
        return (0, *figures, len(self.parts)) if self.fits else (1, *figures[::-1], len(self.parts))

    def costed(self, problem: Problem, context: Context) -> Expert:
        """The same with its cost, from a problem that has it among its seeds."""
        state, model = problem.state(self.decisions), problem.model
        if state is not None:
            cost = problem.cost(state)
        else:
            cost = model.evaluate(context.lower((*problem.base, *self.decisions)))
        return replace(self, cost=cost, fits=cost.peak_blocks <= model.usable_blocks)


def combinations(axes: Sequence[str], menu: Sequence[tuple[str, ...]] = MENU) -> list[tuple[Part, ...]]:
    """All combinations for some axes, those with fewer strategies first.

    >>> combinations(["x"], [("dp",), ("megatron", "sequence")])
    [(), (('dp', 'x'),), (('megatron', 'x'), ('sequence', 'x'))]
    >>> len(combinations(["x", "y"], [("dp",), ("fsdp",), ("zero2",)]))  # fsdp and zero2 do not go together
    14
    """
    combined = []
    for options in itertools.product([(), *menu], repeat=len(axes)):
        parts = [(part, axis) for axis, option in zip(axes, options, strict=True) for part in option]
        if len({part for part, _ in parts} & _SHARDED) <= 1:
            combined.append(tuple(sorted(parts, key=lambda part: PARTS.index(part[0]))))
    return sorted(combined, key=len)


def decided(context: Context, axes: Sequence[str], taken: Sequence[Decision] = (), menu: Sequence[Option] = MENU) -> list[Expert]:
    """All combinations over some axes, on top of what is taken; of those that decide the same the one with the fewest
    strategies. They have no cost yet. Those that do not apply come last."""
    combined = _Combined(context, tuple(taken))
    used = [axis for axis in axes if context.mesh.sizes[context.mesh.index(axis)] > 1]
    alone = {(o, axis): combined.expert((part, axis) for part in o) for o in menu for axis in used}
    able = [o for o in menu if any(not alone[o, axis].reason for axis in used)]
    together = [
        combined.expert(parts)
        for parts in combinations(used, able)
        if not any(alone[o, axis].reason for axis in used if (o := tuple(p for p, a in parts if a == axis)))
    ]
    every = [*together, *alone.values()]
    distinct = {combined.key(expert): expert for expert in reversed(every) if not expert.reason}
    return [*reversed(distinct.values()), *(expert for expert in every if expert.reason)]


def experts(context: Context, model: CostModel, menu: Sequence[Option] = MENU) -> list[Expert]:
    """All combinations that apply, with their costs, those that fit and are fast first; then those that do not apply."""
    every = decided(context, context.mesh.names, menu=menu)
    able = [expert for expert in every if not expert.reason]
    problem = Problem(model, seeds=[expert.decisions for expert in able])
    costed = [expert.costed(problem, context) for expert in able]
    return [*sorted(costed, key=lambda expert: expert.rank), *every[len(able) :]]


class _Combined:
    """The decisions of combinations: many share their first strategies."""

    def __init__(self, context: Context, taken: tuple[Decision, ...]):
        self.context, self.taken = context, taken
        self._decided: dict[tuple[Part, ...], tuple[Decision, ...] | str] = {(): ()}

    def expert(self, parts: Iterable[Part]) -> Expert:
        parts = tuple(sorted(parts, key=lambda part: PARTS.index(part[0])))
        decisions = self._decide(parts)
        if isinstance(decisions, str):
            return Expert(parts, reason=decisions)
        return Expert(parts, tuple(named(*part) for part in parts), decisions)

    def key(self, expert: Expert) -> object:
        """Equal for combinations that decide the same."""
        state = State(self.context.mesh, (*self.taken, *expert.decisions))
        return state.order, state.kept, tuple(sorted(state.sides.items()))

    def _decide(self, parts: tuple[Part, ...]) -> tuple[Decision, ...] | str:
        """The decisions, or why there are none."""
        if parts not in self._decided:
            before = self._decide(parts[:-1])
            self._decided[parts] = before if isinstance(before, str) else self._extended(before, parts[-1])
        return self._decided[parts]

    def _extended(self, before: tuple[Decision, ...], part: Part) -> tuple[Decision, ...] | str:
        try:
            decisions = (*before, *named(*part).decide(self.context, [*self.taken, *before]))
            State(self.context.mesh, (*self.taken, *decisions))
        except DecisionError as error:
            return str(error)
        return decisions
