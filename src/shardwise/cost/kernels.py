"""Kernels: which ops run as one sweep over an array, whatever the state.

A kernel is made of the clusters of ``shardwise.cost.clusters``, joined where they sweep over the same array and nothing has to
be complete between them, as XLA joins them into kernels with several results. ``shardwise.cost.compute`` gives its time under a
lowered state.

A product writes its result in the order in which it is read. Where the result is a sum over devices that cannot be: every
kernel that reads it transposed (a weight's gradient in the optimizer) takes its elements from far apart (``_transposed``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from shardwise.cost.clusters import Clusters, Role
from shardwise.ir.program import Op, Program, Unit, Value
from shardwise.ir.traits import BORDERS, LOOP_SLICES, READ_PARTS, WRITE_PARTS

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
    """Ops that run as one kernel: what they compute, read and write. The time depends on how ``ops`` compute, nothing else.

    ``roots`` are the ops whose results it writes. Each of ``reads`` is one stored value: the places at which it is read.

    ``feeds`` says of each of them whether a product's operands are made of it. ``returned`` is where a result takes the
    place of a donated argument, ``transposed`` where it reads a product's result transposed.
    """

    roots: tuple[int, ...]
    ops: tuple[int, ...]
    region: int
    products: tuple[int, ...]
    others: tuple[int, ...]
    reads: tuple[tuple[Tensor, ...], ...]
    feeds: tuple[bool, ...]
    writes: tuple[Tensor, ...]
    inner: tuple[Edge, ...]
    returned: Edge | None = None
    transposed: Edge | None = None

    @property
    def edges(self) -> tuple[Edge, ...]:
        return (*self.inner, *(edge for edge in (self.returned, self.transposed) if edge))


@dataclass(slots=True)
class _Cluster:
    op: Op
    region: int
    members: list[int]
    products: list[int]
    reads: dict[int, list[Tensor]]
    writes: dict[int, Tensor]
    elements: int  # of the array that it sweeps over
    plain: bool  # of elementwise ops and reductions only, but for a product
    depth: int = 0
    group: int = -1


def kernels(clusters: Clusters, turning: bool = False) -> tuple[Kernel, ...]:
    """The kernels of a program, in its order; ``turning`` adds those that read a product's result transposed.

    Clusters that sweep over the same array are joined where one reads what another writes or both read the
    same, unless something must be complete between them (a reduction, a product's operand): then they are two kernels.
    """
    body = {link: op.regions[0] for op in clusters.program.ops if op.regions for link in op.links}
    kernels = [
        kernel
        for op in clusters.program.schedule
        if _begins(clusters, op)
        for kernel in (_cluster(clusters, op, body.get(op.id, op.region)),)
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
    return (*joined, *_returned(clusters), *(_transposed(clusters, kernels) if turning else ()))


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


def _transposed(clusters: Clusters, kernels: Iterable[_Cluster]) -> Iterator[Kernel]:
    """The transposed reads of products' results: a kernel each, which is free unless the result is a sum over devices."""
    for kernel in kernels:
        found = {
            edge.value: edge for o in kernel.members for edge in _transposed_edges(clusters, clusters.program.ops[o])
        }
        for edge in found.values():
            ops = (edge.maker, edge.user)
            yield Kernel((), ops, kernel.region, (), (), (), (), (), (), None, edge)


def _transposed_edges(clusters: Clusters, user: Op) -> Iterator[Edge]:
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


def _joined(clusters: Clusters, kernels: list[_Cluster], seen: set[int]) -> Kernel:
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
    """Does an op begin a cluster: does it store a result?"""
    if op.rule is None or op.kind in _FREE or (clusters.roles[op.id] is Role.LINK and op.kind not in LOOP_SLICES):
        return False
    if clusters.roles[op.id] is Role.VIEW:
        return False
    return op.kind == "scan.output" or any(v >= 0 and clusters.base[v] == v and clusters.stored[v] for v in op.results)


def _cluster(clusters: Clusters, op: Op, region: int) -> _Cluster:
    """The cluster of an op: walks from the op to the stored values that it reads."""
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
        sizes = [_whole(program, o, k) for o, inner in members.items() for k in range(len(op_values(inner)))]
    return _Cluster(
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


def op_values(op: Op) -> tuple[int, ...]:
    return (*op.operands, *op.results)


def _whole(program: Program, op: int, number: int) -> int:
    """Elements of an operand or result that an op touches, of the whole program."""
    node = program.ops[op]
    number = touched(node, number)
    value = op_values(node)[number]
    return program.values[value].elements if value >= 0 else 1


def touched(op: Op, number: int) -> int:
    """The operand or result whose size is what is touched of another one: of what is sliced, the slice."""
    if op.kind in READ_PARTS and number == 0:
        return len(op.operands)
    part = WRITE_PARTS.get(op.kind)
    if part is not None and (number >= len(op.operands) or (part and number == 0)):
        return part
    return number
