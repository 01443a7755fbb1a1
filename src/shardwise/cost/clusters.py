"""Fusion clusters: which values of a program reach memory, which kernel reads them, and in what order kernels run.

The problem. XLA joins elementwise ops, and the reductions and products beside them, into kernels; what stays inside a kernel
takes no memory. Which values these are hardly depends on the sharding, so it is worked out once for a program.

The idea. One walk in program order; each value is decided by its uses:

- a view (reshape, transpose, a broadcast that does not grow …) is its operand: both have one *base*;
- what elementwise ops make for one use is made in that use. For several uses it is made again in each, however dear, if that
  reads one array of its size at most: a softmax's exponentials come from the scores every time;
- a product (or a convolution) takes a chain of elementwise ops behind it into its kernel. If the chain ends in several uses
  and reads nothing else of its size, the uses do it again instead, and the product's own result is stored (``_is_epilogue``);
- gathers, scatters, sorts, loops and outputs want their operands in memory. What is stored for them only is still made again
  by elementwise uses: logits lie in memory as the product made them and, for the gather of the labels, in float32;
- what stands in a barrier is in memory, and what comes out of it is the same array;
- a pad at the edges is fused into its consumer if it has one consumer; a pad between elements is a separate kernel.

Where products are calls of a library (``calls_library``: GPUs) they read and write whole arrays: nothing is made in them, and
their results are stored. Other kernels take more: any pad, and what gathers read. A scatter of single elements is a kernel.

The order (``kernel_order``). The program's, with three changes that XLA's scheduler makes too: a kernel that takes no more
memory than it frees runs as soon as it can (an update of a parameter right after the gradient); what is made of arguments alone
runs just before its first use; of the products that read one array the one with the smaller result comes first.

All rules were found by reading programs that XLA's TPU compiler scheduled (``benchmarks/fidelity``), none in a paper; those for
GPUs by comparing times and peaks of 19 programs on one H200, without their schedules.

Weak: on TPUs XLA may make a whole softmax in the kernel of its scores, where we know no rule; on GPUs it may add a bias or a
residual in a product. It also joins siblings into one kernel with several results; a mask that is made beside its use counts as
an operand of its size, which is so in some programs only; copies from one layout to another are not known. The file is long for
what it has to explain.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from shardwise.ir.program import Op, Program, Unit
from shardwise.ir.traits import ADDING_SCATTERS, BORDERS, SUMS
from shardwise.rules.tables import ELEMENTWISE, PASSING


class Role(enum.Enum):
    """What an op is to a kernel."""

    VIEW = "view"
    CHEAP = "cheap"
    DEAR = "dear"
    REDUCTION = "reduction"
    PRODUCT = "product"
    LINK = "link"
    UPDATE = "update"
    OTHER = "other"


#: Results are their first operand seen otherwise, if they have as many elements.
_VIEWS: Final = frozenset(
    {*PASSING, "reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "reduce_sum"}
)
_CHEAP: Final = frozenset(
    "broadcast_in_dim iota slice dynamic_slice concatenate split rev scan.input reshape transpose".split()
)
#: Elementwise, but not done again for a second use.
_DEAR: Final = frozenset({"div", "sqrt", "rem", "atan2"})
#: What is smaller may be made ahead of time for a kernel that runs early.
_LITTLE_BYTES: Final = 1 << 20


def role(program: Program, op: Op, library: bool = False) -> Role:
    """What an op is to a kernel."""
    if op.kind in ("scan.const", "shard_map.input", "shard_map.output"):
        return Role.VIEW
    if op.kind == "scan.input":
        return Role.CHEAP
    if op.rule is None or "." in op.kind:
        return Role.LINK
    if op.unit is Unit.MATRIX:
        return Role.OTHER if op.kind.startswith("ragged_dot") else Role.PRODUCT
    if op.kind in _VIEWS and len(op.operands) == 1 and op.operands[0] >= 0 and _same_elements(program, op):
        return Role.VIEW
    if op.kind in _CHEAP or (op.kind == "pad" and (library or not _spreads(op))):
        return Role.CHEAP
    if op.kind in ELEMENTWISE:
        return Role.DEAR if op.kind in _DEAR or ELEMENTWISE[op.kind] > 1 else Role.CHEAP
    if op.kind.startswith(("reduce_", "arg")) and op.kind != "argument":
        return Role.REDUCTION
    return Role.OTHER


def _spreads(op: Op) -> bool:
    """Does a pad put something between elements?"""
    return any(inner > 0 for _, _, inner in op.attribute("padding", ()))


def _same_elements(program: Program, op: Op) -> bool:
    return program.values[op.operands[0]].elements == program.values[op.results[0]].elements


def _find_updates(program: Program, roles: list[Role], library: bool) -> None:
    """Scatters into zeros that need no memory of their own.

    One of single elements is a comparison with a counter, like any elementwise op; one whose only use is a sum scatters into
    the other addend.
    """
    users: dict[int, list[Op]] = {}
    for op in program.ops:
        for v in op.operands:
            users.setdefault(v, []).append(op)
    for op in program.ops:
        if not op.kind.startswith("scatter") or op.operands[0] < 0 or len(op.operands) < 3:
            continue
        target, indices, updates = (program.values[v] for v in op.operands[:3])
        if program.ops[program.definitions[target.id][0]].kind != "broadcast_in_dim":
            continue
        own = users.get(op.results[0], [])
        if updates.elements * indices.shape[-1] == indices.elements and not library:
            roles[op.id] = Role.CHEAP
        elif op.kind in ADDING_SCATTERS and len(own) == 1 and own[0].kind in SUMS:
            roles[op.id], roles[own[0].id] = Role.CHEAP, Role.UPDATE


@dataclass(frozen=True)
class Clusters:
    """``base`` of each value (itself, or what it is a view of); ``stored`` for bases that reach memory; ``reads`` by op: the
    stored bases that its kernel reads (of ops inside other kernels: what they hand on); ``roles`` by op; ``uses`` by base: the
    ops that use it or a view of it; ``through``: bases that the uses that can make it themselves do not read; ``heavy``: values
    with a product in their kernel; ``by_library``: products are calls of a library."""

    program: Program
    base: tuple[int, ...]
    stored: tuple[bool, ...]
    reads: tuple[tuple[int, ...], ...]
    roles: tuple[Role, ...]
    uses: tuple[tuple[int, ...], ...]
    through: tuple[bool, ...]
    heavy: tuple[bool, ...]
    by_library: bool = False

    def kernels(self) -> tuple[int, ...]:
        """The ops that run as something of their own, in the order of the program."""
        return tuple(op.id for op in self.program.schedule if self.is_kernel(op))

    def is_kernel(self, op: Op) -> bool:
        role = self.roles[op.id]
        return role is not Role.VIEW and (
            role is Role.LINK
            or op.rule is None
            or not op.results
            or any(self.stored[v] or self.is_stacked(v) for v in op.results if v >= 0)
        )

    def is_stacked(self, value: int) -> bool:
        """Is the value written straight into the stack that a loop leaves?"""
        return any(self.program.ops[u].kind == "scan.output" for u in self.uses[value])


def cluster(program: Program, library: bool = False) -> Clusters:
    """The clusters of a program; ``library``: products are calls of a library, as on GPUs."""
    return _Clustering(program, library).run()


class _Clustering:
    def __init__(self, program: Program, library: bool):
        self.program, self.by_library = program, library
        self.roles = [role(program, op, library) for op in program.ops]
        _find_updates(program, self.roles, library)
        count = len(program.values)
        self.base = self._bases()
        self.uses: list[list[int]] = [[] for _ in range(count)]
        for op in program.schedule:
            if self.roles[op.id] is not Role.VIEW:
                for b in dict.fromkeys(self.base[v] for v in op.operands if v >= 0):
                    self.uses[b].append(op.id)
        self.stored = [False] * count
        self.through = [False] * count
        self.heavy = [False] * count  # has a product in its kernel
        self.pieced = [False] * count  # has a pad in its kernel
        self.inside: list[tuple[int, ...]] = [()] * count  # what whoever makes the value reads
        barriers = (op for op in program.ops if op.kind == "optimization_barrier")
        self.barred = {self.base[op.operands[0]] for op in barriers if op.operands[0] >= 0}
        self.light = self._light()
        self.taken: set[int] = set()  # ops whose kernel has a product in it already

    def run(self) -> Clusters:
        program, roles, base = self.program, self.roles, self.base
        reads: list[tuple[int, ...]] = [()] * len(program.ops)
        for op in program.schedule:
            kind = roles[op.id]
            if kind is Role.VIEW:
                continue
            sources = [base[v] for v in op.operands if v >= 0]
            read = dict.fromkeys(b for s in sources for b in (self.inside[s] if self._looks_through(op, s) else (s,)))
            reads[op.id] = tuple(read)
            for v in op.results:
                if v < 0 or base[v] != v:
                    continue
                self.heavy[v] = kind is Role.PRODUCT or any(self.heavy[s] and self.through[s] for s in sources)
                self.pieced[v] = op.kind == "pad" or any(self.pieced[s] and self.through[s] for s in sources)
                self.inside[v] = tuple(read)
                self.through[v] = self._joins(v, kind)
                self.stored[v] = not self.through[v] or any(not self._takes(program.ops[u]) for u in self.uses[v])
        return Clusters(
            program,
            tuple(base),
            tuple(self.stored),
            tuple(reads),
            tuple(roles),
            tuple(map(tuple, self.uses)),
            tuple(self.through),
            tuple(self.heavy),
            self.by_library,
        )

    def _bases(self) -> list[int]:
        """What each value is a view of, in the end."""
        base = list(range(len(self.program.values)))
        for op in self.program.schedule:
            if self.roles[op.id] is Role.VIEW and op.operands and op.operands[0] >= 0:
                for v in op.results:
                    base[v] = base[op.operands[0]]
        return base

    def _light(self) -> list[bool]:
        """Which values are made of nothing of their size: masks, broadcasts, counters."""
        light = [False] * len(self.program.values)
        for op in self.program.schedule:
            if self.roles[op.id] in (Role.CHEAP, Role.DEAR) and op.kind != "scan.input":
                sources = [self.base[v] for v in op.operands if v >= 0]
                for v in op.results:
                    most = self.program.values[v].elements / 2
                    light[v] = all(light[s] or self.program.values[s].elements < most for s in sources)
        return light

    def _joins(self, value: int, made_by: Role) -> bool:
        """Is a value made inside the kernels that use it, where they can?"""
        if made_by in (Role.OTHER, Role.LINK, Role.REDUCTION, Role.UPDATE) or not self.uses[value]:
            return False
        if value in self.barred:
            return False
        if self.heavy[value]:
            return not self.by_library and self._is_epilogue(value)
        if len(self.uses[value]) == 1:
            return True
        return not self.pieced[value] and self._unary(value)

    def _unary(self, value: int) -> bool:
        """Does making it again read at most one array of its size?"""
        most = self.program.values[value].elements / 2
        return sum(self.program.values[b].elements >= most for b in self.inside[value]) <= 1

    def _is_epilogue(self, value: int) -> bool:
        """Does the value go on inside the kernel of its product?

        It does along a chain of elementwise ops up to a value that has to be in memory anyway. If that has several uses, and
        the chain reads nothing else of its size, then the uses do the chain again, and the product's own result is stored.
        """
        program = self.program
        own, now, chain = program.values[value], value, []
        while len(self.uses[now]) == 1:
            user = program.ops[self.uses[now][0]]
            if user.kind == "scan.output" or self.roles[user.id] not in (Role.CHEAP, Role.DEAR):
                break
            if user.id in self.taken or program.values[user.results[0]].elements != own.elements:
                break
            if len(user.results) > 1:
                break
            chain.append(user.id)
            others = [self.base[v] for v in user.operands if v >= 0 and self.base[v] != now]
            now = user.results[0]
            if any(program.values[o].elements >= own.elements / 2 and not self._given(o, user) for o in others):
                self.taken.add(chain[0])
                return True
        last = program.values[now]
        if now == value:
            return len(self.uses[value]) == 1 and program.ops[self.uses[value][0]].kind == "scan.output"
        if len(self.uses[now]) > 1 and last.itemsize >= own.itemsize:
            return False
        self.taken.add(chain[0])
        return True

    def _given(self, value: int, user: Op) -> bool:
        """Is a mask or the like given to a loop from outside? One that is made beside its use counts as any operand."""
        program = self.program
        made = program.ops[program.definitions[value][0]].region
        return self.light[value] and made != user.region

    def _looks_through(self, op: Op, source: int) -> bool:
        """Does the op make this operand itself? A product does not where the operand is in memory anyway."""
        if not self.through[source] or not self._takes(op):
            return False
        return not (self.stored[source] and self.roles[op.id] is Role.PRODUCT)

    def _takes(self, user: Op) -> bool:
        """Can operands of this op be made in its kernel?"""
        kind = self.roles[user.id]
        if kind is Role.PRODUCT:
            return not self.by_library
        if user.kind == "gather":
            return self.by_library
        return kind in (Role.CHEAP, Role.DEAR, Role.REDUCTION, Role.UPDATE) or user.kind in ("scan.output", "pad")


def kernel_order(clusters: Clusters, region: int, home: Sequence[int], donated: Set[int]) -> list[int]:
    """Kernels and loops of a region in the order in which they run.

    ``home`` is the region of each value; ``donated`` are bases that will take the place of a donated argument.
    """
    return _Ordering(clusters, region, home, donated).run()


class _Ordering:
    def __init__(self, clusters: Clusters, region: int, home: Sequence[int], donated: Set[int]):
        self.c, self.program, self.home, self.donated = clusters, clusters.program, home, donated
        ops = self.program.ops
        linked = {k for op in ops for k in op.links}
        self.items = [
            k
            for k in self.program.regions[region].ops
            if k not in linked and ops[k].kind not in BORDERS and (ops[k].regions or clusters.is_kernel(ops[k]))
        ]
        self.made = {k: self._made(k, region) for k in self.items}
        self.reads = {k: sorted(self._read(k) - set(self.made[k])) for k in self.items}
        self.maker = {v: k for k, values in self.made.items() for v in values}
        self.readers: dict[int, list[int]] = {}
        for k in self.items:
            for b in self.reads[k]:
                self.readers.setdefault(b, []).append(k)
        self.left = {b: len(readers) for b, readers in self.readers.items()}
        self.lazy: set[int] = set()
        for k in self.items:
            if clusters.roles[k] in (Role.CHEAP, Role.DEAR) and all(
                b not in self.maker or self.maker[b] in self.lazy for b in self.reads[k]
            ):
                self.lazy.add(k)
        self.outputs = set(self.program.regions[region].outputs)
        self.done: set[int] = set()
        self.order: list[int] = []

    def run(self) -> list[int]:
        for k in self.items:
            if k in self.lazy:
                continue
            if k not in self.done and self._heavy(k):
                beside = {j for b in self.reads[k] if b in self.maker for j in self.readers[b]}
                for j in sorted(beside - {k}):
                    if j not in self.done and self._heavy(j) and self._ready(j) and self._gain(j) > self._gain(k):
                        self._put(j)
            self._put(k)
        for k in self.items:
            self._put(k)
        return self.order

    def _parts(self, k: int) -> list[Op]:
        op = self.program.ops[k]
        return [op, *(self.program.ops[j] for j in op.links)]

    def _made(self, k: int, region: int) -> list[int]:
        c = self.c
        results = [v for op in self._parts(k) for v in op.results if v >= 0]
        return [v for v in results if c.stored[v] and c.base[v] == v and self.home[v] == region]

    def _read(self, k: int) -> set[int]:
        """Stored bases that an op reads; a loop, also in its body."""
        c, ops = self.c, self.program.ops
        found = {b for op in self._parts(k) if c.roles[op.id] is not Role.VIEW for b in c.reads[op.id]}
        found |= {c.base[op.operands[0]] for op in self._parts(k) if op.kind == "scan.const"}
        todo = list(ops[k].regions)
        while todo:
            for inner in (ops[j] for j in self.program.regions[todo.pop()].ops):
                todo += inner.regions
                if c.roles[inner.id] is not Role.VIEW:
                    found.update(b for b in c.reads[inner.id] if self.home[b] == ops[k].region)
        return found

    def _heavy(self, k: int) -> bool:
        op = self.program.ops[k]
        return not op.regions and any(self.c.heavy[v] for v in op.results)

    def _size(self, value: int) -> int:
        return self.program.values[value].nbytes

    def _ready(self, k: int) -> bool:
        missing = [b for b in self.reads[k] if b in self.maker and self.maker[b] not in self.done]
        return all(self.maker[b] in self.lazy and self._size(b) < _LITTLE_BYTES for b in missing)

    def _gain(self, k: int) -> int:
        """Bytes that running it frees, less those it takes, before sharding."""
        new = sum(self._size(v) for v in self.made[k] if v not in self.donated)
        last = [b for b in self.reads[k] if self.left[b] == 1 and b in self.maker and b not in self.outputs]
        return sum(map(self._size, last)) - new

    def _put(self, k: int) -> None:
        """Runs an op, what it needs before it, and what may run as soon as it is done."""
        todo = [(k, True)]
        while todo:
            k, wanted = todo.pop()
            if k in self.done or not (wanted or (self._ready(k) and self._gain(k) >= 0)):
                continue
            missing = [self.maker[b] for b in self.reads[k] if b in self.maker and self.maker[b] not in self.done]
            if missing:
                todo += [(k, True), *((j, True) for j in reversed(missing))]
                continue
            self.done.add(k)
            self.order.append(k)
            for b in self.reads[k]:
                self.left[b] -= 1
            near = {j for b in (*self.made[k], *self.reads[k]) if b in self.maker for j in self.readers.get(b, ())}
            todo += [(j, False) for j in sorted(near, reverse=True) if not self.program.ops[j].regions]
