"""The problem that every search method solves: the actions, the costs of states, and which of two states is better.

A state is a sequence of actions in the order in which they are taken. Many sequences are one state: the order of two
decisions matters only if they give one axis to two units, or one unit two axes (``canonical``).

Actions shard the groups of the analysis that matter, on axes that divide one of their sizes, or padded where products have a
size that the axis does not divide (``shardwise.lowering.padding``), with the resolutions of their conflicts; or keep the
arguments that products use (usually parameters) replicated on an axis, so that moments or activations can be sharded where
parameters are not.

``shardwise.search.goal`` says which of two states is better; of equal ones that with fewer decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

from shardwise.cost.model import Cost, CostModel
from shardwise.dims.analysis import Analysis, Group
from shardwise.evaluator.evaluator import Evaluator
from shardwise.evaluator.space import Space
from shardwise.lowering.decisions import Decision, Keep, Shard, State
from shardwise.lowering.small import keep_small
from shardwise.search.bounds import least_bytes
from shardwise.search.goal import FASTEST, Goal, pareto

#: Groups with more conflicts than this have not all their resolutions tried, but those with all alike or one different.
_MOST_BITS: Final = 2

Actions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """A state and its cost."""

    state: Actions
    cost: Cost

    @property
    def point(self) -> tuple[int, int]:
        """Time and peak, as in ``search/goal.py``."""
        return self.cost.time_ps, self.cost.peak_blocks


class Problem:
    """A program on a mesh on hardware, ready to be searched. Without ``seeded`` it does not start from named strategies."""

    seeded: ClassVar = True

    def __init__(
        self,
        model: CostModel,
        base: Sequence[Decision] = (),
        axes: Sequence[str] | None = None,
        extra: Iterable[Decision] = (),
        keeps: bool = True,
        only: Collection[int] | None = None,
        goal: Goal = FASTEST,
    ):
        """``base`` is decided already, and small arguments are kept replicated. ``extra``: decisions of strategies; those that
        are no actions of the search become actions that only seeds take. Without ``keeps`` there are no decisions that keep
        arguments replicated; with ``only`` the search decides about groups with a dimension of these arguments."""
        self.model, self.goal, cost = model, goal, model.cost
        self.analysis, self.mesh = model.structure.analysis, cost.placement.mesh
        analysis = self.analysis
        self.decided = tuple(base)
        self.base = (*self.decided, *keep_small(model.structure, cost, self.mesh, base))
        self.axes = tuple(self.mesh.names if axes is None else axes)
        wanted = list(dict.fromkeys(extra))
        of_seeds = {d.colors for d in wanted if isinstance(d, Shard)}
        groups, together = self._groups(only), self._keep_sets(only) if keeps else ()
        others = [g for g in analysis.groups if g.colors in of_seeds and g not in groups]
        keep_sets = tuple(dict.fromkeys((*together, *(d.values for d in wanted if isinstance(d, Keep)))))
        units, bits = (tuple(tuple(getattr(g, name)) for g in (*groups, *others)) for name in ("colors", "bits"))
        padded = [(n, a) for n, g in enumerate(groups) for a in map(self.mesh.index, self.axes) if self._pads(g, a)]
        wanted_padded = [d for d in wanted if isinstance(d, Shard) and d.padded and d.colors in units]
        padded += [(units.index(d.colors), self.mesh.index(d.axis)) for d in wanted_padded]
        self.space = Space(self.mesh, units, bits, keep_sets, self.base, frozenset(padded))
        decisions = [shard for n, g in enumerate(groups) for shard in self._shards(n, g)]
        decisions += [Keep(values, axis) for values in together for axis in self.axes]
        self.actions = range(len(decisions))
        able = [d for d in wanted if isinstance(d, Keep) or (isinstance(d, Shard) and d.colors in units)]
        decisions += [d for d in able if d not in decisions]
        self.evaluator = Evaluator(self.model, self.space, decisions)
        self._numbers = {d: n for n, d in enumerate(decisions)}
        # Actions with one slot exclude each other: those of one unit on one axis. Keeps exclude only themselves.
        self._slots = [a.slot if a.slot >= 0 else ~n for n, a in enumerate(self.evaluator.actions)]
        self.seeds: tuple[Actions, ...] = ()
        self.evaluations = 0
        self.front: tuple[Scored, ...] = ()
        self._costs: dict[object, Cost] = {}

    def _groups(self, only: Collection[int] | None) -> list[Group]:
        """Returns the groups that are decided."""
        return decided_groups(self.analysis, only)

    def _keep_sets(self, only: Collection[int] | None) -> tuple[tuple[int, ...], ...]:
        """Returns the sets of values that may be kept replicated."""
        replaced, others = (sorted(itertools.chain(*sets)) for sets in kept_alone(self.analysis, only))
        return tuple(tuple(values) for values in (replaced, others) if values)

    def start_from(self, seeds: Iterable[Actions]) -> None:
        """Sets the states from which searches of this problem start."""
        self.seeds = tuple(dict.fromkeys(seeds))

    def state(self, decisions: Iterable[Decision]) -> Actions | None:
        """Returns the state of some decisions on top of the base; None where one of them is no action."""
        state = tuple(self._numbers.get(d, -1) for d in decisions)
        return None if -1 in state else state

    def able(self, decisions: Iterable[Decision]) -> Actions:
        """The state of those decisions that are actions."""
        return tuple(self._numbers[d] for d in decisions if d in self._numbers)

    def _shards(self, unit: int, group: Group) -> list[Decision]:
        """Returns the decisions that shard a unit, other than those of the base."""
        base = State(self.mesh, self.base)
        shards: list[Decision] = []
        for axis in self.axes:
            number = self.mesh.index(axis)
            size = self.mesh.sizes[number]
            resolved = {bit: base.sides[bit, number] for bit in group.bits if (bit, number) in base.sides}
            if all((c, number) in base.order for c in group.colors) and len(resolved) == len(group.bits):
                continue
            able = {False: size > 1 and any(s % size == 0 for s in group.sizes), True: self._pads(group, number)}
            for padded in (padded for padded, is_able in able.items() if is_able):
                sides = (zip(group.bits, s, strict=True) for s in _sides(len(group.bits)))
                resolutions = (tuple(resolved.get(bit, side) for bit, side in pairs) for pairs in sides)
                shards += [self.space.shard(unit, axis, r, padded) for r in dict.fromkeys(resolutions)]
        return shards

    def _pads(self, group: Group, axis: int) -> bool:
        """Returns whether a decision pads a group on an axis."""
        return bool(self.model.structure.padded_sizes(group, self.mesh.sizes[axis]))

    def allowed(self, state: Actions) -> list[int]:
        """Returns the actions that may follow: a unit is not sharded twice on an axis."""
        taken = {self._slots[n] for n in state}
        return [n for n in self.actions if self._slots[n] not in taken]

    def joined(self, state: Actions, others: Actions) -> Actions:
        """A state with further actions, those of them that may follow."""
        taken = {self._slots[n] for n in state}
        return (*state, *(n for n in others if self._slots[n] not in taken))

    def canonical(self, state: Actions) -> object:
        """Returns a key that is equal for sequences that are one state."""
        orders: dict[int, list[int]] = {}  # by axis, and by unit as a negative number
        keeps = []
        for n in state:
            action = self.evaluator.actions[n]
            if action.slot < 0:
                keeps.append(n)
                continue
            orders.setdefault(action.axis, []).append(n)
            orders.setdefault(~action.unit, []).append(n)
        return frozenset(keeps), frozenset(map(tuple, orders.values()))

    def costs(self, states: Sequence[Actions]) -> list[Cost]:
        """Returns the costs of states; those that were asked for before are not evaluated again."""
        keys = [self.canonical(state) for state in states]
        new = {key: state for key, state in zip(keys, states, strict=True) if key not in self._costs}
        if new:
            self._costs.update(zip(new, self.costs_once(list(new.values())), strict=True))
        return [self._costs[key] for key in keys]

    def costs_once(self, states: Sequence[Sequence[int]]) -> list[Cost]:
        """Returns the costs of different states that are not asked for again, and so are not cached."""
        self.evaluations += len(states)
        costs = self.evaluator.evaluate(states)
        scored = {s.point: s for s in (*map(Scored, map(tuple, states), costs), *self.front)}
        self.front = tuple(scored[point] for point in pareto(scored))
        return costs

    def cost(self, state: Actions) -> Cost:
        return self.costs([state])[0]

    @cached_property
    def least_bytes(self) -> int:
        """A lower bound on the peak memory of all states."""
        return least_bytes(self.model, self.decided)

    @cached_property
    def perfect_ps(self) -> int:
        """The step time of perfect scaling: the compute of one device, divided by the number of devices."""
        return self.cost(()).compute_ps // self.mesh.devices

    def fits(self, cost: Cost) -> bool:
        return cost.peak_blocks <= self.model.usable_blocks

    def rank(self, scored: Scored, exact: bool = False) -> tuple[int, int, int, int]:
        """Returns a key for sorting: the better state has the smaller one (``Goal.rank``)."""
        return *self.goal.rank(scored.cost, self.model.usable_blocks, exact), len(scored.state)

    def decisions(self, state: Actions) -> tuple[Decision, ...]:
        """Returns the decisions of a state, without those about small arguments."""
        return (*self.decided, *(self.evaluator.actions[n].decision for n in state))


def _sides(bits: int) -> list[tuple[int, ...]]:
    if bits <= _MOST_BITS:
        return list(itertools.product((0, 1), repeat=bits))
    return [(0,) * bits, (1,) * bits, *(tuple(int(k == b) for k in range(bits)) for b in range(bits))]


def decided_groups(analysis: Analysis, only: Collection[int] | None = None) -> list[Group]:
    """Returns the groups that matter, or ``only`` those with a dimension of some arguments."""
    reached = (g for g in analysis.groups if only is None or any(p.value in only for p in g.places))
    return [g for g in reached if g.matters]


def kept_alone(
    analysis: Analysis, only: Collection[int] | None = None
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns the arguments that may be kept replicated, all or ``only`` some, each with the output that replaces it.

    Arguments that a product or a lookup uses, directly or as a view: first those that an output replaces, the parameters of a
    training step; then the others, the parameters of a step that does not train.
    """
    program = analysis.program

    replaced, others = list[tuple[int, ...]](), list[tuple[int, ...]]()
    used = [a.value for a in program.arguments if a.value in program.multiplied]
    for v in (v for v in used if "float" in program.values[v].dtype):
        if v in analysis.replaced_by and (only is None or v in only):
            replaced.append((v, analysis.replaced_by[v]))
        elif only is None or v in only:
            others.append((v,))
    return replaced, others
