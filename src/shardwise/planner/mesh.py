"""Which mesh: shapes for the devices of a topology, and a race between them.

The problem: given devices and links, the number of mesh axes and their sizes are free. Every mesh is a search of its own, and
the budget does not do for all of them.

The idea. (1) Only meshes that lie well on the links: of all ways to write the number of devices as a product, those whose axes
cut at most one row of a torus in two (a switch can be cut freely). Meshes that differ only in the order of their axes are one,
unless somebody uses the axes by name. (2) Successive halving (Karnin, Koren and Somekh, 2013; Jamieson and Talwalkar, 2016):
all meshes are searched for a little, the better half for longer, and so on, until one has what is left. What was worked out on
a mesh is kept, so that the next round goes on where the last one ended.

Where we deviate: the first round has half of the budget, since a mesh costs something before its first state is known, and is
searched greedily, since that comes to an end soon. What is left over by a search that has ended by itself goes to the others,
those after it in the same round or in the rounds after.

Weak: a mesh that pays only after a long search is dropped early. Each shape is searched on the default placement of
``shardwise.hardware.layout``; the other placements of the best mesh, if they cut no more, are tried with its decisions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from shardwise.errors import MeshError, ShardwiseError
from shardwise.hardware.layout import Placement, Segment, place
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.topology import Topology
from shardwise.search.budget import Budget
from shardwise.search.searcher import Purse

#: Meshes that are raced at most, those that lie best first.
_MOST_MESHES: Final = 16
_MOST_AXES: Final = 3
_NAMES: Final = "abc"

#: Seconds for a race where no budget is given.
RACE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class OpenMesh:
    """Axes of which some have no size yet; no axes at all where even their number is open.

    >>> OpenMesh.of({"data": None, "model": 4})
    OpenMesh(names=('data', 'model'), sizes=(None, 4))
    >>> OpenMesh.of({"data": 4, "model": 4}) is None
    True
    """

    names: tuple[str, ...] = ()
    sizes: tuple[int | None, ...] = ()

    @staticmethod
    def of(mesh: Any) -> OpenMesh | None:
        """From None, or a mapping in which a size of None or -1 is to be found; None for any other mesh."""
        if mesh is None:
            return OpenMesh()
        if not isinstance(mesh, Mapping) or not any(_is_open(size) for size in mesh.values()):
            return None
        MeshAxes.of({name: 1 if _is_open(size) else size for name, size in mesh.items()})
        return OpenMesh(tuple(mesh), tuple(None if _is_open(size) else int(size) for size in mesh.values()))

    def __str__(self) -> str:
        return " × ".join(f"{n} {s or '?'}" for n, s in zip(self.names, self.sizes, strict=True)) or "any mesh"


def _is_open(size: Any) -> bool:
    return size is None or (size == -1 and not isinstance(size, bool))


def meshes(wanted: OpenMesh, topology: Topology, ordered: bool = True) -> tuple[Placement, ...]:
    """The meshes of a topology that are worth a search, those that lie best first.

    ``ordered``: axes have meanings, so that 2 × 8 is not 8 × 2.

    >>> from shardwise.hardware.topology import topology
    >>> [str(p.mesh) for p in meshes(OpenMesh(), topology("v5e:2x4"), ordered=False)]
    ['a 8', 'a 2 × b 4', 'a 2 × b 2 × c 2']
    >>> [str(p.mesh) for p in meshes(OpenMesh.of({"data": None, "model": None}), topology("v5e:2x2"))]
    ['data 1 × model 4', 'data 4 × model 1', 'data 2 × model 2']
    """
    found: dict[object, Placement] = {}
    for mesh in _shapes(wanted, topology.devices):
        placed = place(mesh, topology)
        found.setdefault(mesh if ordered else _lies(placed), placed)
    if not found:
        fixed = math.prod(size for size in wanted.sizes if size)
        raise MeshError(
            f"{topology.text} has {topology.devices} devices: the mesh {wanted} cannot have as many, since its sizes multiply "
            f"to {fixed}"
        )
    fewest = min(map(cuts, found.values()))
    well = [p for p in found.values() if cuts(p) <= max(1, fewest)]
    well.sort(key=lambda p: (cuts(p), sum(size > 1 for size in p.mesh.sizes), _pieces(p), p.mesh.sizes))
    return tuple(well[:_MOST_MESHES])


def _shapes(wanted: OpenMesh, devices: int) -> Iterator[MeshAxes]:
    if wanted.names:
        fixed = math.prod(size for size in wanted.sizes if size)
        left, rest = divmod(devices, fixed)
        if not rest:
            for sizes in _products(left, wanted.sizes.count(None), 1):
                given = iter(sizes)
                yield MeshAxes(wanted.names, tuple(size or next(given) for size in wanted.sizes))
        return
    for count in range(1, _MOST_AXES + 1):
        for sizes in _products(devices, count, min(2, devices) if count == 1 else 2):
            yield MeshAxes(tuple(_NAMES[:count]), sizes)


def _products(total: int, count: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of so many factors, in order."""
    if count == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total // least ** (count - 1) + 1):
        if total % first == 0:
            yield from ((first, *rest) for rest in _products(total // first, count - 1, least))


def _pieces(placed: Placement) -> int:
    return sum(len(row) for row in placed.segments)


def cuts(placed: Placement) -> int:
    """How often rows of a torus are cut."""
    axes = placed.topology.axes
    torus = sum(axis.kind == "torus" for axis in axes)
    return sum(axes[segment.axis].kind == "torus" for row in placed.segments for segment in row) - torus


def _lies(placed: Placement) -> object:
    """Equal for meshes that differ in the order of their axes, or by exchanging equal rows of devices or the inner and the
    outer part of one."""

    def piece(segment: Segment) -> tuple[int, ...]:
        axis = placed.topology.axes[segment.axis]
        return axis.tier, axis.size, axis.wrap, segment.size

    return tuple(sorted(tuple(sorted(map(piece, row))) for row in placed.segments))


class Outcome(Protocol):
    """What a search on a mesh came to: the smaller ``rank`` is better; ``settled`` if a longer search would find the same."""

    @property
    def rank(self) -> tuple[int, int]: ...
    @property
    def settled(self) -> bool: ...
    @property
    def evaluations(self) -> int: ...


_Outcome = TypeVar("_Outcome", bound=Outcome)


@dataclass
class Race(Generic[_Outcome]):
    """A race under way: what each mesh came to last, and why those that dropped out did, by number."""

    outcomes: dict[int, _Outcome] = field(default_factory=dict)
    failed: dict[int, ShardwiseError] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def order(self) -> list[int]:
        """Those that were searched, the best first; of equals the one that lies better."""
        return sorted(self.outcomes, key=lambda k: (self.outcomes[k].rank, k))

    def take(self, number: int, outcome: _Outcome) -> None:
        """Notes what a mesh came to, if it is no worse than what it came to before."""
        known = self.outcomes.get(number)
        if known is None or outcome.rank <= known.rank:
            self.outcomes[number] = outcome

    def settled(self, number: int) -> bool:
        return number in self.outcomes and self.outcomes[number].settled


_Run = Callable[[int, int, Budget], _Outcome]


def race(
    count: int,
    run: _Run[_Outcome],
    drop: Callable[[int], object],
    purse: Purse,
    stopped: Callable[[], bool],
) -> Race[_Outcome]:
    """Successive halving: ``run`` searches a mesh, by number, in a round, by number, within a budget; ``drop`` is told which
    meshes will not be searched again.

    A mesh on which ``run`` raises one of our errors drops out. ``stopped`` says whether somebody interrupted.
    """
    made: Race[_Outcome] = Race()
    alive = list(range(count))
    rounds = math.ceil(math.log2(count)) + 1 if count > 1 else 1
    for n in range(rounds):
        own = Purse(purse.part(min(2, rounds) if n == 0 else rounds - n))
        _in_turn(made, alive, n, run, purse, own, stopped)
        if made.interrupted:
            return made
        best = made.order[: -(-len(alive) // 2)]
        for number in alive:
            if number in made.outcomes and number not in best:
                drop(number)
        alive = best
    return made


def _in_turn(
    made: Race[_Outcome],
    alive: Sequence[int],
    turn: int,
    run: _Run[_Outcome],
    purse: Purse,
    own: Purse,
    stopped: Callable[[], bool],
) -> None:
    """A round, mesh after mesh: what one leaves over goes to the next."""
    for k, number in enumerate(alive):
        if made.settled(number) or (made.outcomes and purse.empty):
            continue
        try:
            outcome = run(number, turn, own.part(len(alive) - k))
        except ShardwiseError as error:
            made.failed[number] = error
            continue
        except KeyboardInterrupt:
            if not made.outcomes:
                raise
            made.interrupted = True
            return
        own.spend(outcome.evaluations)
        made.take(number, outcome)
        if stopped():
            made.interrupted = True
            return
