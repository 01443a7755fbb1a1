"""Dimensions that are padded, because the mesh axis that shards them does not divide their size.

The problem. JAX shards an array only over axes that divide its dimensions. 25 heads or a vocabulary of 50,257 would be computed
in full on every device.

The idea. Inside of the device-local program a block can have ``ceil(size / pieces)`` positions, as if the array ended at the
next multiple. What is behind the end is never read: ops that work position by position compute something there, ops that reduce
or contract the dimension replace it by the identity of their reducer (``shardwise.spmd.local``), and a gather of all blocks
cuts it off (``shardwise.spmd.collectives``). Arguments and outputs of the program are never padded.

Where it stops. A padded dimension is sharded on one axis only: blocks of two axes would not be parts of blocks of one. Ops that
merge a dimension with others, look into windows or run a user's kernel do not compute on padded ones (``can_pad``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from shardwise.ir.program import HEAVY, Op, Origin, Program, Value
from shardwise.ir.rule import Kind
from shardwise.ir.traits import SCATTERS
from shardwise.rules.reduction import CUMULATIVE, REDUCERS_BY_KIND
from shardwise.rules.tables import ELEMENTWISE, PASSING

#: Ops that reduce a padded dimension: their operands are masked.
_REDUCE: Final = frozenset(
    {kind for kind, reducer in REDUCERS_BY_KIND.items() if reducer} | {"dot_general", "scatter-add"}
)
#: Ops that look positions up in the global array, whatever the blocks are.
_INDEX: Final = frozenset({"gather", "dynamic_update_slice", *SCATTERS})
#: Ops of which every position depends on the same position of the operands.
_PARALLEL: Final = frozenset(
    {*ELEMENTWISE} - {*PASSING, "shard_alike"}
    | {*_REDUCE, *_INDEX, *CUMULATIVE}
    | {f"{loop}.{part}" for loop in ("scan", "while", "cond") for part in ("carry", "const", "input", "output")}
    | set(
        """broadcast_in_dim concatenate copy dynamic_slice iota name optimization_barrier pad reshape rev slice sort split
        squeeze stop_gradient top_k transpose""".split()
    )
)
_KINDS: Final = {
    Kind.PARALLEL: _PARALLEL,
    Kind.FREE: frozenset({"broadcast_in_dim", "iota"}),
    Kind.REDUCTION: _REDUCE,
    Kind.INDEXED: _INDEX,
}


def block(size: int, pieces: int) -> int:
    """The positions of a dimension that one device has, padding included.

    >>> block(24, 4), block(25, 4)
    (6, 7)
    """
    return -(-size // pieces)


def ragged_block(rows: int, groups: int) -> int:
    """How many rows of one group a ragged product reads at once that contracts rows. It does so ``rows // block + groups``
    times, since the last block of each group may have fewer.

    >>> ragged_block(32768, 8), ragged_block(32768, 256), ragged_block(40, 8)
    (512, 128, 40)
    """
    return min(rows, 512, max(128, rows // max(groups, 1)))


def is_inner(value: Value) -> bool:
    """Can a value be stored padded? It is neither an argument nor an output of the program."""
    return value.origin is Origin.RESULT and not value.dtype.startswith("key")


def can_pad(program: Program, op: Op, factor: int) -> bool:
    """Can an op compute on a factor that is padded?"""
    rule = op.factor_rule
    dims = [dim for tensor in rule.tensors for dim in tensor if factor in dim]
    if op.kind not in _KINDS.get(rule.factors[factor].kind, ()) or any(len(dim) > 1 for dim in dims):
        return False
    typed = (program.values[v].dtype for v in (*op.operands, *op.results) if v >= 0)
    return not any(w.factor == factor for w in rule.windows) and not any(dtype.startswith("key") for dtype in typed)


def product_sizes(program: Program, factor_colors: Sequence[tuple[int, ...]]) -> dict[int, frozenset[int]]:
    """By color: its sizes in products that can compute it padded."""
    sizes: dict[int, set[int]] = {}
    for op in program.ops:
        for f, color in enumerate(factor_colors[op.id] if op.unit in HEAVY else ()):
            if color >= 0 and can_pad(program, op, f):
                sizes.setdefault(color, set()).add(op.factor_rule.factors[f].size)
    return {color: frozenset(some) for color, some in sizes.items()}


def is_worth(size: int, pieces: int, most: bool) -> bool:
    """Can padding a dimension of a product pay on an axis? It does not where a divisor of the axis shards it as far. Where a
    quarter or more would be padding, it pays only if ``most`` of the program's work has the dimension, as the batch.

    >>> is_worth(25, 4, False), is_worth(24, 4, False), is_worth(3, 4, False), is_worth(6, 8, True), is_worth(2, 8, True)
    (True, False, False, True, False)
    """
    length = block(size, pieces)
    return size % pieces > 0 and (most or 4 * size > 3 * length * pieces) and size > length * math.gcd(size, pieces)
