"""Layouts: which two dimensions of an array are minor on a TPU, and what their tiles add to its size and to its time.

The problem. A TPU stores an array in tiles of its two minor dimensions, most often 8 x 128, and computes on registers of that
size. How much padding that takes depends on which dimensions the compiler makes minor.

The idea. The compiler orders dimensions so that tiles pad least; tiles of fewer than 8 rows take whole registers. There are two
exceptions:

- an argument is in row-major order if that pads nothing. Tiles of 1, 2 or 4 rows pad nothing in memory, but they fill only a
  part of a register: a kernel that streams such an array takes as long as if it had 8 rows. So does a kernel on what is sliced
  from the array or written into it. Products read it at the full rate;
- the minor dimensions of the operands and results of a convolution are batch and features, those of a batched product are
  dimensions other than the batch. Arrays that elementwise ops connect with them have the same order.

``tests/verification/test_tpu.py`` compares both with libtpu. Weak: other layouts that the compiler chooses are not known, nor
the copies between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache

from shardwise.ir.program import Op, Program, Unit
from shardwise.ir.traits import IN_PLACE, READ_PARTS
from shardwise.rules.tables import ELEMENTWISE

#: The dimensions of an array that can be minor, two of them at a time.
Minor = tuple[int, ...]

#: Ops beside elementwise ones whose result has the order of dimensions of their operands.
_KEEP_ORDER = frozenset(
    {"concatenate", "optimization_barrier", "pad", "scan.carry", "scan.output", *IN_PLACE, *READ_PARTS}
)
#: Of these the ones that a product's order of dimensions is passed on through.
_CONNECTING = frozenset({"concatenate", "pad", *IN_PLACE})


class Layouts:
    """The layouts of a program's values that do not follow from their shapes: ``row_major`` ones, and by value the dimensions
    that a product or a convolution leaves to be ``minor``."""

    def __init__(self, program: Program):
        self.row_major = _row_major(program)
        self.minor = _minor(program)
        numbers: dict[tuple[bool | Minor, ...], int] = {}
        #: By op a number for the layouts of its operands and results.
        self.of_op = [
            numbers.setdefault(tuple([self.minor.get(v) or v in self.row_major for v in values]), len(numbers))
            for values in ((*op.operands, *op.results) for op in program.ops)
        ]

    def in_registers(self, value: int, shape: Sequence[int], itemsize: float, tile: tuple[int, int]) -> float:
        """The elements of the registers that a kernel streams a block of this shape through, over the elements of the block."""
        if value in self.minor:
            return self.in_memory(value, shape, tile)
        narrow = narrow_rows(tuple(shape), itemsize, tile) if value in self.row_major else 1.0
        return max(narrow, register_elements(tuple(shape), tile) / max(1, math.prod(shape)))

    def in_memory(self, value: int, shape: Sequence[int], tile: tuple[int, int]) -> float:
        """The elements of the tiles that store a block of this shape, over the block's elements; 1 for arrays in the order that
        pads least."""
        minor = self.minor.get(value)
        return 1.0 if minor is None else padded_elements(tuple(shape), tile, minor) / max(1, math.prod(shape))


def _row_major(program: Program) -> frozenset[int]:
    """Arguments, and what is sliced from them, written into them, or computed from them element by element."""
    found = {a.value for a in program.arguments}
    for op in program.schedule:
        if op.kind in ELEMENTWISE or op.kind in _KEEP_ORDER:
            shapes = {program.values[v].shape[-2:] for v in op.operands if v in found}
            found.update(v for v in op.results if v >= 0 and program.values[v].shape[-2:] in shapes)
    return frozenset(found)


def _minor(program: Program) -> dict[int, Minor]:
    """The operands and results of convolutions and batched products, and what elementwise ops connect with them. Arguments are
    left out: they are stored in the order that pads least, and copied."""
    minor: dict[int, Minor] = {}
    for op in program.ops:
        if op.unit is Unit.MATRIX and op.rule is not None and not op.only_multiplies:
            for value, dims in _of_product(op).items():
                minor.setdefault(value, dims)

    def spread(sources: Iterable[int], targets: Iterable[int]) -> None:
        for dims in [minor[v] for v in sources if v in minor][:1]:
            for v in targets:
                if v >= 0:
                    minor.setdefault(v, dims)

    connecting = [op for op in program.schedule if minor and _connects(program, op)]
    for op in connecting:
        spread(_ordered(op), op.results)
    for op in reversed(connecting):
        spread(op.results, _ordered(op))
    arguments = {a.value for a in program.arguments}
    return {v: dims for v, dims in minor.items() if v not in arguments}


def _connects(program: Program, op: Op) -> bool:
    """Do operands (``_ordered``) and results of an op have one order of dimensions?"""
    pools = op.unit is not Unit.MATRIX and op.rule is not None and bool(op.rule.windows)
    ranks = {len(program.values[v].shape) for v in (*_ordered(op), *op.results) if v >= 0}
    return len(ranks) == 1 and (pools or op.kind in ELEMENTWISE or op.kind in _CONNECTING)


def _ordered(op: Op) -> tuple[int, ...]:
    """The operands that have the order of dimensions of the result: of an op in place the first."""
    return op.operands[:1] if op.kind in IN_PLACE else op.operands


def _of_product(op: Op) -> dict[int, Minor]:
    """By operand and result of a convolution its dimensions other than those that the window slides over; of a batched product
    those other than the batch's."""
    rule = op.factor_rule
    tensors = [{f for dim in tensor for f in dim} for tensor in (*rule.operands[:2], *rule.results)]
    slid, batch = {w.factor for w in rule.windows}, set.intersection(*tensors)
    if not slid and not batch:
        return {}
    found: dict[int, Minor] = {}
    for n, value in enumerate((*op.operands[:2], *op.results)):
        others = set().union(*(factors for m, factors in enumerate(tensors) if m != n))
        kept = others - slid if slid else tensors[n] - batch
        dims = tuple(d for d, dim in enumerate((*rule.operands[:2], *rule.results)[n]) if kept.intersection(dim))
        if value >= 0 and (len(dims) == 2 or (len(dims) > 2 and not slid)):
            found[value] = dims
    return found


@cache
def padded_elements(sizes: tuple[int, ...], tile: tuple[int, int], minor: Minor | None = None) -> int:
    """Elements that an array takes in tiles, with the dimensions in the best order that has these ``minor`` ones; as many as it
    has where tiles have one row.

    >>> padded_elements((100, 130), (8, 128)), padded_elements((3, 1000), (8, 128)), padded_elements((100, 130), (1, 32))
    (17408, 4096, 13000)
    >>> padded_elements((32, 128, 16, 64), (8, 128)), padded_elements((32, 128, 16, 64), (8, 128), (0, 3))
    (4194304, 8388608)
    """
    (rows, lanes), large, total = tile, [s for s in sizes if s > 1], math.prod(sizes)
    if rows == 1 or not total:
        return total
    if minor is not None:
        large = [sizes[d] for d in minor]
    if len(large) <= 1:
        return max(total, lanes) if total <= lanes else _up(total, rows * lanes)
    return min(_tiled(total, a, b, tile) for a, b in itertools.permutations(large, 2))


@cache
def register_elements(sizes: tuple[int, ...], tile: tuple[int, int]) -> int:
    """Elements of the registers that hold an array, with the dimensions in the best order.

    >>> register_elements((3, 1000), (8, 128)), register_elements((1000,), (8, 128))
    (8192, 1024)
    """
    (rows, lanes), large, total = tile, [s for s in sizes if s > 1], math.prod(sizes)
    if rows == 1 or not total or len(large) <= 1:
        return padded_elements(sizes, tile)
    return min(total // (a * b) * _up(a, lanes) * _up(b, rows) for a, b in itertools.permutations(large, 2))


def row_major_elements(sizes: Sequence[int], tile: tuple[int, int]) -> int:
    """Elements that an array takes in tiles of its two last dimensions, apart from those of size 1.

    >>> row_major_elements((1000, 3), (8, 128)), row_major_elements((1000, 1, 256), (8, 128))
    (128000, 256000)
    """
    large = tuple(s for s in sizes if s > 1)
    if len(large) <= 1 or tile[0] == 1:
        return padded_elements(large, tile)
    return _tiled(math.prod(sizes), large[-1], large[-2], tile)


def _tiled(total: int, minor: int, second: int, tile: tuple[int, int]) -> int:
    """Elements of an array with these two minor dimensions, of ``total`` elements without padding."""
    rows = 1 if second <= 1 else 2 if second <= 2 else 4 if second <= 4 else tile[0]
    return total // (minor * second) * _up(minor, tile[1]) * _up(second, rows)


def narrow_rows(shape: tuple[int, ...], itemsize: float, tile: tuple[int, int]) -> float:
    """The elements of the registers that hold a row-major block, over the block's elements. Tiles of fewer rows than a register
    has pad no memory, and fill the register in part.

    >>> narrow_rows((64, 2, 128), 2, (8, 128)), narrow_rows((64, 8, 128), 2, (8, 128)), narrow_rows((64, 1, 128), 4, (8, 128))
    (4.0, 1.0, 8.0)
    """
    (rows, lanes), (count, last) = tile, (1, *shape)[-2:] if len(shape) > 1 else (tile[0], 1)
    fewest = 1 if itemsize >= 4 else 2  # shorter types share a row
    return rows / count if last % lanes == 0 and fewest <= count < rows and rows % count == 0 else 1.0


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
