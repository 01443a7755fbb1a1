"""The device-local program as lines: what one device computes, with local shapes, and the collectives where they run.

The lines are made from the data that ``shardwise.spmd.program`` emits the program from, by the same rules: they list what is
executed. They are plain data; ``shardwise.report.program_text`` lays them out.

- ``f32[16·data,512]`` is a block of 16 × 512 of an array whose first dimension is sharded over ``data``.
- ``%7`` is a value as its op makes it, ``%7.a`` and ``%7.b`` are the same value in other shardings. Arguments are named by
  their paths where these are short. ``w[i]`` is what one trip of a loop reads of ``w``; ``_`` is a number in the program.
- Collectives have the names that they have in ``jax.lax``.

A value is brought into a sharding once in a section: a loop body or what stands behind the barrier of a ``remat`` is one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from shardwise.hardware.mesh import MeshAxes
from shardwise.ir.program import Op, Program, Region, Value
from shardwise.ir.traits import MANUAL
from shardwise.lowering.halo import Fetch, fetches
from shardwise.lowering.reshard_times import partial_need
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import (
    PAIRED,
    ROUNDED,
    Collective,
    Kind,
    Sharding,
    is_made_anew,
    is_narrowed,
    is_rounded,
    reshard,
    result_sharding,
    tensor_sharding,
)
from shardwise.lowering.structure import reshard_sections

#: Kinds of lines that communicate.
MOVING: Final = frozenset(kind.value for kind in Kind if kind is not Kind.SLICE)
#: Arguments and outputs with a longer path are named by number.
_LONGEST_NAME: Final = 16
_REDUCERS: Final = {"sum": "psum", "max": "pmax", "or": "pmax", "min": "pmin", "and": "pmin"}
_FUNCTIONS: Final = {Kind.SLICE: "dynamic_slice", Kind.ALL_GATHER: "all_gather", Kind.REDUCE_SCATTER: "psum_scatter"}
_HOPS: Final = {(1,): "to the next device", (-1,): "to the previous device", (-1, 1): "between neighbors"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line: ``name type = function(operands, details)``.

    ``kind`` is that of a collective (``all-gather``, …, or ``slice``, which is local), or one of ``argument``, ``op``,
    ``output``, ``loop`` (the head of a body or branch) and ``next`` (what a body hands on). ``about`` are the paths of values
    that are named by number; ``nbytes`` the bytes that one device moves each time, ``times`` how often the line runs in a step,
    ``count`` how many collectives it stands for (the hops of a ring), ``values`` the values that it uses and makes.
    """

    kind: str
    depth: int
    name: str = ""
    type: str = ""
    function: str = ""
    operands: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    note: str = ""
    about: str = ""
    source: str = ""
    axes: tuple[str, ...] = ()
    nbytes: float = 0.0
    times: float = 1.0
    count: int = 1
    values: tuple[int, ...] = ()

    @property
    def expression(self) -> str:
        """
        >>> Line("all-gather", 0, "%7.a", "f32[64]", "all_gather", ("%7",), ("data", "dim 0")).expression
        'all_gather(%7, data, dim 0)'
        """
        inner = ", ".join((*self.operands, *self.details))
        return f"{self.function}({inner})" if self.function and inner else self.function or inner


def program_lines(program: Program, sharded: ShardedProgram, most: int | None = None) -> list[Line]:
    """The program of one device, in the order of execution; with ``most`` only the first lines."""
    listing = _Listing(program, sharded)
    for op in program.regions[0].ops:
        if most is not None and len(listing.lines) >= most:
            break
        listing.step(program.ops[op])
    return listing.lines[:most]


def totals(lines: Iterable[Line]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """By kind and axes: the number of collectives, and the bytes that one device moves in a step, as in ``Plan.moved``."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for line in lines:
        if line.kind in MOVING:
            counts[line.kind, line.axes] += line.count
            nbytes[line.kind, line.axes] += line.count * int(line.nbytes * line.times)
    return {key: (counts[key], float(nbytes[key])) for key in sorted(counts)}


def local_type(value: Value, sharding: Sharding, mesh: MeshAxes, sizes: Mapping[int, int] | None = None) -> str:
    """The type of a block. ``sizes``: by dimension the size where a block is not an even share.

    >>> from shardwise.ir.program import Origin
    >>> local_type(Value(0, (64, 512), "bfloat16", 2, Origin.RESULT), Sharding(((0,), ())), MeshAxes(("data",), (4,)))
    'bf16[16·data,512]'
    """
    dims = []
    for d, (size, axes) in enumerate(zip(value.shape, sharding.dims, strict=True)):
        if sizes and d in sizes:
            dims.append(str(sizes[d]))
        else:
            dims.append("·".join([str(size // math.prod(mesh.sizes[a] for a in axes)), *(mesh.names[a] for a in axes)]))
    return f"{_short(value.dtype)}[{','.join(dims)}]"


@cache
def _short(dtype: str) -> str:
    """
    >>> [_short(d) for d in ("float32", "bfloat16", "uint8", "bool", "float8_e4m3fn", "key<fry>")]
    ['f32', 'bf16', 'u8', 'bool', 'f8_e4m3fn', 'key<fry>']
    """
    return re.sub(r"^(b?)(f)loat|^(u)int|^(i)nt|^(c)omplex", lambda m: "".join(g for g in m.groups() if g), dtype)


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' if len(dims) > 1 else ''} {' and '.join(map(str, dims))}"


class _Listing:
    """The walk over the program. ``stored`` has the names of values in the sharding in which they leave their ops, ``copies``
    by section, value and sharding those of the others."""

    def __init__(self, program: Program, sharded: ShardedProgram):
        self.program, self.sharded, self.mesh = program, sharded, sharded.mesh
        self.lines: list[Line] = []
        self.stored: dict[int, str] = {}
        self.copies: dict[tuple[int, int, Sharding, bool], str] = {}
        self._fetched: dict[Hashable, str] = {}
        self._sections, self._crossing = reshard_sections(program)
        self._links = {k for op in program.ops for k in op.links}
        self._roots: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._suffixes: Counter[str] = Counter()
        self._brought: set[tuple[int, int, Sharding]] = set()
        self._region, self._depth = 0, 0

    # Names and types.

    def _name(self, value: int) -> str:
        path = self.program.values[value].path
        return path if path and len(path) <= _LONGEST_NAME else f"%{value}"

    def _copy(self, name: str) -> str:
        """A new name for the same value in another sharding."""
        root = self._roots.get(name, name)
        number, suffix = self._suffixes[root], ""
        self._suffixes[root] += 1
        while number >= 0:
            number, suffix = number // 26 - 1, chr(ord("a") + number % 26) + suffix
        self._roots[f"{root}.{suffix}"] = root
        return f"{root}.{suffix}"

    def _axes(self, axes: Iterable[int]) -> str:
        return "·".join(self.mesh.names[a] for a in axes)

    def _type(self, value: int, sharding: Sharding, sizes: Mapping[int, int] | None = None) -> str:
        return local_type(self.program.values[value], sharding, self.mesh, sizes)

    def _partial(self, value: int, sharding: Sharding) -> str:
        if not sharding.partial:
            return ""
        reducer = self.sharded.array_type(self.program, value).reducer
        return f"partial{'' if reducer == 'sum' else f' {reducer}'} over {self._axes(sharding.partial)}"

    def _add(self, kind: str, op: Op, notes: Iterable[str] = (), **parts: Any) -> None:
        source = self.program.source_of(op)
        parts |= {"source": str(source) if source.file else "", "note": "; ".join(filter(None, notes))}
        roots = dict.fromkeys(self._roots.get(name, name) for name in parts.get("operands", ()))
        parts.setdefault("about", ", ".join(self._paths[root] for root in roots if root in self._paths))
        self.lines.append(Line(kind, self._depth, times=float(self.program.trips[self._region]), **parts))

    # Reshards.

    def _taken(self, op: Op, operand: int) -> str:
        """The name of an operand in the sharding that an op needs, after the collectives that bring it there."""
        value = op.operands[operand]
        if value < 0:
            return "_"
        given, need = self.sharded.shardings[value], self._need(op, operand)
        if need is given:
            return self.stored[value]
        rounded = self.sharded.rounds and op.id in self.program.rounding
        rounded = rounded and is_rounded(self.sharded.array_type(self.program, value), given)
        key = (self._crossing.get((op.id, value), self._sections[op.id]), value, need, rounded)
        if key not in self.copies:
            place = (self._region, value, need)
            note = "again, behind a remat barrier" if place in self._brought else ""
            self._brought.add(place)
            self.copies[key] = self._reshard(op, value, self.stored[value], (given, need), note, rounded)
        return self.copies[key]

    def _need(self, op: Op, operand: int) -> Sharding:
        """The sharding in which an op uses an operand."""
        assert op.rule is not None
        need = tensor_sharding(op.rule.operand_majors[operand], self.sharded.factors[op.id])
        return partial_need(need, self.sharded.shardings[op.operands[operand]], self.sharded.passed[op.id])

    def _made(self, op: Op, value: int) -> Sharding:
        """The sharding in which an op computes one of its results."""
        assert op.rule is not None
        result = op.results.index(value)
        return result_sharding(op.rule, result, self.sharded.factors[op.id], self.sharded.passed[op.id])

    def _store(self, op: Op, value: int, name: str) -> None:
        """Brings a result into the sharding in which it leaves its op."""
        ends = self._made(op, value), self.sharded.shardings[value]
        self.stored[value] = self._reshard(op, value, name, ends)

    def _reshard(
        self, op: Op, value: int, name: str, ends: tuple[Sharding, Sharding], note: str = "", rounded: bool = False
    ) -> str:
        """The name of a value after the collectives from one sharding to another."""
        if ends[0] is ends[1]:
            return name
        array, now = self.sharded.array_type(self.program, value), ends[0]
        array = array.rounded if rounded else array
        if is_made_anew(array, *ends):
            old, name = name, self._copy(name)
            made = {"name": name, "type": self._type(value, ends[1]), "operands": (old,), "values": (value,)}
            self._add("op", op, (note,), function="broadcast_in_dim", **made)
            return name
        for step in reshard(array, *ends, self.mesh):
            assert step.after is not None
            old, name = name, self._copy(name)
            function, details, remark = self._step(step, now, array.reducer)
            if step.kind is not Kind.SLICE and is_narrowed(array, ends[0]):
                remark = f"as {ROUNDED if rounded else self.program.values[self.program.moved_as[value]].dtype}"
            now = step.after
            self._add(
                step.kind.value,
                op,
                (remark, self._partial(value, now), note),
                name=name,
                type=self._type(value, now),
                function=function,
                operands=(old,),
                details=details,
                axes=tuple(self.mesh.names[a] for a in step.axes),
                nbytes=step.nbytes if step.kind is not Kind.SLICE else 0.0,
                count=step.count,
                values=(value,),
            )
        return name

    def _step(self, step: Collective, before: Sharding, reducer: str) -> tuple[str, tuple[str, ...], str]:
        """The function of ``jax.lax`` for one step of a reshard, its arguments, and a remark."""
        after, axes = step.after, self._axes(step.axes)
        assert after is not None
        changed = [d for d, (old, new) in enumerate(zip(before.dims, after.dims, strict=True)) if old != new]
        if step.kind is Kind.ALL_REDUCE and reducer in PAIRED:
            best = "pmax" if reducer == "argmax" else "pmin"
            return (best, (axes,), "of the values") if after is before else ("pmin", (axes,), "of their positions")
        if step.kind is Kind.ALL_REDUCE:
            return _REDUCERS[reducer], (axes,), ""
        if step.kind is Kind.ALL_GATHER and not changed:
            return "all_gather", (axes,), f"then combined by {reducer}"
        if step.hops:
            return "ppermute", (axes, _dims(changed)), f"reduce-scatter, ring of {step.hops}"
        if step.kind is Kind.PERMUTE:
            orders = (f"dim {d} to {self._axes(after.dims[d])}" for d in changed)
            return "ppermute", (axes, *orders), ""
        if step.kind is Kind.ALL_TO_ALL:
            split = [d for d in changed if set(after.dims[d]) - set(before.dims[d])]
            joined = [d for d in changed if set(before.dims[d]) - set(after.dims[d])]
            return "all_to_all", (axes, f"split {_dims(split)}", f"concat {_dims(joined)}"), ""
        return _FUNCTIONS[step.kind], (axes, _dims(changed)), ""

    def _halos(self, op: Op, names: list[str]) -> None:
        """The permutes that bring a windowed op what it needs from other devices; ``names`` of operands are changed."""
        assert op.rule is not None
        shapes = [self.program.values[v].shape if v >= 0 else () for v in (*op.operands, *op.results)]
        cut = [math.prod(self.mesh.sizes[a] for a in axes) for axes in self.sharded.factors[op.id]]
        found: dict[int, list[Fetch]] = {}
        for own in fetches(op.kind, op.rule, shapes, cut) or ():
            found.setdefault(own.operand, []).append(own)
        for k, fetched in found.items():
            key = (self._sections[op.id], op.operands[k], self._need(op, k), tuple(fetched))
            if key not in self._fetched:
                self._fetched[key] = self._fetch(op, k, names[k], fetched)
            names[k] = self._fetched[key]

    def _fetch(self, op: Op, operand: int, name: str, fetched: Sequence[Fetch]) -> str:
        """An operand with what is fetched of it, one dimension after another."""
        assert op.rule is not None
        value, factors = op.operands[operand], self.sharded.factors[op.id]
        need = tensor_sharding(op.rule.operand_majors[operand], factors)
        held = self.program.values[value].nbytes / need.shards(self.mesh)
        widths: dict[int, int] = {}
        found = name
        for own in fetched:
            row, arrived = held / own.block, []
            for r in own.rounds:
                arrived.append(self._copy(name))
                self._add(
                    Kind.PERMUTE.value,
                    op,
                    [_HOPS.get(tuple(sorted({to - source for source, to in r.pairs})), "between devices")],
                    name=arrived[-1],
                    type=self._type(value, need, widths | {own.dim: r.length}),
                    function="ppermute",
                    operands=(found,),
                    details=(self._axes(factors[own.factor]), f"{r.length} of dim {own.dim}"),
                    axes=tuple(self.mesh.names[a] for a in factors[own.factor]),
                    nbytes=r.length * row,
                    values=(value,),
                )
            found = f"concatenate({', '.join([found, *arrived])})" if arrived else found
            if op.kind != "split":  # whose results look into the operand one by one
                held = row * own.width
                widths[own.dim] = own.width
        return found

    # Ops.

    def step(self, op: Op) -> None:
        """Adds the lines of an op, or of a loop or branch with its bodies."""
        if op.id in self._links:
            return
        if op.rule is None:
            self._control(op)
        else:
            self._op(op)

    def _op(self, op: Op) -> None:
        assert op.rule is not None
        names = [self._taken(op, k) for k in range(len(op.operands))]
        if op.rule.windows:
            self._halos(op, names)
        kind = op.kind if op.kind in ("argument", "output") else MANUAL.get(op.kind, "op")
        axes = tuple(n for n in op.attribute("axes", ()) if n in self.mesh.names) if op.kind in MANUAL else ()
        for r, value in enumerate(op.results):
            name, path, made = self._name(value), self.program.values[value].path, self._made(op, value)
            if path not in ("", name):
                self._paths[name] = path
            self._add(
                kind,
                op,
                [self._partial(value, made), *self._counted_once(op, names)],
                name=name,
                type=self._type(value, made),
                function="" if kind in ("argument", "output") else op.kind,
                operands=tuple(names),
                details=(f"result {r}",) if len(op.results) > 1 else ("·".join(axes),) if axes else (),
                axes=axes,
                nbytes=self._stated_bytes(op, r) if axes else 0.0,
                values=(*op.operands, value),
                **({"about": self._paths.get(name, "")} if path else {}),
            )
        for value in op.results:
            self._store(op, value, self._name(value))

    def _stated_bytes(self, op: Op, result: int) -> float:
        """What a collective of the program itself moves: the larger side."""
        both = (op.operands[result], op.results[result])
        return float(max(self.program.values[v].nbytes for v in both if v >= 0))

    def _counted_once(self, op: Op, names: Sequence[str]) -> Iterator[str]:
        """In a sum with partial values, those that are not partial count on the first device only."""
        passed = self.sharded.passed[op.id] if op.kind in ("add", "add_any", "sub") else ()
        for name, v in zip(names, op.operands, strict=True) if passed else ():
            if v < 0 or any(a not in self.sharded.shardings[v].partial for a in passed):
                yield f"{name} counted once"

    # Loops and branches.

    def _control(self, op: Op) -> None:
        links = [self.program.ops[k] for k in op.links]
        handed = {link.id: self._taken(link, 0) for link in links if not link.kind.endswith(".output")}
        for link in links:
            for value in link.results if link.kind.endswith(".const") else ():
                self._store(link, value, handed[link.id])
        for number, region in enumerate(self.program.regions[r] for r in op.regions):
            self._add("loop", op, function=self._head(op, number, region))
            outer = self._region
            self._region, self._depth = region.id, self._depth + 1
            for link in links:
                for value in (v for v in link.results if v in region.inputs and not link.kind.endswith(".const")):
                    self._enter(link, value, handed[link.id])
            for k in region.ops:
                self.step(self.program.ops[k])
            for link in links:
                self._leave(link, number, region)
            if region.kind == "while.cond":
                self._add("next", op, function=f"continue if {self.stored.get(region.outputs[0], '_')}")
            self._region, self._depth = outer, self._depth - 1
        inner = {v for r in op.regions for v in self.program.regions[r].inputs}
        for link in links:
            for value in (v for v in link.results if v not in inner):
                name = self._name(value)
                if op.kind != "cond":
                    last = [v for v in link.results if v in inner][-1:]
                    self._link(link, value, name, (self._name(last[0]) if last else f"{name}[i]",))
                self._store(link, value, name)

    def _head(self, op: Op, number: int, region: Region) -> str:
        trips = f" ×{region.trips if region.trips_known else '?'}"
        if op.kind == "cond":
            return f"cond on {self.stored.get(op.operands[0], '_')}, branch {number}:"
        return "while, condition:" if region.kind == "while.cond" else f"{op.kind}{trips}:"

    def _link(self, link: Op, value: int, name: str, operands: tuple[str, ...]) -> None:
        type_, used = self._type(value, self._made(link, value)), (*link.operands, value)
        self._add("op", link, name=name, type=type_, function=link.kind, operands=operands, values=used)

    def _enter(self, link: Op, value: int, handed: str) -> None:
        """What a body gets over its border: a carried value has its own name, of an input there is one part for each trip."""
        name = handed
        if link.kind != "cond.input":
            name = f"{handed}[i]" if link.kind == "scan.input" else self._name(value)
            root = self._roots.get(handed, handed)
            if link.kind == "scan.input" and root in self._paths:
                self._paths[name] = self._paths[root]
            self._link(link, value, name, (handed,))
        self._store(link, value, name)

    def _leave(self, link: Op, number: int, region: Region) -> None:
        """What a body hands on: to its next trip, or out of the loop or branch."""
        if link.kind.endswith(".carry") and region.kind.endswith(".body"):
            (carried,) = (v for v in link.results if v in region.inputs)
            operand, name, type_ = 1, f"next {self._name(carried)}", ""
        elif link.kind.endswith(".output"):
            (result,) = link.results
            operand = number if link.kind == "cond.output" else 0
            type_ = self._type(result, self._made(link, result)) if link.kind == "cond.output" else ""
            name = self._name(result) if link.kind == "cond.output" else f"{self._name(result)}[i]"
        else:
            return
        taken = self._taken(link, operand)
        self._add("next", link, name=name, type=type_, operands=(taken,), values=link.operands)
