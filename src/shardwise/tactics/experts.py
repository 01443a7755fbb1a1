"""What an expert would try: the named strategies, and their combinations over the axes of a mesh.

Every axis has an *option* of the menu, one strategy or several that belong together (Megatron with the sequence beside it), or
is not used. Only one strategy that shards gradients and moments is used at a time. The strategies of a combination are applied
in the order of ``PARTS``, those of one kind in the order of the mesh.

Strategies may decide what is no action of a search's ``Problem``. So a combination is a list of decisions, evaluated by the
cost model with small arguments kept replicated, as those of a plan are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.model import Cost, CostModel
from shardwise.errors import DecisionError
from shardwise.lowering.candidates import Candidates
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.lowered import Memo
from shardwise.lowering.small import keep_small
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
#: The usual combinations: strategies for all axes, or for all but the last and those for the last.
USUAL: Final = (
    (("dp",), ()),
    (("fsdp",), ()),
    (("fsdp",), ("megatron",)),
    (("dp",), ("megatron",)),
    (("fsdp",), ("megatron", "sequence")),
)
_SHARDED: Final = frozenset(("fsdp", "zero1", "zero2"))

#: A strategy on an axis.
Part = tuple[str, str]


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
        return self.cost is not None


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


def experts(context: Context, model: CostModel, menu: Sequence[tuple[str, ...]] = MENU) -> list[Expert]:
    """All combinations that apply, those that fit and are fast first; then those that do not apply.

    Of combinations that decide the same, the one with the fewest strategies is given.
    """
    evaluated, axes = _Evaluated(context, model), _used_axes(context)
    alone = {(option, axis): evaluated.expert((part, axis) for part in option) for option in menu for axis in axes}
    able = {axis: [(), *(o for o in menu if alone[o, axis].applies)] for axis in axes}
    combined = [
        evaluated.expert(parts)
        for parts in combinations(axes, [o for o in menu if any(o in options for options in able.values())])
        if all(tuple(p for p, a in parts if a == axis) in able[axis] for axis in axes)
    ]
    refused = [expert for expert in (*alone.values(), *combined) if not expert.applies]
    return [*evaluated.distinct(combined), *refused]


def usual(context: Context, model: CostModel, seconds: float = 1.0) -> list[Expert]:
    """The combinations of ``USUAL`` that apply, those that fit and are fast first: as many as there is time for, at least
    one."""
    evaluated, end, axes = _Evaluated(context, model), time.perf_counter() + seconds, _used_axes(context)

    def tried() -> Iterator[Expert]:
        for words, last in USUAL if axes else ():
            parts = [(word, axis) for word in words for axis in (axes[:-1] if last else axes)]
            yield evaluated.expert([*parts, *((part, axes[-1]) for part in last)])
            if time.perf_counter() > end:
                return

    return evaluated.distinct(tried())


def _used_axes(context: Context) -> list[str]:
    return [name for name, size in zip(context.mesh.names, context.mesh.sizes, strict=True) if size > 1]


class _Evaluated:
    """Decisions and costs of combinations: many share their first strategies, and some decide the same."""

    def __init__(self, context: Context, model: CostModel):
        memo = context.memo or Memo(Candidates(model.structure, context.mesh, model.cost))
        self.context, self.model = replace(context, memo=memo), model
        self._decided: dict[tuple[Part, ...], tuple[Decision, ...] | str] = {(): ()}
        self._costs: dict[object, Cost] = {}

    def expert(self, parts: Iterable[Part]) -> Expert:
        parts = tuple(sorted(parts, key=lambda part: PARTS.index(part[0])))
        decided = self._decide(parts)
        if isinstance(decided, str):
            return Expert(parts, reason=decided)
        key = self._key(decided)
        if key not in self._costs:
            self._costs[key] = self._cost(decided)
        cost, tactics = self._costs[key], tuple(named(*part) for part in parts)
        return Expert(parts, tactics, decided, cost, cost.peak_blocks <= self.model.usable_blocks)

    def distinct(self, experts: Iterable[Expert]) -> list[Expert]:
        """Those that apply, the first of those that decide the same, in the order of ``Problem.rank``."""
        ranked: dict[object, tuple[tuple[int, ...], Expert]] = {}
        for expert in experts:
            if expert.cost is not None:
                figures = (expert.cost.time_ps, expert.cost.peak_blocks)
                rank = (0, *figures) if expert.fits else (1, *figures[::-1])
                ranked.setdefault(self._key(expert.decisions), ((*rank, len(expert.parts)), expert))
        return [expert for _, expert in sorted(ranked.values(), key=lambda pair: pair[0])]

    def _key(self, decisions: tuple[Decision, ...]) -> object:
        """Equal for decisions that mean the same."""
        state = State(self.context.mesh, decisions)
        return state.order, state.kept, tuple(sorted(state.sides.items()))

    def _decide(self, parts: tuple[Part, ...]) -> tuple[Decision, ...] | str:
        """The decisions, or why there are none."""
        if parts not in self._decided:
            taken = self._decide(parts[:-1])
            self._decided[parts] = taken if isinstance(taken, str) else self._extended(taken, parts[-1])
        return self._decided[parts]

    def _extended(self, taken: tuple[Decision, ...], part: Part) -> tuple[Decision, ...] | str:
        try:
            decisions = (*taken, *named(*part).decide(self.context, taken))
            State(self.context.mesh, decisions)
        except DecisionError as error:
            return str(error)
        return decisions

    def _cost(self, decisions: tuple[Decision, ...]) -> Cost:
        lowered = self.context.lower(decisions)
        small = keep_small(lowered, self.model.cost)
        return self.model.evaluate(self.context.lower((*decisions, *small)) if small else lowered)
