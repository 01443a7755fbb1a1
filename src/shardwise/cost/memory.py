"""Peak memory of a lowered state: when each array lives, and how much it takes on one device (design, section 7).

The problem. XLA says only after minutes whether a plan fits. Peak memory depends on stored values and on copies of reshards.

The idea. What does not depend on the state is computed once (``Lifetimes``): points of time are kernels in the order of
``kernel_order``, loop bodies inlined once, and a stored value lives from the kernel that computes it to the last that reads it.
A state is a list of allocations, each from local facts: a value's shape and sharding (``value_allocations``), or the reshards
of one value in one region (``copy_allocations``). The peak is the largest sum at one point.

When values live:

- arguments always. An output takes the place of a donated argument of its shape if nothing reads that any more when the output
  is computed; else it is beside it until then. Other outputs take memory from the start to the end;
- a loop's carry is one array. What the body computes for the next trip is beside it while the old one is still read. The stack
  that a scan returns, and that a later loop reads, lives from the start of the one to the end of the other; a stack that an
  outer loop carries and an inner scan reads and returns is updated in place, but not on GPUs;
- elementwise kernels, scatters and updates of slices write into an operand that dies there, unless a product in the kernel
  reads it; on GPUs (``calls_library``) only into one with the same order of dimensions;
- a stack that a loop only reads in a narrower type is converted before the loop;
- a gathered copy lives to the last use of that sharding in its region, from the first one or, if it overlaps, from the product
  before. A reduction to shards has both sides at once; a ring that overlaps, from when the array can be computed until as many
  products have run as it has hops, also across a loop;
  An all-reduce is in place. Outputs that are gathered at the end do not take their argument's place.

How much they take: tiles of the two minor dimensions (``shardwise.cost.layouts``), and a thirty-second more for the gaps that
XLA's heap leaves (the median of ``benchmarks/fidelity`` is 2 %, the mean 4 %). Temporaries are in on-chip memory as far as they
fit (``shardwise.cost.model.in_use``).

Weak. XLA rematerializes when memory runs short: what does not fit is overestimated. XLA may gather unrolled layers ahead of
time. Which temporaries are on the chip is not known, only how much they are together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.clusters import Clusters, Role, kernel_order
from shardwise.cost.layouts import Layouts, Minor, padded_elements
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.ir.program import HEAVY, Op, Origin, Program, Value
from shardwise.ir.traits import IN_PLACE
from shardwise.lowering.lowered import Lowered, Reshard
from shardwise.lowering.sharding import ROUNDED_BYTES, Kind, Sharding

#: Memory is counted in blocks of this many bytes.
BLOCK: Final = 512
#: One block in this many is lost to gaps between temporaries.
GAPS: Final = 32
#: XLA copies some arguments whose outputs are gathered at the end, for the whole step: a sixth to three quarters of them in the
#: cases seen, in no order that we know. One in this many is counted.
COPIED: Final = 3
#: One part in this many of the on-chip memory counts as room for temporaries, the rest as copies of what is in memory: with
#: all of it, programs that libtpu refuses are said to fit (tests/verification/test_tpu.py, narrow rows).
SHARED: Final = 2
#: The powers of two of hops that are distinguished.
_HOPS: Final = 13


@dataclass(frozen=True, slots=True)
class Allocation:
    """Blocks that are alive from point ``first`` to point ``last``, both included; ``on_chip``: they may be there."""

    what: str
    value: int
    blocks: int
    first: int
    last: int
    on_chip: bool = False


class Lifetimes:
    """When everything lives, whatever the state. ``point`` is that of each kernel, ``runs`` the first and last point of each
    op, ``span`` those of each region. ``live``: the stored values, from point to point; ``narrowed``: stacks that are converted
    before a loop: the item size, and the points; ``windowed``: images that convolutions compute in their kernels; ``returned``:
    values that take the place of a donated argument, and the end; ``temporary``: live values that are neither arguments nor
    outputs; ``loops`` and ``products`` by region: their points."""

    def __init__(self, program: Program, by_library: bool = False):
        self.program, self.clusters, self.layouts = program, Clusters(program, by_library), Layouts(program)
        self._arguments = {a.value for a in program.arguments}
        self._matches = self._donations()
        self.point = {op.id: 0 for op in program.ops if op.kind in ("argument", "constant")}
        self.span: dict[int, tuple[int, int]] = {}
        donated = {self.clusters.base[program.ops[k].operands[0]] for k in self._matches}
        self._end = self._walk(0, 0, donated)
        self.points = self._end + 1
        self.point |= {op.id: self._end for op in program.ops if op.kind == "output"}
        self.runs = self._runs()
        self.loops: dict[int, list[int]] = {}
        self.products: dict[int, list[int]] = {}
        for op in program.schedule:
            if op.regions and op.id in self.point:
                self.loops.setdefault(op.region, []).append(self.point[op.id])
            if op.unit in HEAVY and self.runs[op.id]:
                self.products.setdefault(op.region, []).append(self.runs[op.id][0])
        for points in self.products.values():
            points.sort()
        self._readers = self._find_readers()
        self._live = self._stored()
        self._place: dict[int, int] = {}  # values that are where another is
        self._before: dict[int, int] = {}  # the array that dies where an elementwise op writes a value into its place
        for op in program.ops:
            if op.kind.endswith(".carry") and self.clusters.roles[op.id] is Role.LINK:
                self._carry(op)
        for op in program.schedule:
            if self.clusters.is_kernel(op):
                self._in_place(op)
        self.returned: dict[int, int] = {}
        for op in (op for op in program.ops if op.kind == "output"):
            self._output(op)
        self._live |= {v: [0, self._end] for v in self._arguments}
        self.live = {v: (first, last) for v, (first, last) in self._live.items()}
        returned = (op.operands[0] for op in program.ops if op.kind == "output")
        outputs = {self._root(self.clusters.base[v]) for v in returned if v >= 0}
        self.temporary = frozenset(self.live) - self._arguments - outputs
        self.narrowed = self._narrowed()
        self.windowed = self._windowed()

    def beside_span(self, op: int, hops: int) -> tuple[int, int]:
        """From when to when the result of an op is there unreduced, while a ring reduces it: for as many products as it has
        hops (in powers of two), at most until the end of its region. Hops before a loop and after it may be of one ring."""
        points = self.beside_points(op)
        return points[0], points[min((hops - 1).bit_length() + 1, len(points) - 1)]

    def beside_points(self, op: int) -> list[int]:
        """The points of ``beside_span``: the first, and the last for 1, 2, 4, ... hops."""
        region = self.program.ops[op].region
        start, end = self.span[region]
        point, loops = min(self.runs[op], default=start), self.loops.get(region, [])
        makers = [self.program.definitions[b][0] for b in self.clusters.reads[op]]
        before = [self.point[k] for k in makers if k in self.point] + loops
        first = max([start, *(p for p in before if p < point)]) + 2
        products = self.products.get(region, [])
        at = bisect_right(products, point) - 1
        ends = [products[at + 2**k] if at + 2**k < len(products) else end for k in range(_HOPS)]
        return [min(first, point), *ends]

    def ahead(self, region: int, point: int) -> int:
        """The point at which a gather starts whose result is needed at ``point``: it overlaps with the product before."""
        before = bisect_left(products := self.products.get(region, []), point)
        return products[before - 1] if before else point

    def use_points(self, value: int) -> list[int]:
        """The points at which a value is used."""
        return [p for u in self.clusters.uses[self.clusters.base[value]] for p in self.runs[u]] or [0]

    def values(self) -> tuple[int, ...]:
        """All values of which ``value_allocations`` has any."""
        return tuple({**self.live, **self.narrowed, **self.windowed})

    def _donations(self) -> dict[int, int]:
        """For every output op that may take the place of a donated argument, that argument."""
        values = self.program.values
        free = [values[a.value] for a in self.program.arguments if a.donated]
        matches = {}
        for op in (op for op in self.program.ops if op.kind == "output"):
            out = values[op.results[0]]
            same = next((a for a in free if a.type_text == out.type_text), None)
            if same is not None:
                free.remove(same)
                matches[op.id] = same.id
        return matches

    def _walk(self, region: int, now: int, donated: set[int]) -> int:
        """Gives points to a region's kernels, two each: what is overwritten there ends at the odd one before."""
        start, now = now, now + 2
        for k in kernel_order(self.clusters, region, donated):
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
        """The first and the last point of every op: its own, or those of the kernels that it is computed in."""
        c = self.clusters
        runs: list[tuple[int, ...]] = [()] * len(self.program.ops)
        for op in reversed(self.program.schedule):
            if op.id in self.point:
                runs[op.id] = (self.point[op.id],)
                continue
            points = [p for v in op.results if v >= 0 for u in c.uses[c.base[v]] for p in runs[u]]
            runs[op.id] = (min(points), max(points)) if points else ()
        return runs

    def _find_readers(self) -> dict[int, list[tuple[int, int]]]:
        """For each stored base who reads it, and up to which point that keeps it."""
        readers: dict[int, list[tuple[int, int]]] = {}
        for op in self.program.schedule:
            if self.clusters.is_kernel(op):
                for b in self.clusters.reads[op.id]:
                    # What is written straight into a stack is computed, and its operands are read, where it stands.
                    if op.kind != "scan.output" or self.clusters.base[op.operands[0]] == b:
                        readers.setdefault(b, []).append((self._until(b, op), op.id))
        return readers

    def _until(self, base: int, op: Op) -> int:
        """A read from inside a loop keeps what is outside until the loop ends."""
        if op.kind == "scan.input":
            return self.span[self.program.ops[self.clusters.owner[op.id]].regions[-1]][1]
        at, region = self.point[op.id], op.region
        while region != self.program.home[base] and region > 0:
            at, region = self.span[region][1], self.program.regions[region].parent
        return at

    def _stored(self) -> dict[int, list[int]]:
        """First and last point of every stored base, before anything shares a place."""
        c, live = self.clusters, dict[int, list[int]]()
        for op in self.program.schedule:
            if c.roles[op.id] is Role.VIEW or op.rule is None:
                continue
            at = self.point.get(c.owner.get(op.id, op.id), -1)
            for v in op.results:
                if c.stored[v] and c.base[v] == v:
                    reads = [p for p, _ in self._readers.get(v, ())]
                    first = min(reads) if op.kind == "scan.input" and reads else at
                    live[v] = [first, max([first, *reads])]
        return live

    def _carry(self, op: Op) -> None:
        """Initial value, body input and result are one array; so is the output, if the old value is read no more."""
        live, base, first = self._live, self.clusters.base, op.results[0]
        owner = self.clusters.owner[op.id]
        body = self.program.regions[self.program.ops[owner].regions[-1]]
        start, end = self.point[owner], self.span[body.id][1]
        last = max([end + 1, *(live[r][1] for r in op.results[1:] if r in live)])
        inside = [x for r in op.results[:-1] for x in self._readers.get(r, ())]
        for r in op.results[1:]:
            live.pop(r, None)
            self._place[r] = first
        live[first] = [start, last]
        initial, out = base[op.operands[0]], base[op.operands[-1]]
        if initial in live and initial not in self._arguments and live[initial][1] == self.point[op.id]:
            live[initial][1] -= 1
        maker = self.program.ops[self.program.definitions[initial][0]]
        if maker.kind.endswith(".carry") and all(k == op.id or p < start for p, k in self._readers.get(initial, ())):
            live.pop(first)  # the carry of a loop inside of another one, which it goes on in
            self._place[first] = initial
        if out in live and self.program.home[out] == body.id and out not in body.inputs:
            if max([start, *(p for p, _ in inside)]) <= live[out][0] or self._restacks(out, [k for _, k in inside]):
                live.pop(out)
            else:
                live[out][1] = end

    def _restacks(self, stack: int, readers: list[int]) -> bool:
        """Does a scan return the stack that its slices, and nothing else, come from?"""
        maker, owner = self.program.ops[self.program.definitions[stack][0]], self.clusters.owner
        if self.clusters.by_library or maker.kind != "scan.output":
            return False
        return all(self.program.ops[k].kind == "scan.input" and owner[k] == owner[maker.id] for k in readers)

    def _root(self, base: int) -> int:
        while base in self._place:
            base = self._place[base]
        return base

    def _in_place(self, op: Op) -> None:
        """A kernel writes into an operand that dies there."""
        c, live, at = self.clusters, self._live, self.point[op.id]
        if op.kind in IN_PLACE or c.roles[op.id] is Role.UPDATE:
            operands = [c.base[v] for v in op.operands if v >= 0]
            target = next((b for b in operands if c.stored[b]), operands[0])
            result, root = op.results[0], self._root(target)
            others = [p for p, k in self._readers.get(target, ()) if k != op.id]
            free = c.stored[target] and target not in self._arguments and root in live and result in live
            if free and max(others, default=0) <= at:
                live[root][1] = max(live[root][1], live.pop(result)[1])
                self._place[result] = root
        elif c.roles[op.id] is Role.ELEMENTWISE:
            multiplied = self._multiplied(op)
            for v in (v for v in op.results if v in live):
                dying = (b for b in c.reads[op.id] if b in live and b not in self._arguments and live[b][1] == at)
                same = next((b for b in dying if b not in multiplied and self._fits(b, v)), None)
                if same is not None:
                    live[same][1] -= 1
                    self._before[v] = same

    def _multiplied(self, op: Op) -> frozenset[int]:
        """The stored bases that a product in the kernel of an op reads: it reads them until its last result is written."""
        c, found = self.clusters, set[int]()
        inside = [c.base[v] for v in op.operands if v >= 0]
        while inside:
            base = inside.pop()
            if c.heavy[base] and c.through[base]:
                maker = self.program.ops[self.program.definitions[base][0]]
                if c.roles[maker.id] is Role.PRODUCT:
                    found.update(c.reads[maker.id])
                else:
                    inside += [c.base[v] for v in maker.operands if v >= 0]
        return frozenset(found)

    def _fits(self, old: int, new: int) -> bool:
        """Can a value be written over another? A library has its own order of dimensions."""
        a, b = self.program.values[old], self.program.values[new]
        same = (a.elements, a.itemsize) == (b.elements, b.itemsize)
        return same and (a.shape == b.shape or not self.clusters.by_library)

    def _output(self, op: Op) -> None:
        """An output lives to the end, or takes an argument's place."""
        base, match = self.clusters.base[op.operands[0]], self._matches.get(op.id)
        root = self._root(base)
        self._live.pop(op.results[0], None)
        if root in self._arguments and match is None:  # a copy
            self._live[op.results[0]] = [0, self._end]
        if match is not None:
            self.returned[base] = self._end
        if root in self._arguments or root not in self._live:
            return
        if match is None:
            self._live[root] = [0, self._end]
            while (root := self._before.get(root, -1)) in self._live:  # in the output's place, before it is computed
                del self._live[root]
            return
        old = max((p for p, _ in self._readers.get(match, ())), default=0)
        reads = [p for p, k in self._readers.get(base, ()) if self.program.ops[k].kind != "output"]
        self._live[root][1] = max([old, *reads])
        if old <= self._live[root][0]:
            self._live.pop(root)

    def _narrowed(self) -> dict[int, tuple[float, int, int]]:
        """Stacks that loops read in a narrower type only. One copy serves all the loops, from the first to the last."""
        c, ops, values = self.clusters, self.program.ops, self.program.values
        narrowed: dict[int, tuple[float, int, int]] = {}
        for op in (op for op in ops if op.kind == "scan.input" and c.roles[op.id] is not Role.VIEW):
            users = [ops[u] for u in c.uses[op.results[0]]]
            if {u.kind for u in users} != {"convert_element_type"}:
                continue
            itemsize = values[users[0].results[0]].itemsize
            if itemsize < values[op.results[0]].itemsize:
                loop = ops[c.owner[c.outermost(op).id]]
                stack = c.base[op.operands[0]]
                first, last = self.point[loop.id] - 1, self.span[loop.regions[-1]][1]
                _, start, end = narrowed.get(stack, (itemsize, first, last))
                narrowed[stack] = (itemsize, min(first, start), max(last, end))
        return narrowed

    def _windowed(self) -> dict[int, tuple[int, int]]:
        """Images (the first operand, not the weights) that convolutions compute in their kernels."""
        c, windowed = self.clusters, dict[int, tuple[int, int]]()
        for op in self.program.ops:
            if c.roles[op.id] is Role.PRODUCT and op.rule is not None and op.rule.windows:
                at, v = self.runs[op.id], c.base[op.operands[0]]
                if c.through[v] and not c.stored[v] and at:
                    points = (*at, *windowed.get(v, ()))
                    windowed[v] = (min(points), max(points))
        return windowed


def blocks(value: Value, sharding: Sharding, mesh: MeshAxes, profile: Profile, minor: Minor | None = None) -> int:
    """The memory that one device's part of a value takes; ``minor``: see ``shardwise.cost.layouts``."""
    if value.host:
        return 0
    elements = padded_elements(sharding.local_shape(value.shape, mesh), profile.vector_tile, minor)
    size = max(1, math.ceil(elements * value.itemsize / BLOCK))
    return size if value.origin is Origin.ARGUMENT else size + size // GAPS


def on_chip_blocks(profile: Profile) -> int:
    """The on-chip memory for temporaries. What is larger is not kept there."""
    return profile.on_chip_bytes // (SHARED * BLOCK)


def value_allocations(lowered: Lowered, life: Lifetimes, value: int, profile: Profile) -> list[Allocation]:
    """The memory that a value takes where it is stored."""
    v, sharding, mesh, allocations = lowered.program.values[value], lowered.actual[value], lowered.mesh, []
    stored = blocks(v, sharding, mesh, profile, life.layouts.minor.get(value))
    if value in life.live:
        on_chip = value in life.temporary and stored <= on_chip_blocks(profile)
        allocations.append(Allocation("value", value, stored, *life.live[value], on_chip))
    # With fewer examples than a tile has rows XLA folds space into the batch, and nothing is computed inside a convolution.
    if value in life.windowed and sharding.local_shape(v.shape, mesh)[0] < profile.vector_tile[0]:
        allocations.append(Allocation("operand", value, stored, *life.windowed[value]))
    if value in life.narrowed:
        itemsize, first, last = life.narrowed[value]
        narrow = replace(v, itemsize=itemsize, origin=Origin.RESULT)
        allocations.append(Allocation("narrow copy", value, blocks(narrow, sharding, mesh, profile), first, last))
    return allocations


def copy_allocations(
    lowered: Lowered, life: Lifetimes, reshards: Iterable[Reshard], profile: Profile
) -> list[Allocation]:
    """The memory that the reshards of one value in one region take."""
    allocations = []
    for r in reshards:
        kinds = {s.purpose for s in r.steps} - {Kind.SLICE}
        if not kinds or r.source is r.target:  # a halo is part of the kernel that reads it
            continue
        op, v = life.program.ops[r.op], life.program.values[r.value]
        minor = life.layouts.minor.get(r.value)
        source, target = (blocks(v, s, lowered.mesh, profile, minor) for s in (r.source, r.target))
        hops = sum(s.hops for s in r.steps if s.beside)
        if op.kind == "output" and Kind.ALL_GATHER in kinds:
            last = life.points - 1
            allocations.append(Allocation("gathered", r.value, target // COPIED, 0, last))
            allocations.append(Allocation("gathered", r.value, target - target // COPIED, last, last))
        elif r.operand < 0 and kinds != {Kind.ALL_REDUCE}:
            at = life.point.get(r.op, life.use_points(r.value)[0])
            span = life.beside_span(r.op, hops) if hops else (at, at)
            allocations.append(Allocation("unreduced", r.value, source, *span))
            if r.value in life.returned and Kind.ALL_GATHER in kinds:
                allocations.append(Allocation("gathered", r.value, target, at, life.returned[r.value]))
        elif r.operand >= 0 and not kinds <= {Kind.ALL_REDUCE, Kind.PERMUTE}:
            points = _copy_points(lowered, life, r)
            if not points:
                continue
            if lowered.memo.candidates.rounds(op) and not r.source.partial:
                target = blocks(replace(v, itemsize=ROUNDED_BYTES), r.target, lowered.mesh, profile)
            overlaps = Kind.ALL_GATHER in kinds and lowered.structure.early[r.value]
            first = life.ahead(op.region, min(points)) if overlaps else min(points)
            allocations.append(Allocation("copy", r.value, target, first, max(points)))
            if Kind.REDUCE_SCATTER in kinds:
                first = last = min(points)
                if hops:
                    first, last = life.beside_span(life.program.definitions[r.value][0], hops)
                born, dead = life.live.get(r.value, (first, first - 1))  # in between it is there anyway
                for start, end in ((first, born - 1), (max(first, dead + 1), last)):
                    if start <= end:
                        allocations.append(Allocation("unreduced", r.value, source, start, end))
    return allocations


def _copy_points(lowered: Lowered, life: Lifetimes, r: Reshard) -> list[int]:
    """The points at which a resharded copy is used in its section."""
    section, ops = lowered.structure.section, life.program.ops
    here = section(r.op, r.value)
    users = [(ops[u], k) for u, k in lowered.structure.uses[r.value] if section(u, r.value) == here]
    return [p for u, k in users if u.rule is not None and lowered.need(u, k) == r.target for p in life.runs[u.id]]
