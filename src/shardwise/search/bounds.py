"""What every state takes at least: a lower bound on peak memory over all states of a problem.

The problem. That a search found nothing that fits proves nothing. A bound that no state can go below proves it, tells which
tensors are to blame, and costs milliseconds where the search costs seconds.

The idea. When values live does not depend on the state (``shardwise.cost.memory.Lifetimes``), only what each of them takes. At
each point the sum over the values alive there of the least that *each for itself* could take is no more than the sum under any
one state; so is the largest of these sums. With ``A(v)`` the shardings that a state may give a value ``v`` (``_ways``),

    bound = max over points t of the sum over values v alive at t of min over s in A(v) of blocks(v, s)

``A(v)`` follows the storage rule (``shardwise.lowering.storage``): every mesh axis lies on one dimension of a value or on none,
and on one only if the dimension's color can be given it, by the base or by a decision of the search, and if sizes divide.
Pinned dimensions lie as they are pinned; axes on which the base keeps a value whole are not used; a dimension whose conflict
can't be resolved stays whole. Values that wait to be reduced, or that stay as they are computed, are no smaller than the best
of these.

Weak. Values are counted as if each could choose for itself, and the copies that resharding makes are not counted: a plan in
which every value is as small as it can be may have to gather a great deal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardwise.cost.memory import BLOCK, Allocation, blocks
from shardwise.cost.model import CostModel, memory_curve
from shardwise.cost.predict import Alive
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Origin, Value
from shardwise.ir.traits import BORDERS
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.sharding import Sharding
from shardwise.lowering.storage import kept_axes

#: How many of the tensors to blame are named.
_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class Bound:
    """No state has a smaller peak. ``source`` is the line at which it is reached, empty where that is the whole program;
    ``alive`` what is to blame there, the largest first, the rest as one."""

    peak_bytes: int
    source: str
    alive: tuple[Alive, ...]


def peak_bound(
    model: CostModel, base: Sequence[Decision] = (), axes: Sequence[str] | None = None, mesh: MeshAxes | None = None
) -> Bound:
    """The bound over all states that a search on top of ``base`` may decide on, over some mesh axes or all.

    ``mesh`` where it is another than that of the model's placement.

    >>> import jax, shardwise
    >>> from shardwise.lowering.local_cost import HardwareCost
    >>> from shardwise.lowering.structure import Structure
    >>> from shardwise.hardware.mesh import MeshAxes
    >>> x, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(4096, 1024), (1024, 1024)])
    >>> structure = Structure.of(shardwise.analyze(lambda x, w: x @ w, x, w))
    >>> found = peak_bound(CostModel(structure, HardwareCost.of(MeshAxes.of({"data": 4}))))
    >>> found.peak_bytes / 2**20, [(a.label, a.nbytes / 2**20) for a in found.alive[1:]]
    (9.125, [('x', 4.0), ('w', 1.0)])
    """
    least = _Least(model, mesh or model.cost.placement.mesh, base, axes)
    allocations = [a for value in model.life.values() for a in least.allocations(value)]
    curve = memory_curve(model.life.points, allocations)
    at = int(np.argmax(curve))
    held = [a for a in allocations if a.first <= at <= a.last]
    return Bound(int(curve[at]) * BLOCK, _source(model, at), tuple(_blamed(model, held)))


def finest(devices: int) -> MeshAxes:
    """A mesh whose bound is one for every mesh of so many devices: any axis is some of its axes together.

    >>> finest(12)
    MeshAxes(names=('0', '1', '2'), sizes=(2, 2, 3))
    """
    sizes: list[int] = []
    prime = 2
    while devices > 1:
        while devices % prime == 0:
            sizes.append(prime)
            devices //= prime
        prime += 1
    return MeshAxes(tuple(map(str, range(len(sizes)))), tuple(sizes))


class _Least:
    """The least that values can take."""

    def __init__(self, model: CostModel, mesh: MeshAxes, base: Sequence[Decision], axes: Sequence[str] | None):
        self.model, self.mesh = model, mesh
        self._state = State(mesh, tuple(base))
        self._kept = kept_axes(model.structure.program, self._state)
        self._given = self._reach(mesh.names if axes is None else axes)
        self._known: dict[object, tuple[tuple[int, ...], ...]] = {}
        self._sizes: dict[object, int] = {}

    def _reach(self, axes: Iterable[str]) -> dict[int, frozenset[int]]:
        """By color: the axes that it may be given."""
        numbers = frozenset(map(self.mesh.index, axes))
        groups = self.model.structure.analysis.groups
        found = {color: numbers for group in groups if group.matters for color in group.colors}
        for color, axis in self._state.order:
            found[color] = found.get(color, frozenset()) | {axis}
        return found

    def allocations(self, value: int) -> Iterator[Allocation]:
        """As of ``value_allocations``, each as small as it can be."""
        life, tile = self.model.life, self.model.cost.profile.vector_tile
        v, ways = self.model.structure.program.values[value], self._ways(value)
        if value in life.live:
            yield Allocation("value", value, self._least(v, ways), *life.live[value])
        if value in life.windowed and all(shape[0] < tile[0] for shape in ways):
            yield Allocation("operand", value, self._least(v, ways), *life.windowed[value])
        if value in life.narrowed:
            itemsize, first, last = life.narrowed[value]
            narrow = replace(v, itemsize=itemsize, origin=Origin.RESULT)
            yield Allocation("narrow copy", value, self._least(narrow, ways), first, last)

    def _least(self, value: Value, ways: tuple[tuple[int, ...], ...]) -> int:
        key = (ways, value.itemsize, value.origin)
        if key not in self._sizes:
            whole, profile = Sharding.whole(len(value.shape)), self.model.cost.profile
            self._sizes[key] = min(blocks(replace(value, shape=s), whole, self.mesh, profile) for s in ways)
        return self._sizes[key]

    def _ways(self, value: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that one device's part of a value may have. More parts are not always less: tiles are padded."""
        s, shape = self.model.structure, self.model.structure.program.values[value].shape
        kept, pinned = self._kept.get(value, frozenset()), self._state.pinned.get(value)
        able = [self._given.get(c, frozenset()) - kept for c in s.colors[value]]
        for first, second, bit in s.clashes.by_op.get(s.program.definitions[value][0], ()):
            if bit < 0 and first in s.nodes[value] and second in s.nodes[value]:
                able = [
                    a if n not in (first, second) else frozenset() for a, n in zip(able, s.nodes[value], strict=True)
                ]
        parts = [1] * len(shape)
        if pinned is not None:
            fixed = (*pinned, *((),) * (len(shape) - len(pinned)))
            used = {a for own in fixed for a in own or ()}
            able = [a - used if own is None else frozenset() for a, own in zip(able, fixed, strict=True)]
            for d, own in enumerate(fixed):
                for axis in own or ():
                    parts[d] *= self.mesh.sizes[axis]
        key = (shape, tuple(able), tuple(parts))
        if key not in self._known:
            self._known[key] = tuple(_cut(shape, able, parts, self.mesh.sizes))
        return self._known[key]


def _cut(
    shape: tuple[int, ...], able: Sequence[frozenset[int]], parts: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """The local shapes under all ways to give each axis to one of the dimensions that are able to have it, or to none."""
    found = {tuple(parts)}
    for axis, size in enumerate(sizes):
        dims = [d for d, axes in enumerate(able) if axis in axes]
        more = {
            (*own[:d], own[d] * size, *own[d + 1 :]) for own in found for d in dims if not shape[d] % (own[d] * size)
        }
        found |= more
    for own in sorted(found):
        yield tuple(-(-size // n) for size, n in zip(shape, own, strict=True))


def _source(model: CostModel, at: int) -> str:
    """The line that runs at a point."""
    program = model.structure.program
    ran = [(p, k) for k, p in model.life.point.items() if p <= at and program.ops[k].kind not in BORDERS]
    if not ran:
        return ""
    source = program.source_of(program.ops[max(ran)[1]])
    return str(source) if source.file else ""


def _blamed(model: CostModel, held: Sequence[Allocation]) -> Iterator[Alive]:
    program = model.structure.program
    ordered = sorted(held, key=lambda a: (-a.blocks, a.value, a.what))
    for a in ordered[:_NAMED]:
        op = program.ops[program.definitions[a.value][0]]
        # What a loop leaves behind was made by its body: the loop's own line is that of all of them.
        stacked = op.kind == "scan.output" and not program.values[a.value].path
        label = f"stack of {program.label(op.operands[0])}" if stacked else program.label(a.value)
        named = label if a.what == "value" else f"{a.what} of {label}"
        yield Alive(named, a.blocks * BLOCK, str(program.source_of(op)))
    rest = sum(a.blocks for a in ordered[_NAMED:])
    if rest:
        yield Alive(f"{len(ordered) - _NAMED} more", rest * BLOCK, "")
