"""What an expert would try: the named strategies, and their combinations over the axes of a mesh.

Every axis is given an *option* of the menu, one strategy or several that belong together (Megatron with the sequence beside
it), or is left unused. An option may have several axes. Combinations keep to what people do: gradients and moments are sharded
in one way, on all its axes or beside plain data parallelism. The strategies of a combination are applied in the order of
``PARTS``, of one kind in the order of the mesh.

Strategies decide on colors and groups as they see fit, also on what is no action of a search's ``Problem``; so an expert is a
list of decisions, costed by the plain model with small arguments kept whole, as a plan would be.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
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
#: What is tried first of all: on all axes, or on all but the last, which is for the others.
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
    """A combination of strategies, and what it costs; or the ``reason`` why it cannot be applied."""

    parts: tuple[Part, ...]
    tactics: tuple[Tactic, ...] = ()
    decisions: tuple[Decision, ...] = ()
    cost: Cost | None = None
    fits: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        return " + ".join(f"{part} {axis}" for part, axis in self.parts) or "replicated"

    @property
    def applies(self) -> bool:
        return self.cost is not None


def combinations(axes: Sequence[str], menu: Sequence[tuple[str, ...]] = MENU) -> list[tuple[Part, ...]]:
    """All sensible ways to use the axes, those with fewer strategies first; the first uses none.

    >>> combinations(["x"], [("dp",), ("megatron", "sequence")])
    [(), (('dp', 'x'),), (('megatron', 'x'), ('sequence', 'x'))]
    >>> len(combinations(["x", "y"], [("dp",), ("fsdp",), ("zero2",)]))  # fsdp and zero2 do not go together
    14
    """
    found = []
    for options in itertools.product([(), *menu], repeat=len(axes)):
        parts = [(part, axis) for axis, option in zip(axes, options, strict=True) for part in option]
        if len({part for part, _ in parts} & _SHARDED) <= 1:
            found.append(tuple(sorted(parts, key=lambda p: PARTS.index(p[0]))))
    return sorted(found, key=len)


def experts(context: Context, model: CostModel, menu: Sequence[tuple[str, ...]] = MENU) -> list[Expert]:
    """All combinations that apply, those that fit and are fast first; then, once each, the options that do not apply.

    Combinations that decide the same are one, that with the fewest strategies.
    """
    tried = _Tried(context, model)
    axes = [n for n, size in zip(context.mesh.names, context.mesh.sizes, strict=True) if size > 1]
    alone = {(option, axis): tried.expert([(part, axis) for part in option]) for option in menu for axis in axes}
    able = {axis: [o for o in menu if alone[o, axis].applies] for axis in axes}
    found: dict[object, Expert] = {}
    refused = [expert for expert in alone.values() if not expert.applies]
    for parts in combinations(axes, [o for o in menu if any(o in options for options in able.values())]):
        if any(tuple(p for p, a in parts if a == axis) not in [(), *able[axis]] for axis in axes):
            continue
        expert = tried.expert(parts)
        if expert.applies:
            found.setdefault(tried.key(expert), expert)
        else:
            refused.append(expert)
    return [*sorted(found.values(), key=_rank), *refused]


def usual(context: Context, model: CostModel, seconds: float = 1.0) -> list[Expert]:
    """The few that everybody tries first, over all axes or with the last for tensors; those that fit and are fast first. As
    many are tried as there is time for, one at least."""
    tried, end = _Tried(context, model), time.perf_counter() + seconds
    axes = [n for n, size in zip(context.mesh.names, context.mesh.sizes, strict=True) if size > 1]
    found: dict[object, Expert] = {}
    for words, last in USUAL if axes else ():
        parts = [(word, axis) for word in words for axis in (axes[:-1] if last else axes)]
        expert = tried.expert(sorted([*parts, *((part, axes[-1]) for part in last)], key=lambda p: PARTS.index(p[0])))
        if expert.applies:
            found.setdefault(tried.key(expert), expert)
        if time.perf_counter() > end:
            break
    return sorted(found.values(), key=_rank)


def _rank(expert: Expert) -> tuple[int, int, int, int]:
    """As of ``Problem.rank``."""
    assert expert.cost is not None
    time, peak = expert.cost.time_ps, expert.cost.peak_blocks
    return (0, time, peak, len(expert.parts)) if expert.fits else (1, peak, time, len(expert.parts))


class _Tried:
    """What was decided and costed already: combinations share their beginnings."""

    def __init__(self, context: Context, model: CostModel):
        memo = context.memo or Memo(Candidates(model.structure, context.mesh, model.cost))
        self.context, self.model = replace(context, memo=memo), model
        self._decided: dict[tuple[Part, ...], tuple[Decision, ...] | str] = {(): ()}
        self._tactics: dict[Part, Tactic] = {}
        self._costs: dict[object, Cost] = {}

    def expert(self, parts: Sequence[Part]) -> Expert:
        parts = tuple(parts)
        decided = self._decide(parts)
        if isinstance(decided, str):
            return Expert(parts, reason=decided)
        key = self._state(decided)
        if key not in self._costs:
            self._costs[key] = self._cost(decided)
        cost = self._costs[key]
        tactics = tuple(self._tactics[part] for part in parts)
        return Expert(parts, tactics, decided, cost, cost.peak_blocks <= self.model.usable_blocks)

    def key(self, expert: Expert) -> object:
        """Equal for experts that decide the same."""
        return self._state(expert.decisions)

    def _state(self, decisions: tuple[Decision, ...]) -> object:
        state = State(self.context.mesh, decisions)
        return state.order, state.kept, tuple(sorted(state.sides.items()))

    def _decide(self, parts: tuple[Part, ...]) -> tuple[Decision, ...] | str:
        """The decisions, or why there are none."""
        if parts not in self._decided:
            before = self._decide(parts[:-1])
            self._decided[parts] = before if isinstance(before, str) else self._more(before, parts[-1])
        return self._decided[parts]

    def _more(self, taken: tuple[Decision, ...], part: Part) -> tuple[Decision, ...] | str:
        try:
            if part not in self._tactics:
                self._tactics[part] = named(*part)
            made = (*taken, *self._tactics[part].decide(self.context, taken))
            State(self.context.mesh, made)
        except DecisionError as error:
            return str(error)
        return made

    def _cost(self, decisions: tuple[Decision, ...]) -> Cost:
        lowered = self.context.lower(decisions)
        small = keep_small(lowered, self.model.cost)
        return self.model.evaluate(self.context.lower((*decisions, *small)) if small else lowered)
