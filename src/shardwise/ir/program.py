"""The captured program: values, ops and regions. Front-end neutral: nothing here knows JAX.

- A :class:`Value` is one array; it is defined once, by an op.
- An :class:`Op` is its factor rule, its sizes and dtypes, its FLOPs and its source line. Arguments, constants and outputs
  are ops too (``argument``: ``->(i,j)``, ``output``: ``(i,j)->(i,j)``), so that every dimension has a factor.
- A :class:`Region` is the body of a loop or a branch. A loop or branch is an op without a rule that owns regions; what
  crosses its border is one *link* op per tensor, inside the owner's ``links``: a carry is ``(initial, body out) ->
  (body in, result)`` with one factor per dimension, which is exactly "one value, one sharding".
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from shardwise.ir.rule import Rule
from shardwise.ir.traits import SAME_ELEMENTS, WIDER

#: Mesh axes by dimension, major first; None for a dimension that is left open. Missing trailing dimensions are whole.
Spec = tuple[tuple[str, ...] | None, ...]


class Origin(enum.Enum):
    """Where a value comes from."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    RESULT = "result"
    OUTPUT = "output"


class Unit(enum.Enum):
    """Which part of the device does the arithmetic."""

    NONE = "none"
    VECTOR = "vector"
    MATRIX = "matrix"
    KERNEL = "kernel"  # somebody's own: FLOPs are as it says, at the rate of products


#: Ops that may do most of the arithmetic.
HEAVY: Final = (Unit.MATRIX, Unit.KERNEL)


@dataclass(frozen=True, slots=True)
class Value:
    """One array. ``path`` is the pytree path of an argument or output, empty for inner values."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    origin: Origin
    path: str = ""

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return int(self.elements * self.itemsize)

    @property
    def type_text(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``rule`` is None for loops and branches, whose borders are described by their ``links``; their results
    stand by position, -1 where nothing needs one."""

    id: int
    kind: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: Rule | None
    region: int
    source: int
    scope: int
    equation: int
    flops: float = 0.0
    unit: Unit = Unit.NONE
    regions: tuple[int, ...] = ()
    links: tuple[int, ...] = ()
    opaque: str = ""
    attributes: tuple[tuple[str, Any], ...] = ()

    def attribute(self, name: str, default: Any = None) -> Any:
        return dict(self.attributes).get(name, default)


@dataclass(frozen=True, slots=True)
class Region:
    """A straight sequence of ops: the program itself, a loop body, a branch.

    ``trips`` is how often it runs for one run of its parent; ``trips_known`` is False for a ``while`` whose count cannot
    be told from the program (it is then counted once, and reported).
    """

    id: int
    kind: str
    parent: int
    owner: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[int, ...]
    trips: int = 1
    trips_known: bool = True


@dataclass(frozen=True, slots=True)
class Scope:
    """A call that was inlined (``jit``, ``remat``, ``custom_vjp`` …): its kind, name, and where it was called."""

    id: int
    kind: str
    name: str
    parent: int
    equation: int
    region: int
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def has_barrier(self) -> bool:
        """Is this a ``remat`` whose computation shares nothing with what stands before it?"""
        return self.kind == "remat" and all(value for _, value in self.attributes)


@dataclass(frozen=True, slots=True)
class Argument:
    """An input of the program as the caller sees it. ``spec`` is a sharding the caller already gave, by dimension."""

    value: int
    path: str
    donated: bool
    spec: Spec | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A place in the user's program."""

    file: str = ""
    line: int = 0
    function: str = ""
    names: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else "?"


class Sources:
    """Source places by number, resolved when asked: reading a traceback costs more than analysing the op."""

    def __init__(self, resolve: Callable[[int], Source], count: int):
        self._resolve = resolve
        self._count = count
        self._known: dict[int, Source] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Source:
        if index < 0:
            return Source()
        if index not in self._known:
            self._known[index] = self._resolve(index)
        return self._known[index]


@dataclass(frozen=True)
class Program:
    """A captured function. ``regions[0]`` is the program itself. Equations are named by scope and number: ``repeats`` maps
    equations that compute the same as an earlier one to that one; ``undone`` are reshapes back to the shape before the last
    reshape, whose result is the operand of that one."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...]
    scopes: tuple[Scope, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[int, ...]
    sources: Sources = field(repr=False)
    repeats: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict, repr=False)
    undone: frozenset[tuple[int, int]] = field(default=frozenset(), repr=False)

    @cached_property
    def trips(self) -> np.ndarray:
        """How often each region runs in one run of the program."""
        trips = np.ones(len(self.regions))
        for region in self.regions[1:]:
            trips[region.id] = trips[region.parent] * region.trips
        return trips

    @cached_property
    def runs(self) -> np.ndarray:
        """How often each region counts: its trips, and of the alternatives of a branch only the dearest in FLOPs."""
        flops = np.zeros(len(self.regions))
        for op in self.ops:
            flops[op.region] += op.flops
        chosen = np.ones(len(self.regions))
        for op in reversed(self.ops):
            # An owner comes before the ops of its regions, so inner loops and branches are done here.
            costs = [flops[r] * self.regions[r].trips for r in op.regions]
            if op.kind == "cond":
                dearest = int(np.argmax(costs))
                chosen[[r for k, r in enumerate(op.regions) if k != dearest]] = 0
                costs = costs[dearest : dearest + 1]
            flops[op.region] += sum(costs)
        for region in self.regions[1:]:
            chosen[region.id] *= chosen[region.parent]
        return self.trips * chosen

    @cached_property
    def definitions(self) -> Mapping[int, tuple[int, int]]:
        """For every value the op that defines it and the number of the result."""
        return {v: (op.id, k) for op in self.ops if op.rule is not None for k, v in enumerate(op.results)}

    @cached_property
    def moved_as(self) -> Mapping[int, int]:
        """For values that can be moved in a shorter type, a value of that type. Either the value was widened from it, or all
        that is used of the value is what was narrowed to it; views of a value are seen through in both cases."""
        found: dict[int, int] = {}
        for op in self.schedule:
            if op.kind in SAME_ELEMENTS and op.operands[0] >= 0:
                operand, result = op.operands[0], op.results[0]
                old, new = self.values[operand].dtype, self.values[result].dtype
                if operand in found and (old == new or new in WIDER.get(old, ())):
                    found[result] = found[operand]
                elif old != new and (old == "bool" or new in WIDER.get(old, ())):
                    found[result] = operand
        used: dict[int, set[int]] = {}
        for op in reversed(self.schedule):
            for v in op.operands:
                if v < 0:
                    continue
                seen = {-1}
                if op.kind in SAME_ELEMENTS:
                    (result,) = op.results
                    old, new = self.values[v].dtype, self.values[result].dtype
                    seen = {result} if old in WIDER.get(new, ()) else used.get(result, {-1}) if old == new else {-1}
                used.setdefault(v, set()).update(seen)
        for v, narrow in used.items():
            types = {self.values[n].dtype if n >= 0 else "" for n in narrow}
            if len(types) == 1 and "" not in types:
                known = (found[v],) if v in found else ()
                found[v] = min((*narrow, *known), key=lambda n: (self.values[n].itemsize, n))
        return found

    @cached_property
    def rounding(self) -> frozenset[int]:
        """Products of float32 arrays that some devices compute from operands rounded to bfloat16."""
        return frozenset(op.id for op in self.ops if op.attribute("rounds"))

    @cached_property
    def uniform(self) -> frozenset[int]:
        """Values whose elements are all the same: a scalar that was broadcast, and views of it."""
        found: set[int] = set()
        for op in self.schedule:
            if op.kind not in SAME_ELEMENTS or op.kind == "scan.output":  # each trip may have another scalar
                continue
            operand = op.operands[0]
            scalar = op.kind == "broadcast_in_dim" and (operand < 0 or not self.values[operand].shape)
            if scalar or operand in found:
                found.add(op.results[0])
        return frozenset(found)

    @cached_property
    def home(self) -> Mapping[int, int]:
        """For every value the region that it lives in."""
        return {v: op.region for op in self.ops if op.rule is not None for v in op.results} | {
            v: region.id for region in self.regions for v in region.inputs if v >= 0
        }

    @cached_property
    def paths(self) -> Mapping[str, int]:
        """Values of arguments and outputs by path."""
        return {v.path: v.id for v in self.values if v.path}

    @cached_property
    def named_paths(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The paths of arguments, and those of outputs."""
        return tuple(a.path for a in self.arguments), tuple(self.values[v].path for v in self.outputs)

    @cached_property
    def schedule(self) -> tuple[Op, ...]:
        """All ops in the order of execution: what enters a loop, its bodies, what leaves it. A carry stands where it enters."""
        linked = {k for op in self.ops for k in op.links}

        def run(region: int) -> Iterator[Op]:
            for k in self.regions[region].ops:
                if k in linked:
                    continue
                op = self.ops[k]
                yield op
                inputs = {v for r in op.regions for v in self.regions[r].inputs}
                entering = [j for j in op.links if inputs.intersection(self.ops[j].results)]
                yield from (self.ops[j] for j in entering)
                for inner in op.regions:
                    yield from run(inner)
                yield from (self.ops[j] for j in op.links if j not in entering)

        return tuple(run(0))

    def ruled_ops(self) -> Iterator[Op]:
        return (op for op in self.ops if op.rule is not None)

    def source_of(self, op: Op) -> Source:
        return self.sources[op.source]

    def label(self, value: int) -> str:
        """How a person would name a value: its path, or what made it and where."""
        v = self.values[value]
        if v.path:
            return v.path
        op = self.ops[self.definitions[value][0]]
        return f"%{value} ({op.kind} at {self.sources[op.source]})"

    def __str__(self) -> str:
        from shardwise.ir.text import format_program

        return format_program(self)
