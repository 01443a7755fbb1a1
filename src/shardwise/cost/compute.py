"""Compute time of a kernel under a lowered state.

A kernel (``shardwise.cost.kernels``) is one sweep over an array. It takes ``launch + Σ product + stream(bytes beside the
products) + Σ breaks`` (``kernel_s``), on TPUs without the launch where it has products, where

- a product of ``B`` times ``m × k`` with ``k × n`` has ``2·B·m·n·k`` FLOPs at the sizes to which the device pads it, or takes
  the time to read its operands' sources and to write its result, if that is more (``product_s``). Rows and columns of several
  dimensions are padded in one, where that costs least. Laying out the operands is added where it was measured;
- a stream costs by the element and by the byte, or its vector FLOPs if these take longer (``stream_s``). Only what is touched
  counts: of a stacked value the slice, of an update in place the update. Products with a single row or column are streams, and
  on GPUs those of small matrices;
- arrays that are used soon stay in on-chip memory where they fit (``Profile.on_chip_bytes``, ``kernels._mark_spans``), and so
  do operands that other devices send. Writing and reading them is free;
- slices, pads and concatenations that shift elements inside of tiles take vector operations (``SHIFT``); lookups of windows
  are loops (``copies.is_looped``), with the launches of ``KERNELS`` in each trip;
- a convolution of single channels is a product for each tap, with the channels on the diagonal of its tiles;
- a break is a collective inside the kernel: what comes after it is another sweep (``break_s``).

A result of a collective that takes the place of a donated argument is copied (``copy_s``): ZeRO's parameters. So is a stack
that a loop writes while it reads the donated one (``kernels._restacked``). A product writes its result in the order in which it
is read; if the result is a sum over devices it cannot, and kernels that read it transposed pay for that (``transposed_s``).

Where products are calls of a library (GPUs) they are separate kernels and pad each role as one dimension; convolutions over
dilated inputs skip the zeros; and a loop's stacks are filled with zeros first, and each written by itself.

Times are whole picoseconds, so that sums are exact in any order. The model is the roofline of Williams and others (2009); its
rates fit the cycles that TPU compilers estimate (``docs/benchmarks/fidelity.md``). Weak: copies from one layout to another are
missing; nor is known what the compiler fetches into on-chip memory ahead of time, or what it computes twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from shardwise.cost.kernels import Edge, Kernel, Tensor, touched, touched_elements
from shardwise.cost.layouts import Layouts
from shardwise.hardware.profile import Profile
from shardwise.ir.program import Op, Program, Unit
from shardwise.lowering.candidates import Candidate
from shardwise.lowering.local_cost import operations
from shardwise.lowering.lowered import Lowered
from shardwise.lowering.padding import block, ragged_block
from shardwise.lowering.sharding import ROUNDED_BYTES, is_moved

#: Elements of both operands of one product, without batch dimensions, below which XLA for GPUs computes it without a library:
#: of two matrices (the default of ``xla_gpu_gemm_rewrite_size_threshold``), and if one operand is a vector
#: (``ShouldStrengthReduceDotToReduce`` of its algebraic simplifier).
_LARGEST_MATRIX: Final = 100
_LARGEST_VECTOR: Final = 10_000_000
#: Kernels of one trip of a loop over windows, which read the place and the window and write it: four to five where libtpu
#: 0.0.42.1 was seen to loop (benchmarks/fidelity/kinds_more.py).
KERNELS: Final = 5
#: Vector operations per element where elements move inside of tiles, in each of the two minor dimensions: 7 to 9 cycles for a
#: register (benchmarks/fidelity/kinds.py, wave-equation and game-of-life).
SHIFT: Final = 32
#: A value shares the on-chip memory with one in this many of those that are computed until its last use: others live shorter.
SHORTER: Final = 4


def kernel_s(lowered: Lowered, kernel: Kernel, profile: Profile, layouts: Layouts) -> float:
    """Seconds of one execution, in whole picoseconds."""
    sizes = _Sizes(lowered, profile, layouts)
    if kernel.returned is not None:
        return _whole_ps(sizes.copy_s(kernel.returned))
    if kernel.transposed is not None:
        return _whole_ps(sizes.transposed_s(kernel.transposed))
    reads, writes, far, stored = sizes.traffic(kernel)
    room, others = profile.on_chip_bytes, [sizes.local(o) for o in kernel.others]
    seconds = 0.0 if kernel.products and not profile.calls_library else profile.launch_s
    elements, streamed = 0.0, far + stored
    if kernel.products:
        sources = [
            (n, sizes.stays(n, places[0]) or (n <= room and any(sizes.arrives(t.op, t.number) for t in places)))
            for n, places, feeds in zip(reads, kernel.reads, kernel.feeds, strict=True)
            if feeds
        ]
        operands, results = sum([n for n, _ in sources]), sum([sizes.result_bytes(o) for o in kernel.products])
        kept = sum([n for n, stays in sources if stays])
        share = 1.0 - kept / operands if kept else 1.0
        written = results if stored or not writes else 0.0
        for number in kernel.products:
            seconds += sizes.product_s(number, operands / len(kernel.products), share, written / len(kernel.products))
        streamed = max(0.0, sum(reads) + sum(writes) - operands - results)
    else:
        elements = max([x.largest for x in others], default=0.0)
    seconds += sum([sizes.windows_s(op) for op in kernel.looped])
    vector = sum([x.flops + x.shifts for x in others if not x.dtype])
    matrix_s = sum([x.flops / (profile.matrix_rate(x.dtype) * profile.matrix_efficiency) for x in others if x.dtype])
    seconds += max(stream_s(streamed, elements, vector, profile), matrix_s)
    for edge in {e.value: e for e in kernel.inner if sizes.is_resharded(e)}.values():
        seconds += sizes.break_s(edge, kernel.products) + profile.launch_s
    return _whole_ps(seconds)


def transferred_bytes(lowered: Lowered, kernel: Kernel, profile: Profile, layouts: Layouts) -> float:
    """The bytes that one device exchanges with the memory of its host in one execution."""
    return sum([_Sizes(lowered, profile, layouts).result_bytes(op) for op in kernel.transfers])


def work(lowered: Lowered, kernel: Kernel, profile: Profile, layouts: Layouts) -> tuple[float, float]:
    """The FLOPs of one device in one execution, and the bytes that it reads from memory and writes to it."""
    sizes = _Sizes(lowered, profile, layouts)
    return sum([sizes.local(op).flops for op in kernel.ops]), sum(sizes.traffic(kernel)[2:])


def _whole_ps(seconds: float) -> float:
    return round(seconds * 1e12) / 1e12


@dataclass(frozen=True, slots=True)
class Product:
    """A product on one device: the sizes of the dimensions of each role, and its type. In a convolution of a dilated input,
    ``zeros`` is the number of taps of which only one reads an element of the input; ``passes``: the products of bfloat16 parts
    that a higher precision takes where products of float32 arrays read bfloat16."""

    batch: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]
    dtype: str
    zeros: int = 1
    passes: int = 1

    def is_stream(self, library: bool) -> bool:
        """Are elements multiplied and added up, without the matrix unit? So it is if an operand is one row or column, and on
        GPUs also for matrices that are too small for a ``library``."""
        rows, columns = math.prod(self.rows), math.prod(self.columns)
        elements = math.prod(self.depth) * (rows + columns)  # of both operands, without the batch
        largest = _LARGEST_VECTOR if 1 in (rows, columns) else _LARGEST_MATRIX
        return elements < largest if library else 1 in (rows, columns)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * math.prod(self.rows) * math.prod(self.columns) * math.prod(self.depth)


def product_s(product: Product, nbytes: float, profile: Profile, operands: float = 0.0) -> float:
    """Seconds of a product that streams ``nbytes`` and lays out ``operands`` bytes.

    >>> from shardwise.hardware.load import load_profile
    >>> square = Product(1, (4096,), (4096,), (4096,), "bfloat16")
    >>> f"{product_s(square, 1e8, load_profile('v5e')) * 1e3:.3f} ms"
    '0.734 ms'
    """
    rows, columns, depth = profile.matrix_tile
    if profile.calls_library:  # which sees one dimension of each role
        product = replace(product, rows=(math.prod(product.rows),), columns=(math.prod(product.columns),))
    # Either operand may be the one that is held in the array.
    waste = min(
        _waste(product.rows, rows) * _waste(product.columns, columns),
        _waste(product.rows, columns) * _waste(product.columns, rows),
    ) * _waste((math.prod(product.depth),), depth)
    if profile.calls_library:
        waste /= product.zeros
    if profile.rounds:
        waste *= product.passes
    rate = profile.matrix_rate(product.dtype) * profile.matrix_efficiency
    compute_s = product.flops * waste / rate + operands / profile.operand_bytes_per_s
    return max(compute_s, nbytes / (profile.memory_bytes_per_s * profile.memory_efficiency))


def stream_s(nbytes: float, elements: float, flops: float, profile: Profile) -> float:
    """Seconds of one sweep over ``elements`` that reads and writes ``nbytes`` in all."""
    sweep_s = elements / profile.elements_per_s + nbytes / (profile.memory_bytes_per_s * profile.memory_efficiency)
    return max(sweep_s, flops / profile.vector_flops_per_s)


def _waste(sizes: tuple[int, ...], tile: int) -> float:
    """How much larger a role becomes when it is padded in the dimension where that costs least."""
    return min((math.ceil(size / tile) * tile / size for size in sizes), default=float(tile))


@dataclass(frozen=True, slots=True)
class _Local:
    """Elements of each operand and result that an op touches on one device, those of the ``largest`` as they are in registers,
    its FLOPs, a kernel's ``dtype``, and the vector operations that move elements inside of tiles."""

    elements: tuple[float, ...]
    largest: float
    flops: float
    product: Product | None
    dtype: str = ""
    shifts: float = 0.0


class _Sizes:
    """Sizes on one device and the times that follow from them."""

    def __init__(self, lowered: Lowered, profile: Profile, layouts: Layouts):
        self.lowered, self.program, self.mesh, self.profile = lowered, lowered.program, lowered.mesh, profile
        self.layouts = layouts

    def local(self, op: int) -> _Local:
        """What an op touches on one device, and its FLOPs."""
        memo, candidate = self.lowered.memo.local, self.lowered.computes[op]
        key = (self.lowered.structure.alike[op], self.layouts.of_op[op], candidate)
        local: _Local | None = memo.get(key)
        if local is None:
            local = memo[key] = self._local(self.program.ops[op], candidate)
        return local

    def _local(self, op: Op, candidate: Candidate) -> _Local:
        values, shardings = (*op.operands, *op.results), (*candidate.needs, *candidate.results)
        elements, largest = [], 0.0
        for n, size in zip(
            (touched(op, n) for n in range(len(values))), touched_elements(self.program, op), strict=True
        ):
            if values[n] < 0:
                elements.append(1.0)
                continue
            value, tile = self.program.values[values[n]], self.profile.vector_tile
            shape = shardings[n].local_shape(value.shape, self.mesh)
            elements.append(size / candidate.parts[n] * self.layouts.in_memory(value.id, shape, tile))
            registers = self.layouts.in_registers(value.id, shape, value.itemsize, tile)
            largest = max(largest, size / candidate.parts[n] * registers)
        product = self._product(op, candidate) if op.unit is Unit.MATRIX else None
        dtype = widest_dtype(self.program, values) if op.unit is Unit.KERNEL else ""
        shifts = SHIFT * self._shifted(op) * largest if self.profile.vector_tile[0] > 1 else 0.0
        return _Local(
            tuple(elements), largest, operations(self.profile, op) / candidate.devices, product, dtype, shifts
        )

    def _shifted(self, op: Op) -> int:
        """The minor dimensions of which a slice, a pad or a concatenation shifts elements by a part of a tile."""
        if op.unit is Unit.MATRIX or op.rule is None or not op.kind.startswith(("slice", "pad", "concatenate")):
            return 0
        minor, tile = [f for dim in op.rule.results[0][-2:] for f in dim], self.profile.vector_tile
        places = {f: tile[n - len(minor)] for n, f in enumerate(minor)}
        return sum(bool(w.low % places[w.factor]) for w in op.rule.windows if w.factor in places)

    def traffic(self, kernel: Kernel) -> tuple[list[float], list[float], float, float]:
        """The bytes that a kernel reads of each array and writes of each, and the sums of those that are in memory."""
        reads = [max([self.read_bytes(t) for t in places]) for places in kernel.reads]
        writes = [self.elements(t.op, t.number) * t.itemsize for t in kernel.writes]
        far = sum([n for n, t in zip(reads, kernel.reads, strict=True) if not self.stays(n, t[0])])
        stored = sum([n for n, t in zip(writes, kernel.writes, strict=True) if not self.stays(n, t)])
        return reads, writes, far, stored

    def windows_s(self, op: int) -> float:
        """The time that the kernels of a lookup's loop take to start, on TPUs."""
        if self.profile.vector_tile[0] == 1:
            return 0.0
        node = self.program.ops[op]
        data = len(node.operands) if node.kind == "gather" else 2
        value = self.program.values[(*node.operands, *node.results)[data]]
        places = {f for dim in node.factor_rule.operands[1] for f in dim}
        window = [
            n for n, dim in zip(value.shape, node.factor_rule.tensors[data], strict=True) if places.isdisjoint(dim)
        ]
        count = value.elements / self.lowered.computes[op].parts[data] / max(1, math.prod(window))
        return count * KERNELS * self.profile.launch_s

    def stays(self, nbytes: float, t: Tensor) -> bool:
        """Does a value stay in on-chip memory until its last use?"""
        return t.span > 0 and max(1, t.span // SHORTER) * nbytes <= self.profile.on_chip_bytes

    def elements(self, op: int, number: int) -> float:
        return self.local(op).elements[number]

    def read_bytes(self, t: Tensor) -> float:
        """The bytes that an op reads of an operand, which a product may get rounded."""
        return self.elements(t.op, t.number) * min(t.itemsize, self.rounded(t.op, t.number))

    def rounded(self, op: int, number: int) -> float:
        """The item size to which an operand is rounded before other devices send it; infinite where it is not."""
        rounds = self.lowered.memo.candidates.rounds(self.program.ops[op])
        return ROUNDED_BYTES if rounds and self.arrives(op, number) else math.inf

    def arrives(self, op: int, number: int) -> bool:
        """Is an operand of a product a copy from other devices?"""
        node = self.program.ops[op]
        if node.unit is not Unit.MATRIX or node.only_multiplies or number >= 2 or node.operands[number] < 0:
            return False
        actual = self.lowered.actual[node.operands[number]]
        return is_moved(actual, self.lowered.computes[op].need(number, actual), self.mesh)

    def is_resharded(self, edge: Edge) -> bool:
        """Is there a collective on an edge inside a kernel?"""
        if self.lowered.structure.arrays[edge.value].uniform:
            return False  # each device makes the part that it needs
        actual, computes = self.lowered.actual[edge.value], self.lowered.computes
        computed, user = computes[edge.maker].results[edge.result], computes[edge.user]
        if computed is actual is user.needs[edge.operand]:
            return False
        return is_moved(computed, actual, self.mesh) or is_moved(actual, user.need(edge.operand, actual), self.mesh)

    def copy_s(self, edge: Edge) -> float:
        """The time to copy a collective's result to the place of a donated argument, and the argument too."""
        op = self.program.ops[edge.user]
        computed, actual = self.lowered.computes[op.id].results[0], self.lowered.actual[op.results[0]]
        if not self.is_resharded(edge) and not is_moved(computed, actual, self.mesh):
            return 0.0
        value = self.program.values[edge.value]
        nbytes = value.nbytes / actual.parts(value.shape, self.mesh)
        return 2 * (self.profile.launch_s + stream_s(2 * nbytes, 0.0, 0.0, self.profile))

    def transposed_s(self, edge: Edge) -> float:
        """The time that a transposed read of a sum over devices takes."""
        if not self.lowered.computes[edge.maker].results[edge.result].partial:
            return 0.0
        return self._bytes(edge.user, edge.operand) / self.profile.transposed_bytes_per_s

    def break_s(self, edge: Edge, products: tuple[int, ...]) -> float:
        """The time that a collective inside a kernel adds: the value is written, unless it is stored anyway, and read again."""
        result = len(self.program.ops[edge.maker].operands) + edge.result
        written = 0.0 if edge.stored else self.elements(edge.maker, result)
        read = 0.0 if edge.user in products else self.elements(edge.user, edge.operand)
        swept = min((n for n in (written, read) if n), default=0.0)
        return stream_s((written + read) * self.program.values[edge.value].itemsize, swept, 0.0, self.profile)

    def product_s(self, op: int, read: float, share: float, written: float) -> float:
        """The time of a product whose operands are computed from ``read`` bytes, a ``share`` of them in memory."""
        operands = self._bytes(op, 0) + self._bytes(op, 1)
        product = self.local(op).product
        assert product is not None
        if product.is_stream(self.profile.calls_library):
            elements = max(self.elements(op, 0), self.elements(op, 1))
            return stream_s(read * share + written, elements, 0.0, self.profile)
        nbytes = max(read, operands) * share + written
        return product_s(product, nbytes, self.profile, operands)

    def _bytes(self, op: int, number: int) -> float:
        node = self.program.ops[op]
        value = (*node.operands, *node.results)[number]
        itemsize = self.program.values[value].itemsize if value >= 0 else 1
        return self.elements(op, number) * min(itemsize, self.rounded(op, number))

    def result_bytes(self, op: int) -> float:
        return self._bytes(op, len(self.program.ops[op].operands))

    def _product(self, op: Op, candidate: Candidate) -> Product:
        """The roles of a product's factors: batch in all tensors, columns or rows in the result, depth in operands only."""
        rule = op.factor_rule
        left, right, out = ({f for dim in t for f in dim} for t in (*rule.operands[:2], rule.results[0]))
        batch, rows, columns, depth = 1, list[int](), list[int](), list[int]()
        groups = rule.operands[2][-1] if op.kind == "ragged_dot_general" and len(rule.operands[2]) == 1 else ()
        for f, axes in enumerate(candidate.assigned):
            if f in groups:
                continue  # each row meets one group only
            size = max(1, block(self._size(op, f), self.mesh.pieces(axes)))
            if f in out and f in left and f in right:
                batch *= size
            elif f in out:
                (columns if f in right else rows).append(size)
            elif f in left or f in right:
                depth.append(size)
        if out.intersection(groups):  # the last block of each group is not full
            count = rule.factors[groups[0]].size
            at_once = ragged_block(depth[0], count)
            depth[0] = (depth[0] // at_once + count) * at_once
        if rule.windows and batch > 1 and not self.profile.calls_library:
            taps = [f for dim in rule.operands[1] for f in dim if f not in left and f not in out]
            if taps:  # of each tap a product with the kernel's channels on the diagonal of its tiles
                across = self.profile.matrix_tile[2]
                size = math.prod(rule.factors[f].size for f in taps)
                columns = [math.ceil(batch * math.prod(columns) / across) * across]
                depth, batch = [max(across, math.prod(depth) // size)], size
        zeros = math.prod(w.dilation for w in rule.windows)
        dtype = widest_dtype(self.program, op.operands[:2])
        return Product(batch, tuple(rows), tuple(columns), tuple(depth), dtype, zeros, op.attribute("passes", 1))

    def _size(self, op: Op, factor: int) -> int:
        """A factor's size. That of a window differs from tensor to tensor: in the result, or else in the kernel, counts."""
        rule, values = op.factor_rule, (*op.operands, *op.results)
        for tensor in (len(op.operands), 1):
            for d, dim in enumerate(rule.tensors[tensor]):
                if dim == (factor,):
                    return self.program.values[values[tensor]].shape[d]
        return rule.factors[factor].size


def widest_dtype(program: Program, values: tuple[int, ...]) -> str:
    """The dtype with the largest elements among some values; empty where there are none."""
    used = [program.values[v] for v in values if v >= 0]
    return max(used, key=lambda value: value.itemsize).dtype if used else ""
