"""Peak memory of a lowered state: when each array lives, and how much it takes on one device (design, section 7).

The problem. XLA says only after minutes whether a plan fits. Peak memory depends on stored values and on copies of reshards.

The idea. What does not depend on the state is worked out once (``lifetimes``): points of time are kernels in the order of
``kernel_order``, loop bodies inlined once, and a stored value lives from the kernel that makes it to the last that reads it. A
state is a list of allocations, each from local facts: a value's shape and sharding (``value_allocations``), or the reshards of
one value in one region (``copy_allocations``). The peak is the largest sum at one point.

When values live:

- arguments always. An output takes the place of a donated argument of its shape if nothing reads that any more when the output
  is made; else it lies beside it until then. Other outputs live to the end;
- a loop's carry is one array. What the body makes for the next turn lies beside it while the old one is still read. The stack
  that a scan leaves, and that a later loop reads, lives from the start of the one to the end of the other; a stack that an
  outer loop carries and an inner scan takes in and gives out again is updated in place, but not on GPUs;
- elementwise kernels, scatters and updates of slices write into an operand that dies there; on GPUs (``calls_library``) only
  into one with the same order of dimensions;
- a stack that a loop only reads in a narrower type is converted as a whole before the loop;
- a gathered copy lives to the last use of that sharding in its region, from the first one or, if it overlaps, from the product
  before. A reduction to shards has both sides at once; if it overlaps, from when the array can be made until the next loop. An
  all-reduce is in place. Outputs that are gathered at the end do not take their argument's place.

How much they take: tiles of the last two dimensions (``vector_tile``), in whatever order of dimensions pads least, and a
thirty-second more for the gaps that XLA's heap leaves (the median of ``benchmarks/fidelity`` is 2 %, the mean 4 %).

Weak. XLA rematerialises when memory runs short: what does not fit is overestimated, and so are small programs, since XLA keeps
them in on-chip memory. XLA may gather unrolled layers ahead of time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final

from shardwise.cost.clusters import Clusters, Role, cluster, kernel_order
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.ir.program import HEAVY, Op, Origin, Program, Value
from shardwise.ir.traits import IN_PLACE
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.sharding import ROUNDED_BYTES, Kind, Sharding

#: Memory is counted in blocks of this many bytes.
BLOCK: Final = 512
#: One block in so many is lost to gaps between temporaries.
GAPS: Final = 32
#: XLA copies some arguments whose outputs are gathered at the end, for the whole step: a sixth to three quarters of them in the
#: cases seen, in no order that we know. One part in so many of each is taken.
COPIED: Final = 3


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks that are alive from point ``first`` to point ``last``, both included."""

    what: str
    value: int
    blocks: int
    first: int
    last: int


@dataclass(frozen=True)
class Lifetimes:
    """When everything lives, whatever the state.

    ``point`` is that of each kernel, ``runs`` the first and last point of each op, ``span`` those of each region. ``live`` has
    the stored values that take memory; ``narrowed`` stacks that are converted before a loop: a value of the
    narrower type, its item size, the interval; ``windowed`` images that convolutions make in their kernels, from the first of
    them to the last; ``returned`` values that take the place of a donated argument, and the end; ``loops`` by region the points
    at which its loops begin."""

    clusters: Clusters
    points: int
    point: dict[int, int]
    runs: list[tuple[int, ...]]
    span: dict[int, tuple[int, int]]
    live: dict[int, tuple[int, int]]
    narrowed: dict[int, tuple[int, float, int, int]]
    windowed: dict[int, tuple[int, int]]
    returned: dict[int, int]
    loops: dict[int, list[int]]

    @property
    def program(self) -> Program:
        return self.clusters.program

    def beside_span(self, op: int) -> tuple[int, int]:
        """The points from which to which the result of an op is there whole, where it is reduced while other work runs: it is
        made as soon as it can be, and read until the next loop of the region, or its end."""
        region = self.program.ops[op].region
        point = min(self.runs[op], default=self.span[region][0])
        makers = [self.program.definitions[b][0] for b in self.clusters.reads[op]]
        before = [self.point[k] for k in makers if k in self.point] + self.loops.get(region, [])
        first = max([self.span[region][0], *(p for p in before if p < point)]) + 2
        after = [p for p in self.loops.get(region, ()) if p > point]
        return min(first, point), min([self.span[region][1], *after])

    def ahead(self, region: int, point: int) -> int:
        """The point at which a gather starts whose result is needed at ``point``: it overlaps with the product before."""
        before = bisect_left(products := self.products.get(region, []), point)
        return products[before - 1] if before else point

    @cached_property
    def products(self) -> dict[int, list[int]]:
        """The points at which the products of each region run, in order."""
        runs = sorted(
            (op.region, self.runs[op.id][0]) for op in self.program.ops if op.unit in HEAVY and self.runs[op.id]
        )
        return {region: [p for _, p in own] for region, own in itertools.groupby(runs, key=lambda run: run[0])}

    def values(self) -> tuple[int, ...]:
        """All values that ``value_allocations`` has something to say about."""
        return tuple({**self.live, **self.narrowed, **self.windowed})


def lifetimes(program: Program, library: bool = False) -> Lifetimes:
    """The lifetimes of a program's values; ``library`` as of ``cluster``."""
    return _Builder(program, library).run()


class _Builder:
    def __init__(self, program: Program, library: bool):
        self.program, self.c = program, cluster(program, library)
        self.owner = {j: op.id for op in program.ops for j in op.links}
        home = {v: op.region for op in program.ops for v in op.results}
        home |= {v: region.id for region in program.regions for v in region.inputs}
        self.home = [home.get(v.id, 0) for v in program.values]
        self.arguments = {a.value for a in program.arguments}
        self.matches = self._donations()
        self.point = {op.id: 0 for op in program.ops if op.kind in ("argument", "constant")}
        self.span: dict[int, tuple[int, int]] = {}
        donated = {self.c.base[program.ops[k].operands[0]] for k in self.matches}
        self.end = self._walk(0, 0, donated)
        self.point |= {op.id: self.end for op in program.ops if op.kind == "output"}
        self.runs = self._runs()
        self.readers = self._readers()
        self.live = self._stored()
        self.place: dict[int, int] = {}  # values that lie where another does

    def run(self) -> Lifetimes:
        for op in self.program.ops:
            if op.kind.endswith(".carry") and self.c.roles[op.id] is Role.LINK:
                self._carry(op)
        for op in self.program.schedule:
            if self.c.is_kernel(op):
                self._in_place(op)
        returned = self._outputs()
        self.live |= {v: [0, self.end] for v in self.arguments}
        live = {v: (first, last) for v, (first, last) in self.live.items()}
        loops: dict[int, list[int]] = {}
        for op in self.program.schedule:
            if op.regions and op.id in self.point:
                loops.setdefault(op.region, []).append(self.point[op.id])
        intervals = (live, self._narrowed(), self._windowed(), returned)
        return Lifetimes(self.c, self.end + 1, self.point, self.runs, self.span, *intervals, loops)

    def _donations(self) -> dict[int, int]:
        """For every output op that may take the place of a donated argument, that argument."""
        values = self.program.values
        free = [values[a.value] for a in self.program.arguments if a.donated]
        found = {}
        for op in self.program.ops:
            if op.kind == "output":
                out = values[op.results[0]]
                same = next((a for a in free if a.shape == out.shape and a.dtype == out.dtype), None)
                if same is not None:
                    free.remove(same)
                    found[op.id] = same.id
        return found

    def _walk(self, region: int, now: int, donated: set[int]) -> int:
        """Gives points to a region's kernels, two each: what is overwritten there ends at the odd one before."""
        start, now = now, now + 2
        for k in kernel_order(self.c, region, self.home, donated):
            op = self.program.ops[k]
            self.point[k] = now
            now += 2
            if not op.regions:
                continue
            self.point |= dict.fromkeys(op.links, self.point[k])
            for inner in op.regions:
                now = self._walk(inner, now, donated)
            self.point |= {j: now for j in op.links if self.program.ops[j].kind.endswith(".output")}
            now += 2
        self.span[region] = (start, now)
        return now + 2

    def _runs(self) -> list[tuple[int, ...]]:
        """The first and the last point of every op: its own, or those of the kernels that it is made in."""
        found: list[tuple[int, ...]] = [()] * len(self.program.ops)
        for op in reversed(self.program.schedule):
            if op.id in self.point:
                found[op.id] = (self.point[op.id],)
                continue
            points = [p for v in op.results if v >= 0 for u in self.c.uses[self.c.base[v]] for p in found[u]]
            found[op.id] = (min(points), max(points)) if points else ()
        return found

    def _readers(self) -> dict[int, list[tuple[int, int]]]:
        """For each stored base who reads it, and up to which point that keeps it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for op in self.program.schedule:
            if self.c.is_kernel(op):
                for b in self.c.reads[op.id]:
                    # What is written straight into a stack is made, and its operands are read, where it stands.
                    if op.kind != "scan.output" or self.c.base[op.operands[0]] == b:
                        found.setdefault(b, []).append((self._until(b, op), op.id))
        return found

    def _until(self, base: int, op: Op) -> int:
        """A read from inside a loop keeps what is outside until the loop ends."""
        if op.kind == "scan.input":
            return self.span[self.program.ops[self.owner[op.id]].regions[-1]][1]
        at, region = self.point[op.id], op.region
        while region != self.home[base] and region > 0:
            at, region = self.span[region][1], self.program.regions[region].parent
        return at

    def _stored(self) -> dict[int, list[int]]:
        """First and last point of every stored base, before anything shares a place."""
        live: dict[int, list[int]] = {}
        for op in self.program.schedule:
            if self.c.roles[op.id] is Role.VIEW or op.rule is None:
                continue
            at = self.point[self.owner[op.id]] if op.id in self.owner else self.point.get(op.id, -1)
            for v in op.results:
                if self.c.stored[v] and self.c.base[v] == v:
                    reads = [p for p, _ in self.readers.get(v, ())]
                    first = min(reads) if op.kind == "scan.input" and reads else at
                    live[v] = [first, max([first, *reads])]
        return live

    def _carry(self, op: Op) -> None:
        """Initial value, body input and result are one array; so is the output, if the old value is read no more."""
        ops, live, first = self.program.ops, self.live, op.results[0]
        owner = self.owner[op.id]
        body = self.program.regions[ops[owner].regions[-1]]
        start, end = self.point[owner], self.span[body.id][1]
        last = max([end + 1, *(live[r][1] for r in op.results[1:] if r in live)])
        inside = [x for r in op.results[:-1] for x in self.readers.get(r, ())]
        for r in op.results[1:]:
            live.pop(r, None)
            self.place[r] = first
        live[first] = [start, last]
        initial, out = self.c.base[op.operands[0]], self.c.base[op.operands[-1]]
        if initial in live and initial not in self.arguments and live[initial][1] == self.point[op.id]:
            live[initial][1] -= 1
        if out in live and self.home[out] == body.id and out not in body.inputs:
            if max([start, *(p for p, _ in inside)]) <= live[out][0] or self._restacks(out, [k for _, k in inside]):
                live.pop(out)
            else:
                live[out][1] = end

    def _restacks(self, stack: int, readers: list[int]) -> bool:
        """Does a scan give out the stack that its slices, and nothing else, come from?"""
        maker = self.program.ops[self.program.definitions[stack][0]]
        ops = [self.program.ops[k] for k in readers]
        if self.c.by_library or maker.kind != "scan.output":
            return False
        return all(op.kind == "scan.input" and self.owner[op.id] == self.owner[maker.id] for op in ops)

    def _root(self, base: int) -> int:
        while base in self.place:
            base = self.place[base]
        return base

    def _in_place(self, op: Op) -> None:
        """A kernel writes into an operand that dies there."""
        c, live, at = self.c, self.live, self.point[op.id]
        if op.kind in IN_PLACE or c.roles[op.id] is Role.UPDATE:
            operands = [c.base[v] for v in op.operands if v >= 0]
            target = next((b for b in operands if c.stored[b]), operands[0])
            result, root = op.results[0], self._root(target)
            others = [p for p, k in self.readers.get(target, ()) if k != op.id]
            free = c.stored[target] and target not in self.arguments and root in live and result in live
            if free and max(others, default=0) <= at:
                live[root][1] = max(live[root][1], live.pop(result)[1])
                self.place[result] = root
        elif c.roles[op.id] in (Role.CHEAP, Role.DEAR):
            for v in (v for v in op.results if v in live):
                dying = (b for b in c.reads[op.id] if b in live and b not in self.arguments and live[b][1] == at)
                same = next((b for b in dying if self._fits(b, v)), None)
                if same is not None:
                    live[same][1] -= 1

    def _fits(self, old: int, new: int) -> bool:
        """Can a value be written over another? A library wants it in an order of dimensions of its own."""
        a, b = self.program.values[old], self.program.values[new]
        return (a.elements, a.itemsize) == (b.elements, b.itemsize) and (a.shape == b.shape or not self.c.by_library)

    def _outputs(self) -> dict[int, int]:
        """Outputs live to the end, or take an argument's place."""
        returned: dict[int, int] = {}
        for op in (op for op in self.program.ops if op.kind == "output"):
            base = self.c.base[op.operands[0]]
            match, root = self.matches.get(op.id), self._root(base)
            self.live.pop(op.results[0], None)
            if match is not None:
                returned[base] = self.end
            if root in self.arguments or root not in self.live:
                continue
            if match is None:
                self.live[root][1] = self.end
                continue
            old = max((p for p, _ in self.readers.get(match, ())), default=0)
            own = [p for p, k in self.readers.get(base, ()) if self.program.ops[k].kind != "output"]
            self.live[root][1] = max([old, *own])
            if old <= self.live[root][0]:
                self.live.pop(root)
        return returned

    def _narrowed(self) -> dict[int, tuple[int, float, int, int]]:
        """Stacks that loops read in a narrower type only. One copy serves all the loops, from the first to the last."""
        ops, values = self.program.ops, self.program.values
        found: dict[int, tuple[int, float, int, int]] = {}
        for op in (op for op in ops if op.kind == "scan.input" and self.c.roles[op.id] is not Role.VIEW):
            users = [ops[u] for u in self.c.uses[op.results[0]]]
            if {u.kind for u in users} != {"convert_element_type"}:
                continue
            small = values[users[0].results[0]]
            if small.itemsize < values[op.results[0]].itemsize:
                stack, loop = op.operands[0], ops[self.owner[op.id]]
                first, last = self.point[loop.id] - 1, self.span[loop.regions[-1]][1]
                known = found.get(stack, (0, 0.0, first, last))
                found[stack] = (small.id, small.itemsize, min(first, known[2]), max(last, known[3]))
        return found

    def _windowed(self) -> dict[int, tuple[int, int]]:
        """Images (the first operand, not the weights) that convolutions make in their kernels."""
        c, found = self.c, dict[int, tuple[int, int]]()
        for op in self.program.ops:
            if c.roles[op.id] is Role.PRODUCT and op.rule is not None and op.rule.windows:
                at, v = self.runs[op.id], c.base[op.operands[0]]
                if c.through[v] and not c.stored[v] and at:
                    known = found.get(v, (at[0], at[0]))
                    found[v] = (min(*known, *at), max(*known, *at))
        return found


def op_points(life: Lifetimes, op: Op) -> tuple[int, ...]:
    """The first and the last point at which an op runs."""
    return life.runs[op.id]


def use_points(life: Lifetimes, value: int) -> list[int]:
    """The points at which a value is used."""
    uses = life.clusters.uses[life.clusters.base[value]]
    return [p for u in uses for p in life.runs[u]] or [0]


@cache
def padded_elements(sizes: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements that an array takes in tiles, with its dimensions in the best order; as many as it has where rows are 1.

    >>> padded_elements((100, 130), (8, 128)), padded_elements((3, 1000), (8, 128)), padded_elements((100, 130), (1, 32))
    (17408, 4096, 13000)
    """
    (rows, lanes), own, total = tile, [s for s in sizes if s > 1], math.prod(sizes)
    if rows == 1:
        return total
    if len(own) <= 1:
        return max(total, lanes) if total <= lanes else _up(total, rows * lanes)
    return min(
        total // (own[i] * own[j]) * _up(own[i], lanes) * _up(own[j], 2 if own[j] <= 2 else 4 if own[j] <= 4 else rows)
        for i, j in itertools.permutations(range(len(own)), 2)
    )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def local_shape(value: Value, sharding: Sharding, mesh: MeshAxes) -> tuple[int, ...]:
    """The shape of one device's part."""
    pieces = (math.prod(mesh.sizes[a] for a in axes) for axes in sharding.dims)
    return tuple(-(-size // n) for size, n in zip(value.shape, pieces, strict=True))


def blocks(value: Value, sharding: Sharding, mesh: MeshAxes, profile: Profile) -> int:
    """What one device's part of a value takes."""
    elements = padded_elements(local_shape(value, sharding, mesh), profile.vector_tile)
    size = max(1, math.ceil(elements * value.itemsize / BLOCK))
    return size if value.origin is Origin.ARGUMENT else size + size // GAPS


def value_allocations(lowered: Lowered, life: Lifetimes, value: int, profile: Profile) -> list[Allocation]:
    """What a value takes where it is stored."""
    v, sharding, mesh, found = lowered.program.values[value], lowered.actual[value], lowered.state.mesh, []
    if value in life.live:
        found.append(Allocation("value", value, blocks(v, sharding, mesh, profile), *life.live[value]))
    # With fewer examples than a tile has rows XLA folds space into the batch, and nothing is made inside a convolution.
    if value in life.windowed and local_shape(v, sharding, mesh)[0] < profile.vector_tile[0]:
        found.append(Allocation("operand", value, blocks(v, sharding, mesh, profile), *life.windowed[value]))
    if value in life.narrowed:
        _, itemsize, first, last = life.narrowed[value]
        narrow = replace(v, itemsize=itemsize, origin=Origin.RESULT)
        found.append(Allocation("narrow copy", value, blocks(narrow, sharding, mesh, profile), first, last))
    return found


def copy_allocations(
    lowered: Lowered, life: Lifetimes, reshards: Iterable[Reshard], profile: Profile
) -> list[Allocation]:
    """What the reshards of one value in one region take."""
    found = []
    for r in reshards:
        kinds = {s.purpose for s in r.steps} - {Kind.SLICE}
        if not kinds or r.source is r.target:  # a halo is part of the kernel that reads it
            continue
        op, v = life.program.ops[r.op], life.program.values[r.value]
        source, target = (blocks(v, s, lowered.state.mesh, profile) for s in (r.source, r.target))
        if op.kind == "output" and Kind.ALL_GATHER in kinds:
            last = life.points - 1
            found.append(Allocation("gathered", r.value, target // COPIED, 0, last))
            found.append(Allocation("gathered", r.value, target - target // COPIED, last, last))
        elif r.operand < 0 and kinds != {Kind.ALL_REDUCE}:
            at = life.point.get(r.op, use_points(life, r.value)[0])
            span = life.beside_span(r.op) if any(s.beside for s in r.steps) else (at, at)
            found.append(Allocation("unreduced", r.value, source, *span))
            if r.value in life.returned and Kind.ALL_GATHER in kinds:
                found.append(Allocation("gathered", r.value, target, at, life.returned[r.value]))
        elif r.operand >= 0 and not kinds <= {Kind.ALL_REDUCE, Kind.PERMUTE}:
            users = [(life.program.ops[user], k) for user, k in lowered.structure.uses[r.value]]
            section = lowered.structure.section
            here = [
                (u, k) for u, k in users if section(u.id, r.value) == section(op.id, r.value) and u.rule is not None
            ]
            points = [p for u, k in here if lowered.need(u, k) == r.target for p in op_points(life, u)]
            if lowered.memo.candidates.rounds(op) and not r.source.partial:
                target = blocks(replace(v, itemsize=ROUNDED_BYTES), r.target, lowered.state.mesh, profile)
            if points:
                overlaps = Kind.ALL_GATHER in kinds and lowered.structure.early[r.value]
                first = life.ahead(op.region, min(points)) if overlaps else min(points)
                found.append(Allocation("copy", r.value, target, first, max(points)))
            if points and Kind.REDUCE_SCATTER in kinds:
                first = last = min(points)
                if any(s.beside for s in r.steps):
                    first, last = life.beside_span(life.program.definitions[r.value][0])
                made, gone = life.live.get(r.value, (first, first - 1))  # in between it is there anyway
                for start, end in ((first, made - 1), (max(first, gone + 1), last)):
                    if start <= end:
                        found.append(Allocation("unreduced", r.value, source, start, end))
    return found
