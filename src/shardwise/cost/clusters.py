"""Fusion clusters: which values of a program reach memory, which kernel reads them, and in what order kernels run.

The problem. XLA fuses elementwise ops, and the reductions and products beside them, into kernels; what stays inside a kernel
takes no memory. Which values these are hardly depends on the sharding, so it is computed once for a program.

The idea. One walk in program order; each value is decided by its consumers:

- a view (reshape, transpose, a broadcast that does not grow …) is its operand: both have one *base*;
- what elementwise ops compute is fused into the only consumer. With several consumers it is computed again in each, if that
  reads at most one array of its size: a softmax's exponentials come from the scores every time. Concatenations and random
  numbers are not;
- a product (or a convolution) takes a chain of elementwise ops behind it into its kernel (``_is_epilogue``). Masks do not end
  the chain if several products read what follows (``_feeds_products``), inside of loops and outside;
- gathers, scatters, sorts, loops and outputs read their operands from memory. What is stored for them only is still computed
  again by elementwise consumers. The operand of a barrier is in memory, and its result is the same array;
- a pad at the edges is fused into its consumer if there is only one; a pad between elements is a separate kernel.

Where products are calls of a library (GPUs) nothing is fused into them, and their results are stored. Other kernels take more:
any pad, and what gathers read. A scatter of single elements is a kernel.

The order (``kernel_order``) is the program's, with three changes that XLA's scheduler makes too: a kernel that takes no more
memory than it frees runs as soon as it can (a parameter's update after its gradient); what is computed from arguments alone
runs just before its first consumer; of the products that read one array the one with the smaller result comes first.

The rules were found by reading programs that XLA's TPU compiler scheduled (``benchmarks/fidelity``); those for GPUs by
comparing times and peaks of 19 programs on one H200. Weak: on TPUs XLA may compute a whole softmax in the kernel of its scores,
and keep the exponentials of few positions in float32 for the backward pass too; on GPUs it may add a bias or a residual in a
product.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Set
from typing import Final

from shardwise.ir.program import Op, Program, Unit
from shardwise.ir.traits import ADDING_SCATTERS, BORDERS, SUMS, is_transfer
from shardwise.rules.tables import ELEMENTWISE, PASSING


class Role(enum.Enum):
    """What an op is to a kernel."""

    VIEW = "view"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    PRODUCT = "product"
    LINK = "link"
    UPDATE = "update"
    OTHER = "other"


#: Views of their first operand, if they have as many elements.
_VIEWS: Final = frozenset(
    {*PASSING, *"bitcast_convert_type broadcast_in_dim expand_dims reduce_sum reshape squeeze transpose".split()}
)
#: Links by which a value enters a loop, a branch or a ``shard_map`` as it is.
_ENTERING: Final = frozenset({"scan.const", "while.const", "cond.input", "shard_map.input"})
#: Ops that are fused like elementwise ones.
_FUSED: Final = frozenset(
    "broadcast_in_dim iota slice dynamic_slice concatenate split random_bits rev scan.input reshape transpose".split()
)
#: Smaller arrays may be computed ahead of time for a kernel that runs early.
_LITTLE_BYTES: Final = 1 << 20


class Clusters:
    """The clusters of a program; ``by_library``: products are calls of a library, as on GPUs. ``base`` of each value: itself,
    or what it is a view of; ``stored`` for bases that reach memory; ``reads`` by op: the stored bases that its kernel reads;
    ``uses`` by base: the ops that use it or a view of it; ``through``: bases that consumers compute themselves where they can;
    ``heavy``: values with a product in their kernel; ``owner``: by link the op of its loop or branch."""

    def __init__(self, program: Program, by_library: bool = False):
        self.program, self.by_library = program, by_library
        self.owner = {k: op.id for op in program.ops for k in op.links}
        self._elements = [value.elements for value in program.values]
        self.roles = [self._role(op) for op in program.ops]
        self._find_updates()
        count = len(program.values)
        self.base = list(range(count))
        self.uses: list[list[int]] = [[] for _ in range(count)]
        for op in program.schedule:
            if self.roles[op.id] is Role.VIEW and op.operands and op.operands[0] >= 0:
                for v in op.results:
                    self.base[v] = self.base[op.operands[0]]
        for op in program.schedule:
            if self.roles[op.id] is not Role.VIEW:
                for b in dict.fromkeys(self.base[v] for v in op.operands if v >= 0):
                    self.uses[b].append(op.id)
        self.reads: list[tuple[int, ...]] = [()] * len(program.ops)
        self.stored, self.through, self.heavy = ([False] * count for _ in range(3))
        self._once = [False] * count  # has a pad, a concatenation or random numbers in its kernel
        self._inside: list[tuple[int, ...]] = [()] * count  # what a kernel that computes the value reads
        barriers = (op for op in program.ops if op.kind == "optimization_barrier")
        self._barred = {self.base[op.operands[0]] for op in barriers if op.operands[0] >= 0}
        self._light = self._find_light()
        self._taken: set[int] = set()  # ops whose kernel has a product in it already
        for op in program.schedule:
            if self.roles[op.id] is not Role.VIEW:
                self._decide(op)

    def is_kernel(self, op: Op) -> bool:
        """Does an op run as a kernel, rather than inside of another?"""
        role = self.roles[op.id]
        if role in (Role.VIEW, Role.LINK) or op.rule is None or not op.results:
            return role is not Role.VIEW
        return any(self.stored[v] or self._is_stacked(v) for v in op.results if v >= 0)

    def inner_ops(self, op: Op) -> Iterator[Op]:
        """The ops inside a loop or branch, at any depth."""
        for region in op.regions:
            for inner in (self.program.ops[k] for k in self.program.regions[region].ops):
                yield inner
                yield from self.inner_ops(inner)

    def outermost(self, link: Op) -> Op:
        """Returns the link of the outermost loop through which the operand of a loop's link passes as it is."""
        while (maker := self.program.ops[self.program.definitions[link.operands[0]][0]]).kind == "scan.const":
            link = maker
        return link

    def _is_stacked(self, value: int) -> bool:
        """Is the value written straight into the stack that a loop returns?"""
        return any(self.program.ops[u].kind == "scan.output" for u in self.uses[value])

    def _role(self, op: Op) -> Role:
        if op.kind in _ENTERING or op.kind == "shard_map.output":
            return Role.VIEW
        if op.kind == "scan.input":
            return Role.ELEMENTWISE
        if op.rule is None or "." in op.kind:
            return Role.LINK
        if op.only_multiplies:
            return Role.ELEMENTWISE
        if op.unit is Unit.MATRIX:
            return Role.OTHER if op.kind.startswith("ragged_dot") else Role.PRODUCT
        if is_transfer(self.program, op):
            return Role.OTHER
        unary = len(op.operands) == 1 and op.operands[0] >= 0
        if op.kind in _VIEWS and unary and self._elements[op.operands[0]] == self._elements[op.results[0]]:
            return Role.VIEW
        if op.kind == "pad":
            spreads = any(inner > 0 for _, _, inner in op.attribute("padding", ()))
            return Role.OTHER if spreads and not self.by_library else Role.ELEMENTWISE
        if op.kind in _FUSED or op.kind in ELEMENTWISE:
            return Role.ELEMENTWISE
        if op.kind.startswith(("reduce_", "arg")) and op.kind != "argument":
            return Role.REDUCTION
        return Role.OTHER

    def _find_updates(self) -> None:
        """Finds scatters into zeros that need no memory: of single elements, or with a sum as the only consumer."""
        program = self.program
        for op in program.ops:
            if not op.kind.startswith("scatter") or op.operands[0] < 0 or len(op.operands) < 3:
                continue
            target, indices, updates = (program.values[v] for v in op.operands[:3])
            if program.ops[program.definitions[target.id][0]].kind != "broadcast_in_dim":
                continue
            consumers = [program.ops[k] for k, _ in program.uses[op.results[0]]]
            if updates.elements * indices.shape[-1] == indices.elements and not self.by_library:
                self.roles[op.id] = Role.ELEMENTWISE
            elif op.kind in ADDING_SCATTERS and len(consumers) == 1 and consumers[0].kind in SUMS:
                self.roles[op.id], self.roles[consumers[0].id] = Role.ELEMENTWISE, Role.UPDATE

    def _find_light(self) -> list[bool]:
        """Which values are computed from nothing of their size: masks, broadcasts, counters."""
        light = [False] * len(self.program.values)
        for op in self.program.schedule:
            if self.roles[op.id] is Role.ELEMENTWISE and op.kind != "scan.input":
                sources = [self.base[v] for v in op.operands if v >= 0]
                for v in op.results:
                    light[v] = all(light[s] or self._elements[s] < self._elements[v] / 2 for s in sources)
        return light

    def _decide(self, op: Op) -> None:
        """Decides what the kernel of an op reads, and which of its results are stored."""
        role, sources = self.roles[op.id], [self.base[v] for v in op.operands if v >= 0]
        read = dict.fromkeys(b for s in sources for b in (self._inside[s] if self._looks_through(op, s) else (s,)))
        self.reads[op.id] = tuple(read)
        for v in op.results:
            if v < 0 or self.base[v] != v:
                continue
            self.heavy[v] = role is Role.PRODUCT or any(self.heavy[s] and self.through[s] for s in sources)
            once = op.kind in ("pad", "concatenate", "random_bits")
            self._once[v] = once or any(self._once[s] and self.through[s] for s in sources)
            self._inside[v] = tuple(read)
            self.through[v] = self._joins(v, role)
            self.stored[v] = not self.through[v] or any(not self._takes(self.program.ops[u]) for u in self.uses[v])

    def _joins(self, value: int, role: Role) -> bool:
        """Is a value, computed by an op of this role, computed inside the kernels that use it, where they can?"""
        if role not in (Role.ELEMENTWISE, Role.PRODUCT) or not self.uses[value] or value in self._barred:
            return False
        if self.heavy[value]:
            return not self.by_library and self._is_epilogue(value)
        if len(self.uses[value]) == 1:
            return True
        large = sum(self._elements[b] >= self._elements[value] / 2 for b in self._inside[value])
        return not self._once[value] and large <= 1

    def _is_epilogue(self, value: int) -> bool:
        """Does the value go on inside the kernel of its product? It does along a chain of elementwise ops up to a value that
        has to be in memory anyway, unless that has several uses, which then do the chain again."""
        program, elements = self.program, self._elements[value]
        now, chain = value, list[int]()
        while len(self.uses[now]) == 1:
            user = program.ops[self.uses[now][0]]
            if user.kind == "scan.output" or self.roles[user.id] is not Role.ELEMENTWISE or user.id in self._taken:
                break
            if self._elements[user.results[0]] != elements or len(user.results) > 1:
                break
            chain.append(user.id)
            others = [self.base[v] for v in user.operands if v >= 0 and self.base[v] != now]
            now = user.results[0]
            large = [o for o in others if self._elements[o] >= elements / 2]
            if large and not (all(self._light[o] for o in large) and self._feeds_products(now)):
                self._taken.add(chain[0])
                return True
        if now == value:
            return len(self.uses[value]) == 1 and program.ops[self.uses[value][0]].kind == "scan.output"
        if len(self.uses[now]) > 1 and program.values[now].itemsize >= program.values[value].itemsize:
            return False
        self._taken.add(chain[0])
        return True

    def _feeds_products(self, value: int) -> bool:
        """Do several products read what elementwise ops compute from a value? The scores of attention are read by one in the
        forward pass, which stores them masked and in float32, and by those of the backward pass, for which they are stored as
        the product returns them."""
        seen, products, waiting = {value}, set[int](), [value]
        while waiting and len(products) < 2:
            for user in self.uses[self.base[waiting.pop()]]:
                op = self.program.ops[user]
                if self.roles[user] is Role.PRODUCT:
                    products.add(user)
                elif self.roles[user] is Role.ELEMENTWISE:
                    new = [
                        v for v in op.results if v >= 0 and v not in seen and self._elements[v] == self._elements[value]
                    ]
                    seen.update(new)
                    waiting += new
        return len(products) > 1

    def _looks_through(self, op: Op, source: int) -> bool:
        """Does the op compute this operand in its kernel? A product does not where the operand is in memory anyway."""
        if not self.through[source] or not self._takes(op):
            return False
        return not (self.stored[source] and self.roles[op.id] is Role.PRODUCT)

    def _takes(self, user: Op) -> bool:
        """Can operands of this op be computed in its kernel?"""
        role = self.roles[user.id]
        if role is Role.PRODUCT:
            return not self.by_library
        if user.kind == "scan.input":
            return False
        if user.kind == "gather":
            return self.by_library
        return role in (Role.ELEMENTWISE, Role.REDUCTION, Role.UPDATE) or user.kind in ("scan.output", "pad")


def kernel_order(clusters: Clusters, region: int, donated: Set[int]) -> list[int]:
    """Kernels and loops of a region in the order in which they run; ``donated`` bases take the place of donated arguments."""
    return _Ordering(clusters, region, donated).run()


class _Ordering:
    def __init__(self, clusters: Clusters, region: int, donated: Set[int]):
        self.c, self.program, self.donated = clusters, clusters.program, donated
        ops = self.program.ops
        self.items = [
            k
            for k in self.program.regions[region].ops
            if k not in clusters.owner and ops[k].kind not in BORDERS and (ops[k].regions or clusters.is_kernel(ops[k]))
        ]
        self.results = {k: self._results(k, region) for k in self.items}
        self.reads = {k: sorted(self._reads(k) - set(self.results[k])) for k in self.items}
        self.maker = {v: k for k, values in self.results.items() for v in values}
        self.readers: dict[int, list[int]] = {}
        for k in self.items:
            for b in self.reads[k]:
                self.readers.setdefault(b, []).append(k)
        self.left = {b: len(readers) for b, readers in self.readers.items()}
        self.lazy: set[int] = set()
        for k in (k for k in self.items if clusters.roles[k] is Role.ELEMENTWISE):
            if all(b not in self.maker or self.maker[b] in self.lazy for b in self.reads[k]):
                self.lazy.add(k)
        self.outputs = set(self.program.regions[region].outputs)
        self.done: dict[int, None] = {}

    def run(self) -> list[int]:
        for k in self.items:
            if k in self.lazy:
                continue
            if k not in self.done and self._is_heavy(k):
                beside = {j for b in self.reads[k] if b in self.maker for j in self.readers[b]}
                for j in sorted(beside - {k}):
                    if j not in self.done and self._is_heavy(j) and self._ready(j) and self._gain(j) > self._gain(k):
                        self._put(j)
            self._put(k)
        for k in self.items:
            self._put(k)
        return list(self.done)

    def _parts(self, k: int) -> list[Op]:
        op = self.program.ops[k]
        return [op, *(self.program.ops[j] for j in op.links)]

    def _results(self, k: int, region: int) -> list[int]:
        c, home = self.c, self.program.home
        results = [v for op in self._parts(k) for v in op.results if v >= 0]
        return [v for v in results if c.stored[v] and c.base[v] == v and home[v] == region]

    def _reads(self, k: int) -> set[int]:
        """Stored bases that an op reads; a loop, also in its body."""
        c, op = self.c, self.program.ops[k]
        reads = {b for part in self._parts(k) for b in c.reads[part.id]}
        reads |= {c.base[part.operands[0]] for part in self._parts(k) if part.kind in _ENTERING}
        inner = (b for part in c.inner_ops(op) for b in c.reads[part.id])
        return reads.union(b for b in inner if self.program.home[b] == op.region)

    def _is_heavy(self, k: int) -> bool:
        op = self.program.ops[k]
        return not op.regions and any(self.c.heavy[v] for v in op.results)

    def _bytes(self, value: int) -> int:
        return self.program.values[value].nbytes

    def _missing(self, k: int) -> list[int]:
        """What an op reads that is not computed yet."""
        return [b for b in self.reads[k] if b in self.maker and self.maker[b] not in self.done]

    def _ready(self, k: int) -> bool:
        return all(self.maker[b] in self.lazy and self._bytes(b) < _LITTLE_BYTES for b in self._missing(k))

    def _gain(self, k: int) -> int:
        """Bytes that running it frees, less those it takes, before sharding."""
        new = sum(self._bytes(v) for v in self.results[k] if v not in self.donated)
        last = [b for b in self.reads[k] if self.left[b] == 1 and b in self.maker and b not in self.outputs]
        return sum(map(self._bytes, last)) - new

    def _put(self, k: int) -> None:
        """Runs an op, what it needs before it, and what may run as soon as it is done."""
        todo = [(k, True)]
        while todo:
            k, wanted = todo.pop()
            if k in self.done or not (wanted or (self._ready(k) and self._gain(k) >= 0)):
                continue
            missing = self._missing(k)
            if missing:
                todo += [(k, True), *((self.maker[b], True) for b in reversed(missing))]
                continue
            self.done[k] = None
            for b in self.reads[k]:
                self.left[b] -= 1
            near = {j for b in (*self.results[k], *self.reads[k]) if b in self.maker for j in self.readers.get(b, ())}
            todo += [(j, False) for j in sorted(near, reverse=True) if not self.program.ops[j].regions]
