"""Compute seconds of what runs as one kernel, under a lowered state.

The problem. A step's time without communication is the sum over its kernels. Which ops share one hardly depends on the
sharding; how large they are on one device does.

The idea. A *kernel* is one sweep over an array: the clusters of ``shardwise.cost.clusters``, joined where they sweep over the
same array and nothing has to be complete between them, as XLA joins them into kernels with several results. It takes

``kernel = launch + Σ product + stream(bytes beside the products) + Σ breaks`` (``kernel_s``), where

- a product of ``B`` times ``m × k`` with ``k × n`` has ``2·B·m·n·k`` FLOPs at the sizes to which the device pads it, or
  takes the time to read what its operands are made of and to write its result, if that is more (``product_s``). Rows and
  columns of several dimensions are padded in one, where that costs least: ``heads × 80`` columns are ``heads × 128``. Where
  it was measured, laying out the operands comes to the FLOPs (``Profile.operand_bytes_per_s``): few rows pay for it;
- a stream costs by the element and by the byte, or its vector FLOPs if these take longer (``stream_s``). Only what is touched
  counts: of a stacked value the slice, of an update in place the update;
- a break is a collective inside the kernel: what comes after it is another sweep (``break_s``).

A result that a collective makes, and that takes the place of a donated argument, is copied (``copy_s``): ZeRO's parameters.
So is a stack that a loop writes while it reads the donated one: a cache that is scanned (``_restacked``).

A product writes its result in the order in which it is read. Where the result is a sum over devices that cannot be: every
kernel that reads it the other way round (a weight's gradient in the optimizer) takes its elements from far apart, and pays for
each where that was measured (``_turned``, ``turn_s``).

Where products are calls of a library (``calls_library``: GPUs) they are separate kernels and pad each role as one dimension;
convolutions over spread elements skip the zeros; and a loop's stacks are filled with zeros first, and each written by itself.

Form. The time of a kernel depends on structure and on how its ``ops`` compute. It is whole picoseconds, so that sums are exact
in any order.

The model is the roofline of Williams and others (2009). The rates by byte and element fit the cycles that TPU compilers
estimate (``docs/benchmarks/fidelity.md``). The file is long because the structure of a kernel and its cost are one model.

Weak: layouts are not known, so that copies from one to another are missing; nor is what stays in on-chip memory, or what the
compiler computes twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.clusters import Clusters, Role
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.ir.program import Op, Program, Unit, Value
from shardwise.ir.traits import BORDERS, LOOP_SLICES, READ_PARTS, WRITE_PARTS
from shardwise.lowering.candidates import Candidate
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Axes, is_moved

#: Roles of ops that can share a kernel.
_PLAIN: Final = (Role.VIEW, Role.CHEAP, Role.DEAR, Role.REDUCTION, Role.PRODUCT)
#: Kinds that do nothing at run time.
_FREE: Final = BORDERS | {"literal"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One operand or result of an op, numbered operands first; ``itemsize`` as it lies in memory."""

    op: int
    number: int
    itemsize: float


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one op of a kernel hands to another, and whether it is ``stored`` all the same."""

    value: int
    maker: int
    result: int
    user: int
    operand: int
    stored: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernels that run as one: what they compute, read and write. Its time depends on how ``ops`` compute, nothing else.

    ``kernels`` are the ops whose results it writes. Each of ``reads`` is one stored value: the places at which it is read.

    ``feeds`` says of each of them whether a product's operands are made of it. ``returned`` is where a result takes the
    place of a donated argument, ``turned`` where a product's result is read the other way round.
    """

    kernels: tuple[int, ...]
    ops: tuple[int, ...]
    region: int
    products: tuple[int, ...]
    others: tuple[int, ...]
    reads: tuple[tuple[Tensor, ...], ...]
    feeds: tuple[bool, ...]
    writes: tuple[Tensor, ...]
    inner: tuple[Edge, ...]
    returned: Edge | None = None
    turned: Edge | None = None

    @property
    def edges(self) -> tuple[Edge, ...]:
        return (*self.inner, *(edge for edge in (self.returned, self.turned) if edge))


@dataclass(slots=True)
class _Kernel:
    op: Op
    region: int
    members: list[int]
    products: list[int]
    reads: dict[int, list[Tensor]]
    writes: dict[int, Tensor]
    elements: int  # of the array that it kernels over
    plain: bool  # of elementwise ops and reductions only, but for a product
    depth: int = 0
    group: int = -1


def kernels(clusters: Clusters, turning: bool = False) -> tuple[Kernel, ...]:
    """What runs as one kernel, in the order of the program; with what is read the other way round where that costs.

    Clusters that sweep over the same array are joined where one reads what another writes or both read the
    same, unless something must be complete between them (a reduction, a product's operand): then they are two kernels.
    """
    body = {link: op.regions[0] for op in clusters.program.ops if op.regions for link in op.links}
    kernels = [
        kernel
        for op in clusters.program.schedule
        if _begins(clusters, op)
        for kernel in (_kernel(clusters, op, body.get(op.id, op.region)),)
    ]
    writer = {v: n for n, kernel in enumerate(kernels) for v in kernel.op.results if v >= 0 and clusters.stored[v]}
    loops = _loops(clusters)
    groups: list[list[int]] = []
    readers: dict[tuple[int, int, int], int] = {}

    def join(n: int, other: int) -> None:
        first, second = sorted((kernels[n].group, kernels[other].group))
        if first == second or sum(bool(kernels[m].products) for g in (first, second) for m in groups[g]) > 1:
            return
        groups[first] += groups[second]
        for m in groups[second]:
            kernels[m].group = first
        groups[second] = []

    size = [v.elements for v in clusters.program.values]
    for n, kernel in enumerate(kernels):
        kernel.group = n
        groups.append([n])
        joins = []
        for base in dict.fromkeys((*kernel.reads, *clusters.reads[kernel.op.id])):
            m = writer.get(base, -1)
            if base in loops and loops[base][0] == kernel.region:
                before = (kernels[k].depth for b in loops[base][1] if (k := writer.get(b, n)) < n)
                kernel.depth = max(kernel.depth, 2 + max(before, default=0))
            if m < 0 or m >= n or kernels[m].region != kernel.region:
                continue
            aligned = kernel.plain and not kernel.products and size[base] == kernel.elements == kernels[m].elements
            aligned = aligned and kernels[m].plain
            kernel.depth = max(kernel.depth, kernels[m].depth + (not aligned))
            joins += [m] * aligned
        for m in joins:
            if kernels[m].depth == kernel.depth:
                join(n, m)
        if kernel.plain and not kernel.products:
            for base in kernel.reads:
                if size[base] == kernel.elements:
                    join(n, readers.setdefault((base, kernel.region, kernel.depth), n))
    seen: set[int] = set()
    joined = [_joined(clusters, [kernels[n] for n in sorted(group)], seen) for group in groups if group]
    return (*joined, *_returned(clusters), *(_turned(clusters, kernels) if turning else ()))


def _loops(clusters: Clusters) -> dict[int, tuple[int, frozenset[int]]]:
    """For each result of a loop: the region in which the loop stands, and the stored bases from outside that it reads."""
    program, found = clusters.program, dict[int, tuple[int, frozenset[int]]]()
    for op in program.ops:
        if not op.regions or clusters.roles[op.id] is Role.VIEW:
            continue
        read, todo = {clusters.base[v] for k in op.links for v in program.ops[k].operands if v >= 0}, [*op.regions]
        while todo:
            for inner in (program.ops[k] for k in program.regions[todo.pop()].ops):
                todo += inner.regions
                read.update(clusters.reads[inner.id])
        left = op.region, frozenset(read)
        found |= {v: left for v in op.results if v >= 0}
    return found


def _returned(clusters: Clusters) -> Iterator[Kernel]:
    """Results that can take the place of donated arguments: a kernel each, which is free unless a collective makes the result;
    and copies of those that cannot: stacks that a loop writes while it reads the argument."""
    program = clusters.program
    donated = {(v.shape, v.dtype) for a in program.arguments if a.donated for v in (program.values[a.value],)}
    for op in program.ops:
        if op.kind == "output" and op.operands[0] >= 0:
            value = program.values[op.operands[0]]
            if (value.shape, value.dtype) in donated:
                maker, result = program.definitions[value.id]
                edge = Edge(value.id, maker, result, op.id, 0, True)
                yield Kernel((), (maker, op.id), op.region, (), (), (), (), (), (), edge)
                if _restacked(clusters, value):
                    read, written = (Tensor(op.id, n, value.itemsize) for n in (0, 1))
                    yield Kernel((), (op.id,), op.region, (), (op.id,), ((read,),), (False,), (written,), ())


def _turned(clusters: Clusters, kernels: Iterable[_Kernel]) -> Iterator[Kernel]:
    """Products' results that a kernel reads the other way round: a kernel each, which is free unless the result is a sum over
    devices."""
    for kernel in kernels:
        found = {edge.value: edge for o in kernel.members for edge in _turned_edges(clusters, clusters.program.ops[o])}
        for edge in found.values():
            ops = (edge.maker, edge.user)
            yield Kernel((), ops, kernel.region, (), (), (), (), (), (), None, edge)


def _turned_edges(clusters: Clusters, user: Op) -> Iterator[Edge]:
    program = clusters.program
    if clusters.roles[user.id] is Role.VIEW:
        return
    for k, v in enumerate(user.operands):
        turns = False
        while v >= 0:
            number, result = program.definitions[v]
            maker = program.ops[number]
            if maker.unit is Unit.MATRIX and turns:
                yield Edge(v, number, result, user.id, k, False)
            if clusters.roles[number] is not Role.VIEW or maker.kind not in (
                "transpose",
                "reshape",
                "convert_element_type",
            ):
                break
            turns = turns != _turns(maker)
            v = maker.operands[0]


def _turns(op: Op) -> bool:
    """Are elements that lie side by side far apart after a transposition?"""
    rule = op.rule
    if op.kind != "transpose" or rule is None:
        return False
    last = [[f for dim in t for f in dim if rule.factors[f].size > 1][-1:] for t in (rule.operands[0], rule.results[0])]
    return last[0] != last[1]


def _restacked(clusters: Clusters, value: Value) -> bool:
    """Is a value a stack that a loop writes while it takes slices of a donated argument of this shape?"""
    program = clusters.program
    base = clusters.base[value.id]
    maker = program.definitions[base][0]
    if program.ops[maker].kind != "scan.output":
        return False
    loop = next(op for op in program.ops if maker in op.links)
    read = [program.ops[k].operands[0] for k in loop.links if program.ops[k].kind == "scan.input"]
    given = {a.value for a in program.arguments if a.donated}
    like = (program.values[b] for v in read if v >= 0 and (b := clusters.base[v]) in given)
    return any((v.shape, v.dtype) == (value.shape, value.dtype) for v in like)


def _joined(clusters: Clusters, kernels: list[_Kernel], seen: set[int]) -> Kernel:
    """One kernel of some clusters. A value that several kernels compute, each for itself, is ``seen`` in the first: if it needs
    a collective it is computed once after all."""
    program = clusters.program
    writes = {base: t for kernel in kernels for base, t in kernel.writes.items()}
    reads: dict[int, list[Tensor]] = {}
    for kernel in kernels:
        for base, places in kernel.reads.items():
            if base not in writes:
                reads.setdefault(base, []).extend(places)
    products = sorted({o for kernel in kernels for o in kernel.products})
    members = {o for kernel in kernels for o in kernel.members}
    inner = [
        Edge(v, maker, result, o, k, clusters.stored[clusters.base[v]])
        for o in sorted(members)
        for k, v in enumerate(program.ops[o].operands)
        if v >= 0 and (maker := program.definitions[v][0]) in members
        for result in (program.definitions[v][1],)
    ]
    first = [e for e in inner if e.value not in seen]
    seen.update(e.value for e in inner)

    def fills(t: Tensor) -> bool:
        """Is a stack filled with zeros before the loop that writes it?"""
        return clusters.by_library and program.ops[t.op].kind == "scan.output"

    feeding = set(products)
    for edge in sorted(inner, key=lambda e: -e.user):
        if edge.user in feeding:
            feeding.add(edge.maker)
    return Kernel(
        tuple(kernel.op.id for kernel in kernels),
        tuple(sorted(members)),
        kernels[0].region,
        tuple(products),
        tuple(o for o in sorted(members) if o not in products and clusters.roles[o] is not Role.VIEW),
        tuple(tuple(reads[base]) for base in sorted(reads)),
        tuple(any(t.op in feeding for t in reads[base]) for base in sorted(reads)),
        tuple(t for base in sorted(writes) for t in [writes[base]] * (1 + fills(writes[base]))),
        tuple(first),
    )


def _begins(clusters: Clusters, op: Op) -> bool:
    """Does an op run as a kernel of its own, with what is made inside it?"""
    if op.rule is None or op.kind in _FREE or (clusters.roles[op.id] is Role.LINK and op.kind not in LOOP_SLICES):
        return False
    if clusters.roles[op.id] is Role.VIEW:
        return False
    return op.kind == "scan.output" or any(v >= 0 and clusters.base[v] == v and clusters.stored[v] for v in op.results)


def _kernel(clusters: Clusters, op: Op, region: int) -> _Kernel:
    """Walks from a kernel's op to the stored values that it reads."""
    program, made_by = clusters.program, clusters.program.definitions
    members: dict[int, Op] = {}
    reads: dict[int, list[Tensor]] = {}
    todo = [op]
    while todo:
        inner = todo.pop()
        if inner.id in members:
            continue
        members[inner.id] = inner
        for k, v in enumerate(inner.operands):
            if v < 0 or (k == 0 and WRITE_PARTS.get(inner.kind, 0)):
                continue  # what is written into is not read
            base, maker = clusters.base[v], program.ops[made_by[v][0]]
            if base in clusters.reads[inner.id] and clusters.stored[base]:
                if clusters.roles[inner.id] is not Role.UPDATE:
                    reads.setdefault(base, []).append(Tensor(inner.id, k, program.values[base].itemsize))
            elif maker.rule is not None and (clusters.roles[maker.id] is not Role.LINK or maker.kind in LOOP_SLICES):
                todo.append(maker)
    first = len(op.operands)
    written = [(r, v) for r, v in enumerate(op.results) if v >= 0 and clusters.stored[v]]
    if clusters.roles[op.id] is Role.UPDATE:
        written = []  # a scatter into the other addend
    products = sorted(o for o, inner in members.items() if inner.unit is Unit.MATRIX)
    at = program.ops[products[-1]] if products else op
    sizes = [program.values[v].elements for v in at.results if v >= 0]
    if not products:
        sizes = [_whole(program, o, k) for o, inner in members.items() for k in range(len(_values(inner)))]
    return _Kernel(
        op,
        region,
        sorted(members),
        products,
        reads,
        {v: Tensor(op.id, first + r, program.values[v].itemsize) for r, v in written},
        max(sizes, default=0),
        not (clusters.by_library and (products or op.kind == "scan.output"))
        and all(clusters.roles[o] in _PLAIN or members[o].kind == "scan.output" for o in members),
    )


def _values(op: Op) -> tuple[int, ...]:
    return (*op.operands, *op.results)


def _whole(program: Program, op: int, number: int) -> int:
    """Elements of an operand or result that an op touches, of the whole program."""
    node = program.ops[op]
    number = _touched(node, number)
    value = _values(node)[number]
    return program.values[value].elements if value >= 0 else 1


def _touched(op: Op, number: int) -> int:
    """The operand or result whose size is what is touched of another one: of what is sliced, the slice."""
    if op.kind in READ_PARTS and number == 0:
        return len(op.operands)
    part = WRITE_PARTS.get(op.kind)
    if part is not None and (number >= len(op.operands) or (part and number == 0)):
        return part
    return number


def kernel_s(lowered: Lowered, kernel: Kernel, profile: Profile) -> float:
    """Seconds of one execution, in whole picoseconds."""
    sizes = Sizes(lowered)
    if kernel.returned is not None:
        return sizes.copy_s(kernel.returned, profile)
    if kernel.turned is not None:
        return sizes.turn_s(kernel.turned, profile)
    local = sizes.local
    reads = [max([local(t.op).elements[t.number] * t.itemsize for t in places]) for places in kernel.reads]
    moved = sum(reads) + sum([local(t.op).elements[t.number] * t.itemsize for t in kernel.writes])
    others = [local(o) for o in kernel.others]
    elements = 0.0 if kernel.products else max([own.largest for own in others], default=0.0)
    seconds = profile.launch_s
    if kernel.products:
        operands = sum(nbytes for nbytes, feeds in zip(reads, kernel.feeds, strict=True) if feeds)
        results = sum(sizes.result_bytes(o) for o in kernel.products)
        for number in kernel.products:
            seconds += sizes.product_s(number, operands / len(kernel.products), profile)
        moved = max(0.0, moved - operands - results)
    vector = sum([own.flops for own in others if not own.dtype])
    own_s = sum(
        [own.flops / (profile.matrix_rate(own.dtype) * profile.matrix_efficiency) for own in others if own.dtype]
    )
    seconds += max(stream_s(moved, elements, vector, profile), own_s)
    for edge in {e.value: e for e in kernel.inner if sizes.waits(e)}.values():
        seconds += sizes.break_s(edge, kernel.products, profile) + profile.launch_s
    return round(seconds * 1e12) / 1e12


@dataclass(frozen=True, slots=True)
class Product:
    """A product on one device: the sizes of the dimensions of each role, and its type. ``depth`` may hold taps of a window, of
    which all but one in ``zeros`` fall on zeros that were put between elements."""

    batch: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]
    dtype: str
    zeros: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * math.prod(self.rows) * math.prod(self.columns) * math.prod(self.depth)


def product_s(product: Product, nbytes: float, profile: Profile, operands: float = 0.0) -> float:
    """Seconds of a product that streams ``nbytes``, with operands of so many.

    >>> from shardwise.hardware.load import load_profile
    >>> square = Product(1, (4096,), (4096,), (4096,), "bfloat16")
    >>> f"{product_s(square, 1e8, load_profile('v5e')) * 1e3:.3f} ms"
    '0.734 ms'
    """
    rows, columns, depth = profile.matrix_tile
    if profile.calls_library:  # sees one dimension of each role
        product = replace(product, rows=(math.prod(product.rows),), columns=(math.prod(product.columns),))
    # Either operand may be the one that is held in the array.
    waste = min(
        _waste(product.rows, rows) * _waste(product.columns, columns),
        _waste(product.rows, columns) * _waste(product.columns, rows),
    ) * _waste((math.prod(product.depth),), depth)
    if profile.calls_library:
        waste /= product.zeros
    rate = profile.matrix_rate(product.dtype) * profile.matrix_efficiency
    computing = product.flops * waste / rate + operands / profile.operand_bytes_per_s
    return max(computing, nbytes / (profile.memory_bytes_per_s * profile.memory_efficiency))


def stream_s(nbytes: float, elements: float, flops: float, profile: Profile) -> float:
    """Seconds of one sweep over ``elements`` that reads and writes ``nbytes`` in all."""
    passing = elements / profile.elements_per_s + nbytes / (profile.memory_bytes_per_s * profile.memory_efficiency)
    return max(passing, flops / profile.vector_flops_per_s)


def _waste(sizes: tuple[int, ...], tile: int) -> float:
    """How much larger a role becomes when it is padded in the dimension where that costs least."""
    return min((math.ceil(size / tile) * tile / size for size in sizes), default=float(tile))


@dataclass(frozen=True, slots=True)
class _Local:
    """Elements of each operand and result that an op touches on one device, of the largest, and its FLOPs; ``dtype`` where
    these are a kernel's own."""

    elements: tuple[float, ...]
    largest: float
    flops: float
    product: Product | None
    dtype: str = ""


class Sizes:
    """Sizes on one device, from the axes that an op's factors were given."""

    def __init__(self, lowered: Lowered):
        self.lowered, self.program = lowered, lowered.program
        self.mesh = lowered.mesh
        self._locals: dict[int, _Local] = {}

    def local(self, op: int) -> _Local:
        """What an op touches on one device, and its FLOPs."""
        known = self._locals.get(op)
        if known is None:
            key = (self.lowered.structure.alike[op], self.lowered.computes[op])
            known = self.lowered.memo.local.get(key)
            if known is None:
                known = self.lowered.memo.local[key] = self._local(op, key[1])
            self._locals[op] = known
        return known

    def _local(self, op: int, way: Candidate) -> _Local:
        node = self.program.ops[op]
        values, numbers = _values(node), [_touched(node, n) for n in range(len(_values(node)))]
        whole = [self.program.values[values[n]].elements if values[n] >= 0 else 1 for n in numbers]
        elements = [size / way.parts[n] if values[n] >= 0 else 1.0 for n, size in zip(numbers, whole, strict=True)]
        product = self._product(node, way) if node.unit is Unit.MATRIX else None
        used = [self.program.values[v] for v in values if v >= 0]
        kernel = max(used, key=lambda v: v.itemsize).dtype if node.unit is Unit.KERNEL and used else ""
        return _Local(tuple(elements), max(elements, default=0.0), node.flops / way.devices, product, kernel)

    def elements(self, op: int, number: int) -> float:
        """Elements of one operand or result that an op touches."""
        return self.local(op).elements[number]

    def waits(self, edge: Edge) -> bool:
        """Is there a collective on an edge inside a kernel?"""
        actual, computes = self.lowered.actual[edge.value], self.lowered.computes
        made, user = computes[edge.maker].results[edge.result], computes[edge.user]
        if made is actual is user.needs[edge.operand]:
            return False
        return is_moved(made, actual, self.mesh) or is_moved(actual, user.need(edge.operand, actual), self.mesh)

    def copy_s(self, edge: Edge, profile: Profile) -> float:
        """A collective's result does not go straight to where a donated argument lies: XLA copies it, and the argument too."""
        op = self.program.ops[edge.user]
        made, actual = self.lowered.computes[op.id].results[0], self.lowered.actual[op.results[0]]
        if not self.waits(edge) and not is_moved(made, actual, self.mesh):
            return 0.0
        nbytes = self.program.values[edge.value].nbytes / actual.shards(self.mesh)
        return round(2 * (profile.launch_s + stream_s(2 * nbytes, 0.0, 0.0, profile)) * 1e12) / 1e12

    def turn_s(self, edge: Edge, profile: Profile) -> float:
        """What it costs to read a sum over devices the other way round."""
        if not self.lowered.computes[edge.maker].results[edge.result].partial:
            return 0.0
        return round(self._bytes(edge.user, edge.operand) / profile.turned_bytes_per_s * 1e12) / 1e12

    def break_s(self, edge: Edge, products: tuple[int, ...], profile: Profile) -> float:
        """The time that a collective inside a kernel adds: the value is written and read, and the rest is another kernel.

        What is stored was written anyway, and a product has read its operands.
        """
        itemsize = self.program.values[edge.value].itemsize
        made = self.elements(edge.maker, len(self.program.ops[edge.maker].operands) + edge.result)
        used = self.elements(edge.user, edge.operand)
        written = 0.0 if edge.stored else made
        read = 0.0 if edge.user in products else used
        passed = min((n for n in (written, read) if n), default=0.0)
        return stream_s((written + read) * itemsize, passed, 0.0, profile)

    def product_s(self, op: int, read: float, profile: Profile) -> float:
        """Of a product whose operands are made of ``read`` bytes."""
        operands = sum(self._bytes(op, k) for k in (0, 1))
        product = self.local(op).product
        assert product is not None
        return product_s(product, max(read, operands) + self.result_bytes(op), profile, operands)

    def _bytes(self, op: int, number: int) -> float:
        value = _values(self.program.ops[op])[number]
        return self.elements(op, number) * (self.program.values[value].itemsize if value >= 0 else 1)

    def result_bytes(self, op: int) -> float:
        return self._bytes(op, len(self.program.ops[op].operands))

    def _product(self, node: Op, way: Candidate) -> Product:
        """The roles of a product's factors: in both operands and the result (batch), in the result with the second operand
        (columns), in the result otherwise (rows), in operands only (depth, with the taps of a window)."""
        rule, given = node.rule, way.assigned
        assert rule is not None
        left, right, out = ({f for dim in t for f in dim} for t in (*rule.operands[:2], rule.results[0]))
        batch = 1
        rows: list[int] = []
        columns: list[int] = []
        depth: list[int] = []
        for f in range(len(rule.factors)):
            if f in right and f not in left | out and node.kind == "ragged_dot_general":
                continue  # each row meets one group only
            size = max(1, self._size(node, f) // _parts(self.mesh, [given[f]]))
            if f in out and f in left and f in right:
                batch *= size
            elif f in out:
                (columns if f in right else rows).append(size)
            elif f in left or f in right:
                depth.append(size)
        used = [self.program.values[v] for v in node.operands[:2] if v >= 0]
        dtype = max(used, key=lambda value: value.itemsize).dtype
        zeros = math.prod(w.dilation for w in rule.windows)
        return Product(batch, tuple(rows), tuple(columns), tuple(depth), dtype, zeros)

    def _size(self, node: Op, factor: int) -> int:
        """A factor's size. That of a window differs from tensor to tensor: in the result, or else in the kernel, counts."""
        rule = node.rule
        assert rule is not None
        for tensor in (len(node.operands), 1):
            for d, dim in enumerate(rule.tensors[tensor]):
                if dim == (factor,):
                    return self.program.values[_values(node)[tensor]].shape[d]
        return rule.factors[factor].size


def _parts(mesh: MeshAxes, axes: Iterable[Axes]) -> int:
    count = 1
    for own in axes:
        for a in own:
            count *= mesh.sizes[a]
    return count
