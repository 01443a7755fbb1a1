"""What every search method is given: the actions, the costs of states, and which of two states is better.

A state is a sequence of actions in the order in which they are taken. Many sequences are one state: the order of two
decisions matters only if they give one axis to two units, or one unit two axes (``canonical``).

Actions are those that can matter: groups of the analysis on axes that divide one of their sizes, with the ways to resolve their
conflicts; and keeping whole, on an axis, the arguments that products use (parameters, as far as structure tells), so that
moments or activations can be sharded where parameters are not.

Goals come in order: a state that fits is better than one that does not; of two that fit the faster; of two that do not the
smaller. Ties go to the smaller or the faster, then to fewer decisions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.cost.model import Cost, CostModel
from shardwise.dims.analysis import Analysis, Group
from shardwise.evaluator.evaluator import Evaluator
from shardwise.evaluator.space import Space
from shardwise.ir.program import HEAVY
from shardwise.ir.traits import VIEWS
from shardwise.lowering.decisions import Decision, Keep, State
from shardwise.lowering.small import small_together
from shardwise.search.front import Front

#: Ways to resolve the conflicts of one group that are tried; with more bits than two, all alike or one different.
_MOST_BITS: Final = 2

Actions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """A state and what it costs."""

    state: Actions
    cost: Cost


class Problem:
    """A program on a mesh on hardware, ready to be searched."""

    def __init__(
        self,
        model: CostModel,
        base: Sequence[Decision] = (),
        axes: Sequence[str] | None = None,
        keeps: bool = True,
        inner: bool = True,
    ):
        """Without ``inner`` only groups with a dimension of an argument are decided on. ``keeping``: by axis the action that
        keeps all small arguments, which is no strategy and only taken with others (``shardwise.search.rest``)."""
        self.model, cost = model, model.cost
        self.analysis, self.mesh = model.structure.analysis, cost.placement.mesh
        analysis = self.analysis
        self.base = tuple(base)
        self.axes = tuple(self.mesh.names if axes is None else axes)
        arguments = {a.value for a in analysis.program.arguments}
        reached = (g for g in analysis.groups if inner or any(p.value in arguments for p in g.places))
        groups = [g for g in reached if g.matters]
        kept = kept_together(analysis) if keeps else ()
        small = {a: small_together(analysis, cost, self.mesh.index(a)) for a in self.axes} if keeps else {}
        small = {axis: values for axis, values in small.items() if values}
        units, bits = tuple(g.colors for g in groups), tuple(tuple(g.bits) for g in groups)
        self.space = Space(self.mesh, units, bits, tuple(dict.fromkeys((*kept, *small.values()))), self.base)
        made = [a for n, g in enumerate(groups) for a in self._shards(n, g)]
        made += [Keep(values, axis) for values in kept for axis in self.axes]
        self.actions = range(len(made))
        self.keeping = {self.mesh.index(axis): len(made) + k for k, axis in enumerate(small)}
        made += [Keep(values, axis) for axis, values in small.items()]
        self.evaluator = Evaluator(self.model, self.space, made)
        self.evaluations = 0
        self.front = Front()
        self._known: dict[object, Cost] = {}

    def _shards(self, unit: int, group: Group) -> list[Decision]:
        """Without what the base decided: a unit that has an axis, with its conflicts resolved, is not given it again."""
        taken = State(self.mesh, self.base)
        given = set(taken.order)
        found: list[Decision] = []
        for axis in self.axes:
            number = self.mesh.index(axis)
            size = self.mesh.sizes[number]
            resolved = {bit: side for bit in group.bits if (side := taken.sides.get((bit, number))) is not None}
            if all((c, number) in given for c in group.colors) and len(resolved) == len(group.bits):
                continue
            if size > 1 and any(s % size == 0 for s in group.sizes):
                ways = (
                    [resolved.get(b, s) for b, s in zip(group.bits, w, strict=True)] for w in _sides(len(group.bits))
                )
                found += [self.space.shard(unit, axis, way) for way in dict.fromkeys(map(tuple, ways))]
        return found

    def allowed(self, state: Actions) -> list[int]:
        """The actions that may follow: no unit twice on an axis."""
        taken = {self._place(n) for n in state}
        return [n for n in self.actions if self._place(n) not in taken]

    def _place(self, action: int) -> tuple[int, int]:
        slot = self.evaluator.actions[action].slot
        return (slot, -1) if slot >= 0 else (-1, action)

    def canonical(self, state: Actions) -> object:
        """Equal for sequences that are one state."""
        actions = self.evaluator.actions
        width = len(self.mesh.sizes)
        by_axis: dict[int, list[int]] = {}
        by_unit: dict[int, list[int]] = {}
        for n in state:
            slot = actions[n].slot
            if slot >= 0:
                by_axis.setdefault(slot % width, []).append(n)
                by_unit.setdefault(slot // width, []).append(n)
        keeps = frozenset(n for n in state if actions[n].slot < 0)
        orders = (tuple(order) for order in (*by_axis.values(), *by_unit.values()))
        return keeps, frozenset(orders)

    def costs(self, states: Sequence[Actions]) -> list[Cost]:
        """The costs of states; those that were asked for before are not evaluated again."""
        keys = [self.canonical(state) for state in states]
        new = {key: state for key, state in zip(keys, states, strict=True) if key not in self._known}
        if new:
            found = self.costs_once(list(new.values()))
            self._known.update(zip(new, found, strict=True))
        return [self._known[key] for key in keys]

    def costs_once(self, states: Sequence[Sequence[int]]) -> list[Cost]:
        """The costs of many different states that nobody will ask for again: they are not remembered."""
        self.evaluations += len(states)
        found = self.evaluated(states)
        self.front.add(found)
        return found

    def evaluated(self, states: Sequence[Sequence[int]]) -> list[Cost]:
        """By the cost model."""
        return self.evaluator.evaluate(states)

    def cost(self, state: Actions) -> Cost:
        return self.costs([state])[0]

    def fits(self, cost: Cost) -> bool:
        return cost.peak_blocks <= self.model.usable_blocks

    def rank(self, scored: Scored) -> tuple[int, int, int, int]:
        """Smaller is better."""
        if self.fits(scored.cost):
            return 0, scored.cost.time_ps, scored.cost.peak_blocks, len(scored.state)
        return 1, scored.cost.peak_blocks, scored.cost.time_ps, len(scored.state)

    def decisions(self, state: Actions) -> tuple[Decision, ...]:
        return (*self.base, *(self.evaluator.actions[n].decision for n in state))


def _sides(bits: int) -> list[tuple[int, ...]]:
    if bits <= _MOST_BITS:
        return list(itertools.product((0, 1), repeat=bits))
    return [(0,) * bits, (1,) * bits, *(tuple(int(k == b) for k in range(bits)) for b in range(bits))]


def kept_together(analysis: Analysis) -> tuple[tuple[int, ...], ...]:
    """Sets of arguments, with the outputs that replace them, that may be kept whole together.

    Arguments that a product or a lookup uses, directly or as a view: first those that an output of the same type replaces,
    which a training step calls its parameters; then the others, the parameters of a step that does not train.
    """
    program = analysis.program
    looked = {v for op in program.ops if op.unit in HEAVY or op.kind == "gather" for v in op.operands}
    for op in reversed(program.schedule):
        if op.kind in VIEWS and not looked.isdisjoint(op.results):
            looked.add(op.operands[0])
    used = [a.value for a in program.arguments if a.value in looked and "float" in program.values[a.value].dtype]
    outputs: dict[tuple[object, ...], list[int]] = {}
    color = {(a, d): c for a, d, c in _colors(analysis)}
    for v in program.outputs:
        outputs.setdefault(_type(analysis, v, color), []).append(v)
    replaced = [v for v in used if _type(analysis, v, color) in outputs]
    others = tuple(sorted(set(used) - set(replaced)))
    kept = [*replaced]
    for v in replaced:
        matches = outputs[_type(analysis, v, color)]
        if matches:
            kept.append(matches.pop(0))
    return tuple(found for found in (tuple(sorted(dict.fromkeys(kept))), others) if found)


def _colors(analysis: Analysis) -> list[tuple[int, int, int]]:
    names = analysis.names
    nodes = names.color[names.member_node].tolist()
    return list(zip(names.member_value.tolist(), names.member_dim.tolist(), nodes, strict=True))


def _type(analysis: Analysis, value: int, color: dict[tuple[int, int], int]) -> tuple[object, ...]:
    v = analysis.program.values[value]
    return (v.type_text, *(color.get((value, d), -1) for d in range(len(v.shape))))
