"""Tactics, and the context in which they decide.

A tactic turns a strategy ("data parallel over this axis") into decisions about colors. It looks at the structure of the program
and at the roles of arguments, never at names. Tactics are applied in order and never undo an earlier one; what a tactic cannot
do is an error that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shardwise.dims.analysis import Analysis, Group
from shardwise.errors import DecisionError
from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.paths import find_paths
from shardwise.ir.program import Value
from shardwise.lowering.candidates import Candidates
from shardwise.lowering.decisions import Decision, State
from shardwise.lowering.decisions import Shard as ShardDecision
from shardwise.lowering.local_cost import HardwareCost
from shardwise.lowering.lowered import Lowered, Memo
from shardwise.lowering.structure import Structure
from shardwise.search.searcher import Searcher
from shardwise.tactics.places import PathDim, Places, find_places, stage_colors
from shardwise.tactics.roles import NAME_THEM, Roles

T = TypeVar("T")
#: One mesh axis or several.
Axes = str | Sequence[str]


@dataclass(frozen=True)
class Context:
    """The inputs of tactics. ``roles`` are path prefixes by role: ``batch``, ``params``, ``optimizer``; ``searcher`` is for
    tactics that search, ``memo`` for those that lower decisions, and ``cache`` has what they computed about the program."""

    analysis: Analysis
    mesh: MeshAxes
    cost: HardwareCost
    roles: Roles = field(default_factory=dict)
    searcher: Searcher | None = None
    memo: Memo | None = None
    cache: dict[object, Any] = field(default_factory=dict, compare=False)

    def once(self, key: object, compute: Callable[[], T]) -> T:
        """Returns a fact about the program, computed once for a key."""
        if key not in self.cache:
            self.cache[key] = compute()
        fact: T = self.cache[key]
        return fact

    def lower(self, decisions: Sequence[Decision], ops: Iterable[int] | None = None) -> Lowered:
        """Lowers decisions: the whole program, or some ops of it."""
        memo = self.memo or Memo(Candidates(Structure(self.analysis), self.mesh, self.cost))
        lowered = Lowered(memo.candidates.structure, State(self.mesh, tuple(decisions)), self.cost, memo)
        lowered.lower_all() if ops is None else lowered.lower_ops(ops)
        return lowered

    def role(self, name: str, tactic: str) -> list[Value]:
        """Returns the arguments of a role."""
        prefixes = self.roles.get(name)
        if not prefixes:
            raise DecisionError(
                f"{tactic} needs to know which arguments are the {name}: {NAME_THEM.replace('batch', name)}"
            )
        return self.arguments(prefixes)

    @property
    def places(self) -> Places:
        """Sequences, vocabularies, experts and edges, by the roles of the arguments."""
        known = [self.arguments(self.roles.get(role, ())) for role in ("batch", "params", "cache")]
        return self.once("places", lambda: find_places(self.analysis, *known))

    def arguments(self, prefixes: Sequence[str]) -> list[Value]:
        """Returns the arguments that some paths name (``shardwise.ir.paths``)."""
        program = self.analysis.program

        def find() -> list[Value]:
            paths = (path for one in prefixes for path in find_paths(one, program.named_paths[0], what="argument"))
            return [program.values[program.paths[path]] for path in dict.fromkeys(paths)]

        return self.once(("arguments", *prefixes), find)

    def colors(self, place: PathDim, tactic: str) -> list[int]:
        """Returns the colors of a dimension of an argument or output, or of several whose paths match."""
        path, dim = place
        colors = [self.analysis.color_of(p, dim) for p in find_paths(path, *self.analysis.program.named_paths)]
        numbers = [color.id for color in colors if color is not None]
        if not numbers:
            raise DecisionError(f"{tactic}: {path}[{dim}] has size one: there is nothing to shard")
        return numbers

    @property
    def stages(self) -> list[int]:
        """Returns the colors of the stages of pipelines."""
        return self.once("stages", lambda: stage_colors(self.analysis))

    def group(self, color: int) -> Group:
        """Returns the group of a color: the colors that are decided together with it."""
        return self.analysis.groups[self.analysis.colors[color].group]

    def colors_of(self, value: Value) -> list[tuple[int, int]]:
        """Returns (dimension, color) of a value's dimensions larger than one."""
        return [(d, c) for d, c in enumerate(self.analysis.value_colors[value.id]) if c >= 0]


class Tactic(Protocol):
    """``decide`` adds decisions to those already taken."""

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]: ...


def decide(context: Context, tactics: Iterable[Tactic], first: Sequence[Decision] = ()) -> list[Decision]:
    """Returns the decisions of some tactics, in order, after those of ``first``."""
    taken: list[Decision] = list(first)
    for tactic in tactics:
        taken += tactic.decide(context, taken)
    return taken


def axis_names(*axes: Axes) -> tuple[str, ...]:
    """Returns the names of axes, each a name or several.

    >>> axis_names("x"), axis_names("x", "y"), axis_names(("x", "y"))
    (('x',), ('x', 'y'), ('x', 'y'))
    """
    names = [name for axis in axes for name in ([axis] if isinstance(axis, str) else axis)]
    return tuple(dict.fromkeys(names))


class OverAxes:
    """A tactic that is applied to each of its mesh axes in turn, or to all of the mesh where it names none. A subclass has the
    field ``axes`` and decides ``on`` one of them."""

    __slots__ = ()
    axes: Axes

    def on(self, axis: str, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        raise NotImplementedError

    def decide(self, context: Context, taken: Sequence[Decision]) -> list[Decision]:
        decisions: list[Decision] = []
        for axis in axis_names(self.axes) or context.mesh.names:
            context.mesh.index(axis)
            decisions += self.on(axis, context, [*taken, *decisions])
        return decisions


@dataclass(frozen=True, init=False)
class Listed(OverAxes):
    """A tactic whose arguments are axes, one by one or together: ``Megatron("x", "y")``, ``Megatron(("x", "y"))``."""

    axes: tuple[str, ...]

    def __init__(self, *axes: Axes) -> None:
        wrong = [name for name in axes if isinstance(name, int)]
        if wrong:
            raise DecisionError(f"{type(self).__name__}: a mesh axis is a name, such as 'data', not {wrong[0]}")
        object.__setattr__(self, "axes", axis_names(*axes))


@dataclass(frozen=True, init=False)
class Batched(Listed):
    """A tactic of axes and of the batch. ``dim`` is the batch dimension of every batch argument; without it, the first
    dimension of each that no loop runs over."""

    dim: int | None

    def __init__(self, *axes: Axes, dim: int | None = None) -> None:
        super().__init__(*axes)
        object.__setattr__(self, "dim", dim)


def shard_groups(
    context: Context, colors: Sequence[int], axis: str, taken: Sequence[Decision], side: int = 0
) -> list[Decision]:
    """Returns decisions that shard the groups of some colors on an axis, without colors that have the axis already."""
    context.mesh.index(axis)
    sharded = {c for d in taken if isinstance(d, ShardDecision) and d.axis == axis for c in d.colors}
    decisions: list[Decision] = []
    groups = {group.id: group for group in map(context.group, colors)}
    for group in groups.values():
        left = tuple(c for c in group.colors if c not in sharded)
        if left:
            decisions.append(ShardDecision(left, axis, tuple((bit, side) for bit in group.bits)))
    return decisions
