"""The captured program: values, ops and regions. Front-end neutral: nothing here knows JAX.

- A :class:`Value` is one array; it is defined once, by an op. Arguments, constants and outputs are ops too (``argument``:
  ``->(i,j)``, ``output``: ``(i,j)->(i,j)``), so that every dimension has a factor.
- A :class:`Region` is the body of a loop or a branch. A loop or branch is an op without a rule that owns regions. Each tensor
  that crosses its border has one *link* op, in the owner's ``links``: a carry is ``(initial, body out) -> (body in, result)``
  with one factor per dimension, so that it has one sharding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final

import numpy as np

from shardwise.ir.rule import Kind, Rule, Symbol
from shardwise.ir.traits import SAME_ELEMENTS, VIEWS, WIDER

#: Mesh axes by dimension, major first; None for an unconstrained dimension. Missing trailing dimensions are replicated.
Spec = tuple[tuple[str, ...] | None, ...]


class Origin(Symbol):
    ARGUMENT = "argument"
    CONSTANT = "constant"
    RESULT = "result"
    OUTPUT = "output"


class Unit(Symbol):
    """The part of the device that does the arithmetic."""

    NONE = "none"
    VECTOR = "vector"
    MATRIX = "matrix"
    KERNEL = "kernel"  # an opaque kernel: its FLOPs are those it states, at the rate of products


#: Ops that may do most of the arithmetic.
HEAVY: Final = (Unit.MATRIX, Unit.KERNEL)


@dataclass(frozen=True, slots=True)
class Value:
    """One array. ``path`` is the pytree path of an argument or output, empty for inner values; ``host``: whether it is in the
    memory of the host, and takes none of the device's."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    origin: Origin
    path: str = ""
    host: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return int(self.elements * self.itemsize)

    @property
    def type_text(self) -> str:
        return f"{self.dtype}{'<host>' * self.host}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. ``rule`` is None for loops and branches; of their results those that are not used are -1."""

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

    @property
    def factor_rule(self) -> Rule:
        """The rule of an op that is no loop or branch."""
        assert self.rule is not None
        return self.rule

    @property
    def only_multiplies(self) -> bool:
        """Is the op a product without a sum? Compilers make it a multiplication."""
        sums = (f for f in self.rule.factors if f.kind is Kind.REDUCTION) if self.rule is not None else ()
        return self.kind == "dot_general" and all(f.size == 1 for f in sums)

    def attribute(self, name: str, default: Any = None) -> Any:
        return dict(self.attributes).get(name, default)


@dataclass(frozen=True, slots=True)
class Region:
    """A sequence of ops: the program itself, a loop body, a branch. It runs ``trips`` times for each run of its parent."""

    id: int
    kind: str
    parent: int
    owner: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[int, ...]
    trips: int = 1

    @property
    def trips_known(self) -> bool:
        """False for a ``while`` that is counted once."""
        return not self.kind.startswith("while.") or self.trips > 1


@dataclass(frozen=True, slots=True)
class Scope:
    """A call that was inlined (``jit``, ``remat``, ``custom_vjp`` …): its kind, name, and where it was called.
    ``has_barrier``: a ``remat`` whose computation shares nothing with that before it."""

    id: int
    kind: str
    name: str
    parent: int
    region: int
    has_barrier: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """An input of the program. ``spec`` is the sharding that the caller stated, if any."""

    value: int
    path: str
    donated: bool
    spec: Spec | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's program, and its name stack."""

    file: str = ""
    line: int = 0
    names: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else "?"

    @property
    def module(self) -> str:
        """The names of ``jax.named_scope``s, which frameworks set for modules, without transformations and equations of einsum.

        >>> Source(names="jit(step)/transpose(jvp(model))/block_0/dense").module
        'model/block_0/dense'
        """
        names = re.sub(r"\bp?jit\([^()]*\)/?", "", self.names)
        return "/".join(n for n in re.sub(r"\w+\(|\)", "", names).strip("/").split("/") if "->" not in n)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a front end needs to execute a program: by op its equation, by value the arrays of constants, and by op and number
    the operands that are scalars in the program."""

    equations: tuple[Any, ...]
    constants: Mapping[int, Any]
    scalars: Mapping[tuple[int, int], Any]


@dataclass(frozen=True)
class Program:
    """A captured function. ``regions[0]`` is the program itself; ``sources`` reads source lines by number when asked."""

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    regions: tuple[Region, ...]
    scopes: tuple[Scope, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[int, ...]
    sources: Callable[[int], Source] = field(repr=False)
    contents: Contents = field(default=Contents((), {}, {}), repr=False, compare=False)

    @cached_property
    def trips(self) -> np.ndarray:
        """By region: how often it runs in one run of the program."""
        trips = np.ones(len(self.regions))
        for region in self.regions[1:]:
            trips[region.id] = trips[region.parent] * region.trips
        return trips

    @cached_property
    def runs(self) -> np.ndarray:
        """By region: how often it counts, which is its trips, and 0 for all branches of a ``cond`` but that of most FLOPs."""
        flops = np.bincount([op.region for op in self.ops], [op.flops for op in self.ops], len(self.regions))
        chosen = np.ones(len(self.regions))
        for op in reversed([op for op in self.ops if op.regions]):
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
        """By value: the op that defines it, and the number of the result."""
        return {v: (op.id, k) for op in self.ops if op.rule is not None for k, v in enumerate(op.results)}

    @cached_property
    def uses(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By value: the ops that use it, each with the number of the operand."""
        uses: list[list[tuple[int, int]]] = [[] for _ in self.values]
        for op in self.ops:
            for k, v in enumerate(op.operands):
                if v >= 0:
                    uses[v].append((op.id, k))
        return tuple(map(tuple, uses))

    @cached_property
    def argument_of(self) -> Mapping[int, int]:
        """By value that is an argument or a view of one: the argument."""
        roots = {a.value: a.value for a in self.arguments}
        for op in self.schedule:
            if op.kind in VIEWS and op.operands[0] in roots:
                roots.update(dict.fromkeys(op.results, roots[op.operands[0]]))
        return roots

    @cached_property
    def multiplied(self) -> frozenset[int]:
        """The arguments that a product or a lookup reads, directly or as a view."""
        users = (op for op in self.ops if op.unit in HEAVY or op.kind == "gather")
        return frozenset(self.argument_of[v] for op in users for v in op.operands if v in self.argument_of)

    @cached_property
    def moved_as(self) -> Mapping[int, int]:
        """For values that can be communicated in a narrower type, a value of that type."""
        narrower: dict[int, int] = {}
        for op in self.schedule:
            if op.kind in SAME_ELEMENTS and op.operands[0] >= 0:
                operand, result = op.operands[0], op.results[0]
                old, new = self.values[operand].dtype, self.values[result].dtype
                if operand in narrower and (old == new or new in WIDER.get(old, ())):
                    narrower[result] = narrower[operand]
                elif old != new and (old == "bool" or new in WIDER.get(old, ())):
                    narrower[result] = operand
        uses: dict[int, set[int]] = {}  # the narrowed values that a value is used as; -1 for any other use
        for op in reversed(self.schedule):
            for v in op.operands:
                if v < 0:
                    continue
                use = {-1}
                if op.kind in SAME_ELEMENTS:
                    (result,) = op.results
                    old, new = self.values[v].dtype, self.values[result].dtype
                    use = {result} if old in WIDER.get(new, ()) else uses.get(result, {-1}) if old == new else {-1}
                uses.setdefault(v, set()).update(use)
        for v, narrow in uses.items():
            if -1 not in narrow and len({self.values[n].dtype for n in narrow}) == 1:
                narrower[v] = min(narrow | {narrower.get(v, v)}, key=lambda n: (self.values[n].itemsize, n))
        return narrower

    @cached_property
    def rounding(self) -> frozenset[int]:
        """Products of float32 arrays that some devices compute from operands rounded to bfloat16."""
        return frozenset(op.id for op in self.ops if op.attribute("rounds"))

    @cached_property
    def uniform(self) -> frozenset[int]:
        """Values whose elements are all the same: a scalar that was broadcast, and views of it."""
        uniform: set[int] = set()
        for op in self.schedule:
            if op.kind not in SAME_ELEMENTS or op.kind == "scan.output":  # each trip may have another scalar
                continue
            operand = op.operands[0]
            scalar = op.kind == "broadcast_in_dim" and (operand < 0 or not self.values[operand].shape)
            if scalar or operand in uniform:
                uniform.add(op.results[0])
        return frozenset(uniform)

    @cached_property
    def linked(self) -> frozenset[int]:
        """Ops that are links."""
        return frozenset(k for op in self.ops for k in op.links)

    @cached_property
    def home(self) -> Mapping[int, int]:
        """By value: the region that it belongs to."""
        return {v: op.region for op in self.ops if op.rule is not None for v in op.results} | {
            v: region.id for region in self.regions for v in region.inputs if v >= 0
        }

    @cached_property
    def barriers(self) -> tuple[tuple[int, ...], ...]:
        """By op: the scopes with a barrier that are around it in its region, the innermost first."""

        scopes = self.scopes

        @cache
        def around(scope: int, region: int) -> tuple[int, ...]:
            here = scopes[scope]
            if here.parent < 0 or here.region != region:
                return ()
            return (scope,) * here.has_barrier + around(here.parent, region)

        return tuple(around(op.scope, op.region) for op in self.ops)

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
        """All ops in the order of execution: links into a loop, its bodies, links out of it. Carries are links into it."""

        def run(region: int) -> Iterator[Op]:
            for k in self.regions[region].ops:
                if k in self.linked:
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

    def source_of(self, op: Op) -> Source:
        return self.sources(op.source)

    def label(self, value: int) -> str:
        """Returns the path of a value, or its number, op, the module whose parameter that op uses, and source line."""
        v = self.values[value]
        if v.path:
            return v.path
        op = self.ops[self.definitions[value][0]]
        paths = (self.values[self.argument_of[v]].path for v in op.operands if v in self.argument_of)
        module = next((tree for path in paths if "/" in (tree := path.rpartition("/")[0])), "")
        return f"%{value} ({op.kind} at {module}{', ' if module else ''}{self.source_of(op)})"

    def __str__(self) -> str:
        return format_program(self)


def format_program(program: Program, sources: bool = False) -> str:
    """Returns one line per op: ``%3:f32[8,2] = dot_general %0 %1  (i,k),(k,j)->(i,j); sum k``. Bodies are indented."""
    lines = [f"program {program.name}"]
    lines += _region(program, 0, "  ", sources)
    lines.append("return " + " ".join(f"%{v}" for v in program.outputs))
    return "\n".join(lines)


def _region(program: Program, region: int, indent: str, sources: bool) -> Iterator[str]:
    for k in program.regions[region].ops:
        if k in program.linked:
            continue
        op = program.ops[k]
        yield indent + _op(program, op, sources)
        for link in op.links:
            yield indent + "  " + _op(program, program.ops[link], sources)
        for inner in op.regions:
            r = program.regions[inner]
            trips = f" x{r.trips}" if r.trips != 1 else "" if r.trips_known else " x?"
            yield f"{indent}  {r.kind}{trips}:"
            yield from _region(program, inner, indent + "    ", sources)


def _op(program: Program, op: Op, sources: bool) -> str:
    values = [program.values[v] for v in op.results] if op.rule is not None else []
    results = " ".join(f"%{v.id}:{v.type_text}" for v in values)
    operands = " ".join(f"%{v}" if v >= 0 else "lit" for v in op.operands)
    text = f"{results} = {op.kind}" if results else op.kind
    path = next((v.path for v in values if v.path), "")
    text += f" {operands}" if operands else ""
    text += f" '{path}'" if path else ""
    text += f"  {op.rule}" if op.rule is not None and op.rule.factors else ""
    return text + (f"  # {program.source_of(op)}" if sources and program.source_of(op).file else "")
