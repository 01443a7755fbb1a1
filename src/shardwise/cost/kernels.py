"""Kernels: which ops run as one sweep over an array, whatever the state. Clusters are joined where they sweep over the same
array and nothing has to be complete between them, as XLA joins them into kernels with several results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from shardwise.cost.clusters import Clusters, Role
from shardwise.cost.copies import is_looped
from shardwise.ir.program import Op, Program, Unit, Value
from shardwise.ir.traits import BORDERS, LOOP_SLICES, READ_PARTS, WRITE_PARTS, is_transfer

#: Roles of ops that can share a kernel.
_PLAIN: Final = (Role.VIEW, Role.ELEMENTWISE, Role.REDUCTION, Role.PRODUCT)
#: Kinds that do nothing at run time.
_FREE: Final = BORDERS | {"literal"}
#: Views through which a transposed read is followed to its product.
_FOLLOWED: Final = ("transpose", "reshape", "convert_element_type")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One operand or result of an op, numbered operands first; ``itemsize`` as it is in memory. ``span``: the kernels of its
    region that run until the last use of the value, up to a power of two; 0 if it is read elsewhere too."""

    op: int
    number: int
    itemsize: float
    span: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one op passes to another, and whether it is ``stored``."""

    value: int
    maker: int
    result: int
    user: int
    operand: int
    stored: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """Ops that run as one kernel: what they compute, read and write. The time depends on how ``ops`` compute, nothing else.
    ``roots`` are the ops whose results it writes; ``transfers``: those that move an
    array between the memories of host and device; ``reads`` by stored value the places at which it is read; ``feeds``: whether
    a product's operands are computed from it; ``inner``: the edges between its ops; ``looped``: lookups that run as a loop. A
    kernel with ``returned`` (a result takes the place of a donated argument) or ``transposed`` (a product's result is read
    transposed) is nothing else."""

    region: int
    ops: tuple[int, ...]
    roots: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()
    reads: tuple[tuple[Tensor, ...], ...] = ()
    feeds: tuple[bool, ...] = ()
    writes: tuple[Tensor, ...] = ()
    inner: tuple[Edge, ...] = ()
    looped: tuple[int, ...] = ()
    returned: Edge | None = None
    transposed: Edge | None = None

    @property
    def main(self) -> int:
        """The op that a kernel is named after."""
        return (self.products or self.roots or self.ops)[0]

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


def kernels(
    clusters: Clusters, transposed: bool = False, narrowed: Mapping[int, float] | None = None
) -> tuple[Kernel, ...]:
    """The kernels of a program, in its order; ``transposed`` adds those that read a product's result transposed. Clusters that
    sweep over the same array are joined where one reads what another writes or both read the same, unless something must be
    complete between them (a reduction, a product's operand). ``narrowed``: the item sizes to which stacks are converted before
    the loops that read them, a kernel each."""
    program, narrowed = clusters.program, narrowed or {}
    body = {link: op.regions[0] for op in program.ops if op.regions for link in op.links}
    parts = [
        _cluster(clusters, op, body.get(op.id, op.region), narrowed) for op in program.schedule if _begins(clusters, op)
    ]
    writer = {v: n for n, part in enumerate(parts) for v in part.op.results if v >= 0 and clusters.stored[v]}
    _mark_spans(clusters, parts, writer)
    loops = _loops(clusters)
    groups: list[list[int]] = []
    readers: dict[tuple[int, int, int], int] = {}
    depths: dict[int, int] = {}  # by loop

    def join(n: int, other: int) -> None:
        first, second = sorted((parts[n].group, parts[other].group))
        if first == second or sum(bool(parts[m].products) for g in (first, second) for m in groups[g]) > 1:
            return
        groups[first] += groups[second]
        for m in groups[second]:
            parts[m].group = first
        groups[second] = []

    for n, part in enumerate(parts):
        part.group = n
        groups.append([n])
        sweeps, joins = part.plain and not part.products, []
        for base in dict.fromkeys((*part.reads, *clusters.reads[part.op.id])):
            if base in loops and loops[base].region == part.region:
                if loops[base].op not in depths:  # once for all results of the loop
                    before = (parts[k].depth for b in loops[base].reads if (k := writer.get(b, n)) < n)
                    depths[loops[base].op] = 2 + max(before, default=0)
                part.depth = max(part.depth, depths[loops[base].op])
            m = writer.get(base, n)
            if m >= n or parts[m].region != part.region:
                continue
            same = program.values[base].elements == part.elements == parts[m].elements
            aligned = sweeps and same and parts[m].plain
            part.depth = max(part.depth, parts[m].depth + (not aligned))
            joins += [m] * aligned
        for m in joins:
            if parts[m].depth == part.depth:
                join(n, m)
        for base in part.reads if sweeps else ():
            if program.values[base].elements == part.elements:
                join(n, readers.setdefault((base, part.region, part.depth), n))
    seen: set[int] = set()
    joined = [_joined(clusters, [parts[n] for n in sorted(group)], seen) for group in groups if group]
    reads = (kernel for part in parts for kernel in _transposed(clusters, part)) if transposed else ()
    return (*joined, *_returned(clusters), *_conversions(clusters, narrowed, body), *reads)


def _mark_spans(clusters: Clusters, parts: list[_Cluster], writer: dict[int, int]) -> None:
    """Marks what is read by later clusters of its region only with their number."""
    last = dict(writer)
    for n, part in enumerate(parts):
        last |= dict.fromkeys((b for b in part.reads if b in writer), n)
    ops = clusters.program.ops
    spans = {
        b: 1 << (last[b] - n - 1).bit_length()
        for b, n in writer.items()
        if last[b] > n
        and parts[last[b]].region == parts[n].region
        and not any(clusters.roles[u] is Role.LINK or ops[u].kind in BORDERS for u in clusters.uses[b])
    }
    for part in parts:
        part.writes = {b: replace(t, span=spans.get(b, 0)) for b, t in part.writes.items()}
        part.reads = {b: [replace(t, span=spans.get(b, 0)) for t in places] for b, places in part.reads.items()}


class _Loop(NamedTuple):
    """A loop: its op, the region in which it stands, and the stored bases from outside that it reads."""

    op: int
    region: int
    reads: set[int]


def _loops(clusters: Clusters) -> dict[int, _Loop]:
    """The loop of each result of one."""
    program, loops = clusters.program, dict[int, _Loop]()
    for op in program.ops:
        if op.regions and clusters.roles[op.id] is not Role.VIEW:
            reads = {clusters.base[v] for k in op.links for v in program.ops[k].operands if v >= 0}
            reads.update(b for inner in clusters.inner_ops(op) for b in clusters.reads[inner.id])
            loops |= dict.fromkeys((v for v in op.results if v >= 0), _Loop(op.id, op.region, reads))
    return loops


def _returned(clusters: Clusters) -> Iterator[Kernel]:
    """Results that can take the place of donated arguments: a kernel each; and copies of stacks that cannot."""
    program = clusters.program
    donated = {(v.shape, v.dtype) for a in program.arguments if a.donated for v in (program.values[a.value],)}
    for op in program.ops:
        if op.kind == "output" and op.operands[0] >= 0:
            value = program.values[op.operands[0]]
            if (value.shape, value.dtype) in donated:
                maker, result = program.definitions[value.id]
                edge = Edge(value.id, maker, result, op.id, 0, True)
                yield Kernel(op.region, (maker, op.id), returned=edge)
                if _restacked(clusters, value):
                    read, write = (Tensor(op.id, n, value.itemsize) for n in (0, 1))
                    ops = (op.id,)
                    yield Kernel(op.region, ops, others=ops, reads=((read,),), feeds=(False,), writes=(write,))


def _conversions(clusters: Clusters, narrowed: Mapping[int, float], body: Mapping[int, int]) -> Iterator[Kernel]:
    """The conversions of stacks before the first loop that reads them: slice by slice, as many as the loop has trips, or whole
    before an outer loop through which they pass."""
    program, converted = clusters.program, set[int]()
    for op in (op for op in program.schedule if op.kind == "scan.input" and op.id in body):
        stack, link = clusters.base[op.operands[0]], clusters.outermost(op)
        if stack in narrowed and stack not in converted and not program.values[stack].host:
            converted.add(stack)
            read, write = Tensor(link.id, 0, program.values[stack].itemsize), Tensor(link.id, 1, narrowed[stack])
            region, ops = body[op.id] if link is op else link.region, (link.id,)
            yield Kernel(region, ops, others=ops, reads=((read,),), feeds=(False,), writes=(write,))


def _transposed(clusters: Clusters, part: _Cluster) -> Iterator[Kernel]:
    """The transposed reads of products' results: a kernel each, which is free unless the result is a sum over devices."""
    program, edges = clusters.program, dict[int, Edge]()
    for user in (program.ops[o] for o in part.members if clusters.roles[o] is not Role.VIEW):
        for k, v in enumerate(user.operands):
            turns = False
            while v >= 0:
                number, result = program.definitions[v]
                maker = program.ops[number]
                if maker.unit is Unit.MATRIX and turns:
                    edges[v] = Edge(v, number, result, user.id, k, False)
                if clusters.roles[number] is not Role.VIEW or maker.kind not in _FOLLOWED:
                    break
                turns = turns != _turns(maker)
                v = maker.operands[0]
    for edge in edges.values():
        yield Kernel(part.region, (edge.maker, edge.user), transposed=edge)


def _turns(op: Op) -> bool:
    """Are neighboring elements far apart after a transposition?"""
    rule = op.rule
    if op.kind != "transpose" or rule is None:
        return False
    last = [[f for dim in t for f in dim if rule.factors[f].size > 1][-1:] for t in (rule.operands[0], rule.results[0])]
    return last[0] != last[1]


def _restacked(clusters: Clusters, value: Value) -> bool:
    """Is a value a stack that a loop writes while it takes slices of a donated argument of this shape?"""
    program = clusters.program
    maker = program.definitions[clusters.base[value.id]][0]
    if program.ops[maker].kind != "scan.output":
        return False
    links = (program.ops[k] for k in program.ops[clusters.owner[maker]].links)
    reads = {clusters.base[op.operands[0]] for op in links if op.kind == "scan.input" and op.operands[0] >= 0}
    donated = (program.values[a.value] for a in program.arguments if a.donated and a.value in reads)
    return any((v.shape, v.dtype) == (value.shape, value.dtype) for v in donated)


def _joined(clusters: Clusters, parts: list[_Cluster], seen: set[int]) -> Kernel:
    """One kernel of some clusters. A value that several kernels compute is ``seen`` in the first."""
    program = clusters.program
    writes = {base: t for part in parts for base, t in part.writes.items()}
    reads: dict[int, list[Tensor]] = {}
    for part in parts:
        for base, places in part.reads.items():
            if base not in writes:
                reads.setdefault(base, []).extend(places)
    products = sorted({o for part in parts for o in part.products})
    members = {o for part in parts for o in part.members}
    inner = [
        Edge(v, *program.definitions[v], o, k, clusters.stored[clusters.base[v]])
        for o in sorted(members)
        for k, v in enumerate(program.ops[o].operands)
        if v >= 0 and program.definitions[v][0] in members
    ]
    first = tuple(e for e in inner if e.value not in seen)
    seen.update(e.value for e in inner)
    feeding = set(products)
    for edge in sorted(inner, key=lambda e: -e.user):
        if edge.user in feeding:
            feeding.add(edge.maker)
    # A library fills a stack with zeros before the loop that writes it.
    twice = {base for base, t in writes.items() if clusters.by_library and program.ops[t.op].kind == "scan.output"}
    return Kernel(
        parts[0].region,
        tuple(sorted(members)),
        roots=tuple(part.op.id for part in parts),
        products=tuple(products),
        others=tuple(o for o in sorted(members) if o not in products and clusters.roles[o] is not Role.VIEW),
        transfers=tuple(o for o in sorted(members) if is_transfer(program, program.ops[o])),
        reads=tuple(tuple(reads[base]) for base in sorted(reads)),
        feeds=tuple(any(t.op in feeding for t in reads[base]) for base in sorted(reads)),
        writes=tuple(t for base in sorted(writes) for t in [writes[base]] * (1 + (base in twice))),
        inner=first,
        looped=() if clusters.by_library else tuple(o for o in sorted(members) if is_looped(program.ops[o])),
    )


def _begins(clusters: Clusters, op: Op) -> bool:
    """Does an op begin a cluster: does it store a result?"""
    role = clusters.roles[op.id]
    if op.rule is None or op.kind in _FREE or role is Role.VIEW or (role is Role.LINK and op.kind not in LOOP_SLICES):
        return False
    return op.kind == "scan.output" or any(v >= 0 and clusters.base[v] == v and clusters.stored[v] for v in op.results)


def _cluster(clusters: Clusters, op: Op, region: int, narrowed: Mapping[int, float]) -> _Cluster:
    """The cluster of an op: walks from the op to the stored values that it reads."""
    program = clusters.program
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
            base, maker = clusters.base[v], program.ops[program.definitions[v][0]]
            if base in clusters.reads[inner.id] and clusters.stored[base]:
                if clusters.roles[inner.id] is not Role.UPDATE and not program.values[base].host:
                    sliced = inner.kind == "scan.input" and base in narrowed
                    itemsize = narrowed[base] if sliced else program.values[base].itemsize
                    reads.setdefault(base, []).append(Tensor(inner.id, k, itemsize))
            elif maker.rule is not None and (clusters.roles[maker.id] is not Role.LINK or maker.kind in LOOP_SLICES):
                todo.append(maker)
    updates = clusters.roles[op.id] is Role.UPDATE  # a scatter into the other addend, which writes no array
    results = [] if updates else [(r, v) for r, v in enumerate(op.results) if v >= 0 and clusters.stored[v]]
    results = [(r, v) for r, v in results if not program.values[v].host]
    products = sorted(o for o, inner in members.items() if inner.unit is Unit.MATRIX and not inner.only_multiplies)
    if products:
        sizes = [program.values[v].elements for v in program.ops[products[-1]].results if v >= 0]
    else:
        sizes = [size for inner in members.values() for size in touched_elements(program, inner)]
    separate = clusters.by_library and (products or op.kind == "scan.output")
    return _Cluster(
        op,
        region,
        members=sorted(members),
        products=products,
        reads=reads,
        writes={v: Tensor(op.id, len(op.operands) + r, program.values[v].itemsize) for r, v in results},
        elements=max(sizes, default=0),
        plain=not separate and all(_is_plain(clusters, inner) for inner in members.values()),
    )


def _is_plain(clusters: Clusters, op: Op) -> bool:
    """Can a sweep over an array take this op in? Windows that slide over it are a kernel of their own."""
    pools = op.kind.startswith(("reduce_window", "select_and"))
    return not pools and (clusters.roles[op.id] in _PLAIN or op.kind == "scan.output")


def touched(op: Op, number: int) -> int:
    """The operand or result whose size is what is touched of another one: of what is sliced, the slice."""
    if op.kind in READ_PARTS and number == 0:
        return len(op.operands)
    part = WRITE_PARTS.get(op.kind)
    if part is not None and (number >= len(op.operands) or (part and number == 0)):
        return part
    return number


def touched_elements(program: Program, op: Op) -> list[int]:
    """The elements that an op touches of each operand and result, on all devices."""
    values = (*op.operands, *op.results)
    places = [values[touched(op, n)] for n in range(len(values))]
    return [program.values[v].elements if v >= 0 else 1 for v in places]
