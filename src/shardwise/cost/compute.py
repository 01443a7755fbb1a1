"""Compute seconds of what runs as one kernel, under a lowered state.

The problem. A step's time without communication is the sum over its kernels. Which ops share one hardly depends on the
sharding; how large they are on one device does.

The idea. A kernel (``shardwise.cost.kernels``) is one sweep over an array. It takes

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
kernel that reads it transposed (a weight's gradient in the optimizer) takes its elements from far apart, and pays for
each where that was measured (``_transposed``, ``transposed_s``).

Where products are calls of a library (``calls_library``: GPUs) they are separate kernels and pad each role as one dimension;
convolutions over spread elements skip the zeros; and a loop's stacks are filled with zeros first, and each written by itself.

Form. The time of a kernel depends on structure and on how its ``ops`` compute. It is whole picoseconds, so that sums are exact
in any order.

The model is the roofline of Williams and others (2009). The rates by byte and element fit the cycles that TPU compilers
estimate (``docs/benchmarks/fidelity.md``).

Weak: layouts are not known, so that copies from one to another are missing; nor is what stays in on-chip memory, or what the
compiler computes twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.cost.kernels import Edge, Kernel, op_values, touched
from shardwise.hardware.mesh import MeshAxes
from shardwise.hardware.profile import Profile
from shardwise.ir.program import Op, Unit
from shardwise.lowering.candidates import Candidate
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.sharding import Axes, is_moved


def kernel_s(lowered: Lowered, kernel: Kernel, profile: Profile) -> float:
    """Seconds of one execution, in whole picoseconds."""
    sizes = Sizes(lowered)
    if kernel.returned is not None:
        return sizes.copy_s(kernel.returned, profile)
    if kernel.transposed is not None:
        return sizes.transposed_s(kernel.transposed, profile)
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
        values, numbers = op_values(node), [touched(node, n) for n in range(len(op_values(node)))]
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

    def transposed_s(self, edge: Edge, profile: Profile) -> float:
        """The time that a transposed read of a sum over devices takes."""
        if not self.lowered.computes[edge.maker].results[edge.result].partial:
            return 0.0
        return round(self._bytes(edge.user, edge.operand) / profile.transposed_bytes_per_s * 1e12) / 1e12

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
        value = op_values(self.program.ops[op])[number]
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
                    return self.program.values[op_values(node)[tensor]].shape[d]
        return rule.factors[factor].size


def _parts(mesh: MeshAxes, axes: Iterable[Axes]) -> int:
    count = 1
    for own in axes:
        for a in own:
            count *= mesh.sizes[a]
    return count
