"""Lists the device-local program: what one device computes, with local shapes, and the collectives where they run.

- ``f32[16·data,512]`` is a block of 16 × 512 of an array whose first dimension is sharded over ``data``.
- ``%7`` is a value as its op makes it, ``%7.a`` and ``%7.b`` are the same value in other shardings. Arguments are named by
  their paths where these are short. ``w[i]`` is what one trip of a loop reads of ``w``; ``_`` is a number in the program.
- Collectives have the names that they have in ``jax.lax``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from shardwise.ir.program import Op, Program, Region
from shardwise.ir.traits import MANUAL
from shardwise.lowering.halo import Fetch
from shardwise.lowering.sharded_program import ShardedProgram
from shardwise.lowering.sharding import PAIRED, Collective, Kind, Sharding, is_made_anew, reshard
from shardwise.spmd.collectives import ALL_REDUCES, changed_dims
from shardwise.spmd.walk import Handed, Walk

#: Kinds of lines that communicate.
MOVING: Final = frozenset(kind.value for kind in Kind if kind is not Kind.SLICE)
#: Arguments and outputs with a longer path are named by number.
_LONGEST_NAME: Final = 16
_FUNCTIONS: Final = {Kind.SLICE: "dynamic_slice", Kind.ALL_GATHER: "all_gather", Kind.REDUCE_SCATTER: "psum_scatter"}
_HOPS: Final = {(1,): "to the next device", (-1,): "to the previous device", (-1, 1): "between neighbors"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line: ``name type = function(operands, details)``.

    ``kind`` is that of a collective (``all-gather``, …, or ``slice``, which is local), or one of ``argument``, ``op``,
    ``output``, ``loop`` (the head of a body or branch) and ``next`` (a result of a body). ``about`` are the paths of values
    that are named by number; ``nbytes`` the bytes that one device moves each time, ``times`` how often the line runs in a step,
    ``count`` the number of collectives (the hops of a ring), ``values`` the values that it uses and makes.
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
    """Returns the program of one device, in the order of execution; with ``most`` only the first lines."""
    listing = _Listing(program, sharded)
    for op in program.regions[0].ops:
        if most is not None and len(listing.lines) >= most:
            break
        listing.step(program.ops[op])
    return listing.lines[:most]


def totals(lines: Iterable[Line]) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
    """Returns, by kind and axes, the number of collectives and the bytes that one device moves in a step (``Plan.moved``)."""
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    nbytes: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for line in lines:
        if line.kind in MOVING:
            counts[line.kind, line.axes] += line.count
            nbytes[line.kind, line.axes] += line.count * int(line.nbytes * line.times)
    return {key: (counts[key], float(nbytes[key])) for key in sorted(counts)}


@cache
def _short(dtype: str) -> str:
    """
    >>> [_short(d) for d in ("float32", "bfloat16", "uint8", "bool", "float8_e4m3fn", "key<fry>")]
    ['f32', 'bf16', 'u8', 'bool', 'f8_e4m3fn', 'key<fry>']
    """
    return re.sub(r"^(b?)(f)loat|^(u)int|^(i)nt|^(c)omplex", lambda m: "".join(g for g in m.groups() if g), dtype)


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' if len(dims) > 1 else ''} {' and '.join(map(str, dims))}"


class _Listing(Walk):
    """Walks over a sharded program with names in place of arrays, and adds lines."""

    def __init__(self, program: Program, sharded: ShardedProgram):
        super().__init__(program, sharded, rounds=True)
        self.lines: list[Line] = []
        self._roots: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._suffixes: Counter[str] = Counter()
        self._resharded: set[tuple[int, int, Sharding]] = set()
        self._region, self._depth = 0, 0

    # Names and types.

    def _name(self, value: int) -> str:
        path = self.program.values[value].path
        return path if path and len(path) <= _LONGEST_NAME else f"%{value}"

    def _copy(self, name: str) -> str:
        """Returns a new name for the same value in another sharding."""
        root = self._roots.get(name, name)
        number, suffix = self._suffixes[root], ""
        self._suffixes[root] += 1
        while number >= 0:
            number, suffix = number // 26 - 1, chr(ord("a") + number % 26) + suffix
        self._roots[f"{root}.{suffix}"] = root
        return f"{root}.{suffix}"

    def _names(self, axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.mesh.names[a] for a in axes)

    def _axes(self, axes: Iterable[int]) -> str:
        return "·".join(self._names(axes))

    def _type(self, value: int, sharding: Sharding, sizes: Mapping[int, int] = MappingProxyType({})) -> str:
        """Returns the type of a block. ``sizes``: by dimension, the sizes that are no even share of the array."""
        array = self.program.values[value]
        dims = list(map(str, sharding.local_shape(array.shape, self.mesh)))
        for d, axes in enumerate(sharding.dims):
            dims[d] = str(sizes[d]) if d in sizes else "·".join([dims[d], *self._names(axes)])
        return f"{_short(array.dtype)}[{','.join(dims)}]"

    def _partial(self, value: int, sharding: Sharding) -> str:
        reducer = self._types[value].reducer
        reduced = "" if reducer == "sum" else f" {reducer}"
        return f"partial{reduced} over {self._axes(sharding.partial)}" if sharding.partial else ""

    def _add(self, kind: str, op: Op, notes: Iterable[str] = (), **parts: Any) -> None:
        source = self.program.source_of(op)
        parts |= {"source": str(source) if source.file else "", "note": "; ".join(filter(None, notes))}
        roots = dict.fromkeys(self._roots.get(name, name) for name in parts.get("operands", ()))
        parts.setdefault("about", ", ".join(self._paths[root] for root in roots if root in self._paths))
        self.lines.append(Line(kind, self._depth, times=float(self.program.trips[self._region]), **parts))

    # Reshards.

    def _read(self, op: Op, operand: int) -> str:
        return str(self.stored.get(op.operands[operand], "_"))

    def _reshard(self, op: Op, value: int, xs: Sequence[Any], ends: tuple[Sharding, Sharding], rounded: bool) -> str:
        """Adds the collectives from one sharding to another, and returns the name of the result."""
        name, place = str(xs[0]), (self._region, value, ends[1])
        note = "again, behind a remat barrier" if place in self._resharded else ""
        self._resharded.add(place)
        array, now = self._array(value, rounded), ends[0]
        if is_made_anew(array, *ends):
            old, name = name, self._copy(name)
            parts = {"name": name, "type": self._type(value, ends[1]), "operands": (old,), "values": (value,)}
            self._add("op", op, (note,), function="broadcast_in_dim", **parts)
        narrow = self._moved_dtype(value, ends[0], rounded)
        for step in reshard(array, *ends, self.mesh):
            old, name = name, self._copy(name)
            function, details, remark = self._step(step, now, array.reducer)
            moves, now = step.kind is not Kind.SLICE, step.after
            self._add(
                step.kind.value,
                op,
                (f"as {narrow}" if narrow and moves else remark, self._partial(value, now), note),
                name=name,
                type=self._type(value, now),
                function=function,
                operands=(old,),
                details=(self._axes(step.axes), *details),
                axes=self._names(step.axes),
                nbytes=step.nbytes if moves else 0.0,
                count=step.count,
                values=(value,),
            )
        return name

    def _step(self, step: Collective, before: Sharding, reducer: str) -> tuple[str, tuple[str, ...], str]:
        """Returns the function of ``jax.lax`` for one step of a reshard, its arguments after the axes, and a remark."""
        after, changed = step.after, changed_dims(before, step.after)
        if step.kind is Kind.ALL_REDUCE and reducer in PAIRED and after is not before:
            return "pmin", (), "of their positions"
        if step.kind is Kind.ALL_REDUCE:
            return ALL_REDUCES[reducer], (), "of the values" if reducer in PAIRED else ""
        if step.kind is Kind.ALL_GATHER and not changed:
            return "all_gather", (), f"then combined by {reducer}"
        if step.hops:
            return "ppermute", (_dims(changed),), f"reduce-scatter, ring of {step.hops}"
        if step.kind is Kind.PERMUTE:
            return "ppermute", tuple(f"dim {d} to {self._axes(after.dims[d])}" for d in changed), ""
        if step.kind is Kind.ALL_TO_ALL:
            split = [d for d in changed if set(after.dims[d]) - set(before.dims[d])]
            joined = [d for d in changed if set(before.dims[d]) - set(after.dims[d])]
            return "all_to_all", (f"split {_dims(split)}", f"concat {_dims(joined)}"), ""
        return _FUNCTIONS[step.kind], (_dims(changed),), ""

    def _fetch(self, op: Op, operand: int, name: str, needed: Sequence[Fetch]) -> str:
        """Adds the permutes that fetch halos of an operand, dimension by dimension, and returns the name of the result."""
        value, factors = op.operands[operand], self.sharded.factors[op.id]
        need = self._need(op, operand, Sharding(()))
        array = self.program.values[value]
        nbytes = math.prod(need.local_shape(array.shape, self.mesh)) * array.itemsize
        widths: dict[int, int] = {}
        fetched = name
        for f in needed:
            row, arrived = nbytes / f.block, []
            for r in f.rounds:
                arrived.append(self._copy(name))
                self._add(
                    Kind.PERMUTE.value,
                    op,
                    [_HOPS.get(tuple(sorted({to - source for source, to in r.pairs})), "between devices")],
                    name=arrived[-1],
                    type=self._type(value, need, widths | {f.dim: r.length}),
                    function="ppermute",
                    operands=(fetched,),
                    details=(self._axes(factors[f.factor]), f"{r.length} of dim {f.dim}"),
                    axes=self._names(factors[f.factor]),
                    nbytes=r.length * row,
                    values=(value,),
                )
            fetched = f"concatenate({', '.join([fetched, *arrived])})" if arrived else fetched
            if op.kind != "split":  # whose results look into the operand one by one
                nbytes = row * f.width
                widths[f.dim] = f.width
        return fetched

    # Ops.

    def _op(self, op: Op) -> None:
        names = [self._operand(op, k) for k in range(len(op.operands))]
        for k, needed in self._fetches(op).items():
            shared = self._fetched(op, k)
            if needed not in shared:
                shared[needed] = self._fetch(op, k, names[k], needed)
            names[k] = shared[needed]
        kind = op.kind if op.kind in ("argument", "output") else MANUAL.get(op.kind, "op")
        axes = tuple(n for n in op.attribute("axes", ()) if n in self.mesh.names) if op.kind in MANUAL else ()
        once = [f"{x} counted once" for k, x in enumerate(names) if self._counted_once(op, k)]
        for r, value in enumerate(op.results):
            name, path, computed = self._name(value), self.program.values[value].path, self._computed(op, r)
            if path not in ("", name):
                self._paths[name] = path
            moved = [self.program.values[v].nbytes for v in (op.operands[r], value) if v >= 0] if axes else [0]
            self._add(
                kind,
                op,
                [self._partial(value, computed), *once],
                name=name,
                type=self._type(value, computed),
                function="" if kind in ("argument", "output") else op.kind,
                operands=tuple(names),
                details=(f"result {r}",) if len(op.results) > 1 else ("·".join(axes),) if axes else (),
                axes=axes,
                nbytes=float(max(moved)),
                values=(*op.operands, value),
                **({"about": self._paths.get(name, "")} if path else {}),
            )
        for value in op.results:
            self._store(op, value, self._name(value))

    # Loops and branches.

    @contextmanager
    def _inside(self, op: Op, number: int) -> Iterator[None]:
        region, outer = self.program.regions[op.regions[number]], self._region
        head = f"{op.kind} ×{region.trips if region.trips_known else '?'}:"
        if op.kind == "cond":
            head = f"cond on {self._read(op, 0)}, branch {number}:"
        self._add("loop", op, function="while, condition:" if region.kind == "while.cond" else head)
        self._region, self._depth = region.id, self._depth + 1
        yield
        self._region, self._depth = outer, self._depth - 1

    def _loop(self, op: Op, links: list[Op], initial: Handed, body: Callable[[int, Handed], Handed]) -> Handed:
        for number in range(len(op.regions)):
            body(number, initial)
        return dict.fromkeys(op.links)

    def _test(self, op: Op) -> None:
        self._add("next", op, function=f"continue if {self._read(op, 0)}")

    def _link_type(self, link: Op, value: int) -> str:
        return self._type(value, self._computed(link, link.results.index(value)))

    def _link(self, link: Op, value: int, name: str, operand: str) -> None:
        """Stores the name of a value inside or behind a loop or branch; a loop has a line for it."""
        if not link.kind.startswith("cond."):
            parts = {"name": name, "type": self._link_type(link, value), "operands": (operand,)}
            notes = [self._partial(value, self._computed(link, link.results.index(value)))]
            if value == link.results[0] and self._counted_once(link, 0):
                notes.append(f"{operand} counted once")
            self._add("op", link, notes, function=link.kind, values=(*link.operands, value), **parts)
        self._store(link, value, name)

    def _exit(self, link: Op, value: int, x: Any) -> None:
        name, inner = self._name(value), [v for v in link.results if v != value]
        self._link(link, value, name, self._name(inner[-1]) if inner else f"{name}[i]")

    def _enter(self, link: Op, value: int, x: Any) -> None:
        """Adds an input of a body: a carried value with a new name, or the slice of a scanned input for one trip."""
        name = str(x) if link.kind == "cond.input" else self._name(value)
        if link.kind == "scan.input":
            name, root = f"{x}[i]", self._roots.get(x, x)
            if root in self._paths:
                self._paths[name] = self._paths[root]
        self._link(link, value, name, x)

    def _leave(self, link: Op, operand: int, region: Region | None = None) -> Any:
        """Adds a result of a body: for its next trip, or for the loop or branch."""
        x = self._operand(link, operand)
        if region is not None:
            name, type_ = self._name(link.results[0]), ""
            if link.kind == "cond.output":
                type_ = self._link_type(link, link.results[0])
            elif link.kind.endswith(".carry"):
                name = f"next {next(self._name(v) for v in link.results if v in region.inputs)}"
            else:
                name = f"{name}[i]"
            self._add("next", link, name=name, type=type_, operands=(x,), values=link.operands)
        return x
