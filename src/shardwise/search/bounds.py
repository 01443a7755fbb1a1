"""A lower bound on peak memory over all states of a problem.

The problem: a search that finds nothing that fits proves nothing. A lower bound proves it in milliseconds, and tells which
tensors are to blame.

The idea. The lifetimes of values do not depend on the state (``shardwise.cost.memory.Lifetimes``), only their sizes do. With
``A(v)`` the shardings that a state may give a value ``v`` (``_local_shapes``),

    bound = max over points t of the sum over values v alive at t of min over s in A(v) of blocks(v, s)

``A(v)`` follows the storage rule (``shardwise.lowering.storage``): every mesh axis shards one dimension of a value or none,
and only one whose color the base or the search can shard on it, and whose size it divides, or that can be padded
(``shardwise.lowering.padding``). Pinned dimensions are sharded as they are pinned; axes on which the base keeps a value
replicated are not used; nor are dimensions whose conflict cannot be resolved. Values that wait to be reduced, or that stay as
they are computed, are no smaller than the best of these.

Weak: the best sharding is chosen for each value separately, and the copies that reshards make are not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.cost.memory import BLOCK, Allocation, Lifetimes, blocks
from shardwise.cost.model import CostModel, in_use, memory_curve
from shardwise.cost.predict import Alive, alive
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Origin, Value
from shardwise.ir.traits import BORDERS
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.padding import block, is_inner
from shardwise.lowering.sharding import Sharding
from shardwise.lowering.storage import sets_of_views
from shardwise.lowering.structure import Structure


@dataclass(frozen=True)
class Bound:
    """No state has a smaller peak. ``at`` is the point at which memory peaks."""

    peak_bytes: int
    at: int
    least: _Least

    @property
    def source(self) -> str:
        """The line that runs at the peak, empty if it is not in the user's program."""
        return _source(self.least.model, self.at)

    @property
    def alive(self) -> tuple[Alive, ...]:
        """The largest tensors at the peak, and the rest as one."""
        model = self.least.model
        allocations = (a for value in model.life.values() for a in self.least.allocations(value))
        at_peak = [a for a in allocations if a.first <= self.at <= a.last]
        return tuple(alive(model.structure.program, at_peak, self.peak_bytes // BLOCK))


def peak_bound(model: CostModel, base: Sequence[Decision] = (), mesh: MeshAxes | None = None) -> Bound:
    """Returns the bound over all states of a search on top of ``base``, on ``mesh`` or that of the model's placement.

    >>> import jax, shardwise
    >>> from shardwise.lowering.local_cost import HardwareCost
    >>> from shardwise.lowering.structure import Structure
    >>> from shardwise.hardware.mesh import MeshAxes
    >>> x, w = (jax.ShapeDtypeStruct(s, "float32") for s in [(4096, 1024), (1024, 1024)])
    >>> structure = Structure(shardwise.analyze(lambda x, w: x @ w, x, w))
    >>> bound = peak_bound(CostModel(structure, HardwareCost.of(MeshAxes.of({"data": 4}))))
    >>> bound.peak_bytes / 2**20, [(a.label, a.nbytes / 2**20) for a in bound.alive[1:]]
    (9.125, [('x', 4.0), ('w', 1.0)])
    """
    least = _Least(model, mesh or model.cost.placement.mesh, base)
    curve = least.curve()
    at = int(np.argmax(curve))
    return Bound(int(curve[at]) * BLOCK, at, least)


def least_bytes(model: CostModel, base: Sequence[Decision] = ()) -> int:
    """Returns the bytes of the bound on the mesh of the model. Arms and their searches share it."""
    key = (least_bytes, model.cost.placement.mesh, tuple(base))
    if key not in model.prepared:
        model.prepared[key] = peak_bound(model, base).peak_bytes
    found: int = model.prepared[key]
    return found


def finest(devices: int) -> MeshAxes:
    """Returns a mesh whose bound holds for every mesh of this number of devices: their axes are products of its axes.

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


class _Kinds:
    """Values of one kind have the same shardings to choose from, on every mesh, unless they are pinned or kept. ``values``: the
    first of each kind; ``kind``, ``ends`` (first and last point) and ``temporary`` by stored value, in the order of ``live``;
    ``lost``: by value the dimensions that cannot be sharded."""

    def __init__(self, structure: Structure, life: Lifetimes):
        program = structure.program
        self.lost = _inconsistent(structure)
        numbers: dict[Hashable, int] = {}
        self.values: list[int] = []
        self.live = {v: n for n, v in enumerate(life.live)}
        kinds = []
        for number in life.live:
            v = program.values[number]
            key = (
                v.shape,
                v.itemsize,
                v.origin,
                v.host,
                v.dtype.startswith("key"),
                structure.colors[number],
                self.lost.get(number),
            )
            kind = numbers.setdefault(key, len(numbers))
            if kind == len(self.values):
                self.values.append(number)
            kinds.append(kind)
        self.kind = np.array(kinds, np.int64)
        self.ends = np.array(list(life.live.values()), np.int64).reshape(-1, 2)
        self.temporary = np.array([v in life.temporary for v in life.live], bool)


def _inconsistent(structure: Structure) -> dict[int, tuple[int, ...]]:
    """By value the dimensions that no state shards: those of a conflict that cannot be resolved."""
    lost: dict[int, tuple[int, ...]] = {}
    for value, (op, _) in structure.program.definitions.items():
        if op in structure.clashes.by_op:
            nodes = structure.nodes[value]
            pairs = [(a, b) for a, b, bit in structure.clashes.by_op[op] if bit < 0 and a in nodes and b in nodes]
            lost[value] = tuple(d for d, n in enumerate(nodes) if any(n in pair for pair in pairs))
    return lost


class _Least:
    """The smallest allocations that values can have."""

    def __init__(self, model: CostModel, mesh: MeshAxes, base: Sequence[Decision]):
        self.model, self.mesh = model, mesh
        structure = model.structure
        self._state = State(mesh, tuple(base))
        # By value: the axes on which the base keeps it replicated.
        self._kept = {v: frozenset(axes) for v, axes in sets_of_views(structure.program, self._state.kept).items()}
        if _Kinds not in model.prepared:
            model.prepared[_Kinds] = _Kinds(structure, model.life)
        self._kinds: _Kinds = model.prepared[_Kinds]
        groups = structure.analysis.groups
        every = frozenset(range(len(mesh.sizes)))
        self._axes = {color: every for group in groups if group.matters for color in group.colors}
        for color, axis in self._state.order:
            self._axes[color] = self._axes.get(color, frozenset()) | {axis}
        # The axes of another mesh may be products of these.
        divisors = [k for k in range(1, mesh.devices + 1) if mesh.devices % k == 0]
        parts = mesh.sizes if mesh == model.cost.placement.mesh else divisors
        able = (g for g in groups if g.matters and any(structure.padded_sizes(g, k) for k in parts))
        self._padded = {c for group in able for c in group.colors} | {c for c, _ in self._state.padded}
        self._cut = functools.cache(functools.partial(_cut, mesh.sizes))
        self._sizes: dict[object, int] = {}

    def curve(self) -> np.ndarray:
        """Blocks at each point that are alive in every state."""
        life, kinds, values = self.model.life, self._kinds, self.model.structure.program.values
        by_kind = [self._least(values[v], self._local_shapes(v, free=True)) for v in kinds.values]
        blocks = np.array(by_kind, np.int64)[kinds.kind]
        for v in {*self._state.pinned, *self._kept} & kinds.live.keys():
            blocks[kinds.live[v]] = self._least(values[v], self._local_shapes(v))
        room = self.model.on_chip_blocks
        start = (kinds.temporary & (blocks <= room)) * (life.points + 1)
        changes = np.zeros(2 * (life.points + 1), np.int64)
        np.add.at(changes, start + kinds.ends[:, 0], blocks)
        np.add.at(changes, start + kinds.ends[:, 1] + 1, -blocks)
        others = [a for v in {**life.windowed, **life.narrowed} for a in self.allocations(v) if a.what != "value"]
        curve: np.ndarray = in_use(changes, room) + memory_curve(life.points, others)
        return curve

    def allocations(self, value: int) -> Iterator[Allocation]:
        """Yields the allocations of a value (``value_allocations``), each as small as it can be."""
        life, tile = self.model.life, self.model.cost.profile.vector_tile
        v, shapes = self.model.structure.program.values[value], self._local_shapes(value)
        if value in life.live:
            least = self._least(v, shapes)
            on_chip = value in life.temporary and least <= self.model.on_chip_blocks
            yield Allocation("value", value, least, *life.live[value], on_chip)
        if value in life.windowed and all(shape[0] < tile[0] for shape in shapes):
            yield Allocation("operand", value, self._least(v, shapes), *life.windowed[value])
        if value in life.narrowed:
            itemsize, first, last = life.narrowed[value]
            narrow = replace(v, itemsize=itemsize, origin=Origin.RESULT)
            yield Allocation("narrow copy", value, self._least(narrow, shapes), first, last)

    def _least(self, value: Value, shapes: tuple[tuple[int, ...], ...]) -> int:
        key = (id(shapes), value.itemsize, value.origin is Origin.ARGUMENT, value.host)  # ``_cut`` keeps the shapes
        if key not in self._sizes:
            replicated, profile = Sharding.whole(len(value.shape)), self.model.cost.profile
            self._sizes[key] = min(blocks(replace(value, shape=s), replicated, self.mesh, profile) for s in shapes)
        return self._sizes[key]

    def _local_shapes(self, value: int, free: bool = False) -> tuple[tuple[int, ...], ...]:
        """Returns the local shapes that a value may have, or might if it were neither pinned nor kept (``free``). More shards
        are not always smaller: tiles are padded."""
        s, shape = self.model.structure, self.model.structure.program.values[value].shape
        kept = frozenset[int]() if free else self._kept.get(value, frozenset())
        pinned = None if free else self._state.pinned.get(value)
        able = [self._axes.get(c, frozenset()) - kept for c in s.colors[value]]
        for d in self._kinds.lost.get(value, ()):
            able[d] = frozenset()
        shards = [1] * len(shape)
        if pinned is not None:
            fixed = (*pinned, *((),) * (len(shape) - len(pinned)))
            used = {a for axes in fixed for a in axes or ()}
            able = [a - used if axes is None else frozenset() for a, axes in zip(able, fixed, strict=True)]
            shards = [self.mesh.pieces(axes or ()) for axes in fixed]
        padded = is_inner(s.program.values[value])
        return self._cut(
            shape, tuple(able), tuple(shards), tuple(padded and c in self._padded for c in s.colors[value])
        )


def _cut(
    sizes: Sequence[int],
    shape: tuple[int, ...],
    able: tuple[frozenset[int], ...],
    shards: tuple[int, ...],
    padded: tuple[bool, ...],
) -> tuple[tuple[int, ...], ...]:
    """Returns the local shapes where each axis shards one of the dimensions that can have it, or none."""
    cuts = {shards}
    for axis, size in enumerate(sizes):
        dims = [d for d, axes in enumerate(able) if axis in axes]
        cuts |= {
            (*c[:d], c[d] * size, *c[d + 1 :]) for c in cuts for d in dims if padded[d] or not shape[d] % (c[d] * size)
        }
    return tuple(tuple(block(size, n) for size, n in zip(shape, c, strict=True)) for c in sorted(cuts))


def _source(model: CostModel, at: int) -> str:
    """Returns the source line that runs at a point."""
    program = model.structure.program
    before = [(p, k) for k, p in model.life.point.items() if p <= at and program.ops[k].kind not in BORDERS]
    if not before:
        return ""
    source = program.source_of(program.ops[max(before)[1]])
    return str(source) if source.file else ""
